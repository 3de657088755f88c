"""One file of tensors in the safetensors format: laid out, copied to host memory, and read again with every number checked.

Written here and not by the library so that training stalls for one copy into memory that is there already; the library
reads the files, and so does everybody who has it.

Source: the format description of huggingface/safetensors (8 bytes little-endian length, JSON header, tensors back to back).
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_core.checkpoint.header import parse_header
from kernel_core.errors import CheckpointFormatError

BLOCK_BYTES = 128 << 20  # what is written and hashed at once; smaller blocks take twice as long
NAME_OF_DTYPE = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
DTYPE_OF_NAME = {name: dtype for dtype, name in NAME_OF_DTYPE.items()}


class Staging:
    """Host memory that tensors are copied to, kept from one save to the next: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def reserve(self, num_bytes: int, pinned: bool) -> Tensor:
        """Return ``num_bytes`` of memory that is there, not only promised."""
        if self._buffer is None or self._buffer.numel() < num_bytes:
            self._buffer = None  # before the new one is there
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:num_bytes]

    def release(self) -> None:
        """Give the memory back."""
        self._buffer = None


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a file lies.

    Attributes:
        header: The first bytes of the file.
        places: For each tensor, in the order given, where its bytes begin and end behind the header.
        num_bytes: How many bytes follow the header.
    """

    header: bytes
    places: tuple[tuple[int, int], ...]
    num_bytes: int

    @classmethod
    def of(cls, keys: Sequence[str], tensors: Sequence[Tensor], metadata: Mapping[str, str] | None = None) -> Layout:
        """Lay out ``tensors`` under ``keys``: those with the largest elements first, so that all are aligned."""
        order = sorted(range(len(keys)), key=lambda index: (-tensors[index].element_size(), keys[index]))
        places: list[tuple[int, int]] = [(0, 0)] * len(keys)
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        end = 0
        for index in order:
            tensor = tensors[index]
            start, end = end, end + tensor.nbytes
            places[index] = (start, end)
            entries[keys[index]] = {
                "dtype": NAME_OF_DTYPE[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return cls(struct.pack("<Q", len(text)) + text, tuple(places), end)

    @torch.no_grad()
    def fill(self, buffer: Tensor, tensors: Sequence[Tensor]) -> None:
        """Copy ``tensors`` into ``buffer``; asynchronously from an accelerator, for which the caller waits."""
        for (start, end), tensor in zip(self.places, tensors, strict=True):
            if end > start:
                place = buffer[start:end].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)

    def blocks(self, buffer: Tensor) -> list[memoryview]:
        """Return the file as pieces to be written one after another; they share the memory of ``buffer``."""
        view = memoryview(buffer.numpy())  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol
        ends = range(0, self.num_bytes, BLOCK_BYTES)
        return [memoryview(self.header), *(view[start : min(start + BLOCK_BYTES, self.num_bytes)] for start in ends)]


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: where its bytes begin and end in it, from its first byte on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """A file, mapped into memory. What was read from it may outlive it; writing into that changes memory only."""

    def __init__(self, path: Path, where: str) -> None:
        self.where = where
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
        try:
            size = os.fstat(handle).st_size
            self.data: Any = mmap.mmap(handle, size, access=mmap.ACCESS_COPY) if size else b""
        finally:
            os.close(handle)
        self._entries: Mapping[str, Entry] | None = None

    def blocks(self) -> Iterator[memoryview]:
        """Yield all bytes."""
        view = memoryview(self.data)
        for start in range(0, len(view), BLOCK_BYTES):
            yield view[start : start + BLOCK_BYTES]

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors in the file by key.

        Raises:
            CheckpointFormatError: the header is not one, or does not fit the file.
        """
        if self._entries is None:
            self._entries = read_header(self.data, len(self.data), self.where)
        return self._entries

    def tensor(self, key: str) -> Tensor:
        """Return a tensor that shares the mapped memory."""
        entry = self.entries[key]
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        raw = torch.frombuffer(self.data, dtype=torch.uint8, offset=entry.start, count=entry.end - entry.start)
        if entry.dtype is torch.bool and raw.amax() > 1:
            raise CheckpointFormatError(f"{self.where}: {key!r:.80}: holds truth values other than 0 and 1.")
        if entry.start % entry.dtype.itemsize:
            raw = raw.clone()  # other writers may leave tensors unaligned
        return raw.view(entry.dtype).view(entry.shape)


def read_header(data: Any, size: int, where: str) -> dict[str, Entry]:
    """Return the tensors that the header of a file of ``size`` bytes announces.

    Raises:
        CheckpointFormatError: it is not a header, or tensors overlap, leave gaps, or lead out of the file.
    """
    announced = parse_header(data, size, where)
    return {key: Entry(DTYPE_OF_NAME[one.dtype], one.shape, one.start, one.end) for key, one in announced.items()}
