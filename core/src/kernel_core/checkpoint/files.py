"""The files of a checkpoint: fetched where they are not local, and compared with the manifest before anything in them is used."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernel_core.checkpoint.locate import Found
from kernel_core.checkpoint.manifest import FileRecord, checksum
from kernel_core.errors import CheckpointCorruptError, CheckpointError, StorageKeyError, StorageMissingError

READ_BYTES = 8 << 20
THREADS = 4


class LocalFiles:
    """The files of a checkpoint as files of this machine; those that were fetched are deleted by ``close``.

    Args:
        found: The checkpoint.
        folder: Where files of a remote store are kept, None for a temporary folder of its own.
    """

    def __init__(self, found: Found, folder: Path | None = None) -> None:
        self.found = found
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None

    def path(self, name: str) -> Path:
        """Return the path of a file, fetching it if need be.

        Raises:
            CheckpointCorruptError: it is missing.
        """
        storage, key = self.found.storage, self.found.key(name)
        try:
            path = storage.local_path(key)
            if path is not None:
                return path
            path = self._remote(name)
            if not path.exists():
                storage.fetch(key, path)
            return path
        except StorageMissingError as error:
            raise CheckpointCorruptError(f"{self.found.url}: {name} is missing. The checkpoint is damaged.") from error
        except StorageKeyError as error:  # a link that leads out of the folder
            raise CheckpointCorruptError(f"{self.found.url}: {name} is not a file: {error}") from error

    def _remote(self, name: str) -> Path:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="kernel-checkpoint-")
            self._folder = Path(self._temporary.name)
        return self._folder / name

    def close(self) -> None:
        """Delete what was fetched into a temporary folder."""
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = self._folder = None


def verify(files: LocalFiles, names: Collection[str]) -> None:
    """Read those files and compare them with the manifest.

    Raises:
        CheckpointCorruptError: names the first that differs.
    """
    paths = [(name, files.path(name), files.found.manifest.files[name]) for name in sorted(names)]
    with ThreadPoolExecutor(THREADS) as pool:  # checksums run without the interpreter's lock
        for problem in pool.map(lambda one: _problem(*one), paths):
            if problem:
                raise CheckpointCorruptError(f"{files.found.url}: {problem}. The checkpoint is damaged.")


def is_intact(found: Found) -> bool:
    """Say whether every file of a checkpoint is there as it was written: its bytes, or in a remote store its size."""
    manifest = found.manifest
    files = LocalFiles(found)
    try:
        if manifest.files and found.storage.local_path(found.key(next(iter(manifest.files)))) is not None:
            verify(files, manifest.files)
            return True
        return all(found.storage.size(found.key(name)) == record.size for name, record in manifest.files.items())
    except (CheckpointError, StorageMissingError):
        return False


def _problem(name: str, path: Path, record: FileRecord) -> str | None:
    if path.is_symlink() or not path.is_file():
        return f"{name} is missing" if not os.path.lexists(path) else f"{name} is not a file"
    try:
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes, and {record.size} were written"
        found = checksum(_pieces(path))
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return (
        None
        if found == record.checksum
        else f"the content of {name} is not what was written ({found}, {record.checksum})"
    )


def _pieces(path: Path) -> Iterator[memoryview]:
    """Yield a file's bytes. They are read, not mapped: what a failing disk makes an error here, kills who has it mapped."""
    buffer = bytearray(READ_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield view[:count]
