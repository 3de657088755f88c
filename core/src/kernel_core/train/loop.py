"""The training loop, top to bottom. One ``next`` is one trained batch.

Every phase opens with its hook. A hook nobody answers is an empty tuple, so its line costs some twenty nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

from kernel_core.data.spec import DataSpec
from kernel_core.errors import DataError
from kernel_core.logger import Logger
from kernel_core.schedules import apply_schedules, split_schedules
from kernel_core.surgery import StructureWatch
from kernel_core.timing import TimeUnit
from kernel_core.train.evaluation import Evaluations, compute_metrics
from kernel_core.train.microbatch import make_train_batch
from kernel_core.train.state import State

_EXHAUSTED = object()


def training_steps(
    state: State,
    hooks: SimpleNamespace,
    logger: Logger,
    data: DataSpec,
    evaluations: Evaluations,
    watch: StructureWatch,
    step_schedulers_every_batch: bool = True,
) -> Iterator[None]:
    """Train until ``state.max_duration``; yields after every batch, at a point where the run could be saved.

    Args:
        state: The run, with optimizers, dataloader and ``max_duration`` set.
        hooks: The compiled plan: an attribute for each hook, holding a tuple of calls.
        logger: Gets the loss and the time of each batch if anybody listens.
        data: What is trained on.
        evaluations: Runs the evaluators that are due.
        watch: Notices structure that changes after surgery.
        step_schedulers_every_batch: Whether torch's schedulers are stepped by batch or by epoch.
    """
    progress, engine, optimizers = state.progress, state.engine, state.optimizers
    count_samples, count_tokens = data.get_num_samples_in_batch, data.get_num_tokens_in_batch
    train_batch = make_train_batch(state, hooks, data)
    torch_schedulers, schedules = split_schedules(state.schedulers)
    counts_tokens = state.max_duration is not None and state.max_duration.unit is TimeUnit.TOKEN
    listening = logger.listening

    # fit start: the plan is fixed, the model final; resumed runs enter the epoch they left
    watch.look("the start of fit")
    for call in hooks.fit_start:
        call()
    state.model.train()
    last = time.perf_counter()
    while not state.stopped:
        if progress.epoch_in_iteration == 0 and progress.batch_in_epoch == 0:
            for call in hooks.iteration_start:
                call()
        if progress.batch_in_epoch == 0:
            watch.look(f"epoch {progress.epoch}")
            for call in hooks.epoch_start:
                call()
        _start_epoch(data.dataloader, progress.epoch)
        batches = _batches(data.dataloader, state.dataloader_len, progress.batch_in_epoch)
        while not state.stopped:
            # data: the whole batch of this rank, counted as the loader gives it
            for call in hooks.before_dataloader:
                call()
            batch: Any = next(batches, _EXHAUSTED)
            if batch is _EXHAUSTED:
                if progress.batch_in_epoch == 0:
                    raise DataError(
                        f"train_dataloader: it gave no batch in epoch {progress.epoch}. "
                        "Give a loader that can be read anew each epoch and is not empty."
                    )
                break
            if data.batch_transforms is not None:
                batch = data.batch_transforms(batch)
            num_samples, num_tokens = count_samples(batch), count_tokens(batch)
            if counts_tokens and not num_tokens:
                raise DataError(
                    f"max_duration: {state.max_duration} counts tokens, and the batch has none. "
                    "Give DataSpec(dataloader, get_num_tokens_in_batch=...), or another unit."
                )
            state.batch = batch
            for call in hooks.after_dataloader:
                call()

            # step: forward, loss and backward of every microbatch, then the optimizers
            for call in hooks.batch_start:
                call()
            if schedules:
                apply_schedules(state, schedules)
            state.loss = engine.step(optimizers, train_batch)

            # end of the step: time moves, then everybody looks at the result
            now = time.perf_counter()
            progress.finish_batch(num_samples, num_tokens, now - last)
            last = now
            if listening:
                _log_batch(logger, state)
            for call in hooks.batch_end:
                call()
            if step_schedulers_every_batch:
                for scheduler in torch_schedulers:
                    scheduler.step()
            if evaluations.each_batch and evaluations.run_due("batch"):
                last = time.perf_counter()  # evaluation is not training time
            for call in hooks.batch_checkpoint:
                call()
            yield
        else:
            if progress.batch_in_epoch != state.dataloader_len:
                break  # stopped in mid-epoch

        # end of the epoch: the loader is exhausted
        progress.finish_epoch()
        if not step_schedulers_every_batch:
            for scheduler in torch_schedulers:
                scheduler.step()
        _finish_train_metrics(state, logger)
        for call in hooks.epoch_end:
            call()
        evaluations.run_due("epoch")
        for call in hooks.epoch_checkpoint:
            call()
        if state.iteration_length is not None and progress.epoch_in_iteration >= state.iteration_length:
            progress.finish_iteration()
            for call in hooks.iteration_end:
                call()
            evaluations.run_due("iteration")
            for call in hooks.iteration_checkpoint:
                call()
        last = time.perf_counter()

    watch.look("the end of fit")

    # fit end: what was not evaluated since the last batch is evaluated now, so that fit_end sees the final metrics
    if progress.batch_in_epoch:
        _finish_train_metrics(state, logger)
    evaluations.run_final()
    for optimizer in optimizers:
        optimizer.zero_grad()
    for call in hooks.fit_end:
        call()


def _start_epoch(dataloader: Any, epoch: int) -> None:
    """Tell a distributed or resumable sampler which epoch begins, so that each has its own order."""
    for holder in (dataloader, getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def _batches(dataloader: Iterable[Any], length: int | None, start: int) -> Iterator[Any]:
    """Return the batches of an epoch from ``start`` on, at most up to ``length``."""
    return islice(iter(dataloader), start, length)


def _log_batch(logger: Logger, state: State) -> None:
    progress = state.progress
    metrics = {
        "loss/train/total": state.loss,
        "time/epoch": progress.epoch,
        "time/sample": progress.sample,
        "time/total_wct": progress.total_wct,
    }
    if progress.token:
        metrics["time/token"] = progress.token
    logger.log_metrics(metrics)


def _finish_train_metrics(state: State, logger: Logger) -> None:
    if not state.train_metrics:
        return
    state.train_metric_values = compute_metrics(state.train_metrics)
    for metric in state.train_metrics.values():
        metric.reset()
    if logger.listening:
        logger.log_metrics({f"metrics/train/{name}": value for name, value in state.train_metric_values.items()})
