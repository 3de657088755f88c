"""``device_train_microbatch_size="auto"``: the largest microbatch that fits, found by trying.

A try that runs out of memory is undone and made again with half the rows. Copies to undo it with are taken only while
a size is being probed: until a microbatch of that many rows and entries has gone through a whole step, after the first,
in which optimizers make their state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_core.data.spec import DataSpec, tensors_of
from kernel_core.engine import TrainBatch
from kernel_core.errors import TrainerError
from kernel_core.logger import Logger
from kernel_core.train.precision import Precision
from kernel_core.train.snapshot import Snapshot, is_out_of_memory
from kernel_core.train.state import State

log = logging.getLogger(__name__)
Size = tuple[float, float]
UNKNOWN = float("inf")  # of a batch without tensors: as if it were larger than any other


class AutoMicrobatch:
    """Finds ``state.device_train_microbatch_size`` for a run of one process."""

    def __init__(self, state: State, data: DataSpec, precision: Precision, logger: Logger) -> None:
        self._state, self._precision, self._logger = state, precision, logger
        self._count = data.get_num_samples_in_batch
        self._proven: list[Size] = []  # microbatches that have gone through, none within another
        self._gone_through: list[Size] = []  # those of this step
        self._first = True
        self._updating = False  # whether the optimizers have begun
        self._unreported = True

    def batch(self, run_batch: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return ``run_batch``, from the batch as the loader gave it to the end of its step, tried again when memory runs out.

        In the first step everything is undone, the weights too: optimizers make their state there. Later, what fails
        inside the optimizers themselves cannot be.
        """

        def retried() -> Tensor:
            batch = self._state.batch
            snapshot = self._snapshot(batch, weights=self._first)
            while True:
                self._updating, self._gone_through = False, []
                try:
                    loss = run_batch()
                except Exception as error:
                    if self._updating and not self._first:
                        raise
                    self._shrink(error, batch)
                else:
                    self._finish_step()
                    return loss
                self._undo(snapshot, batch)

        return retried

    def evaluation(self, train_batch: TrainBatch) -> TrainBatch:
        """Return ``train_batch`` tried again when memory runs out: an optimizer may be in the middle of its step."""

        def retried() -> Tensor:
            batch, self._updating = self._state.batch, True
            snapshot = self._snapshot(batch)
            while True:
                try:
                    loss = train_batch()
                except Exception as error:
                    self._shrink(error, batch)
                else:
                    self._gone_through.append(self._measure(batch))
                    return loss
                self._undo(snapshot, batch)

        return retried

    def _measure(self, batch: Any) -> Size:
        """Return the rows of the largest microbatch of ``batch``, and the entries of a row."""
        rows = self._count(batch)
        entries = sum(tensor.numel() for tensor in tensors_of(batch)) or UNKNOWN
        return min(self._state.device_train_microbatch_size or rows, rows), entries / max(rows, 1)

    def _is_proven(self, size: Size) -> bool:
        return any(size[0] <= rows and size[1] <= width < UNKNOWN for rows, width in self._proven)

    def _snapshot(self, batch: Any, weights: bool = False) -> Snapshot | None:
        if self._is_proven(self._measure(batch)):
            return None
        return Snapshot(self._state, self._state.train_metrics, weights)

    def _finish_step(self) -> None:
        if self._first:
            self._first = False  # the next step is the first with all that stays in memory
        else:
            for through in self._gone_through:
                if not self._is_proven(through):
                    larger = [one for one in self._proven if one[0] > through[0] or one[1] > through[1]]
                    self._proven = [*larger, through]
        if self._unreported:
            self._unreported = False
            size = self._state.device_train_microbatch_size or self._count(self._state.batch)
            self._logger.log_metrics({"trainer/device_train_microbatch_size": size})

    def _shrink(self, error: Exception, batch: Any) -> None:
        """Halve the size, or raise ``error`` if it is another one or there is nothing left to halve."""
        if not is_out_of_memory(error):
            raise error
        state = self._state
        rows = min(state.device_train_microbatch_size or UNKNOWN, self._count(batch))
        if rows <= 1:
            raise too_large() from error
        state.device_train_microbatch_size = int(rows) // 2
        self._proven, self._unreported = [], True
        log.warning("out of memory with microbatches of %d rows; trying %d.", rows, rows // 2)

    def _undo(self, snapshot: Snapshot | None, batch: Any) -> None:
        state = self._state
        if snapshot is None:
            log.warning(
                "batch %d ran out of memory although one of its size had passed; it is tried again, and what it had changed "
                "in buffers and metrics is not undone.",
                state.progress.batch,
            )
            state.batch, state.outputs, state.loss = batch, None, None
            for parameter in state.model.parameters():
                parameter.grad = None
        else:
            snapshot.restore()
        self._precision.forget_gradients()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


def too_large() -> TrainerError:
    """Return the error that says that not even one row fits."""
    return TrainerError(
        "device_train_microbatch_size: the device runs out of memory with a single row. Expected a model and a row "
        "that fit. Use a smaller model or shorter rows, a smaller precision, or an engine that shards."
    )
