"""``device_train_microbatch_size="auto"`` on several ranks: all take the same size, and none waits for one that failed.

Where passes wait for nobody (DDP), a size is tried without averaging gradients. When its microbatches are through, or memory
ran out, the ranks tell one another; only if all are through do they average. Where passes wait for other ranks (sharded
models), a rank that fails cannot take part any more and cannot try again: it writes down the smaller size, tells the others
to end, and the launcher starts all of them again.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kernel_core.data.spec import DataSpec
from kernel_core.engine import TrainBatch
from kernel_core.errors import StartAgain
from kernel_core.logger import Logger
from kernel_core.train.auto_microbatch import UNKNOWN, AutoMicrobatch, too_large
from kernel_core.train.precision import Precision
from kernel_core.train.ranks import Ranks
from kernel_core.train.snapshot import Snapshot, is_out_of_memory
from kernel_core.train.state import State

log = logging.getLogger(__name__)
REPORT_DIR, SIZE = "KERNEL_REPORT_DIR", "KERNEL_MICROBATCH_SIZE"  # set by the launcher


class OtherRankFailed(Exception):
    """Memory ran out on another rank."""


class SharedAutoMicrobatch(AutoMicrobatch):
    """Finds the size for a run of several ranks."""

    def __init__(self, state: State, data: DataSpec, precision: Precision, logger: Logger, ranks: Ranks) -> None:
        super().__init__(state, data, precision, logger)
        self._ranks, self._engine = ranks, state.engine
        self._settled = False

    def batch(self, run_batch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return ``run_batch``; what fails outside the microbatches cannot be tried again, since other ranks go on."""

        def run() -> Tensor:
            self._gone_through = []
            try:
                loss = run_batch()
            except Exception as error:
                if is_out_of_memory(error):
                    raise self._start_again(error) from error
                raise
            self._finish_step()
            return loss

        return run

    def evaluation(self, train_batch: TrainBatch) -> TrainBatch:
        """Return ``train_batch`` tried until it goes through on all ranks."""

        def run() -> Tensor:
            batch = self._state.batch
            if self._engine.needs_all_ranks:
                loss = train_batch()
            else:
                proven = self._is_proven(self._measure(batch))
                unproven = self._ranks.sum(float(not proven))[0] > 0  # one small message in each batch
                loss = self._try(train_batch, batch) if unproven else train_batch()
            self._gone_through.append(self._measure(batch))
            return loss

        return run

    def settle(self) -> None:
        """Hear whether all ranks are through, then average the gradients.

        Raises:
            OtherRankFailed: one is not.
        """
        if self._state.trying:
            if self._ranks.sum(0.0)[0]:
                raise OtherRankFailed
            self._settled = True
        self._engine.reduce_gradients()

    def _try(self, train_batch: TrainBatch, batch: Any) -> Tensor:
        state = self._state
        snapshot = Snapshot(state, state.train_metrics)
        while True:
            state.trying, self._settled = True, False
            try:
                return train_batch()
            except OtherRankFailed as error:
                cause: Exception = error
            except Exception as error:
                if not is_out_of_memory(error) or self._settled:
                    raise
                cause = error
                self._ranks.sum(1.0)
            finally:
                state.trying = False
            self._shrink_together(cause, batch)
            self._undo(snapshot, batch)

    def _shrink_together(self, error: Exception, batch: Any) -> None:
        state = self._state
        rows = self._ranks.most(int(min(state.device_train_microbatch_size or UNKNOWN, self._count(batch))))
        if rows <= 1:
            raise too_large() from error
        state.device_train_microbatch_size = rows // 2
        self._proven, self._unreported = [], True
        if state.rank == 0:
            log.warning("out of memory on a rank with microbatches of %d rows; all try %d.", rows, rows // 2)

    def _start_again(self, error: Exception) -> Exception:
        """Write down half the size for the next start, and return the error that asks for it."""
        state = self._state
        rows = int(min(state.device_train_microbatch_size or UNKNOWN, self._count(state.batch)))
        if rows <= 1:
            return too_large()
        write_size(rows // 2)
        return StartAgain(
            f"device_train_microbatch_size: memory ran out on rank {state.rank} with microbatches of {rows} rows, where other "
            f"ranks cannot try again in place. Expected a size that fits. kernel launch starts again with {rows // 2}; without "
            f"it, start again with device_train_microbatch_size={rows // 2}.",
            rows // 2,
        )


def write_size(size: int) -> None:
    """Leave the size for the launcher, if one has said where."""
    if folder := os.environ.get(REPORT_DIR):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "microbatch_size").write_text(str(size))


def first_size() -> int | None:
    """Return the size that the start before found to be worth trying, None if this is the first."""
    text = os.environ.get(SIZE, "")
    if not text and (folder := os.environ.get(REPORT_DIR)):
        path = Path(folder) / "microbatch_size"
        text = path.read_text() if path.exists() else ""
    return int(text) if text.isdigit() and int(text) > 0 else None
