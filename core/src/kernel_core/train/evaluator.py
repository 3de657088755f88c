"""What to evaluate on, when, and with which of the model's metrics."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from kernel_core.data.spec import DataSpec
from kernel_core.errors import DataError, TrainerError
from kernel_core.timing import Time, TimeUnit
from kernel_core.train.forward import Microbatch

Due = Callable[[Any, str], bool]
Interval = int | str | Time | Due


def as_interval(value: Interval) -> Time | Due:
    """Return a Time, epochs for a plain number, or the function ``(state, event) -> bool`` as it is."""
    if callable(value):
        return value
    return Time.from_input(value, TimeUnit.EPOCH)


class Evaluator:
    """A dataloader to evaluate on, under a label.

    Args:
        label: The middle part of ``metrics/<label>/<name>``.
        dataloader: A loader, DataSpec, or dict of DataSpec's arguments.
        metric_names: Which of the model's metrics to compute: regular expressions of which one must be found in the
            metric's name, in any case. None for all.
        subset_num_batches: Evaluate on the first batches only; -1 for all, None for what the trainer says.
        eval_interval: When; None for the trainer's. A function ``(state, event) -> bool`` is asked at the end of every
            batch, epoch and iteration, with the event's name.
        device_eval_microbatch_size: Rows in a forward pass; None for the whole batch, ``"auto"`` for as many as fit.
    """

    def __init__(
        self,
        label: str,
        dataloader: Any,
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: Interval | None = None,
        device_eval_microbatch_size: int | Literal["auto"] | None = None,
    ) -> None:
        if not label or "/" in label:
            raise TrainerError(f"evaluator: got the label {label!r}. Expected a word without '/'.")
        for pattern in metric_names or ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise TrainerError(f"evaluator {label}: {pattern!r} is no regular expression: {error}.") from None
        self.label = label
        self.data = DataSpec.of(dataloader)
        self.metric_names = None if metric_names is None else list(metric_names)
        self.subset_num_batches = subset_num_batches
        self.metrics: dict[str, Any] | None = None
        self.eval_interval = None if eval_interval is None else as_interval(eval_interval)
        self.microbatch = Microbatch.of(device_eval_microbatch_size, f"evaluator {label}: device_eval_microbatch_size")

    def select(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return copies of those of ``metrics`` that this evaluator computes.

        Raises:
            TrainerError: a name that fits no metric of the model.
        """
        if self.metric_names is None:
            return copy.deepcopy(metrics)
        chosen: dict[str, Any] = {}
        for wanted in self.metric_names:
            found = [name for name in metrics if re.search(wanted, name, re.IGNORECASE)]
            if not found:
                raise TrainerError(
                    f"evaluator {self.label}: no metric of the model matches {wanted!r}. It has "
                    f"{', '.join(metrics) or 'none'} for evaluation."
                )
            chosen |= {name: metrics[name] for name in found}
        return copy.deepcopy(chosen)


def as_evaluators(data: Any, subset_num_batches: int = -1, taken: str | None = None) -> list[Evaluator]:
    """Return evaluators for what a user may give: a loader, a DataSpec, an Evaluator or a sequence of Evaluators.

    Args:
        subset_num_batches: For those that do not say.
        taken: A label that is not free: that of the training metrics.

    Returns:
        Copies, so that an Evaluator may serve another trainer too.

    Raises:
        TrainerError: two have one label, or Evaluators and loaders are mixed.
    """
    if data is None or (isinstance(data, list | tuple) and not data):
        return []
    if isinstance(data, Evaluator):
        data = [data]
    if not (isinstance(data, list | tuple) and any(isinstance(item, Evaluator) for item in data)):
        data = [Evaluator("eval", data)]
    if not all(isinstance(item, Evaluator) for item in data):
        raise TrainerError(
            "eval_dataloader: got Evaluators and other things. Wrap every loader: Evaluator(label, loader)."
        )
    labels = [item.label for item in data]
    for label in labels:
        if labels.count(label) > 1:
            raise TrainerError(f"eval_dataloader: two evaluators have the label {label!r}. Give each its own.")
    if taken in labels:
        raise TrainerError(
            f"eval_dataloader: an evaluator has the label {taken!r}, which is that of the training metrics. Give it another."
        )
    evaluators = [copy.copy(item) for item in data]
    for evaluator in evaluators:
        evaluator.metrics = None
        evaluator.microbatch = copy.copy(evaluator.microbatch)
        if evaluator.subset_num_batches is None:
            evaluator.subset_num_batches = subset_num_batches
    return evaluators


def check_subset(evaluator: Evaluator, subset_num_batches: int = -1) -> None:
    """Refuse an endless loader without a limit.

    Raises:
        DataError: the loader has no length and no ``subset_num_batches`` is given.
    """
    if evaluator.data.num_batches is None and max(evaluator.subset_num_batches or -1, subset_num_batches) < 0:
        raise DataError(
            f"evaluator {evaluator.label}: its loader has no length. Give subset_num_batches, so that evaluation ends."
        )
