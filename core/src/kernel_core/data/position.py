"""Where a run is in its data, to be saved and found again.

A position is of one of these kinds:

- ``map``: a loader with ``ResumableBatchSampler``. Its place is a number; nothing is read again.
- ``stateful``: a loader with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.
- ``dataset``: a DataLoader over an ``IterableDataset`` with these methods, read in this process (``num_workers=0``), such as
  Hugging Face's; or over a data set that is told how many samples were used, ``state_dict(num_samples, from_beginning)``,
  such as Mosaic's ``StreamingDataset``, with any number of workers.
- ``count``: anything else. The batches before the place are read again and thrown away. For that the generators are set to
  where they were when the epoch began, so that samplers which draw their order from them give the same order.

``state_dict`` of samplers is not asked: with workers a sampler is ahead of what was used, and how far is not known.
The state of a loader or data set belongs to its rank and number of ranks (``elastic`` is False).
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from kernel_core.data.loader import begin_epoch
from kernel_core.data.sampler import ResumableBatchSampler
from kernel_core.errors import DataError
from kernel_core.train.randomness import randomness_state, restore_randomness

Kind = Literal["map", "stateful", "dataset", "count"]

_KINDS: dict[str, str] = {
    "map": "a map-style data set in an order of the kernel's",
    "stateful": "a loader that keeps its position",
    "dataset": "a data set that keeps its position",
    "count": "a loader that is skipped by count",
}
_END = object()


@dataclass
class _Reading:
    """What is known of a loader that is read in this process.

    Attributes:
        begun: Whether it was iterated, in this run or the one that is resumed.
        iterator: A weak reference to the latest iterator.
        start: The generators when the present epoch began, and whether it was iterated before.
        resumed: What ``restore_position`` was given, until ``enter_epoch`` uses it.
    """

    begun: bool = False
    iterator: Any = None
    start: dict[str, Any] = field(default_factory=dict)
    resumed: Mapping[str, Any] | None = None


_READINGS: dict[int, _Reading] = {}  # by identity, since loaders may compare equal or not be hashable


def _reading(loader: Any) -> _Reading:
    if id(loader) not in _READINGS:
        try:
            weakref.finalize(loader, _READINGS.pop, id(loader), None)
        except TypeError:  # a list and the like: it has nothing that could be lost
            return _Reading()
        _READINGS[id(loader)] = _Reading()
    return _READINGS[id(loader)]


def position_kind(loader: Any) -> Kind:
    """Return how the position of ``loader`` is kept."""
    if isinstance(getattr(loader, "batch_sampler", None), ResumableBatchSampler):
        return "map"
    if _keeps_state(loader):
        return "stateful"
    if isinstance(loader, DataLoader) and _keeps_state(loader.dataset):
        here = isinstance(loader.dataset, IterableDataset) and not loader.num_workers
        if here or _counts_samples(loader.dataset):
            return "dataset"
    return "count"


def _keeps_state(holder: Any) -> bool:
    return callable(getattr(holder, "state_dict", None)) and callable(getattr(holder, "load_state_dict", None))


def _counts_samples(dataset: Any) -> bool:
    """Say whether ``dataset`` wants to be told how many samples of the epoch were used."""
    return _keeps_state(dataset) and "num_samples" in inspect.signature(dataset.state_dict).parameters


# saving


def capture_position(loader: Any, batches_done: int, samples_done: int | None = None) -> dict[str, Any]:
    """Return where this rank is in ``loader``: plain data, and tensors where a state has them.

    Call it between two batches, on every rank, while the iterator of ``enter_epoch`` is held. Nothing is drawn or read.

    Args:
        loader: What is read.
        batches_done: The batches of the present epoch that were used.
        samples_done: Their samples over all ranks, for data sets that want to be told; the default is right for one rank and
            full batches.
    """
    reading, kind = _reading(loader), position_kind(loader)
    state: Any = None
    if not (batches_done or reading.begun):
        pass  # asking some loaders for their state starts their workers
    elif kind == "stateful":
        state = loader.state_dict()
        if state is None:
            kind = "count"
    elif kind == "dataset" and _counts_samples(loader.dataset):
        samples = batches_done * (loader.batch_size or 1) if samples_done is None else samples_done
        state = loader.dataset.state_dict(samples, True)
    elif kind == "dataset":
        state = loader.dataset.state_dict()
    own = [generator.get_state() for generator in _own_generators(loader)]
    start = reading.start if batches_done else {"begun": reading.begun, "own": own}
    saved: dict[str, Any] = {"kind": kind, "begun": reading.begun, "own": own, "start": dict(start)}
    saved["elastic"] = kind == "map" or (kind == "dataset" and _counts_samples(loader.dataset))
    if kind == "map":
        return saved | _order_of(loader.batch_sampler)
    if state is not None:
        saved |= {"state": copy.deepcopy(state)}  # it may be written while the run goes on
        saved["ended"] = not saved["elastic"] and _ended(reading)
    return saved


def _order_of(batches: ResumableBatchSampler) -> dict[str, Any]:
    order = batches.sampler
    return {
        "num_samples": len(order),
        "global_batch_size": batches.global_batch_size,
        "shuffle": order.shuffle,
        "drop_last": batches.drop_last,
        "seed": order.seed,
    }


def _ended(reading: _Reading) -> bool:
    """Say whether the data set met its end within the last batch, a short one; its state may then be that of a new pass."""
    iterator = reading.iterator() if reading.iterator is not None else None
    return bool(getattr(getattr(iterator, "_dataset_fetcher", None), "ended", False))


# going on


def restore_position(loader: Any, saved: Mapping[str, Any], *, batches_done: int, epoch: int) -> str | None:
    """Prepare ``loader`` to go on where ``saved`` was captured; the next ``enter_epoch(loader, epoch, batches_done)`` does it.

    Args:
        loader: What is read, as the run that was saved had it.
        saved: What ``capture_position`` returned on this rank.
        batches_done: The batches of the epoch that were used; 0 before the first one.
        epoch: The number of the epoch.

    Returns:
        A warning for the log that names what cannot be exact, or None.

    Raises:
        DataError: ``loader`` is read in another way, or has other samples or batches.
    """
    kind = position_kind(loader)
    if kind != saved["kind"] and not (kind == "stateful" and saved["kind"] == "count"):
        raise DataError(
            f"dataloader: the run that was saved had {_KINDS[saved['kind']]} ({saved['kind']}), and this one has "
            f"{_KINDS[kind]} ({kind}). Resume with the loader of that run, its sampler and num_workers included."
        )
    reading = _reading(loader)
    if kind == "map":
        _check_order(_order_of(loader.batch_sampler), saved)
        loader.batch_sampler.sampler.seed = saved["seed"]
    elif "state" in saved:
        _load_state(loader, saved, batches_done, epoch)
    reading.resumed, reading.start = saved, dict(saved["start"])
    reading.begun = reading.begun or saved["begun"]
    return _inexact(loader, batches_done, epoch) if saved["kind"] == "count" else None


def _check_order(now: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name in ("num_samples", "global_batch_size", "shuffle", "drop_last"):
        if now[name] != saved[name]:
            raise DataError(
                f"dataloader: {name} is {now[name]}, and the run that was saved had {saved[name]}. "
                "Resume with the same data set and batches."
            )


def _load_state(loader: Any, saved: Mapping[str, Any], batches_done: int, epoch: int) -> None:
    state = copy.deepcopy(saved["state"])  # some take theirs apart
    if saved["kind"] == "stateful":
        loader.load_state_dict(state)
        return
    if _counts_samples(loader.dataset) and not batches_done and isinstance(state, dict) and "epoch" in state:
        state["epoch"] = epoch  # it counts an epoch when it begins to read it, so between two it is one behind
    loader.dataset.load_state_dict(state)


def enter_epoch(loader: Any, epoch: int, batch: int = 0, *, skip: bool = True) -> Iterator[Any]:
    """Return an iterator over the batches of ``epoch`` from number ``batch`` on.

    At the first batch, ``iter`` draws from the global generators what it draws in a run that was not interrupted. At a later
    one the generators of Python, NumPy and torch on the CPU are afterwards as they were before. So whoever resumes a run sets
    them first, at any place, then calls this.

    Args:
        loader: What is read.
        epoch: Its number.
        batch: How many of its batches were used.
        skip: Whether loaders that cannot be set to a place are read up to it; else they go on where they are.
    """
    reading = _reading(loader)
    if batch and reading.begun and reading.resumed is None and position_kind(loader) in ("stateful", "dataset"):
        # taken up in the same process
        restore_position(loader, capture_position(loader, batch), batches_done=batch, epoch=epoch)
    resumed, reading.resumed = reading.resumed, None
    if batch:
        return _enter_within(loader, reading, resumed, epoch, batch, skip)
    if resumed:
        _set_own(loader, resumed["own"])
    reading.start = _start_of(loader, reading.begun)
    begin_epoch(loader, epoch)
    batches = _iterate(loader, reading, _new_seeds(loader, reading) if resumed else None)
    if position_kind(loader) in ("map", "count"):
        return batches
    first = next(batches, _END)
    if first is not _END:
        return chain([first], batches)
    restore_randomness(reading.start["host"])  # it was still at the end of an epoch: only another pass counts
    _set_own(loader, reading.start["own"])
    return _iterate(loader, reading, None)


def _enter_within(
    loader: Any, reading: _Reading, resumed: Mapping[str, Any] | None, epoch: int, batch: int, skip: bool
) -> Iterator[Any]:
    own, host = [generator.get_state() for generator in _own_generators(loader)], randomness_state()
    _set_own(loader, reading.start.get("own", ()))
    if "host" in reading.start:
        restore_randomness(reading.start["host"])
    to_skip = begin_epoch(loader, epoch, batch)
    if resumed and resumed.get("ended"):
        batches: Iterator[Any] = iter(())  # another pass would begin
    elif resumed and "state" in resumed:
        batches = _iterate(loader, reading, _copy_of_seeds(loader))
    else:
        batches = _iterate(loader, reading, _new_seeds(loader, reading) if resumed else None)
        if skip and batches is not loader:
            for _ in range(to_skip):
                next(batches, None)
    restore_randomness(host)
    _set_own(loader, resumed["own"] if resumed else own)
    return batches


def _new_seeds(loader: Any, reading: _Reading) -> torch.Generator | None:
    """Return what the seed of workers is drawn from that the run which is resumed had already; None: from the usual place."""
    had_workers = reading.start.get("begun") and getattr(loader, "persistent_workers", False)
    return torch.Generator(device="cpu") if had_workers else None


def _copy_of_seeds(loader: Any) -> torch.Generator:
    """Return a generator that gives DataLoader the seed of workers which it would draw now."""
    source = getattr(loader, "generator", None) or torch.default_generator
    made = torch.Generator(device="cpu")
    made.set_state(source.get_state())
    return made


def _iterate(loader: Any, reading: _Reading, seeds: torch.Generator | None) -> Iterator[Any]:
    """Return ``iter(loader)``; a DataLoader draws the seed of its workers from ``seeds``, if given."""
    batches: Iterator[Any]
    if seeds is None or not isinstance(loader, DataLoader):
        batches = iter(loader)
    else:
        with _drawing_from(seeds, loader):
            batches = iter(loader)
    reading.begun = True
    reading.iterator = weakref.ref(batches) if isinstance(loader, DataLoader) else None
    if seeds is not None and isinstance(loader, DataLoader) and inspect.isgenerator(batches):
        return _begin_drawing_from(seeds, loader, batches)  # one that iterates when it is asked for its first batch
    return batches


@contextmanager
def _drawing_from(seeds: torch.Generator, loader: DataLoader[Any]) -> Iterator[None]:
    held, loader.generator = loader.generator, seeds
    try:
        yield
    finally:
        loader.generator = held


def _begin_drawing_from(seeds: torch.Generator, loader: DataLoader[Any], batches: Iterator[Any]) -> Iterator[Any]:
    with _drawing_from(seeds, loader):
        first = next(batches, _END)
    if first is not _END:
        yield first
        yield from batches


# generators


def _own_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators that the user gave to the loader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = (getattr(holder, "generator", None) for holder in holders)
    return list({id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values())


def _start_of(loader: Any, begun: bool) -> dict[str, Any]:
    """Return the generators as an epoch begins; the global ones only where a place cannot be had from a number."""
    start: dict[str, Any] = {"begun": begun, "own": [generator.get_state() for generator in _own_generators(loader)]}
    if position_kind(loader) != "map" and not isinstance(loader, Iterator):
        start["host"] = randomness_state()
    return start


def _set_own(loader: Any, states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_own_generators(loader), states, strict=False):
        generator.set_state(state)


# what cannot be exact


def _inexact(loader: Any, batches_done: int, epoch: int) -> str | None:
    """Return the warning for a loader that is skipped by count."""
    name = type(loader).__name__
    if isinstance(loader, Iterator):
        return (
            f"dataloader: a {name} is an iterator, which cannot go back to a place. The run goes on with the batches it gives "
            "next, whichever these are. Give something that can be iterated anew each epoch."
        )
    if not batches_done:
        return None
    why, then, remedy = _why_counted(loader)
    return (
        f"dataloader: {why}. Batches 0 to {batches_done - 1} of epoch {epoch} are read again and thrown away; what follows is "
        f"what the run would have read only if {then}. {remedy}"
    )


def _why_counted(loader: Any) -> tuple[str, str, str]:
    dataset = getattr(loader, "dataset", None)
    data, same = (
        f"its data set {type(dataset).__name__}",
        "each pass over an epoch gives the same samples in the same order",
    )
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__} has no state_dict and load_state_dict", same, "Give it these methods."
    if not isinstance(dataset, IterableDataset):
        samplers = {type(loader.sampler).__name__, type(loader.batch_sampler).__name__} - {"NoneType"}
        return (
            f"the order of its {' and '.join(sorted(samplers))} is not known to the kernel",
            "that order follows from the epoch, or from generators of torch, Python and NumPy or the sampler's `generator`",
            "Use shuffle=True or shuffle=False, or torchdata's StatefulDataLoader, for an exact place.",
        )
    if _keeps_state(dataset):
        return (
            f"{data} keeps its position in {loader.num_workers} worker processes, out of reach",
            same,
            "Use num_workers=0, or torchdata's StatefulDataLoader, for an exact place.",
        )
    remedy = "Give it these methods and num_workers=0, or use a map-style data set, for an exact place."
    return f"{data} has no state_dict and load_state_dict", same, remedy
