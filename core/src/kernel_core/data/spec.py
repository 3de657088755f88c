"""A dataloader with what the loop must know about its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_core.errors import DataError


class DataSpec:
    """A dataloader and the functions that count, split and transform its batches.

    Args:
        dataloader: An iterable of batches of this rank, started anew each epoch.
        num_samples: Samples in an epoch, where the loader cannot tell.
        num_tokens: Tokens in an epoch.
        batch_transforms: Runs on the whole batch on the CPU, as it comes from the loader.
        microbatch_transforms: Runs on each microbatch on the device.
        split_batch: ``(batch, size) -> microbatches`` of at most ``size`` samples.
        get_num_samples_in_batch: The number of rows of a batch.
        get_num_tokens_in_batch: The number of tokens of a batch.
    """

    def __init__(
        self,
        dataloader: Iterable[Any],
        num_samples: int | None = None,
        num_tokens: int | None = None,
        batch_transforms: Callable[[Any], Any] | None = None,
        microbatch_transforms: Callable[[Any], Any] | None = None,
        split_batch: Callable[[Any, int], Sequence[Any]] | None = None,
        get_num_samples_in_batch: Callable[[Any], int] | None = None,
        get_num_tokens_in_batch: Callable[[Any], int] | None = None,
    ) -> None:
        if not isinstance(dataloader, Iterable):
            raise DataError(
                f"dataloader: got {dataloader!r}, which is not iterable. Give a DataLoader or an iterable of batches."
            )
        self.dataloader = dataloader
        self.num_samples = num_samples
        self.num_tokens = num_tokens
        self.batch_transforms = batch_transforms
        self.microbatch_transforms = microbatch_transforms
        self.split_batch = split_batch or split
        self.get_num_samples_in_batch = get_num_samples_in_batch or count_samples
        self.get_num_tokens_in_batch = get_num_tokens_in_batch or count_tokens

    @classmethod
    def of(cls, data: DataSpec | Iterable[Any] | dict[str, Any]) -> DataSpec:
        """Return ``data`` as a DataSpec: one already, a dict of its arguments, or a bare loader."""
        if isinstance(data, DataSpec):
            return data
        if isinstance(data, dict):
            if "dataloader" not in data:
                raise DataError(
                    f"dataloader: got a dict with {sorted(data)}. Expected the arguments of DataSpec, 'dataloader' among them."
                )
            return cls(**data)
        return cls(data)

    @property
    def num_batches(self) -> int | None:
        """Batches in an epoch, None if the loader has no length."""
        try:
            return len(self.dataloader)  # type: ignore[arg-type]
        except TypeError:
            return None


def count_samples(batch: Any) -> int:
    """Return the number of rows of a tensor, or of the first tensor or list inside a mapping or sequence.

    A list inside a tuple, list or mapping holds one entry per row, and so does a list of mappings.

    Raises:
        DataError: there is nothing whose rows could be counted.
    """
    if isinstance(batch, Tensor):
        if batch.ndim:
            return int(batch.shape[0])
    elif isinstance(batch, Mapping):
        for value in batch.values():
            if isinstance(value, Tensor) and value.ndim:
                return int(value.shape[0])
        for value in batch.values():
            if isinstance(value, list | tuple):
                return len(value)
    elif isinstance(batch, list | tuple) and batch:
        first = batch[0]
        if isinstance(first, list):
            return len(first)
        structured = isinstance(first, Tensor | tuple) or (isinstance(first, Mapping) and isinstance(batch, tuple))
        return count_samples(first) if structured else len(batch)
    raise DataError(
        f"batch: cannot tell how many samples are in a {type(batch).__name__}. "
        "Give DataSpec(dataloader, get_num_samples_in_batch=...)."
    )


def count_tokens(batch: Any) -> int:
    """Return the number of elements of ``input_ids`` of a mapping, 0 for anything else."""
    if not isinstance(batch, Tensor | tuple | list) and isinstance(batch, Mapping):  # the abstract class is slow to ask
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor):
            return ids.numel()
    return 0


def split(batch: Any, size: int) -> list[Any]:
    """Split tensors, mappings, tuples and lists into microbatches of at most ``size`` rows.

    Inside a mapping or tuple, whatever is not a tensor, list or tuple goes into every microbatch.

    Raises:
        DataError: the batch is of another kind.
    """
    if not isinstance(batch, Tensor | Mapping | list | tuple):
        raise DataError(f"batch: cannot split a {type(batch).__name__}. Give DataSpec(dataloader, split_batch=...).")
    rows = count_samples(batch)
    return [_rows(batch, start, min(start + size, rows), rows) for start in range(0, rows, size)]


def _rows(value: Any, start: int, stop: int, rows: int, nested: bool = False) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == rows else value
    if isinstance(value, Mapping):
        parts = {key: _rows(item, start, stop, rows, nested=True) for key, item in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list) and value and (nested or isinstance(value[0], Mapping)):
        if len(value) != rows:
            raise DataError(
                f"batch: a list of {len(value)} entries stands beside {rows} rows, so the batch cannot be split. "
                "Give DataSpec(dataloader, split_batch=..., get_num_samples_in_batch=...)."
            )
        return value[start:stop]
    if isinstance(value, list | tuple):
        if all(not isinstance(item, Tensor | Mapping | list | tuple) for item in value):
            return value[start:stop] if len(value) == rows else value
        parts_list = [_rows(item, start, stop, rows, nested=True) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts_list)
        return type(value)(parts_list)
    return value


def device_of(batch: Any) -> torch.device | None:
    """Return the device of the first tensor inside ``batch``, None if there is none."""
    if isinstance(batch, Tensor):
        return batch.device
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((device for part in parts if (device := device_of(part)) is not None), None)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move every tensor inside ``batch`` to ``device`` without waiting for the copies."""
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True) if isinstance(batch, Tensor) else batch.to(device)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(item, device) for item in batch])
    if isinstance(batch, list | tuple):
        return type(batch)([to_device(item, device) for item in batch])
    return batch


def get_item(batch: Any, key: Any) -> Any:
    """Return a part of ``batch`` by index, key, or a function that gets it."""
    if callable(key):
        return key(batch)
    if isinstance(key, tuple) and len(key) == 2 and callable(key[0]):
        return key[0](batch)
    return batch[key]


def set_item(batch: Any, key: Any, value: Any) -> Any:
    """Return a shallow copy of ``batch`` with a part set by index, key, or a pair of functions (getter, setter)."""
    if isinstance(key, tuple) and len(key) == 2 and callable(key[1]):
        return key[1](batch, value)
    if isinstance(batch, tuple):
        items = list(batch)
        items[key] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    changed = copy.copy(batch)  # the loader may hand out the same object again
    changed[key] = value
    return changed
