"""Forward passes over a loader without gradients: what evaluation and prediction share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal

import torch

from kernel_core.data.spec import DataSpec, tensors_of, to_device
from kernel_core.errors import TrainerError
from kernel_core.timing import Progress
from kernel_core.train.ranks import Ranks
from kernel_core.train.snapshot import is_out_of_memory
from kernel_core.train.state import State

log = logging.getLogger(__name__)


@dataclass
class Microbatch:
    """How many rows go through the model at once.

    Attributes:
        rows: None for the whole batch.
        auto: Halve ``rows`` when memory runs out.
        proven: Entries of the largest batch that has passed with the present ``rows``.
    """

    rows: int | None = None
    auto: bool = False
    proven: int = 0

    @classmethod
    def of(cls, size: int | Literal["auto"] | None, argument: str) -> Microbatch:
        """Read what a user may give.

        Raises:
            TrainerError: it is neither a size, "auto" nor None.
        """
        if size == "auto":
            return cls(None, True)
        check_size(argument, size)
        return cls(size)

    def shrink(self, error: Exception, rows: int, what: str) -> None:
        """Halve the size, or raise ``error`` if it is another one, or the size is fixed or one."""
        if not (self.auto and is_out_of_memory(error)) or (self.rows or rows) <= 1:
            raise error
        self.rows, self.proven = (self.rows or rows) // 2, 0
        log.warning("%s: out of memory; trying microbatches of %d rows.", what, self.rows)
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def check_size(argument: str, size: Any) -> None:
    """Refuse anything but a whole number of at least 1, or None."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise TrainerError(f"{argument}: got {size!r}. Expected a whole number of at least 1, or None.")


@dataclass(frozen=True)
class Pass:
    """One pass over a loader.

    Attributes:
        data, limit: What to read; at most ``limit`` batches if that is not negative.
        progress: Counts what was read.
        prefix: ``eval`` or ``predict``: whose hooks fire.
        forward: ``microbatch -> outputs``.
        microbatch: How many rows at once.
        take: Gets the outputs of each microbatch; ``state.batch`` is that microbatch.
        hold: Called before a batch that may run out of memory; what it returns takes back all that ``take`` did since.
        finish_batch: Called when all microbatches of a batch are taken.
    """

    data: DataSpec
    limit: int
    progress: Progress
    prefix: str
    forward: Callable[[Any], Any]
    microbatch: Microbatch
    take: Callable[[Any], None]
    hold: Callable[[], Callable[[], None]]
    finish_batch: Callable[[], None] = lambda: None


def batches_within(data: DataSpec, limit: int) -> int | None:
    """Return how many batches are read, at most ``limit`` if that is not negative; None if nobody knows."""
    length = data.num_batches
    return length if limit < 0 else limit if length is None else min(length, limit)


def run_pass(state: State, hooks: SimpleNamespace, job: Pass, ranks: Ranks | None = None) -> bool:
    """Run every batch; say whether the end was reached: False if a signal ended it early.

    Of several ranks each runs its own batches; one that has none left, while others have, computes along where passes need
    all ranks, and takes nothing.
    """
    data, on_cpu = job.data, state.device.type == "cpu"
    batch_start, batch_end = getattr(hooks, f"{job.prefix}_batch_start"), getattr(hooks, f"{job.prefix}_batch_end")
    run_batch = _make_run_batch(state, hooks, job, ranks)
    batches: Iterator[Any] = islice(iter(data.dataloader), None if job.limit < 0 else job.limit)
    if data.batch_transforms is not None:
        batches = map(data.batch_transforms, batches)
    if ranks is not None:
        what = f"{job.prefix}_dataloader"
        rounds = ranks.agree_on_length(batches_within(data, job.limit), what, to_the_last=True)
        batches = ranks.in_step(batches, data, rounds, what, True, state.engine.needs_all_ranks)
    state.engine.begin_passes(state.model)
    for batch in batches:
        started = time.perf_counter()
        absent = ranks is not None and ranks.absent
        num_samples = 0 if absent else data.get_num_samples_in_batch(batch)
        num_tokens = 0 if absent else data.get_num_tokens_in_batch(batch)
        if ranks is not None:
            num_samples, num_tokens = ranks.agree_to_stop(num_samples, num_tokens)
        state.batch = batch if on_cpu else to_device(batch, state.device)
        for call in () if absent else batch_start:
            call()
        if not absent or state.engine.needs_all_ranks:
            run_batch()
        job.progress.finish_batch(num_samples, num_tokens, time.perf_counter() - started)
        if not absent:
            job.finish_batch()
            for call in batch_end:
                call()
        if state.interrupted is not None:
            break
    state.engine.finish_passes()
    return state.interrupted is None


def _make_run_batch(state: State, hooks: SimpleNamespace, job: Pass, ranks: Ranks | None) -> Callable[[], None]:
    before, after = getattr(hooks, f"{job.prefix}_before_forward"), getattr(hooks, f"{job.prefix}_after_forward")
    data, microbatch, transforms = job.data, job.microbatch, job.data.microbatch_transforms
    in_step = ranks if state.engine.needs_all_ranks else None

    def prepared(part: Any) -> Any:
        return part if transforms is None else transforms(part)

    def run_microbatches(batch: Any) -> None:
        parts: Sequence[Any] = [batch] if microbatch.rows is None else data.split_batch(batch, microbatch.rows)
        own = 0 if ranks is not None and ranks.absent else len(parts)
        rounds = own if in_step is None else 1 if microbatch.rows is None else in_step.most(own)
        for part in parts[:own]:
            state.batch = prepared(part)
            for call in before:
                call()
            state.outputs = job.forward(state.batch)
            for call in after:
                call()
            job.take(state.outputs)
        for _ in range(own, rounds):  # other ranks have more
            job.forward(prepared(parts[-1]))

    def run_batch() -> None:
        batch = state.batch
        entries = sum(tensor.numel() for tensor in tensors_of(batch)) if microbatch.auto else 0
        take_back = job.hold() if microbatch.auto and not 0 < entries <= microbatch.proven else None
        while True:
            try:
                run_microbatches(batch)
                microbatch.proven = max(microbatch.proven, entries)
                break
            except Exception as error:
                if take_back is None or in_step is not None:
                    raise  # what was given cannot be taken back, or other ranks wait in the pass that failed
                rows = data.get_num_samples_in_batch(batch)
                microbatch.shrink(error, rows, f"{job.prefix} {state.dataloader_label}")
            take_back()
            state.outputs = None
        if microbatch.rows is not None:
            state.batch = batch

    return run_batch
