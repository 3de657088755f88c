"""The arithmetic of ALiBi: the slope of each head, and the bias between query and key positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_core.errors import DataError, OptionError, SurgeryError
from torch import Tensor

DEFAULT_MAX_BIAS_BYTES = 2 * 1024**3


def alibi_slopes(num_heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the slope of each head, by global head index.

    For n heads, n a power of two, head i of 1 … n has slope 2^(-8i/n). For any other count the slopes of the next lower
    power of two come first, then every second slope of the next higher one.

    Args:
        num_heads: The heads of the whole attention layer, however many of them this process holds.
        device: Where to put the slopes.

    Returns:
        float32, shape (num_heads,), each in (0, 1).

    Raises:
        SurgeryError: ``num_heads`` is not a positive whole number.

    Source:
        Press, Smith, Lewis, Train Short, Test Long (ICLR 2022), section 3; for other counts the authors' released code.

    Example:
        >>> alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
    """
    _check_heads(num_heads)
    lower = 1 << (num_heads.bit_length() - 1)
    slopes = _geometric(lower) + _geometric(2 * lower)[::2][: num_heads - lower]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def _geometric(num_heads: int) -> list[float]:
    return [2.0 ** (-8.0 * head / num_heads) for head in range(1, num_heads + 1)]


def _check_heads(num_heads: int) -> None:
    if not isinstance(num_heads, int) or num_heads < 1:
        raise SurgeryError(
            f"alibi: got {num_heads!r} attention heads. Expected a whole number of at least 1. "
            "Take it from the attention layer as a whole, not from one shard of it."
        )


@dataclass(frozen=True, slots=True)
class AlibiBias:
    """Builds the bias of one attention layer for the lengths of one call, within limits. Keeps no tensor.

    Attributes:
        num_heads: The heads of the whole layer.
        max_sequence_length: The longest sequence allowed, in positions; None for no limit.
        max_bias_bytes: The most memory that one bias may take.

    Example:
        >>> AlibiBias(num_heads=8)(2, 2)[0].tolist()
        [[-0.0, -0.5], [-0.5, -0.0]]
    """

    num_heads: int
    max_sequence_length: int | None = None
    max_bias_bytes: int = DEFAULT_MAX_BIAS_BYTES

    def __post_init__(self) -> None:
        _check_heads(self.num_heads)
        for name in ("max_sequence_length", "max_bias_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise OptionError(f"alibi.{name}: got {value!r}. Expected a whole number of at least 1.")

    def __call__(
        self,
        q_length: int,
        kv_length: int,
        *,
        q_offset: int | Tensor | None = None,
        kv_offset: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Return minus slope times distance, to be added to the scaled scores before the softmax.

        The distance counts in both directions. Under a causal mask only keys at or before the query are left, for which
        this is the causal bias.

        Args:
            q_length: Number of queries.
            kv_length: Number of keys.
            q_offset: Position of the first query, an int or a 0-d tensor; None if the queries are the last positions.
            kv_offset: Position of the first key.
            dtype: Of the result. The arithmetic is float32: a distance above 256 has no exact bfloat16.
            device: Of the result.

        Returns:
            Shape (num_heads, q_length, kv_length), values at most 0.

        Raises:
            DataError: the sequence or the memory the bias takes exceeds its limit.
        """
        self.check(1, q_length, kv_length, kv_offset, dtype)
        first = kv_offset + kv_length - q_length if q_offset is None else q_offset
        queries = (torch.arange(q_length, device=device) + first).float()
        keys = (torch.arange(kv_length, device=device) + kv_offset).float()
        distance = (queries[:, None] - keys).abs()
        return (distance * -alibi_slopes(self.num_heads, device)[:, None, None]).to(dtype)

    def check(self, rows: int, q_length: int, kv_length: int, kv_offset: int, dtype: torch.dtype) -> None:
        """Raise ``DataError`` if a bias of shape (rows, num_heads, q_length, kv_length) exceeds a limit."""
        length = kv_offset + kv_length
        if self.max_sequence_length is not None and length > self.max_sequence_length:
            raise DataError(
                f"alibi: a sequence has {length} positions, more than max_sequence_length={self.max_sequence_length}. "
                "Expected at most that many; a static key-value cache counts in full. "
                "Shorten the batch, raise max_sequence_length, or leave it at None."
            )
        num_bytes = rows * self.num_heads * q_length * kv_length * dtype.itemsize
        if num_bytes > self.max_bias_bytes:
            raise DataError(
                f"alibi: the bias for {rows} x {self.num_heads} heads x {q_length} queries x {kv_length} keys in "
                f"{dtype} would take {num_bytes:,} bytes, more than max_bias_bytes={self.max_bias_bytes:,}. Expected "
                "a shorter sequence or, where sequences are padded, fewer rows. Shorten the batch, use smaller "
                "microbatches, or raise max_bias_bytes."
            )
