"""Evaluation and prediction: forward passes without gradients, and the metrics made of them."""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernel_core.data.spec import DataSpec, to_device
from kernel_core.errors import DataError, TrainerError
from kernel_core.logger import Logger
from kernel_core.schedules import Trigger
from kernel_core.timing import Progress, Time, TimeUnit
from kernel_core.train.randomness import forked_randomness
from kernel_core.train.state import State


class Evaluator:
    """A dataloader to evaluate on, under a label.

    Args:
        label: The middle part of ``metrics/<label>/<name>``.
        dataloader: A loader, DataSpec, or dict of DataSpec's arguments.
        metric_names: Which of the model's metrics to compute: regular expressions of which one must be found in the
            metric's name, in any case. None for all.
        subset_num_batches: Evaluate on the first batches only; -1 or None for all.
        eval_interval: When; None for the trainer's.
    """

    def __init__(
        self,
        label: str,
        dataloader: Any,
        metric_names: Sequence[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: int | str | Time | None = None,
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
        self.subset_num_batches = -1 if subset_num_batches is None else subset_num_batches
        self.metrics: dict[str, Any] | None = None
        self.eval_interval = None if eval_interval is None else Time.from_input(eval_interval, TimeUnit.EPOCH)

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


def as_evaluators(data: Any, subset_num_batches: int = -1) -> list[Evaluator]:
    """Return evaluators for what a user may give: a loader, a DataSpec, an Evaluator or a sequence of Evaluators.

    Raises:
        TrainerError: two have one label, or Evaluators and loaders are mixed.
    """
    if data is None:
        return []
    if isinstance(data, Evaluator):
        data = [data]
    if isinstance(data, list | tuple) and any(isinstance(item, Evaluator) for item in data):
        if not all(isinstance(item, Evaluator) for item in data):
            raise TrainerError(
                "eval_dataloader: got Evaluators and other things. Wrap every loader: Evaluator(label, loader)."
            )
        labels = [item.label for item in data]
        for label in labels:
            if labels.count(label) > 1:
                raise TrainerError(f"eval_dataloader: two evaluators have the label {label!r}. Give each its own.")
        return list(data)
    return [Evaluator("eval", data, subset_num_batches=subset_num_batches)]


class Evaluations:
    """Decides which evaluators are due and runs them.

    Args:
        default_interval: For evaluators without one of their own; a value of 0 means never.
    """

    def __init__(self, state: State, hooks: SimpleNamespace, logger: Logger, default_interval: Time) -> None:
        self._state, self._hooks, self._logger = state, hooks, logger
        self._triggers: dict[str, list[tuple[Evaluator, Trigger]]] = {"batch": [], "epoch": [], "iteration": []}
        self._last: dict[str, int] = {}
        self._active: list[Evaluator] = []
        for evaluator in state.evaluators:
            interval = evaluator.eval_interval or default_interval
            if interval.value <= 0:
                continue
            trigger = Trigger(interval, state)
            at = {TimeUnit.EPOCH: "epoch", TimeUnit.ITERATION: "iteration"}.get(trigger.unit, "batch")
            self._triggers[at].append((evaluator, trigger))
            self._active.append(evaluator)

    @property
    def each_batch(self) -> bool:
        """Whether any evaluator can become due inside an epoch."""
        return bool(self._triggers["batch"])

    def run_due(self, at: str) -> bool:
        """Run the evaluators that are due at the end of a ``batch``, ``epoch`` or ``iteration``; say whether there were any."""
        return self._run([evaluator for evaluator, due in self._triggers[at] if due()])

    def run_final(self) -> None:
        """Run those whose last evaluation is older than the last batch."""
        now = self._state.progress.batch
        self._run([evaluator for evaluator in self._active if self._last.get(evaluator.label) != now])

    def _run(self, due: list[Evaluator]) -> bool:
        if due:
            evaluate(self._state, self._hooks, self._logger, due)
            self._last |= {evaluator.label: self._state.progress.batch for evaluator in due}
        return bool(due)


def evaluate(
    state: State,
    hooks: SimpleNamespace,
    logger: Logger,
    evaluators: Sequence[Evaluator],
    subset_num_batches: int | None = None,
) -> None:
    """Run ``evaluators`` one after another and log ``metrics/<label>/<name>``.

    Args:
        subset_num_batches: Overrides that of the evaluators.
    """
    held = (state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs, state.loss)
    was_training = state.model.training
    for call in hooks.eval_before_all:
        call()
    state.model.eval()
    try:
        for evaluator in evaluators:
            # a fork: whether and how often is evaluated must not shift what training draws
            # not inference_mode: tensors made here may be kept by plugins and trained on
            with forked_randomness(state.seed, "eval", evaluator.label), torch.no_grad():
                limit = evaluator.subset_num_batches if subset_num_batches is None else subset_num_batches
                _evaluate_one(state, hooks, logger, evaluator, limit)
    finally:
        state.model.train(was_training)
        state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs, state.loss = held
    for call in hooks.eval_after_all:
        call()


def _evaluate_one(state: State, hooks: SimpleNamespace, logger: Logger, evaluator: Evaluator, limit: int) -> None:
    data = evaluator.data
    if evaluator.metrics is None:
        evaluator.metrics = evaluator.select(state.model.get_metrics(is_train=False))
    metrics = state.eval_metrics[evaluator.label] = evaluator.metrics
    for metric in metrics.values():
        metric.reset()
        if hasattr(metric, "to"):
            metric.to(state.device)
    state.dataloader, state.dataloader_label, state.dataloader_len = data.dataloader, evaluator.label, data.num_batches
    state.eval_progress = Progress()
    for call in hooks.eval_start:
        call()
    for _ in _forward_batches(state, data, limit, state.eval_progress, EVAL, hooks):
        for metric in metrics.values():
            state.model.update_metric(state.batch, state.outputs, metric)
    values = {f"{evaluator.label}/{name}": value for name, value in compute_metrics(metrics).items()}
    state.eval_metric_values |= values
    if logger.listening:
        logger.log_metrics({f"metrics/{name}": value for name, value in values.items()})
    for call in hooks.eval_end:
        call()


EVAL = ("eval_batch_start", "eval_before_forward", "eval_after_forward", "eval_batch_end")
PREDICT = ("predict_batch_start", "predict_before_forward", "predict_after_forward", "predict_batch_end")


def _forward_batches(
    state: State, data: DataSpec, limit: int, progress: Progress, names: Sequence[str], hooks: SimpleNamespace
) -> Iterable[None]:
    batch_start, before_forward, after_forward, batch_end = (getattr(hooks, name) for name in names)
    forward: Callable[[Any], Any] = state.model.eval_forward if names is EVAL else state.model
    on_cpu = state.device.type == "cpu"
    for batch in islice(iter(data.dataloader), None if limit < 0 else limit):
        started = time.perf_counter()
        if data.batch_transforms is not None:
            batch = data.batch_transforms(batch)
        num_samples, num_tokens = data.get_num_samples_in_batch(batch), data.get_num_tokens_in_batch(batch)
        batch = batch if on_cpu else to_device(batch, state.device)
        state.batch = data.microbatch_transforms(batch) if data.microbatch_transforms is not None else batch
        for call in batch_start:
            call()
        for call in before_forward:
            call()
        state.outputs = forward(state.batch)
        for call in after_forward:
            call()
        yield
        progress.finish_batch(num_samples, num_tokens, time.perf_counter() - started)
        for call in batch_end:
            call()


def compute_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what each metric computes; one that returns a dict contributes each of its entries."""
    values: dict[str, Any] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        if isinstance(value, dict):
            values |= value
        else:
            values[name] = value
    return values


def predict(
    state: State, hooks: SimpleNamespace, data: DataSpec, subset_num_batches: int, return_outputs: bool
) -> list[Any]:
    """Return the outputs of each batch on the CPU."""
    held = (state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs)
    was_training = state.model.training
    state.dataloader, state.dataloader_label, state.dataloader_len = data.dataloader, "predict", data.num_batches
    state.predict_progress = Progress()
    state.model.eval()
    outputs: list[Any] = []
    try:
        with forked_randomness(state.seed, "predict"), torch.no_grad():
            for call in hooks.predict_start:
                call()
            for _ in _forward_batches(state, data, subset_num_batches, state.predict_progress, PREDICT, hooks):
                if return_outputs:
                    outputs.append(to_device(state.outputs, torch.device("cpu")))
            for call in hooks.predict_end:
                call()
    finally:
        state.model.train(was_training)
        state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs = held
    return outputs


def number(value: Any) -> float | int | None:
    """Return a metric value as a plain number (one device sync for a tensor), None if it is no scalar or not finite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if value == value and abs(value) != float("inf") else None


def check_subset(evaluator: Evaluator, subset_num_batches: int = -1) -> None:
    """Refuse an endless loader without a limit.

    Raises:
        DataError: the loader has no length and no ``subset_num_batches`` is given.
    """
    if evaluator.data.num_batches is None and max(evaluator.subset_num_batches, subset_num_batches) < 0:
        raise DataError(
            f"evaluator {evaluator.label}: its loader has no length. Give subset_num_batches, so that evaluation ends."
        )
