"""Average the weights of the last part of training."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from kernel_core import Algorithm, Logger, State, Time, hookimpl
from kernel_core.errors import OptionError, TimeStringError
from kernel_core.timing import TimeUnit
from pydantic import Field
from torch import Tensor

from kernel_plugin_swa.averaging import Anneal, add_to_average, annealed, norms_of, start_average, take_average

__all__ = ["SWA", "add_to_average", "annealed", "start_average", "take_average"]

log = logging.getLogger(__name__)
UNITS = (TimeUnit.DURATION, TimeUnit.EPOCH, TimeUnit.BATCH)


class SWA(Algorithm):
    """Average the weights from ``swa_start`` to ``swa_end``; from then on the model has the average.

    What is left of the run then trains nothing: its batches collect the statistics of batch norm anew, which those of other
    weights would be wrong for, as ``torch.optim.swa_utils.update_bn`` does. The average is kept in float32 or wider.

    Args:
        swa_start: When averaging begins: a share of the run, epochs or batches.
        swa_end: When it ends, in the same unit.
        update_interval: How often weights are added to the average, in epochs or batches.
        schedule_swa_lr: Take the learning rate over from ``swa_start`` on, whatever its schedule says.
        anneal_strategy: How the rate goes from where it was to ``swa_lr``: in a line, or along a cosine.
        anneal_steps: After how many intervals it is there.
        swa_lr: Where it goes; None for where it was. Needs ``schedule_swa_lr``.

    Source: Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, Averaging Weights Leads to Wider Optima and Better Generalization,
        2018, section 3.
    """

    after = {"role:wraps-optimizer"}
    before = {"role:clips-gradients"}
    conflicts = {"role:averages-weights"}
    example = {
        "swa_start": "0.3dur", "swa_end": "0.8dur", "update_interval": "1ba", "schedule_swa_lr": True, "swa_lr": 0.02,
        "anneal_steps": 3,
    }  # fmt: skip

    def __init__(
        self,
        swa_start: str | Time = "0.7dur",
        swa_end: str | Time = "0.97dur",
        update_interval: str | Time = "1ep",
        schedule_swa_lr: bool = False,
        anneal_strategy: Anneal = "linear",
        anneal_steps: Annotated[int, Field(ge=0)] = 10,
        swa_lr: Annotated[float, Field(ge=0)] | None = None,
    ) -> None:
        self.swa_start, self.swa_end = _read("swa_start", swa_start), _read("swa_end", swa_end)
        self.update_interval = _read("update_interval", update_interval, (TimeUnit.EPOCH, TimeUnit.BATCH))
        _check(self.swa_start, self.swa_end, self.update_interval)
        if swa_lr is not None and not schedule_swa_lr:
            raise OptionError(
                f"swa.swa_lr: got {swa_lr} without schedule_swa_lr. Expected both: the rate is left to its schedule else. Give "
                "schedule_swa_lr=True."
            )
        self.schedule_swa_lr = schedule_swa_lr
        self.anneal_strategy: Anneal = anneal_strategy
        self.anneal_steps = anneal_steps
        self.swa_lr = swa_lr
        self.roles = {"averages-weights", *(["sets-learning-rate"] if schedule_swa_lr else [])}
        self.average: dict[str, Tensor] | None = None  # None before averaging begins and after it has ended
        self.count = 0  # of the models in it
        self.done = False  # whether the model has the average
        self.collecting = False  # whether batch norm collects its statistics anew
        self.rates: list[float] = []  # of the groups, when averaging began
        self.begun_at = 0
        self._momenta: list[tuple[Any, float | None]] = []

    def active_hooks(self) -> set[str]:
        """Average at the end of batches or of epochs, not of both; the end of averaging may come within an epoch."""
        always = {"after_load", "fit_start", "batch_start", "after_train_batch", "batch_end", "fit_end", "close"}
        return always | ({"epoch_end"} if self.update_interval.unit is TimeUnit.EPOCH else set())

    def state_dict(self) -> dict[str, Any]:
        """Return the average by the names of the parameters, of how many models it is, and where rates began."""
        return {
            "average": None if self.average is None else dict(self.average),
            "count": self.count,
            "done": self.done,
            "collecting": self.collecting,
            "rates": list(self.rates),
            "begun_at": self.begun_at,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned; ``after_load`` puts the average where the model is."""
        self.average = None if state["average"] is None else dict(state["average"])
        self.count, self.done, self.collecting = state["count"], state["done"], state["collecting"]
        self.rates, self.begun_at = list(state["rates"]), state["begun_at"]

    @hookimpl
    def after_load(self, state: State) -> None:
        """Bring a restored average to the model's device, of shards this rank's; go on collecting statistics."""
        if self.average is not None:
            placed = start_average(state.model)
            for name, own in placed.items():
                state.engine.scatter(self.average[name], own)
            self.average = placed
        if self.collecting:
            self._collect(state)

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Begin anew where a finished run is made longer; say so where there is nothing left to train."""
        if self.done and not self._is_past(state, self.swa_end):
            self.close()
            self.count, self.done, self.collecting, self.rates = 0, False, False, []
        elif self.done and state.rank == 0:
            log.warning("swa: the model has its average since swa_end=%s; nothing is trained any more.", self.swa_end)

    @hookimpl
    def batch_start(self, state: State) -> None:
        """Set the rates of this batch, after the schedule has; or begin to collect statistics of the average."""
        if self.done and not self.collecting:
            for norm in norms_of(state.model):
                norm.reset_running_stats()
            self._collect(state)
            self.collecting = True
        if self.schedule_swa_lr and self.rates and not self.done:
            passed = state.progress.value(self.update_interval.unit) - self.begun_at
            steps = passed // self.update_interval.value
            share = steps / self.anneal_steps if self.anneal_steps else 1.0
            for group, rate in zip(_groups(state), self.rates, strict=True):
                group["lr"] = annealed(rate, rate if self.swa_lr is None else self.swa_lr, share, self.anneal_strategy)

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Train nothing any more once the model has the average."""
        if self.done:
            for parameter in state.model.parameters():
                parameter.grad = None

    @hookimpl
    def batch_end(self, state: State, logger: Logger) -> None:
        """Average, where that is counted in batches; end it, whatever that is counted in."""
        if self.average is not None and self._is_past(state, self.swa_end):
            self._finish(state, logger)
        elif self.update_interval.unit is TimeUnit.BATCH:
            self._average(state)

    @hookimpl
    def epoch_end(self, state: State, logger: Logger) -> None:
        """Average, or end it, where that is counted in epochs."""
        if self.average is not None and self._is_past(state, self.swa_end):
            self._finish(state, logger)
        else:
            self._average(state)

    def _average(self, state: State) -> None:
        """Add the weights if an interval of the time between start and end is over."""
        now = int(state.progress.value(self.update_interval.unit))
        due = not self.done and now % self.update_interval.value == 0 and self._is_past(state, self.swa_start)
        if not due or self._is_past(state, self.swa_end):
            return
        if self.average is None:
            self.rates, self.begun_at = [group["lr"] for group in _groups(state)], now
            self.average, self.count = start_average(state.model), 1
        else:
            add_to_average(self.average, state.model, self.count)
            self.count += 1

    def _is_past(self, state: State, moment: Time) -> bool:
        if moment.unit is TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and elapsed >= moment
        return state.progress.value(moment.unit) >= moment.value

    def _finish(self, state: State, logger: Logger) -> None:
        """Give the model the average."""
        assert self.average is not None
        take_average(state.model, self.average)
        logger.log_metrics({"swa/num_averaged": self.count})
        self.average, self.done = None, True

    def _collect(self, state: State) -> None:
        """Let batch norm take the mean over all batches from now on, instead of a moving one."""
        self._momenta = [(norm, norm.momentum) for norm in norms_of(state.model)]
        for norm in norms_of(state.model):
            norm.momentum = None

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Say what is not as it should be: no average, or statistics of other weights."""
        if state.rank:
            return
        if not self.done:
            log.warning("swa: the run ended before swa_end=%s: the model has no average.", self.swa_end)
        elif not self.collecting and any(True for _ in norms_of(state.model)):
            log.warning(
                "swa: no batch was left after swa_end=%s, so that the statistics of batch norm are those of other weights. "
                "Expected some. Choose an earlier swa_end.",
                self.swa_end,
            )

    @hookimpl
    def close(self) -> None:
        """Give batch norm its own momentum back."""
        for norm, momentum in self._momenta:
            norm.momentum = momentum
        self._momenta = []


def _groups(state: State) -> list[dict[str, Any]]:
    return [group for optimizer in state.optimizers for group in optimizer.param_groups]


def _read(option: str, value: str | Time, units: tuple[TimeUnit, ...] = UNITS) -> Time:
    try:
        time = Time.from_input(value, units[0])
    except TimeStringError as error:
        raise OptionError(f"swa.{option}: got {value!r}. {error}") from None
    if time.unit not in units or time.value < 0 or (time.unit is TimeUnit.DURATION and time.value > 1):
        words = ", ".join(unit.value for unit in units)
        raise OptionError(
            f"swa.{option}: got {str(value)!r}. Expected a time of at least 0 in {words}, a share of at most 1."
        )
    return time


def _check(start: Time, end: Time, interval: Time) -> None:
    if start.unit is not end.unit or start.value >= end.value:
        raise OptionError(
            f"swa.swa_end: got {str(end)!r} with swa_start={str(start)!r}. Expected a later time in the same unit."
        )
    if interval.value < 1:
        raise OptionError(f"swa.update_interval: got {str(interval)!r}. Expected at least 1.")
