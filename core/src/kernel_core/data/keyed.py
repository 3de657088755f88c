"""Noise that belongs to a sample: what a data set draws while it reads sample *i* is a function of (seed, epoch, i).

It is then the same without workers and with any number of them, persistent or not, after a resume, and on any number of
ranks; and the generators of the main process are as they were before the batch was read. This holds for what is drawn
from the global generators of Python, NumPy and torch on the CPU.

Most data sets draw nothing, and seeding costs 5 µs a sample for torch's generator alone and 15 for all three. So a data set
is watched: its batch is read, and only if a generator moved is the batch read once more, sample by sample with seeded
generators, and from then on always so. Only the generators that were seen to move are seeded. A quiet data set pays for the
look, about 40 µs a batch; a true attribute ``draws_nothing`` spares it that.

What this cannot key: generators that the data set or a transform keeps for itself (their state goes on from read to read,
in each worker by itself), accelerators' generators, and a data set whose samples change by being read. A batch may be read
twice, once in each process.

``collate_fn`` sees the batch of one rank, so what it draws follows from (seed, epoch, first sample of that batch): the same
after a resume and with any number of workers, but not on another number of ranks.
"""

from __future__ import annotations

import copy
import ctypes
import random
import struct
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from kernel_core.train.randomness import keyed_seed

try:
    from torch.utils.data import MapDataPipe
except ImportError:  # torch means to drop them
    MapDataPipe = ()  # type: ignore[assignment, misc]

PLAIN = (list, tuple, range, torch.Tensor, np.ndarray, TensorDataset)  # data sets without code of a user's
_MT19937_BYTES = 2500  # 624 words and the position in them


class EpochBatch(list[int]):
    """The sample ids of a batch, with the seed and the epoch they are read for, which so reach workers that persist.

    Args:
        ids: The sample ids.
        seed: The seed of the run.
        epoch: The number of the epoch.
    """

    __slots__ = ("epoch", "seed")

    def __init__(self, ids: Iterable[int], seed: int, epoch: int) -> None:
        super().__init__(ids)
        self.seed = seed
        self.epoch = epoch

    def __reduce__(self) -> tuple[Any, ...]:
        return EpochBatch, (list(self), self.seed, self.epoch)


class _Python:
    """Python's ``random``. Capturing costs 11 µs."""

    capture = staticmethod(random.getstate)
    restore = staticmethod(random.setstate)
    seed = staticmethod(random.seed)

    @staticmethod
    def moved(before: Any) -> bool:
        now = random.getstate()
        # the position, a word that changes with each refill, and the second half of a pair of normal numbers
        return bool(now[1][-2:] != before[1][-2:] or now[2] != before[2])


class _Numpy:
    """NumPy's global ``RandomState``. Its own functions take 40 µs to get the state, comparing its memory takes 0.5.

    A captured state is kept as long as the memory stays the same. That memory is without the second half of a pair of
    normal numbers, so a state that has one is not kept: it may be used up without a trace.
    """

    def __init__(self) -> None:
        self._memory: bytes | None = None
        self._state: Any = None

    @staticmethod
    def _read_memory() -> bytes | None:
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if type(bits) is not np.random.MT19937:
            return None
        return ctypes.string_at(bits.ctypes.state_address, _MT19937_BYTES)  # type: ignore[arg-type]

    def capture(self) -> Any:
        memory = self._read_memory()
        if memory is None or memory != self._memory:
            self._state = np.random.get_state(legacy=False)
            self._memory = None if self._state["has_gauss"] else memory
        return self._state

    def moved(self, before: Any) -> bool:
        if before["bit_generator"] != "MT19937":
            return False  # put there by the user, and not to be seeded
        if not before["has_gauss"]:
            return self._read_memory() != self._memory
        now = np.random.get_state(legacy=False)
        words, old = now["state"], before["state"]  # type: ignore[call-overload]
        return bool(
            not now["has_gauss"]  # type: ignore[call-overload]
            or words["pos"] != old["pos"]
            or not np.array_equal(words["key"], old["key"])
        )

    @staticmethod
    def restore(state: Any) -> None:
        np.random.set_state(state)

    @staticmethod
    def seed(seed: int) -> None:
        np.random.seed(seed & 0xFFFFFFFF)


class _Torch:
    """Torch's generator of the CPU alone: ``torch.manual_seed`` looks for accelerators, which takes 150 µs."""

    capture = staticmethod(torch.default_generator.get_state)
    restore = staticmethod(torch.default_generator.set_state)
    seed = staticmethod(torch.default_generator.manual_seed)

    @staticmethod
    def moved(before: torch.Tensor) -> bool:
        return torch.default_generator.get_state().numpy().tobytes() != before.numpy().tobytes()


SOURCES: tuple[Any, ...] = (_Python(), _Numpy(), _Torch())
_SEEDS = tuple(source.seed for source in SOURCES)
_THREE_NUMBERS = struct.Struct("<QQQ")


class KeyedDataset:
    """What an iterator of a loader reads instead of the data set: whole batches, whose noise is keyed.

    Attributes are those of the data set, to read and to write, since code in workers asks for them
    (``get_worker_info().dataset.transform``).

    Args:
        dataset: The map-style data set.
        collate: Makes a batch of a list of samples.
        drawn: Three numbers, each set to 1 when the generator in that place of ``SOURCES`` was seen to move; shared among
            processes, so that the workers of the next epoch know.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], drawn: torch.Tensor) -> None:
        # straight into the namespace, because attributes set in the usual way go to the data set
        vars(self).update(_dataset=dataset, _collate=collate, _drawn=drawn, _keyed=tuple(map(bool, drawn.tolist())))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and unpickling look for these while there is no data set yet
            raise AttributeError(name)
        return getattr(vars(self)["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, ids: EpochBatch) -> Any:
        """Return the finished batch of ``ids``."""
        keyed = self._keyed
        main = get_worker_info() is None  # in a worker nobody else draws, so nothing is put back
        before = [source.capture() if main or not key else None for source, key in zip(SOURCES, keyed, strict=True)]
        try:
            batch = self._read_keyed(ids) if any(keyed) else self._collate(self._read(list(ids)))
        finally:
            for source, key, state in zip(SOURCES, keyed, before, strict=True):
                if main and key:
                    source.restore(state)
        found = [not key and source.moved(state) for source, key, state in zip(SOURCES, keyed, before, strict=True)]
        if not any(found):
            return batch
        for place, (source, state) in enumerate(zip(SOURCES, before, strict=True)):
            if found[place]:
                source.restore(state)
                self._drawn[place] = 1
        vars(self)["_keyed"] = tuple(key or new for key, new in zip(keyed, found, strict=True))
        return self.__getitems__(ids)  # once more, and sample by sample

    def _read(self, ids: list[int]) -> Any:
        if getattr(self._dataset, "__getitems__", None):
            return self._dataset.__getitems__(ids)
        return [self._dataset[i] for i in ids]

    def _read_keyed(self, ids: EpochBatch) -> Any:
        key = keyed_seed(ids.seed, "sample", ids.epoch).to_bytes(8, "big")
        samples = []
        read, seed = self._read, self._seed
        for i in ids:
            seed(key, b"%d" % i)
            sample = read([i])
            if not isinstance(sample, list) or len(sample) != 1:  # a __getitems__ that makes the batch itself
                seed(key, b"batch %d" % ids[0])
                samples = read(list(ids))
                break
            samples += sample
        self._seed(key, b"collate %d" % ids[0])
        return self._collate(samples)

    def _seed(self, key: bytes, what: bytes) -> None:
        # a number of its own for each: from the same one NumPy and torch would draw the same
        numbers = _THREE_NUMBERS.unpack(blake2b(what, digest_size=24, key=key).digest())
        for seed, number, keyed in zip(_SEEDS, numbers, self._keyed, strict=True):
            if keyed:
                seed(number)


class KeyedLoader(DataLoader[Any]):
    """A DataLoader over a data set whose noise is keyed. ``dataset`` and ``collate_fn`` are the user's as before."""

    _drawn: torch.Tensor

    @classmethod
    def like(cls, loader: DataLoader[Any]) -> KeyedLoader:
        """Return a loader with everything that ``loader`` has."""
        made = cls.__new__(cls)
        drawn = torch.zeros(len(SOURCES), dtype=torch.uint8, device="cpu")
        vars(made).update(vars(loader), _drawn=drawn)
        if loader.num_workers:
            drawn.share_memory_()  # type: ignore[no-untyped-call]
        return made

    def _get_iterator(self) -> Any:
        # only the iterator sees the stand-ins, so that loader.dataset keeps its type for everybody else
        reading = copy.copy(self)
        vars(reading).update(dataset=KeyedDataset(self.dataset, self.collate_fn, self._drawn), collate_fn=_as_read)
        return DataLoader._get_iterator(reading)


def _as_read(batch: Any) -> Any:
    return batch


def needs_keys(loader: DataLoader[Any]) -> bool:
    """Say whether reading ``loader`` may draw: not if its data set and its ``collate_fn`` are known to draw nothing."""
    if isinstance(loader.dataset, MapDataPipe):  # DataLoader looks for them, so they cannot be wrapped
        return False
    return loader.collate_fn is not default_collate or not draws_nothing(loader.dataset)


def draws_nothing(dataset: Any) -> bool:
    """Say whether it is known that reading ``dataset`` draws nothing.

    Known are plain containers and tensors, torch's own combinations of those, and what says so by a true attribute
    ``draws_nothing``.
    """
    if type(dataset) in PLAIN or getattr(dataset, "draws_nothing", False) is True:
        return True
    if type(dataset) is Subset:
        return draws_nothing(dataset.dataset)
    if type(dataset) in (ConcatDataset, StackDataset):
        parts = dataset.datasets
        return all(map(draws_nothing, parts.values() if isinstance(parts, dict) else parts))
    return False
