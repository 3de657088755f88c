"""Samplers whose order is a function of (seed, epoch): resumable in mid-epoch, the same on any number of ranks.

Batch *t* of an epoch is, over all ranks, ``order[t * G : (t + 1) * G]`` with G the global batch size; each rank takes its
slice. So neither the world size nor the place where a run was interrupted changes which samples meet in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from kernel_core.data.keyed import EpochBatch
from kernel_core.errors import DataError
from kernel_core.train.randomness import keyed_generator


def epoch_order(num_samples: int, *, shuffle: bool, seed: int, epoch: int) -> torch.Tensor | range:
    """Return the sample ids of an epoch in their order: all of them, each once.

    A shuffled order takes 8 bytes a sample and no draw from the global generators.
    """
    if not shuffle:
        return range(num_samples)
    generator = keyed_generator(torch.device("cpu"), seed, "sampler", epoch)
    return torch.randperm(num_samples, generator=generator, device="cpu")  # whatever the default device is


def share(window: range | torch.Tensor, rank: int, world_size: int) -> Sequence[int]:
    """Return this rank's slice of a global batch; ranks differ by at most one sample, the first ones having more."""
    each, extra = divmod(len(window), world_size)
    start = rank * each + min(rank, extra)
    mine = window[start : start + each + (rank < extra)]
    return mine.tolist() if isinstance(mine, torch.Tensor) else list(mine)


class ResumableSampler(Sampler[int]):
    """The sample ids of an epoch, in the order of ``epoch_order``.

    Args:
        data_source: The data set, or anything whose length is the number of samples, or that number.
        shuffle: Whether each epoch has an order of its own; else it is 0, 1, 2, …
        seed: Decides the order, together with the epoch's number.
    """

    def __init__(self, data_source: Sized | int, *, shuffle: bool, seed: int) -> None:
        self.data_source = data_source
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterators are for."""
        self.epoch = epoch

    def order(self, epoch: int) -> torch.Tensor | range:
        """Return the ids of ``epoch`` in their order."""
        return epoch_order(len(self), shuffle=self.shuffle, seed=self.seed, epoch=epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(share(self.order(self.epoch), 0, 1))

    def __len__(self) -> int:
        return self.data_source if isinstance(self.data_source, int) else len(self.data_source)


class ResumableBatchSampler(Sampler[list[int]]):
    """This rank's part of each global batch of an epoch, as lists of sample ids that know their epoch (``EpochBatch``).

    The last global batch of an epoch may be short. It is shared evenly: a rank gets a sample less than another, and with
    fewer samples than ranks the last ranks get none and have one batch less. ``len`` is the number of global batches, the
    same on every rank.

    Args:
        sampler: Gives the order.
        batch_size: Samples per batch and rank.
        drop_last: Leave out the last global batch if it is short.
        rank: This process's number.
        world_size: The number of processes.

    Example:
        >>> order = ResumableSampler(10, shuffle=False, seed=0)
        >>> list(ResumableBatchSampler(order, 2, rank=1, world_size=2))
        [[2, 3], [6, 7], [9]]
    """

    def __init__(
        self, sampler: ResumableSampler, batch_size: int, drop_last: bool = False, *, rank: int = 0, world_size: int = 1
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise DataError(f"batch_size: got {batch_size!r}. Expected a whole number of at least 1.")
        if not 0 <= rank < world_size:
            raise DataError(f"rank: got {rank} of {world_size}. Expected a number from 0 to {world_size - 1}.")
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self._start = 0

    @property
    def global_batch_size(self) -> int:
        """Samples in a batch over all ranks."""
        return self.batch_size * self.world_size

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iterators are for. A start position stays."""
        self.sampler.set_epoch(epoch)

    def start_at(self, batch: int) -> None:
        """Let the next epoch that is read begin with its batch number ``batch``; the one after begins with its first again.

        Nothing is read for the batches before it. The length of the epoch is as ever.

        Raises:
            DataError: the epoch has fewer batches.
        """
        if not 0 <= batch <= len(self):
            raise DataError(
                f"start_at: got batch {batch}, and an epoch has {len(self)} batches of {self.global_batch_size} samples. "
                "The data set or the batch size is not that of the run that was saved; resume with the same."
            )
        self._start = batch

    def __iter__(self) -> Iterator[list[int]]:
        # bound now: what is set later is for later iterators
        return self._batches(self.sampler.epoch, self._start)

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        # Here and not in __iter__: a DataLoader with workers makes two iterators for its first epoch and reads the second.
        if self._start == start:
            self._start = 0
        order, size = self.sampler.order(epoch), self.global_batch_size
        for first in range(start * size, self._num_batches(len(order)) * size, size):
            if ids := share(order[first : first + size], self.rank, self.world_size):
                yield EpochBatch(ids, self.sampler.seed, epoch)

    def _num_batches(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __len__(self) -> int:
        return self._num_batches(len(self.sampler))
