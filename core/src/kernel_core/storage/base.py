"""What a storage backend implements: files under keys, with one meaning for every store."""

from __future__ import annotations

import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernel_core.errors import StorageKeyError, StorageMissingError, StorageTransientError

Buffers = bytes | bytearray | memoryview | Sequence[memoryview | bytes]
"""One object, or its pieces in order."""

RANGE_BYTES = 16 * 2**20  # of one request when a large object is fetched
_TEMPORARY = re.compile(r"\.(tmp|lock)-[0-9a-f]{16}")


@dataclass(frozen=True)
class Entry:
    """An object that is there.

    Attributes:
        key: Its key.
        size: In bytes.
    """

    key: str
    size: int


class Storage(ABC):
    """Files under keys ``a/b/c``, below a root: a folder, or a bucket and a prefix.

    Instances may be used by several threads. Every method raises subclasses of ``StorageError``; a store that cannot be
    asked (credentials, network) is never reported as a missing object. A new backend's tests subclass
    ``kernel_core.testing.storage.StorageContract``, which holds every clause below.

    Attributes:
        url: What it was opened with, for messages.
        parallel_ranges: How many ranges of a large object ``fetch`` asks for at a time.
    """

    url: str
    parallel_ranges: int = 8

    @abstractmethod
    def put(self, key: str, data: Buffers) -> None:
        """Store ``data``, replacing what is there.

        A reader sees the old bytes or the new, never a part. When it returns, the bytes survive a power cut.
        """

    @abstractmethod
    def create(self, key: str, data: Buffers) -> None:
        """Store ``data`` if nothing is there. Of several at the same time one succeeds, where the store allows it.

        Raises:
            StorageExistsError: there is something.
        """

    @abstractmethod
    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return the bytes from ``start`` up to, not including, ``end``; fewer where the object ends earlier.

        Raises:
            StorageMissingError: there is nothing.
        """

    @abstractmethod
    def size(self, key: str) -> int:
        """Return the size in bytes.

        Raises:
            StorageMissingError: there is nothing.
        """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Say whether there is an object of exactly that key; a folder is none. A store that cannot be asked raises."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield all objects below the folder ``prefix``, sorted by key; none for a folder that is not there.

        Files of the backend's own, that a writer is busy with or died over, are among them where the store has such: their
        names are what ``is_temporary`` recognises, and ``delete`` removes them.
        """

    @abstractmethod
    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the folders directly in the folder ``prefix``, sorted, without walking through them."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object, durably. Nothing there is no error. A folder that became empty goes too."""

    @abstractmethod
    def version(self, key: str) -> str | None:
        """Return an opaque tag of the present content, None where nothing is."""

    @abstractmethod
    def replace(self, key: str, data: Buffers, version: str | None) -> None:
        """Store ``data`` if ``version(key)`` is still ``version``; None means that nothing must be there.

        Of several at the same time one succeeds.

        Raises:
            StorageConflictError: somebody was faster.
        """

    def local_path(self, key: str) -> Path | None:
        """Return the file of ``key``, for memory mapping, or None: the store is not a file system of this machine."""
        check_key(key, self.url)
        return None

    def fetch(self, key: str, path: Path) -> None:
        """Download to the file ``path``, which appears when it is complete.

        Raises:
            StorageMissingError: there is nothing.
            StorageTransientError: the object was replaced meanwhile, or its length is not what the store said.
        """
        temporary = path.with_name(temporary_name())
        try:
            with open(temporary, "wb") as file:
                self._fetch_into(file.fileno(), key)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def _fetch_into(self, handle: int, key: str) -> None:
        if self.size(key) <= RANGE_BYTES:
            _write_at(handle, self.get(key), 0)
            return
        version, size = self.version(key), self.size(key)

        def copy(start: int) -> int:
            data = self.get(key, start, min(start + RANGE_BYTES, size))
            _write_at(handle, data, start)
            return len(data)

        with ThreadPoolExecutor(self.parallel_ranges) as pool:
            copied = sum(pool.map(copy, range(0, size, RANGE_BYTES)))
        where = join_url(self.url, key)
        if self.version(key) != version:
            raise StorageTransientError(f"{where}: it was replaced while it was fetched. Fetch it again.")
        if copied != size:
            raise StorageTransientError(f"{where}: got {copied} bytes. Expected {size}. Fetch it again.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


def check_key(key: str, url: str, own: bool = False) -> str:
    """Return ``key`` if it can be one: parts that are names, joined by ``/``; with ``own`` the backend's own too.

    Raises:
        StorageKeyError: it cannot.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts):
        what = "it is absolute, leads upwards, or has an empty part"
    elif "\\" in key or any(ord(character) < 32 or 0x7F <= ord(character) < 0xA0 for character in key):
        what = "it holds a backslash or a control character"
    elif any(0xD800 <= ord(character) < 0xE000 for character in key):
        what = "it is not valid Unicode"
    elif not own and any(is_temporary(part) for part in parts):
        what = "names of this form are the storage's own"
    else:
        return key
    raise StorageKeyError(f"{url}: got the key {key!r}: {what}. Expected names joined by '/', such as 'a/b.json'.")


def check_prefix(prefix: str, url: str) -> str:
    """Return the folder ``prefix`` without a ``/`` at its end; the empty one is the root.

    Raises:
        StorageKeyError: it cannot be a folder.
    """
    return check_key(prefix.removesuffix("/"), url) if prefix else ""


def check_range(start: int, end: int | None, where: str) -> None:
    """Refuse a range that counts from the end.

    Raises:
        StorageKeyError: a bound is negative.
    """
    if start < 0 or (end is not None and end < 0):
        raise StorageKeyError(f"{where}: got the range {start} to {end}. Expected bounds of at least 0.")


def temporary_name() -> str:
    """Return a new name for a file that is not complete yet."""
    return f".tmp-{secrets.token_hex(8)}"


def is_temporary(name: str) -> bool:
    """Say whether a file of this name is a backend's own: half-written, or a lock. No key may hold it."""
    return _TEMPORARY.fullmatch(name) is not None


def join_url(base: str | os.PathLike[str], *parts: str) -> str:
    """Append parts to a URL or path.

    >>> join_url("s3://bucket/runs/", "one", "latest.json")
    's3://bucket/runs/one/latest.json'
    """
    text = os.fspath(base)
    for part in parts:
        if part:
            text = f"{text}{'' if text.endswith('/') or not text else '/'}{part.lstrip('/')}"
    return text


def num_bytes(data: Buffers) -> int:
    """Return the size of an object that may be in pieces."""
    return sum(view.nbytes for view in _views(data))


def blocks(data: Buffers, size: int) -> Iterator[memoryview]:
    """Yield the object as blocks of at most ``size`` bytes, large pieces as views of them, small ones joined."""
    small = bytearray()
    for view in _views(data):
        if small and len(small) + view.nbytes > _JOINED:
            yield memoryview(bytes(small))
            small.clear()
        if view.nbytes < _JOINED:
            small += view
            continue
        for start in range(0, view.nbytes, size):
            yield view[start : start + size]
    if small:
        yield memoryview(bytes(small))


def missing(where: str) -> StorageMissingError:
    """Return the error for a key that holds nothing."""
    return StorageMissingError(f"{where}: there is no such object. Expected one. Look at what `list` shows.")


_JOINED = 64 * 2**10  # copying less than this is cheaper than a write of its own


def _views(data: Buffers) -> Iterator[memoryview]:
    pieces = (data,) if isinstance(data, bytes | bytearray | memoryview) else data
    for piece in pieces:
        view = memoryview(piece)
        if view.nbytes:
            yield view.cast("B") if view.format != "B" or view.ndim != 1 else view


def _write_at(handle: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, offset)
        view, offset = view[written:], offset + written
