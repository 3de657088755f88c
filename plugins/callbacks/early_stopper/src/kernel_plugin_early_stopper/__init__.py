"""Stop training when a metric no longer gets better."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from kernel_core import Callback, State, Time, Timestamp, hookimpl
from kernel_core.errors import OptionError
from kernel_core.naming import did_you_mean

from kernel_plugin_early_stopper.rules import Comparison, choose_comparison, is_better, read_patience, split_monitor

__all__ = ["EarlyStopper", "choose_comparison", "is_better", "split_monitor"]

log = logging.getLogger(__name__)


class EarlyStopper(Callback):
    """Stop training when more than ``patience`` has passed since a metric was last at its best.

    A training metric is looked at when an epoch ends, the metric of an evaluator when an evaluation in ``fit`` ends;
    reading it waits for the device then, and at no other time. ``best`` and ``best_occurred`` go into checkpoints.

    Args:
        monitor: The metric's name, or ``metrics/<label>/<name>``.
        dataloader_label: ``train`` for a training metric, else the label of an evaluator (``eval`` for a bare
            ``eval_dataloader``); left out where ``monitor`` holds it.
        comp: ``less``, ``greater``, or a function ``(value, best) -> better?`` of two 0-d tensors. None means ``less`` if
            the name contains loss, error, perplexity or entropy, else ``greater``.
        min_delta: Only a change by more than this counts; its sign does not.
        patience: Epochs as an int, or a time string or Time in epochs or batches. With 1 epoch and one evaluation per
            epoch, the second one in a row without a better value stops.
    """

    example = {"monitor": "MulticlassAccuracy", "dataloader_label": "train"}

    def __init__(
        self,
        monitor: str,
        dataloader_label: str | None = None,
        comp: Literal["less", "greater"] | Comparison | None = None,
        min_delta: float = 0.0,
        patience: int | str | Time = 1,
    ) -> None:
        self.monitor, self.dataloader_label = split_monitor(monitor, dataloader_label)
        self.comp = choose_comparison(self.monitor, comp)
        self.min_delta = abs(min_delta)
        self.patience = read_patience(patience)
        self.best: float | None = None
        self.best_occurred: Timestamp | None = None
        self._standalone = False  # whether an evaluation outside fit is running

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and when it was reached; nothing before the first value."""
        if self.best_occurred is None:
            return {}
        when = {unit: self.best_occurred.get(unit).value for unit in ("ep", "ba")}
        return {"best": self.best, "best_occurred": when}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned."""
        self.best, when = state.get("best"), state.get("best_occurred")
        self.best_occurred = None if when is None else Timestamp(epoch=when["ep"], batch=when["ba"])

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Refuse a label that does not exist, and start anew where time was set back."""
        self._standalone = False
        if self.best_occurred is not None and state.progress.batch < self.best_occurred.batch.value:
            self.best = self.best_occurred = None
        self._check(state)

    @hookimpl
    def epoch_end(self, state: State) -> None:
        """Look at the training metric."""
        if self.dataloader_label == state.train_label:
            self._look(state, state.train_metric_values)

    @hookimpl
    def eval_standalone_start(self) -> None:
        """Look away: what is evaluated now may be other data, and there is no training to stop."""
        self._standalone = True

    @hookimpl
    def eval_standalone_end(self) -> None:
        """Look again."""
        self._standalone = False

    @hookimpl
    def eval_end(self, state: State) -> None:
        """Look at the evaluator's metric; an evaluation that a signal cut short has none."""
        if self.dataloader_label == state.dataloader_label and not self._standalone and state.interrupted is None:
            prefix = f"{self.dataloader_label}/"
            values = {name: value for name, value in state.eval_metric_values.items() if name.startswith(prefix)}
            self._look(state, {name.removeprefix(prefix): value for name, value in values.items()})

    def _look(self, state: State, values: Mapping[str, Any]) -> None:
        """Take the value (one device sync) and stop if the best one is too long ago."""
        value = self._read(values)
        if self.best is None or is_better(value, self.best, self.comp, self.min_delta):
            self.best, self.best_occurred = value, state.timestamp
        assert self.best_occurred is not None
        unit = self.patience.unit
        if state.timestamp.get(unit) - self.best_occurred.get(unit) > self.patience and not state.stopped:
            state.stop_training()
            if state.rank:
                return  # the first one says it
            log.warning(
                "early_stopper: %s of %s has not become better than %.6g, reached at %s, for more than %s. Training stops.",
                self.monitor,
                self.dataloader_label,
                self.best,
                self.best_occurred.get(unit),
                self.patience,
            )

    def _read(self, values: Mapping[str, Any]) -> float:
        if self.monitor not in values:
            raise OptionError(self._unknown_metric(values))
        value = values[self.monitor]
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError):
            raise OptionError(
                f"early_stopper.monitor: {self.monitor!r} of {self.dataloader_label!r} is {' '.join(repr(value).split()):.80}, "
                "which is no single number. Expected a scalar metric. Name another one."
            ) from None

    def _unknown_metric(self, names: Mapping[str, Any]) -> str:
        return (
            f"early_stopper.monitor: there is no metric {self.monitor!r} of {self.dataloader_label!r}."
            f"{did_you_mean(self.monitor, names)} There is {', '.join(sorted(names)) or 'none'}. Name one of these, or let the "
            "model's get_metrics return it."
        )

    def _check(self, state: State) -> None:
        evaluators = {evaluator.label: evaluator for evaluator in state.evaluators}
        if self.dataloader_label == state.train_label:
            names = state.train_metrics
        elif self.dataloader_label in evaluators:
            names = evaluators[self.dataloader_label].select(state.model.get_metrics(is_train=False))
        else:
            labels = [state.train_label, *evaluators]
            raise OptionError(
                f"early_stopper.dataloader_label: nothing has the label {self.dataloader_label!r}."
                f"{did_you_mean(self.dataloader_label, labels)} Expected one of {', '.join(labels)}. Name one, or give Trainer "
                "an Evaluator with that label."
            )
        if not names:
            raise OptionError(self._unknown_metric(names))
        if self.monitor not in names and state.rank == 0:
            # not yet an error: one metric may compute several under names of their own
            log.warning("%s It is looked for again when they are computed.", self._unknown_metric(names))
