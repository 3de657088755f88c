"""``device_train_microbatch_size="auto"``: the largest microbatch that fits, found by trying.

A try that runs out of memory is undone and made again with half the rows. Copies to undo it with are taken only while
a size is being probed: until a batch of that many entries has passed once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_core.data.spec import DataSpec
from kernel_core.engine import TrainBatch
from kernel_core.errors import TrainerError
from kernel_core.logger import Logger
from kernel_core.train.precision import Precision
from kernel_core.train.snapshot import Snapshot, is_out_of_memory
from kernel_core.train.state import State

log = logging.getLogger(__name__)


class AutoMicrobatch:
    """Finds ``state.device_train_microbatch_size`` for a run."""

    def __init__(self, state: State, data: DataSpec, precision: Precision, logger: Logger) -> None:
        self._state, self._precision, self._logger = state, precision, logger
        self._count = data.get_num_samples_in_batch
        self._proven = -1  # entries of the largest batch that has passed with the present size
        self._unreported = True
        self._batch: Any = None

    def train_batch(self, train_batch: TrainBatch) -> TrainBatch:
        """Return ``train_batch`` made again with smaller microbatches when memory runs out."""

        def retried() -> Tensor:
            self._batch = self._state.batch
            entries = count_entries(self._batch)
            snapshot = Snapshot(self._state, self._state.train_metrics) if entries > self._proven else None
            while True:
                try:
                    loss = train_batch()
                except Exception as error:
                    self._shrink(error)
                else:
                    self._proven = max(self._proven, entries)
                    self._report()
                    return loss
                self._undo(snapshot)

        return retried

    def first_step(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return ``step`` of which the first call can fail half-way: optimizers make their state there."""
        begun = False

        def stepped() -> Tensor:
            nonlocal begun
            if begun:
                return step()
            self._batch = self._state.batch
            snapshot = Snapshot(self._state, self._state.train_metrics, weights=True)
            while True:
                try:
                    loss = step()
                except Exception as error:
                    self._shrink(error)
                else:
                    begun = True
                    return loss
                self._undo(snapshot)

        return stepped

    def _shrink(self, error: Exception) -> None:
        """Halve the size, or raise ``error`` if it is another one or there is nothing left to halve."""
        if not is_out_of_memory(error):
            raise error
        state = self._state
        rows = state.device_train_microbatch_size or self._count(self._batch)
        if rows <= 1:
            raise TrainerError(
                "device_train_microbatch_size: the device runs out of memory with a single row. Expected a model and a row "
                "that fit. Use a smaller model or shorter rows, a smaller precision, or an engine that shards."
            ) from error
        state.device_train_microbatch_size = rows // 2
        self._proven, self._unreported = -1, True
        log.warning("out of memory with microbatches of %d rows; trying %d.", rows, rows // 2)

    def _undo(self, snapshot: Snapshot | None) -> None:
        state = self._state
        if snapshot is None:
            log.warning(
                "batch %d ran out of memory although one of its size had passed; it is tried again, and what it had changed "
                "in buffers and metrics is not undone.",
                state.progress.batch,
            )
            state.batch, state.outputs, state.loss = self._batch, None, None
            for parameter in state.model.parameters():
                parameter.grad = None
        else:
            snapshot.restore()
        self._precision.forget_gradients()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()

    def _report(self) -> None:
        if self._unreported:
            self._unreported = False
            size = self._state.device_train_microbatch_size or self._count(self._batch)
            self._logger.log_metrics({"trainer/device_train_microbatch_size": size})


def count_entries(batch: Any) -> int:
    """Return the number of entries of all tensors inside ``batch``."""
    if isinstance(batch, Tensor):
        return batch.numel()
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return sum(map(count_entries, parts))
