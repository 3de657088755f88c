"""A dataloader with what the loop must know about its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_core.errors import DataError

ARRAYS = (Tensor, np.ndarray)  # their first dimension counts rows
STRUCTURED = (Tensor, np.ndarray, Mapping, list, tuple)  # what can hold rows


class DataSpec:
    """A dataloader and the functions that count, split and transform its batches.

    Args:
        dataloader: An iterable of batches of this rank, started anew each epoch.
        num_samples: Samples in an epoch over all ranks, where the loader cannot tell its length; the default is the
            length of its data set, if that has one. ``epoch_share`` reads it.
        num_tokens: Tokens in an epoch over all ranks, where neither the length nor the samples are known.
        batch_transforms: Runs on the whole batch on the CPU, as it comes from the loader.
        microbatch_transforms: Runs on each microbatch on the device.
        split_batch: ``(batch, size) -> microbatches`` of at most ``size`` samples.
        get_num_samples_in_batch: The number of rows of a batch.
        get_num_tokens_in_batch: The number of tokens of a batch, or a dict whose ``total`` is that number; other entries
            (``loss_generating``) are not counted. The default is the area of ``input_ids``, else the data set's
            ``max_seq_len`` times the samples, else 0.
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
        get_num_tokens_in_batch: Callable[[Any], int | Mapping[str, int]] | None = None,
    ) -> None:
        if not isinstance(dataloader, Iterable):
            raise DataError(
                f"dataloader: got {dataloader!r}, which is not iterable. Give a DataLoader or an iterable of batches."
            )
        for name, value in (("num_samples", num_samples), ("num_tokens", num_tokens)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise DataError(f"{name}: got {value!r}. Expected a whole number of at least 1, or None.")
        self.dataloader = dataloader
        dataset = getattr(dataloader, "dataset", None)
        self.num_samples = num_samples or _length(dataset)
        self.num_tokens = num_tokens
        self.batch_transforms = batch_transforms
        self.microbatch_transforms = microbatch_transforms
        self.split_batch = split_batch or split
        self.get_num_samples_in_batch = get_num_samples_in_batch or count_samples
        self.get_num_tokens_in_batch: Callable[[Any], int]
        if get_num_tokens_in_batch is not None:
            self.get_num_tokens_in_batch = partial(_total, get_num_tokens_in_batch)
        elif isinstance(max_seq_len := getattr(dataset, "max_seq_len", None), int):
            self.get_num_tokens_in_batch = partial(_count_full_rows, max_seq_len, self.get_num_samples_in_batch)
        else:
            self.get_num_tokens_in_batch = count_tokens

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
        return _length(self.dataloader)

    def epoch_share(self, samples: float, tokens: float) -> float | None:
        """Return which share of an epoch so many samples or tokens are, at most 1; None if its size is not known.

        For loaders without a length: schedules in epochs can then move within an epoch.
        """
        for done, whole in ((samples, self.num_samples), (tokens, self.num_tokens)):
            if whole:
                return min(1.0, done / whole)
        return None


def _length(sized: Any) -> int | None:
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


def _total(count: Callable[[Any], int | Mapping[str, int]], batch: Any) -> int:
    """Return what the user's ``count`` says, or its entry ``total``."""
    counted = count(batch)
    if not isinstance(counted, dict):
        return counted  # type: ignore[return-value]
    if "total" not in counted:
        raise DataError(
            f"get_num_tokens_in_batch: returned a dict with {sorted(counted)}. Expected a number, or a dict with 'total'."
        )
    return int(counted["total"])


def _count_full_rows(max_seq_len: int, count_rows: Callable[[Any], int], batch: Any) -> int:
    """Return the area of ``input_ids``, else ``max_seq_len`` tokens for each row."""
    return count_tokens(batch) or max_seq_len * count_rows(batch)


def count_samples(batch: Any) -> int:
    """Return the number of rows of ``batch``.

    A tensor or array has a row for each index of its first dimension. A mapping, tuple or list of those has columns side by
    side: the first tensor says how many rows, at whatever depth; without any, the first list does, which then has an entry
    for each row (texts, images of several sizes, mappings). An outermost list of plain values or of mappings is a list of
    rows.

    Raises:
        DataError: there is nothing whose rows could be counted, or lists without a tensor disagree.
    """
    # asked every batch: the common cases first, by exact class (0.3 µs)
    kind, first = batch.__class__, batch
    if (kind is list or kind is tuple) and batch:
        first = batch[0]
    elif kind is dict and batch:
        first = next(iter(batch.values()))
    if first.__class__ is Tensor and first.ndim:
        return first.size(0)
    return _measure(batch)[0]


def _measure(batch: Any) -> tuple[int, bool]:
    """Return the number of rows and whether a tensor says so."""
    found = _find_rows(batch)
    if found is None:
        raise DataError(
            f"batch: cannot tell how many samples are in a {type(batch).__name__}. "
            "Give DataSpec(dataloader, get_num_samples_in_batch=...)."
        )
    return found


def _find_rows(batch: Any) -> tuple[int, bool] | None:
    if isinstance(batch, ARRAYS):
        return (int(batch.shape[0]), True) if batch.ndim else None
    if isinstance(batch, Mapping):
        return _find_rows_of_columns(list(batch.values()))
    if isinstance(batch, list | tuple) and batch:
        return (len(batch), False) if _holds_rows(batch) else _find_rows_of_columns(batch)
    return None


def _find_rows_of_columns(columns: Sequence[Any]) -> tuple[int, bool] | None:
    for column in columns:
        if isinstance(column, ARRAYS) and column.ndim:
            return int(column.shape[0]), True
    for column in columns:
        if (isinstance(column, Mapping) or hasattr(column, "_fields")) and (found := _find_rows(column)):
            return found
    lists = [column for column in columns if isinstance(column, list) or _lists_no_arrays(column)]
    if lists:
        for column in lists:
            if len(column) != len(lists[0]):
                raise _uneven(len(column), len(lists[0]))
        return (len(lists[0]), False) if lists[0] else None
    tuples = (found for column in columns if isinstance(column, tuple) and (found := _find_rows(column)))
    return next(tuples, None)


def _lists_no_arrays(column: Any) -> bool:
    """Say whether ``column`` is a tuple with an entry for each row, as ``tuple(zip(*samples))`` makes them of non-tensors."""
    return (
        isinstance(column, tuple)
        and bool(column)
        and not hasattr(column, "_fields")
        and not any(isinstance(item, ARRAYS) for item in column)
    )


def _holds_rows(batch: list[Any] | tuple[Any, ...]) -> bool:
    """Say whether an outermost list or tuple has rows as its entries, not columns."""
    if hasattr(batch, "_fields"):
        return False
    if isinstance(batch, list) and isinstance(batch[0], Mapping):
        return True
    return not any(isinstance(item, STRUCTURED) for item in batch)


def _uneven(entries: int, rows: int) -> DataError:
    return DataError(
        f"batch: a list of {entries} entries stands beside {rows} rows, so which is a sample cannot be told. "
        "Give DataSpec(dataloader, split_batch=..., get_num_samples_in_batch=...)."
    )


def count_tokens(batch: Any) -> int:
    """Return the number of elements of ``input_ids`` of a mapping, 0 for anything else."""
    kind = batch.__class__
    if kind is list or kind is tuple or kind is Tensor:
        return 0
    if kind is dict or isinstance(batch, Mapping):  # the abstract class is slow to ask
        ids = batch.get("input_ids")
        if isinstance(ids, ARRAYS):
            return ids.numel() if isinstance(ids, Tensor) else int(ids.size)
    return 0


def split(batch: Any, size: int) -> list[Any]:
    """Split tensors, arrays, mappings, tuples and lists into microbatches of at most ``size`` rows.

    Inside a mapping or tuple, whatever has no rows (numbers, strings, tensors with another first dimension) goes into every
    microbatch. Mappings and named tuples keep their type. A list or tuple inside is taken for columns if a tensor tells the
    number of rows and its entries, tensors among them, have as many each; else it has an entry for each row.

    Raises:
        DataError: the batch is of another kind, or a list inside fits neither way.
    """
    if not isinstance(batch, STRUCTURED):
        raise DataError(f"batch: cannot split a {type(batch).__name__}. Give DataSpec(dataloader, split_batch=...).")
    rows, by_tensor = _measure(batch)
    if 0 < rows <= size:
        return [batch]
    return [_Rows(start, min(start + size, rows), rows, by_tensor).of(batch) for start in range(0, rows, size)]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows from ``start`` to ``stop`` of a batch that has ``rows``; ``by_tensor``: a tensor says so."""

    start: int
    stop: int
    rows: int
    by_tensor: bool

    def of(self, value: Any, nested: bool = False) -> Any:
        """Return these rows of a batch, or of a part ``nested`` in it."""
        if isinstance(value, ARRAYS):
            return value[self.start : self.stop] if self._has_rows(value) else value
        if isinstance(value, Mapping):
            return _like(value, {key: self.of(item, nested=True) for key, item in value.items()})
        if not isinstance(value, list | tuple) or not value:
            return value
        if hasattr(value, "_fields"):
            return type(value)(*[self.of(item, nested=True) for item in value])  # type: ignore[arg-type]
        if self._is_list_of_rows(value) if nested else _holds_rows(value):
            return value[self.start : self.stop]
        if not any(isinstance(item, STRUCTURED) for item in value):
            return value
        return type(value)([self.of(item, nested=True) for item in value])

    def _has_rows(self, array: Any) -> bool:
        return bool(array.ndim) and array.shape[0] == self.rows

    def _is_list_of_rows(self, value: list[Any] | tuple[Any, ...]) -> bool:
        holders = [item for item in value if isinstance(item, STRUCTURED)]
        columns = self.by_tensor and bool(holders) and all(self._is_column(item) for item in holders)
        if columns and any(isinstance(item, ARRAYS) for item in holders):
            return False
        if isinstance(value, list) and len(value) != self.rows and not columns:
            raise _uneven(len(value), self.rows)
        return len(value) == self.rows

    def _is_column(self, item: Any) -> bool:
        found = _find_rows(item)
        return found is not None and found[0] == self.rows


def _like(mapping: Mapping[Any, Any], parts: dict[Any, Any]) -> Any:
    """Return ``parts``, which has the keys of ``mapping``, as a mapping of its type and with its attributes."""
    if type(mapping) is dict:
        return parts
    try:
        made: Any = copy.copy(mapping)  # constructors of subclasses take anything; a copy needs none
        for key, part in parts.items():
            made[key] = part
    except TypeError:  # an immutable mapping
        return type(mapping)(parts)  # type: ignore[call-arg]
    return made


def device_of(batch: Any) -> torch.device | None:
    """Return the device of the first tensor inside ``batch``, None if there is none."""
    if isinstance(batch, Tensor):
        return batch.device
    return next((tensor.device for tensor in tensors_of(batch)), None)


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Return the tensors inside ``batch``, at whatever depth."""
    if isinstance(batch, Tensor):
        yield batch
        return
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for part in parts:
        yield from tensors_of(part)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with every tensor inside on ``device``; ``batch`` stays as it is.

    Copies to an accelerator are not waited for; copies to the CPU are, since whoever asks for them reads them next.
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=device.type != "cpu")
    if isinstance(batch, Mapping):
        if hasattr(batch, "to"):
            batch = _ask_to(copy.copy(batch), device)  # some mappings move themselves in place
        return _like(batch, {key: to_device(value, device) for key, value in batch.items()})
    if hasattr(batch, "to"):
        return _ask_to(batch, device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(item, device) for item in batch])
    if isinstance(batch, list | tuple):
        return type(batch)([to_device(item, device) for item in batch])
    return batch


def _ask_to(batch: Any, device: torch.device) -> Any:
    """Let ``batch`` move itself, without waiting if it knows how."""
    try:
        return batch.to(device, non_blocking=device.type != "cpu")
    except TypeError:
        return batch.to(device)


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
        return key[1](copy.copy(batch), value)  # a setter may write into it
    if isinstance(batch, tuple):
        items = list(batch)
        items[key] = value
        return type(batch)(*items) if hasattr(batch, "_fields") else tuple(items)
    changed = copy.copy(batch)  # the loader may hand out the same object again
    changed[key] = value
    return changed
