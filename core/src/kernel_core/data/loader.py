"""Loaders that go on in mid-epoch: torch's own samplers are replaced, everything else of the user's loader is kept.

Randomness. The order draws nothing. What a data set draws from the global generators while it reads a sample is a function
of (seed, epoch, sample), see ``keyed``. The rebuilt loader keeps the user's ``generator``. Without one, DataLoader draws the
seed of its workers from the global generator: one number for each iterator, with persistent workers for the first only.
"""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from kernel_core.data.keyed import KeyedLoader, needs_keys
from kernel_core.data.sampler import ResumableBatchSampler, ResumableSampler
from kernel_core.errors import DataError


def resumable_loader(
    loader: Any,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    global_batch_size: int | None = None,
    once: bool = False,
) -> tuple[Any, str | None]:
    """Return a loader like ``loader`` whose order follows from (seed, epoch), and a line for the log or None.

    A plain DataLoader over a map-style data set, batched by torch from a RandomSampler without replacement or a
    SequentialSampler, is copied with ``ResumableBatchSampler`` in it and so shared among the ranks, and its data set's noise
    is keyed by sample. Anything else is returned as it is; the line says why where a user should know.

    Args:
        loader: The user's loader; it is not changed.
        seed: The seed of the run.
        rank: This process's number.
        world_size: The number of processes; each gets its slice of every global batch.
        global_batch_size: Samples in a batch over all ranks in the run that is resumed; each rank then gets its share of
            that instead of the loader's ``batch_size``.
        once: Replace a DistributedSampler too, which gives some samples to two ranks where their number does not divide.

    Raises:
        DataError: ``global_batch_size`` cannot be met.
    """
    if not isinstance(loader, DataLoader):
        return loader, None
    batch_size = _batch_size(loader, world_size, global_batch_size)
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.batch_sampler, ResumableBatchSampler):
        return loader, None
    if obstacle := _obstacle(loader, once):
        return loader, _why_left(loader, obstacle, world_size)
    theirs: Any = loader.batch_sampler
    order = _order_like(theirs.sampler, seed)
    batches = ResumableBatchSampler(order, batch_size, theirs.drop_last, rank=rank, world_size=world_size)
    # every other argument, also of later releases of torch
    rebuilt = KeyedLoader.like(loader) if needs_keys(loader) else copy.copy(loader)
    # past the guard against assignment, which protects iterators that exist; a copy has none
    vars(rebuilt).update(sampler=order, batch_sampler=batches, batch_size=batch_size)
    return rebuilt, _what_was_done(loader, theirs.sampler, batches)


def _order_like(theirs: Any, seed: int) -> ResumableSampler:
    if isinstance(theirs, DistributedSampler):
        return ResumableSampler(theirs.dataset, shuffle=theirs.shuffle, seed=seed)  # type: ignore[arg-type]
    return ResumableSampler(theirs.data_source, shuffle=isinstance(theirs, RandomSampler), seed=seed)


def begin_epoch(loader: Any, epoch: int, batch: int = 0) -> int:
    """Tell a loader and its samplers which epoch is read next and from which batch on; call it before ``iter(loader)``.

    Returns:
        How many batches the caller still has to read and throw away: 0 if the sampler skips them.
    """
    set_epoch(loader, epoch)
    batch_sampler = getattr(loader, "batch_sampler", None)
    if isinstance(batch_sampler, ResumableBatchSampler):
        batch_sampler.start_at(batch)
        return 0
    return batch


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell the epoch to a loader, its data set and its samplers, each once, so that each epoch has an order of its own.

    A data set in workers that persist is out of reach.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    samplers = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    holders = (loader, getattr(loader, "dataset", None), *samplers)
    once = {id(holder): holder for holder in holders}  # a loader's sampler is often that of its batches
    for holder in once.values():
        tell = getattr(holder, "set_epoch", None)
        if callable(tell):
            tell(epoch)


def _batch_size(loader: DataLoader[Any], world_size: int, global_batch_size: int | None) -> int:
    """Return the samples of a batch of one rank; 0 if the loader does not say."""
    found = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 0
    if global_batch_size is None or found * world_size == global_batch_size:
        return found
    if global_batch_size % world_size:
        raise DataError(
            f"dataloader: a global batch of {global_batch_size} samples cannot be shared by {world_size} ranks. "
            f"Use a number of ranks that divides {global_batch_size}."
        )
    wanted = global_batch_size // world_size
    if found and (isinstance(loader.dataset, IterableDataset) or _obstacle(loader)):
        raise DataError(
            f"dataloader: it gives {found} samples to each of {world_size} ranks, the run that is resumed had "
            f"{global_batch_size} in all, and its batches cannot be changed from outside. Give it batch_size={wanted}."
        )
    return wanted


def _obstacle(loader: DataLoader[Any], once: bool = False) -> str | None:
    """Say what about ``loader`` keeps its sampler from being replaced, None if nothing does."""
    batch_sampler = loader.batch_sampler
    if type(loader) is not DataLoader:
        return f"it is a {type(loader).__name__}"
    if batch_sampler is None:
        return "batch_size=None leaves batching to its data set"
    if type(batch_sampler) is not BatchSampler:
        return f"its batch sampler is a {type(batch_sampler).__name__}"
    sampler: Any = batch_sampler.sampler  # not loader.sampler, which nothing reads where a batch sampler was given
    if type(sampler) is RandomSampler and (sampler.replacement or sampler.num_samples != len(sampler.data_source)):
        return "its RandomSampler draws with replacement or another number than the data set has"
    if type(sampler) not in (RandomSampler, SequentialSampler, *([DistributedSampler] if once else ())):
        return f"its sampler is a {type(sampler).__name__}"
    if loader._iterator is not None:
        return "its persistent workers run already"
    return None


def _why_left(loader: DataLoader[Any], obstacle: str, world_size: int) -> str | None:
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            if sampler.num_replicas == world_size:
                return None  # shared among the ranks already, and told the epoch by the loop
            return (
                f"dataloader: its DistributedSampler shares the data among {sampler.num_replicas} ranks, "
                f"and the run has {world_size}. Samples are missed or read twice."
            )
    shared = f" It is not shared among the {world_size} ranks: each reads what it gives." if world_size > 1 else ""
    return (
        f"dataloader: left as it is, because {obstacle}. A resumed run reads the batches before its place again and throws "
        f"them away.{shared}"
    )


def _what_was_done(loader: DataLoader[Any], theirs: Any, batches: ResumableBatchSampler) -> str:
    if isinstance(theirs, RandomSampler) or getattr(theirs, "shuffle", False):
        own = (
            ", and no longer from the sampler's own generator" if getattr(theirs, "generator", None) is not None else ""
        )
        order = f"the order follows from the run's seed and the epoch{own}"
    else:
        order = "the order stays"
    shared = f"; each of {batches.world_size} ranks reads its share of every {batches.global_batch_size} samples"
    mixed = " With in_order=False a resumed run may read some batches twice and miss others."
    return (
        f"dataloader: its {type(theirs).__name__} is replaced by a resumable one: {order}"
        f"{shared if batches.world_size > 1 else ''}.{mixed if loader.num_workers and not loader.in_order else ''}"
    )
