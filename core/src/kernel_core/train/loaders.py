"""What a trainer reads: the loader it trains on and its evaluators, each rank its share of them."""

from __future__ import annotations

import copy
import logging
from typing import Any

from kernel_core.data.loader import resumable_loader
from kernel_core.data.spec import DataSpec
from kernel_core.errors import TrainerError
from kernel_core.train.evaluator import Evaluator, as_evaluators
from kernel_core.train.forward import batches_within
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State

log = logging.getLogger(__name__)


class Loaders:
    """The loaders of one trainer, rebuilt so that their order can be resumed and shared among ranks.

    Args:
        state: The run, whose attributes about loaders are set here.
        ranks: The other ranks; None in a run of one process.
        subset_num_batches: Cut every epoch of training to so many batches; -1 for whole epochs.

    Attributes:
        train: What is trained on, None as long as nobody has said.
    """

    def __init__(self, state: State, ranks: Ranks | None, subset_num_batches: int) -> None:
        self._state, self._ranks = state, ranks
        self.subset_num_batches = subset_num_batches
        self.train: DataSpec | None = None

    def set_train(self, dataloader: Any, global_batch_size: int | None = None) -> None:
        """Train on ``dataloader`` from now on.

        Args:
            dataloader: A loader, DataSpec, or dict of DataSpec's arguments.
            global_batch_size: Samples in a batch over all ranks, of which each reads its share; None for what it says itself.

        Raises:
            TrainerError, DataError: it cannot be used.
        """
        state = self._state
        self.train = data = self._rebuilt(DataSpec.of(dataloader), False, global_batch_size)
        state.dataloader, state.dataloader_label = data.dataloader, state.train_label
        if not self.subset_num_batches:
            raise TrainerError("train_subset_num_batches: got 0. Expected at least 1, or -1 for whole epochs.")
        state.epoch_share = data.epoch_share
        state.dataloader_len = batches_within(data, self.subset_num_batches)
        if self._ranks is not None:
            state.dataloader_len = self._ranks.agree_on_length(state.dataloader_len, "train_dataloader")

    def set_evaluators(self, dataloader: Any, subset_num_batches: int) -> None:
        """Evaluate on ``dataloader`` from now on, whatever of it can be made an Evaluator."""
        state = self._state
        state.evaluators = as_evaluators(dataloader, subset_num_batches, state.train_label)
        for evaluator in state.evaluators:
            evaluator.metrics = evaluator.select(state.model.get_metrics(is_train=False))
            self.share(evaluator)

    def share(self, evaluator: Evaluator) -> None:
        """Let each rank evaluate its share, and noise follow from the sample alone."""
        evaluator.data = self._rebuilt(evaluator.data, True)

    def shared(self, data: DataSpec) -> DataSpec:
        """Return a copy of ``data`` for a pass of which each rank reads its share; of one process ``data`` itself."""
        return data if self._ranks is None else self._rebuilt(data, True)

    def _rebuilt(self, data: DataSpec, once: bool, global_batch_size: int | None = None) -> DataSpec:
        """``once``: every sample on one rank only, as a pass over all of them wants it."""
        engine, data = self._state.engine, copy.copy(data)  # the user's own may serve another run
        data.dataloader, note = resumable_loader(
            data.dataloader,
            self._state.seed,
            engine.data_rank,
            engine.data_world_size,
            global_batch_size=global_batch_size,
            once=once,
        )
        if note and engine.rank == 0 and (engine.world_size > 1 or not once):
            log.info("%s", note)
        return data
