"""Where files go. ``Storage`` is what a storage backend implements; the kernel brings the local file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path


class Storage(ABC):
    """Files under keys, ``a/b/c``, below a root. The backend for a URL is found by its scheme."""

    @abstractmethod
    def write(self, key: str, data: bytes) -> None:
        """Store ``data`` under ``key``, replacing what is there; a reader sees the old bytes or the new, never a part."""

    @abstractmethod
    def read(self, key: str) -> bytes:
        """Return what is stored under ``key``.

        Raises:
            FileNotFoundError: there is nothing.
        """

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Say whether something is stored under ``key``."""

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys below the folder ``prefix``, sorted."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove ``key``, or everything below it when it is a folder; nothing there is no error."""


class LocalStorage(Storage):
    """Files below a folder of this machine.

    Args:
        root: The folder; made when first written to.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def _path(self, key: str) -> Path:
        path = Path(os.path.normpath(self.root / key))
        if not path.is_relative_to(Path(os.path.normpath(self.root))):
            raise ValueError(f"storage: the key {key!r} leads out of {self.root}. Use keys such as 'a/b.json'.")
        return path

    def write(self, key: str, data: bytes) -> None:
        """Write to a temporary file beside the target, flush it to the disk, and rename it into place."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def read(self, key: str) -> bytes:
        """Return the bytes of the file."""
        return self._path(key).read_bytes()

    def exists(self, key: str) -> bool:
        """Say whether the file or folder exists."""
        return self._path(key).exists()

    def list(self, prefix: str = "") -> Iterator[str]:
        """Yield the files below ``prefix`` as keys, sorted."""
        files = (path for path in self._path(prefix).rglob("*") if path.is_file())
        yield from sorted(path.relative_to(self.root).as_posix() for path in files)

    def delete(self, key: str) -> None:
        """Remove the file, or the folder with all it holds."""
        path = self._path(key)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
