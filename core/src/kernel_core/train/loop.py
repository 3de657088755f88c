"""The training loop, top to bottom. One ``next`` is one trained batch.

Every phase opens with its hook. A hook nobody answers is an empty tuple, so its line costs some twenty nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from kernel_core.checkpoint.saving import Saves
from kernel_core.data.position import enter_epoch
from kernel_core.data.prefetch import DevicePrefetcher, safe_depth
from kernel_core.data.spec import DataSpec
from kernel_core.errors import DataError
from kernel_core.logger import Logger
from kernel_core.optim.scheduling import split_schedules
from kernel_core.surgery import StructureWatch
from kernel_core.timing import TimeUnit
from kernel_core.train.evaluation import Evaluations, compute_metrics
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State

_EXHAUSTED = object()


def training_steps(
    state: State,
    hooks: SimpleNamespace,
    logger: Logger,
    data: DataSpec,
    evaluations: Evaluations,
    watch: StructureWatch,
    run_batch: Callable[[], Tensor],
    read: Callable[..., Any] = next,
    step_schedulers_every_batch: bool = True,
    ranks: Ranks | None = None,
    saves: Saves | None = None,
    resume: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Train until ``state.max_duration``; yields after every batch, at a point where the run could be saved.

    Args:
        state: The run, with optimizers, dataloader and ``max_duration`` set.
        hooks: The compiled plan: an attribute for each hook, holding a tuple of calls.
        logger: Gets the loss and the time of each batch if anybody listens.
        data: What is trained on.
        evaluations: Runs the evaluators that are due.
        watch: Notices structure that changes after surgery.
        run_batch: Trains on ``state.batch`` as the loader gave it and returns its detached loss.
        read: ``next``, or something around it.
        step_schedulers_every_batch: Whether torch's schedulers are stepped by batch or by epoch.
        ranks: The other ranks; None in a run of one process.
        saves: Saves the run where policies ask for it; None if there are none.
        resume: Puts back what a resumed run goes on with, once, when everybody had a chance to draw and to set up.
    """
    progress, optimizers = state.progress, state.optimizers
    count_samples, count_tokens = data.get_num_samples_in_batch, data.get_num_tokens_in_batch
    torch_schedulers, _ = split_schedules(state.schedulers)
    counts_tokens = state.counts(TimeUnit.TOKEN)
    epochs_in_iteration = state.iteration_in(TimeUnit.EPOCH)
    tokens_in_iteration = state.iteration_in(TimeUnit.TOKEN)
    listening = logger.listening
    before_dataloader, batch_end, batch_checkpoint = hooks.before_dataloader, hooks.batch_end, hooks.batch_checkpoint

    if saves is not None:
        saves.settle()  # a fit that was left in the middle may have begun to write one
    # fit start: the plan is fixed, the model final; resumed runs enter the epoch they left
    watch.look("the start of fit")
    for call in hooks.fit_start:
        call()
    state.model.train()
    announced = -1
    if resume is not None:
        resume()
        evaluations.run_missed()
        if (epochs_in_iteration and progress.epoch_in_iteration >= epochs_in_iteration) or (
            tokens_in_iteration and progress.token_in_iteration >= tokens_in_iteration
        ):
            _finish_iteration(state, hooks, evaluations, saves)
    last, state.time_out_s = time.perf_counter(), 0.0
    while not state.stopped or _owes_epoch_end(state):
        announced = _start_iteration(state, hooks, announced)
        if progress.batch_in_epoch == 0:
            watch.look(f"epoch {progress.epoch}")
            for call in hooks.epoch_start:
                call()
        batches = _batches(data, state, ranks)
        while not state.stopped:
            if tokens_in_iteration:
                announced = _start_iteration(state, hooks, announced)

            # data: the whole batch of this rank, counted as the loader gives it
            for call in before_dataloader:
                call()
            batch: Any = read(batches, _EXHAUSTED)
            if batch is _EXHAUSTED:
                if progress.batch_in_epoch == 0:
                    raise DataError(
                        f"train_dataloader: it gave no batch in epoch {progress.epoch}. "
                        "Give a loader that can be read anew each epoch and is not empty."
                    )
                break
            num_samples, num_tokens = count_samples(batch), count_tokens(batch)
            if counts_tokens and not num_tokens:
                raise DataError(
                    "max_duration, iteration_length, eval_interval or a schedule counts tokens, and the batch has none. "
                    "Give DataSpec(dataloader, get_num_tokens_in_batch=...), or another unit."
                )
            state.batch, state.evaluation = batch, 0
            if ranks is not None:
                ranks.read = num_samples, num_tokens

            # step: after_dataloader, batch_start, the microbatches' forward, loss and backward, then the optimizers
            state.loss = run_batch()

            # end of the step: time moves, then everybody looks at the result
            now = time.perf_counter()
            duration_s = max(now - last - state.time_out_s, 0.0)  # a clock never goes back, whoever counted
            if ranks is not None:  # what all ranks read, and how long it took them
                num_samples, num_tokens, duration_s = ranks.receive(duration_s)
            progress.finish_batch(num_samples, num_tokens, duration_s)
            last, state.time_out_s = now, 0.0
            loss = state.loss if ranks is None else ranks.mean_loss(state.loss)
            if listening:
                _log_batch(logger, state, loss)
            for call in batch_end:
                call()
            if step_schedulers_every_batch:
                for scheduler in torch_schedulers:
                    scheduler.step()
            if evaluations.each_batch and evaluations.run_due("batch") and ranks is not None:
                ranks.agree_to_stop()
            for call in batch_checkpoint:
                call()
            if saves is not None:
                saves.at("batch_checkpoint")
            if tokens_in_iteration and progress.token_in_iteration >= tokens_in_iteration:
                _finish_iteration(state, hooks, evaluations, saves)
            paused = time.perf_counter()
            yield
            state.time_out_s += time.perf_counter() - paused
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
        if saves is not None:
            saves.at("epoch_checkpoint")
        if epochs_in_iteration and progress.epoch_in_iteration >= epochs_in_iteration:
            _finish_iteration(state, hooks, evaluations, saves)
        if ranks is not None:
            ranks.agree_to_stop()

    if ranks is not None:
        ranks.agree_to_stop()
    watch.look("the end of fit")

    # fit end: what was not evaluated since the last batch is evaluated now, so that fit_end sees the final metrics
    if state.interrupted is None:
        if progress.batch_in_epoch and not evaluations.ended:
            _finish_train_metrics(state, logger)
        evaluations.run_final()
    if state.interrupted is not None:  # in order, and early: what belongs to a finished run does not happen
        if saves is not None:
            saves.at("interrupted")
            saves.settle()
        return
    for optimizer in optimizers:
        optimizer.zero_grad()
    for call in hooks.fit_end:
        call()
    if saves is not None:
        saves.at("fit_end")
        saves.settle()


def _owes_epoch_end(state: State) -> bool:
    """Whether every batch of an epoch is done but not its end: so a run is that was resumed just there."""
    return 0 < state.progress.batch_in_epoch == state.dataloader_len


def _start_iteration(state: State, hooks: SimpleNamespace, announced: int) -> int:
    """Fire ``iteration_start`` if an iteration begins here that is not ``announced`` yet; return the latest that is.

    None begins between the last batch of an epoch and its end: a run that is resumed after that would fire it again.
    """
    number = state.progress.iteration
    if not state.at_iteration_start or number == announced or _owes_epoch_end(state):
        return announced
    for call in hooks.iteration_start:
        call()
    return number


def _finish_iteration(state: State, hooks: SimpleNamespace, evaluations: Evaluations, saves: Saves | None) -> None:
    state.progress.finish_iteration()
    for call in hooks.iteration_end:
        call()
    evaluations.run_due("iteration")
    for call in hooks.iteration_checkpoint:
        call()
    if saves is not None:
        saves.at("iteration_checkpoint")


def _batches(data: DataSpec, state: State, ranks: Ranks | None) -> Iterator[Any]:
    """Return the batches of the present epoch from the present place on; copied ahead to an accelerator where that is safe.

    Several ranks read in step: as long as one has a batch, all have.
    """
    done, length = state.progress.batch_in_epoch, state.dataloader_len
    batches = enter_epoch(data.dataloader, state.progress.epoch, done, skip=state.spin_dataloaders)
    rounds = None if length is None else max(length - done, 0)
    batches = islice(batches, rounds)
    if state.device.type != "cpu" and (depth := safe_depth(data.dataloader)):
        batches = iter(DevicePrefetcher(batches, state.device, depth, data.batch_transforms))
    elif data.batch_transforms is not None:
        batches = map(data.batch_transforms, batches)
    return batches if ranks is None else ranks.in_step(batches, data, rounds, "train_dataloader")


def _log_batch(logger: Logger, state: State, loss: Tensor) -> None:
    progress = state.progress
    metrics = {
        "loss/train/total": loss,
        "time/epoch": progress.epoch,
        "time/sample": progress.sample,
        "time/total_wct": progress.total_wct,
    }
    if progress.token:
        metrics["time/token"] = progress.token
    if state.loss_parts:
        metrics |= {f"loss/train/{name}": value for name, value in state.loss_parts.items()}
    logger.log_metrics(metrics)


def _finish_train_metrics(state: State, logger: Logger) -> None:
    if not state.train_metrics:
        return
    state.train_metric_values = compute_metrics(state.train_metrics)
    for metric in state.train_metrics.values():
        metric.reset()
    if logger.listening:
        logger.log_metrics(
            {f"metrics/{state.train_label}/{name}": value for name, value in state.train_metric_values.items()}
        )
