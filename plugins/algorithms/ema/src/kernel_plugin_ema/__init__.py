"""Keep an exponential moving average of the weights and evaluate with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from kernel_core import Algorithm, State, Time, hookimpl
from kernel_core.errors import OptionError, TimeStringError, TrainerError
from kernel_core.timing import TimeUnit
from pydantic import Field
from torch import Tensor

from kernel_plugin_ema.averaging import (
    Model,
    compute_ema,
    copy_averaged_tensors,
    get_ema_model,
    placed_like,
    refuse_shards,
    smoothing_of,
    swap_weights,
)

__all__ = ["EMA", "compute_ema", "copy_averaged_tensors", "get_ema_model", "smoothing_of", "swap_weights"]


def _read_time(option: str, value: str | Time) -> Time:
    try:
        time = Time.from_input(value)
    except TimeStringError as error:
        raise OptionError(f"ema.{option}: got {value!r}. {error}") from None
    return time


def _read_period(option: str, value: str | Time) -> Time:
    period = _read_time(option, value)
    if period.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or period.value <= 0:
        raise OptionError(
            f"ema.{option}: got {str(value)!r}. Expected a time greater than 0 in batches or epochs, such as '10ba'."
        )
    return period


def _read_start(value: str | Time) -> Time:
    start = _read_time("ema_start", value)
    if start.value < 0 or (start.unit is TimeUnit.DURATION and start.value > 1):
        raise OptionError(
            f"ema.ema_start: got {str(value)!r}. Expected a time of at least 0, and as a share of the run at most '1dur'."
        )
    return start


class EMA(Algorithm):
    """Average the weights over training with exponentially falling shares, and evaluate and predict with the average.

    The average begins as a copy of the weights at the first batch (or epoch) that ends at or after ``ema_start``.
    Training goes on with its own weights, which are back bit for bit after an evaluation. The average is saved and
    restored as the plugin's own state.

    Args:
        half_life: After this time a weight has half of its share left, in batches or epochs; None means 1000ba, unless
            ``smoothing`` is given.
        smoothing: The share of the old average at an update, instead of ``half_life``.
        ema_start: When averaging begins: a share of the run, or a time in any other unit.
        update_interval: How often the average is updated, in the unit of ``half_life``; None means 1 of that unit, or 1ba
            with ``smoothing``.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992, for averaging; the
        exponential form as in Tarvainen and Valpola, Mean teachers are better role models, 2017, section 2.
    """

    roles = {"averages-weights", "swaps-weights"}
    conflicts = {"role:averages-weights"}
    example = {"half_life": "3ba"}
    neutral: ClassVar[
        dict[str, Any]
    ] = {}  # training is the same whatever the options: only evaluations see the average
    commutes = {"gradient_clipping"}

    def __init__(
        self,
        half_life: str | Time | None = None,
        smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None,
        ema_start: str | Time = "0.0dur",
        update_interval: str | Time | None = None,
    ) -> None:
        if half_life is not None and smoothing is not None:
            raise OptionError(
                f"ema: got half_life={half_life!r} and smoothing={smoothing!r}. Expected one of them. Leave one out."
            )
        life = (
            None if smoothing is not None else _read_period("half_life", "1000ba" if half_life is None else half_life)
        )
        unit = TimeUnit.BATCH if life is None else life.unit
        interval = Time(1, unit) if update_interval is None else _read_period("update_interval", update_interval)
        if life is not None and interval.unit is not unit:
            raise OptionError(
                f"ema.update_interval: got {str(update_interval)!r} with half_life={str(life)!r}. Expected the same unit. "
                f"Give update_interval in {unit}."
            )
        self.smoothing: float = smoothing_of(life, interval) if life is not None else smoothing or 0.0
        self.update_interval = interval
        self.ema_start = _read_start(ema_start)
        self.ema_tensors: dict[str, Tensor] | None = None  # None until averaging begins
        self._swapped = False  # whether the model holds the average, and ema_tensors the weights of training

    def active_hooks(self) -> set[str]:
        """Update at the end of batches or of epochs, not of both."""
        always = "after_load eval_start eval_end predict_start predict_end fit_failed".split()
        return {*always, "batch_end" if self.update_interval.unit is TimeUnit.BATCH else "epoch_end"}

    def get_ema_model(self, model: Model) -> Model:
        """Return a copy of ``model``, the one in training, with the averaged weights.

        Raises:
            TrainerError: averaging has not begun, or the model is sharded over the ranks.
        """
        if self.ema_tensors is None:
            raise TrainerError(
                f"ema: there is no average yet. Averaging begins at ema_start={str(self.ema_start)!r}. Train longer."
            )
        refuse_shards(model)
        return copy.deepcopy(model) if self._swapped else get_ema_model(model, self.ema_tensors)

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names of the model's tensors; nothing before averaging begins."""
        return {} if self.ema_tensors is None else {"ema_tensors": dict(self.ema_tensors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the average; ``after_load`` puts it on the model's device."""
        saved = state.get("ema_tensors")
        self.ema_tensors = None if saved is None else {name: tensor.clone() for name, tensor in saved.items()}

    def _update(self, state: State) -> None:
        if self.ema_tensors is None:
            if self._is_due_to_start(state):
                self.ema_tensors = copy_averaged_tensors(state.model)
        elif state.progress.value(self.update_interval.unit) % self.update_interval.value == 0:
            compute_ema(state.model, self.ema_tensors, self.smoothing)

    def _is_due_to_start(self, state: State) -> bool:
        if self.ema_start.unit is TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and elapsed >= self.ema_start
        return state.progress.value(self.ema_start.unit) >= self.ema_start.value

    def _hold_average(self, state: State, wanted: bool) -> None:
        """See to it that the model holds the average, or the weights of training."""
        if self.ema_tensors is not None and self._swapped is not wanted:
            swap_weights(state.model, self.ema_tensors)
            self._swapped = wanted

    @hookimpl
    def after_load(self, state: State) -> None:
        """Bring a restored average to the model's device, of shards this rank's."""
        if self.ema_tensors is not None:
            self.ema_tensors = placed_like(state.model, self.ema_tensors, state.engine.scatter)

    @hookimpl
    def batch_end(self, state: State) -> None:
        """Update the average, where it is counted in batches."""
        self._update(state)

    @hookimpl
    def epoch_end(self, state: State) -> None:
        """Update the average, where it is counted in epochs."""
        self._update(state)

    @hookimpl
    def eval_start(self, state: State) -> None:
        """Evaluate with the average."""
        self._hold_average(state, True)

    @hookimpl
    def eval_end(self, state: State) -> None:
        """Take the weights of training back, after the callbacks saw those that were evaluated."""
        self._hold_average(state, False)

    @hookimpl
    def predict_start(self, state: State) -> None:
        """Predict with the average."""
        self._hold_average(state, True)

    @hookimpl
    def predict_end(self, state: State) -> None:
        """Take the weights of training back."""
        self._hold_average(state, False)

    @hookimpl
    def fit_failed(self, state: State) -> None:
        """Take the weights of training back if an evaluation or prediction failed, perhaps within a pass."""
        if self._swapped:
            state.engine.finish_passes()  # no collective; what a pass has gathered is not what was swapped
        self._hold_average(state, False)
