"""The header of a safetensors file, read with every number checked. Needs no torch, so that looking at a checkpoint needs none.

Source: the format description of huggingface/safetensors (8 bytes little-endian length, JSON header, tensors back to back).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_core.checkpoint.codec import read_json
from kernel_core.errors import CheckpointFormatError

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_BYTES = 2**60
BYTES_OF_DTYPE = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


@dataclass(frozen=True)
class Announced:
    """A tensor in a file: the name of its dtype, and where its bytes begin and end, from the first byte of the file on."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(data: Any, size: int, where: str) -> dict[str, Announced]:
    """Return the tensors that the header of a file announces.

    Args:
        data: The file, or at least its header.
        size: How large the whole file is.
        where: For messages.

    Raises:
        CheckpointFormatError: it is not a header, or tensors overlap, leave gaps, or lead out of the file.
    """
    length = header_bytes(data, size, where)
    header = read_json(bytes(data[8 : 8 + length]), where, "utf-8")
    if not isinstance(header, dict):
        raise CheckpointFormatError(f"{where}: its header is no object.")
    told = header.pop("__metadata__", {})
    if not isinstance(told, dict) or not all(type(value) is str for value in told.values()):
        raise CheckpointFormatError(f"{where}: __metadata__ of its header is not text by name.")
    entries = {}
    for key, told in header.items():
        try:
            entries[key] = _entry(told, 8 + length)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointFormatError(f"{where}: {key!r:.80}: {error!r:.200}.") from None
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != end:
            raise CheckpointFormatError(f"{where}: its tensors overlap or leave gaps at byte {end}.")
        end = entry.end
    if end != size:
        raise CheckpointFormatError(f"{where}: its tensors end at byte {end} of {size}.")
    return entries


def header_bytes(data: Any, size: int, where: str) -> int:
    """Return the length of the header, without its own 8 bytes, of a file of ``size`` bytes that begins with ``data``.

    Raises:
        CheckpointFormatError: there is no room for it.
    """
    if size < 8 or len(data) < 8:
        raise CheckpointFormatError(f"{where}: has {size} bytes. Expected a safetensors file.")
    (length,) = struct.unpack("<Q", bytes(data[:8]))
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise CheckpointFormatError(f"{where}: announces a header of {length} bytes in a file of {size}.")
    return int(length)


def _entry(told: Mapping[str, Any], begin: int) -> Announced:
    if set(told) != {"dtype", "shape", "data_offsets"}:
        raise ValueError("expected dtype, shape and data_offsets")
    if told["dtype"] not in BYTES_OF_DTYPE:
        raise ValueError(f"the dtype {told['dtype']!r:.40}")
    if type(told["shape"]) is not list or type(told["data_offsets"]) is not list:
        raise ValueError("expected lists")
    start, end = told["data_offsets"]
    numbers = [*told["shape"], start, end]
    if any(type(number) is not int or not 0 <= number < MAX_BYTES for number in numbers):
        raise ValueError("a number that is no size")
    # strides of empty tensors must be sizes too
    if math.prod(number for number in told["shape"] if number) >= MAX_BYTES:
        raise ValueError("a shape that no tensor has")
    num_bytes = BYTES_OF_DTYPE[told["dtype"]] * math.prod(told["shape"])
    if end - start != num_bytes:
        raise ValueError(f"{end - start} bytes for a shape of {num_bytes}")
    return Announced(told["dtype"], tuple(told["shape"]), begin + start, begin + end)
