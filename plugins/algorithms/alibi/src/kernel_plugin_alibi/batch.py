"""Shorter training sequences: the rows of a batch of token ids cut into pieces."""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sized
from typing import Any

from kernel_core.errors import DataError, OptionError
from torch import Tensor


def reshape_batch(batch: Any, scaling: float) -> Any:
    """Cut each row of a batch of token ids into 1/scaling rows, scaling times as long.

    A batch of token ids is a mapping with a 2-D ``input_ids``, or one whose tensors are all 2-D, of one shape, and hold
    no floating-point numbers. Anything else (a tuple, images and their targets) is returned as it is.

    Args:
        batch: Token ids, labels, masks: tensors of shape (B, T). Scalars pass through.
        scaling: 1, or one over a whole number k that divides T.

    Returns:
        A batch of the same type (a dict for a mapping that cannot be changed) with tensors of shape (k * B, T / k), the
        pieces of a row one after another; the batch itself if there is nothing to do. The given batch is not changed.

    Raises:
        OptionError: ``scaling`` is not one over a whole number.
        DataError: T is not divisible by k, or something in the batch has one entry per row, or positions of its own,
            and would no longer fit.

    Example:
        >>> reshape_batch({"input_ids": torch.arange(8).view(1, 8)}, 0.5)["input_ids"].tolist()
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    pieces = num_pieces(scaling)
    shape = _token_shape(batch)
    if pieces == 1 or shape is None:
        return batch
    if shape[1] % pieces:
        raise DataError(
            f"alibi: sequences of {shape[1]} tokens cannot be cut into {pieces} equal pieces. Expected a length "
            f"divisible by {pieces}, as train_sequence_length_scaling={scaling:g} asks. Pad or crop to such a length, "
            "or set train_sequence_length_scaling=1."
        )
    for key, value in batch.items():
        _check_fits(key, value, shape, pieces)
    cut = {
        key: value.reshape(shape[0] * pieces, shape[1] // pieces) if _has_shape(value, shape) else value
        for key, value in batch.items()
    }
    if not isinstance(batch, MutableMapping):
        return cut
    result = copy.copy(batch)
    for key, value in cut.items():
        result[key] = value
    return result


def num_pieces(scaling: float) -> int:
    """Return 1/scaling, checked to be a whole number."""
    pieces = round(1 / scaling) if 0 < scaling <= 1 else 0
    if pieces < 1 or abs(pieces * scaling - 1) > 1e-6:
        raise OptionError(
            f"alibi.train_sequence_length_scaling: got {scaling!r}. Expected 1 or one over a whole number, such as 0.5 "
            "or 0.25, so that each row is cut into whole pieces. Use one of those."
        )
    return pieces


def _token_shape(batch: Any) -> tuple[int, int] | None:
    if not isinstance(batch, Mapping):
        return None
    named = batch.get("input_ids")
    tensors = [named] if named is not None else [value for value in batch.values() if isinstance(value, Tensor)]
    shapes = {tuple(tensor.shape) if _is_tokens(tensor) else None for tensor in tensors}
    shape = shapes.pop() if len(shapes) == 1 else None
    return None if shape is None else (shape[0], shape[1])


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()


def _has_shape(value: Any, shape: tuple[int, int]) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape


def _check_fits(key: object, value: Any, shape: tuple[int, int], pieces: int) -> None:
    if _has_shape(value, shape):
        return
    if isinstance(value, Tensor):
        clashes, found = not set(shape).isdisjoint(value.shape), f"shape {tuple(value.shape)}"
    else:
        clashes = isinstance(value, Sized) and not isinstance(value, str | bytes) and len(value) == shape[0]
        found = f"{len(value)} entries" if clashes else ""
    if clashes:
        raise DataError(
            f"alibi: batch[{key!r}] has {found} beside tokens of shape {shape}, so it would not fit the rows after "
            f"each is cut into {pieces}. Expected every tensor to have the shape of the tokens. "
            "Set train_sequence_length_scaling=1 to train on whole sequences."
        )
