"""The sources of the running Python's standard library, as windows of bytes."""

import hashlib
import os
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal, TypedDict

import torch
from kernel_core.errors import DataError
from torch.utils.data import Dataset

Split = Literal["train", "heldout"]

HELDOUT_FRACTION = 0.05
# Between two files: Python forbids this byte in source code, so that it means nothing else.
SEPARATOR = b"\0"
# Installed packages are not the standard library, and tests would be two thirds of it.
LEFT_OUT_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"})
# Written when Python is built, with the paths of that machine.
LEFT_OUT_PREFIX = "_sysconfigdata"


class ByteBatch(TypedDict):
    """Windows of source code.

    Attributes:
        input_ids: shape (batch, length), int64, bytes from 0 to 255.
        labels: the same; the model's loss shifts them.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor


def source_files(root: Path | None = None) -> list[str]:
    """List the library's ``*.py`` files, without tests, idlelib and installed packages.

    Args:
        root: where to look; the default is the standard library of the running Python.

    Returns:
        Paths relative to ``root``, with slashes, in an order that is random but always the same, so that the first files
        are a fair sample of all.

    Raises:
        DataError: there are none.
    """
    root = _stdlib_folder() if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in LEFT_OUT_FOLDERS]
        found += [
            Path(folder, name).relative_to(root).as_posix()
            for name in names
            if name.endswith(".py") and not name.startswith(LEFT_OUT_PREFIX)
        ]
    if not found:
        raise DataError(
            f"stdlib: there are no Python source files below {root}. Expected those of the standard library. "
            "Run with a Python whose library is neither zipped nor stripped of its sources."
        )
    return sorted(found, key=lambda path: (_place(path), path))


def split_of(path: str) -> Split:
    """Say which split a file is in. Its path alone decides, in every release of Python.

    Args:
        path: relative to the standard library, with slashes.
    """
    return "heldout" if _place(path) < HELDOUT_FRACTION else "train"


@cache
def read_corpus(split: Split, max_bytes: int | None = None) -> torch.Tensor:
    """Read the files of one split, one after another.

    Args:
        split: which files; none is in both.
        max_bytes: stop after so many bytes; None reads all.

    Returns:
        Shape (bytes,), uint8: a zero byte before, between and after the files. Shared by all callers: not to be changed.
    """
    root, data = _stdlib_folder(), bytearray(SEPARATOR)
    for path in source_files(root):
        if max_bytes is not None and len(data) >= max_bytes:
            break
        if split_of(path) == split:
            data += (root / path).read_bytes() + SEPARATOR
    return torch.frombuffer(data, dtype=torch.uint8)[:max_bytes]


def windows_of(data: torch.Tensor, length: int) -> torch.Tensor:
    """Cut bytes into windows that do not overlap.

    Args:
        data: shape (bytes,).
        length: of each window, in bytes; at least 2, so that there is a byte to predict.

    Returns:
        Shape (windows, length), a view; what is left at the end is dropped.

    Raises:
        DataError: no window fits, or it would have nothing to predict.
    """
    num_windows = len(data) // length if length > 1 else 0
    if num_windows == 0:
        raise DataError(
            f"stdlib: cannot cut {len(data)} bytes into windows of {length}. Expected windows of at least 2 bytes and bytes "
            "for at least one. Choose another window length or read more bytes."
        )
    return data[: num_windows * length].view(num_windows, length)


def spread_windows(data: torch.Tensor, num_windows: int, length: int) -> torch.Tensor:
    """Take windows at even distances, so that few of them tell about all of ``data``.

    Args:
        data: shape (bytes,).
        num_windows: 1 or more; fewer are taken where no more fit without overlap.
        length: of each window, in bytes.

    Returns:
        Shape (windows, length), a view.

    Raises:
        DataError: no window fits.
    """
    stride = max(length, len(data) // num_windows)
    return windows_of(data, stride)[:num_windows, :length]


class ByteWindows(Dataset[torch.Tensor]):
    """Windows of bytes; which window ``i`` is depends on ``i`` alone.

    Args:
        windows: shape (windows, length), uint8.
    """

    def __init__(self, windows: torch.Tensor) -> None:
        self.windows = windows

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index]


def collate_windows(windows: Sequence[torch.Tensor]) -> ByteBatch:
    """Stack windows of one length into a batch."""
    input_ids = torch.stack(list(windows)).long()
    return ByteBatch(input_ids=input_ids, labels=input_ids)


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _place(path: str) -> float:
    """Map a path to a place in [0, 1) that looks drawn but is the same on every machine."""
    digest = hashlib.blake2b(path.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
