"""Evaluation: which evaluators are due, forward passes over their batches, and the metrics made of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernel_core.logger import Logger
from kernel_core.timing import Progress, Time, TimeUnit
from kernel_core.train.evaluator import Due, Evaluator
from kernel_core.train.forward import Pass, batches_within, run_pass
from kernel_core.train.precision import Precision
from kernel_core.train.randomness import forked_randomness
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State
from kernel_core.train.trigger import Trigger

Evaluate = Callable[[Sequence[Evaluator]], None]


class Evaluations:
    """Decides which evaluators are due and runs them.

    Args:
        state: The run, with ``max_duration`` set.
        evaluate: Runs evaluators.
        default_interval: For evaluators without one of their own; a value of 0 means never.
    """

    def __init__(self, state: State, evaluate: Evaluate, default_interval: Time | Due) -> None:
        self._state, self._evaluate = state, evaluate
        self._due: dict[str, list[tuple[Evaluator, Callable[[], bool]]]] = {"batch": [], "epoch": [], "iteration": []}
        self._last: dict[str, int] = {}
        self._missed: list[str] = []
        self._ended_at = -1
        self._active: list[Evaluator] = []
        for evaluator in state.evaluators:
            interval = default_interval if evaluator.eval_interval is None else evaluator.eval_interval
            if self._add(evaluator, interval):
                self._active.append(evaluator)

    def _add(self, evaluator: Evaluator, interval: Time | Due) -> bool:
        if isinstance(interval, Time):
            if interval.value <= 0:
                return False
            trigger = Trigger(interval, self._state)
            at = {TimeUnit.EPOCH: "epoch", TimeUnit.ITERATION: "iteration"}.get(trigger.unit, "batch")
            self._due[at].append((evaluator, trigger))
            return True
        for at, due in self._due.items():
            due.append((evaluator, lambda event=f"{at}_end": bool(interval(self._state, event))))  # type: ignore[misc]
        return True

    @property
    def each_batch(self) -> bool:
        """Whether any evaluator can become due inside an epoch."""
        return bool(self._due["batch"])

    def run_due(self, at: str) -> bool:
        """Run the evaluators that are due at the end of a ``batch``, ``epoch`` or ``iteration``; say whether there were any."""
        now = self._state.progress.batch
        due = [evaluator for evaluator, is_due in self._due[at] if is_due() and self._last.get(evaluator.label) != now]
        return self._run(due)

    @property
    def ended(self) -> bool:
        """Whether the run came to its end at this batch, perhaps before it was resumed."""
        return self._ended_at == self._state.progress.batch

    def run_final(self) -> None:
        """Run those whose last evaluation is older than the last batch."""
        now = self._ended_at = self._state.progress.batch
        self._run([evaluator for evaluator in self._active if self._last.get(evaluator.label) != now])

    def run_missed(self) -> None:
        """Run those that were due when a signal ended the run that is resumed."""
        missed, self._missed = self._missed, []
        self._run([evaluator for evaluator in self._active if evaluator.label in missed])

    def _run(self, due: list[Evaluator]) -> bool:
        if not due:
            return False
        self._evaluate(due)
        if self._state.interrupted is None:
            self._last |= {evaluator.label: self._state.progress.batch for evaluator in due}
        else:  # whichever of them were complete: they are run again when the run is resumed
            self._missed = [evaluator.label for evaluator in due]
        return True

    def memory(self) -> dict[str, Any]:
        """Return what a resumed run has to know: which evaluators ran at which batch, which were due and did not, and the end."""
        return {"evaluated": dict(self._last), "missed": list(self._missed), "ended": self._ended_at}

    def remember(self, memory: Mapping[str, Any]) -> None:
        """Take what ``memory`` returned."""
        self._last = dict(memory.get("evaluated", {}))
        self._missed = list(memory.get("missed", []))
        self._ended_at = memory.get("ended", -1)

    @property
    def complete(self) -> bool:
        """Whether every evaluator has seen the model as it is."""
        now = self._state.progress.batch
        return not self._missed and all(self._last.get(evaluator.label) == now for evaluator in self._active)


def evaluate(
    state: State,
    hooks: SimpleNamespace,
    logger: Logger,
    precision: Precision,
    evaluators: Sequence[Evaluator],
    subset_num_batches: int | None = None,
    ranks: Ranks | None = None,
) -> None:
    """Run ``evaluators`` one after another and log ``metrics/<label>/<name>``.

    An evaluation that a signal ends early closes its hooks and gives no metrics: those of a part would mislead.

    Args:
        subset_num_batches: Overrides that of the evaluators.
        ranks: The other ranks, each of which evaluates its share; metrics put theirs together when they compute.
    """
    held = (state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs, state.loss)
    started = time.perf_counter()
    modes = [(module, module.training) for module in state.model.modules()]
    for call in hooks.eval_before_all:
        call()
    state.model.eval()
    try:
        for evaluator in evaluators:
            # a fork: whether and how often is evaluated must not shift what training draws
            # not inference_mode: tensors made here may be kept by plugins and trained on
            with forked_randomness(state.seed, "eval", evaluator.label), torch.no_grad():
                limit = evaluator.subset_num_batches if subset_num_batches is None else subset_num_batches
                _evaluate_one(state, hooks, logger, precision, evaluator, -1 if limit is None else limit, ranks)
            if state.interrupted is not None:
                break
    finally:
        state.time_out_s += time.perf_counter() - started
        for module, training in modes:
            module.training = training
        state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs, state.loss = held
    for call in hooks.eval_after_all:
        call()


def _evaluate_one(
    state: State,
    hooks: SimpleNamespace,
    logger: Logger,
    precision: Precision,
    evaluator: Evaluator,
    limit: int,
    ranks: Ranks | None,
) -> None:
    data, model = evaluator.data, state.model
    if evaluator.metrics is None:
        evaluator.metrics = evaluator.select(model.get_metrics(is_train=False))
    metrics = state.eval_metrics[evaluator.label] = evaluator.metrics
    for metric in metrics.values():
        metric.reset()
    share_metrics(state, metrics)
    for name in [name for name in state.eval_metric_values if name.partition("/")[0] == evaluator.label]:
        del state.eval_metric_values[name]  # one that is interrupted leaves no values, and no old ones
    state.dataloader, state.dataloader_label = data.dataloader, evaluator.label
    state.dataloader_len = batches_within(data, limit)
    state.eval_progress = Progress()

    def update(outputs: Any) -> None:
        for metric in metrics.values():
            model.update_metric(state.batch, outputs, metric)

    def hold() -> Callable[[], None]:
        kept = copy.deepcopy(metrics)
        return lambda: metrics.update(copy.deepcopy(kept))

    for call in hooks.eval_start:
        call()
    forward = precision.cast(model.eval_forward, training=False)
    microbatch = evaluator.microbatch
    job = Pass(data, limit, state.eval_progress, "eval", forward, microbatch, update, hold)
    complete = run_pass(state, hooks, job, ranks)
    if complete:
        values = {f"{evaluator.label}/{name}": value for name, value in compute_metrics(metrics).items()}
        state.eval_metric_values |= values
        if logger.listening:
            logger.log_metrics({f"metrics/{name}": value for name, value in values.items()})
            if microbatch.auto and microbatch.rows is not None:
                logger.log_metrics({f"trainer/{evaluator.label}/device_eval_microbatch_size": microbatch.rows})
    for call in hooks.eval_end:
        call()


def share_metrics(state: State, metrics: Mapping[str, Any]) -> None:
    """Put ``metrics`` on the device, and let each put together what the ranks that read different data have seen.

    torchmetrics does so over all ranks by itself; ranks that hold parts of one model would count twice, and a rank without
    a sample would break it.
    """
    engine = state.engine
    for metric in metrics.values():
        if hasattr(metric, "to"):
            metric.to(state.device)
        if engine.world_size > 1 and getattr(metric, "dist_sync_fn", metric) is None:
            from kernel_core.distributed.gathering import gather_ragged  # a run of one process has no need of it

            metric.dist_sync_fn = gather_ragged
        if engine.data_world_size == engine.world_size or not hasattr(metric, "sync_on_compute"):
            continue
        if engine.data_world_size == 1:
            metric.sync_on_compute = False
        else:
            metric.process_group = engine.data_group


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


def number(value: Any) -> float | int | None:
    """Return a metric value as a plain number (one device sync for a tensor), None if it is no scalar or not finite."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if value == value and abs(value) != float("inf") else None
