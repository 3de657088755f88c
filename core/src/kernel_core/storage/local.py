"""Files below a folder of this machine, or of a network file system."""

from __future__ import annotations

import builtins
import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kernel_core.errors import (
    StorageConflictError,
    StorageError,
    StorageExistsError,
    StorageForbiddenError,
    StorageFullError,
    StorageKeyError,
    StorageMissingError,
    StorageRootError,
    StorageTransientError,
)
from kernel_core.storage import files
from kernel_core.storage.base import (
    Buffers,
    Entry,
    Storage,
    blocks,
    check_key,
    check_prefix,
    check_range,
    join_url,
    missing,
    temporary_name,
)

LOCK_TIME_LIMIT_S = 60.0
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
_NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}
_TRIES = 100  # of making a folder that others keep removing because it is empty


class LocalStorage(Storage):
    """Files below a folder.

    Args:
        root: The folder, as a path or a ``file://`` URL; made when first written to.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.url = os.fspath(root)
        self.root = Path(os.path.abspath(_path_of(self.url)))
        self._durable: dict[Path, int] = {}  # folders whose way from the root is on the disk, with their inodes

    def put(self, key: str, data: Buffers) -> None:
        """Write to a temporary file beside the target, flush it to the disk, and rename it into place."""
        target = self._path(key)
        with self._errors(key, "writing it"):
            temporary = self._write_temporary(target, data)
            with _removed_on_error(temporary):
                files.system.rename(temporary, target)
            _flush_names(target.parent)

    def create(self, key: str, data: Buffers) -> None:
        """Write to a temporary file and link it under its name, which fails if the name is taken.

        Where the file system has no links, the folder is locked: then one of several ``create`` succeeds, but a ``put``
        at the same moment may be lost.
        """
        target = self._path(key)
        with self._errors(key, "writing it"):
            temporary = self._write_temporary(target, data)
            with _removed_on_error(temporary):
                try:
                    files.system.link(temporary, target)
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    with _locked(target, self._where(key)):
                        if os.path.lexists(target):
                            raise FileExistsError(errno.EEXIST, "the name is taken") from None
                        files.system.rename(temporary, target)
                else:
                    files.system.unlink(temporary)
            _flush_names(target.parent)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Read the file, or a part of it."""
        check_range(start, end, self._where(key))
        path = self._path(key, follow=True)
        with self._errors(key, "reading it"), open(path, "rb") as file:
            file.seek(start)
            return file.read(-1 if end is None else max(0, end - start))

    def size(self, key: str) -> int:
        """Return the size of the file."""
        path = self._path(key, follow=True)
        with self._errors(key, "reading its size"):
            status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise missing(self._where(key))
        return status.st_size

    def exists(self, key: str) -> bool:
        """Say whether there is such a file."""
        try:
            self.size(key)
        except StorageMissingError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the files below the folder. Links to folders are not followed."""
        folder = self._folder(prefix)
        with self._errors(prefix, "listing it"):
            found = [Entry(path.relative_to(self.root).as_posix(), size) for path, size in _walk(folder)]
        yield from sorted(found, key=lambda entry: entry.key)

    def list_folders(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the folders in the folder, empty ones too."""
        folder = self._folder(prefix)
        with self._errors(prefix, "listing it"):
            names = [entry.name for entry in _scan(folder) if entry.is_dir(follow_symlinks=False)]
        yield from sorted(names)

    def delete(self, key: str) -> None:
        """Remove the file, then the folders above it that are empty, up to the root."""
        path = self._path(key, own=True)
        with self._errors(key, "deleting it"):
            try:
                files.system.unlink(path)
                files.system.fsync_folder(path.parent)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError:
                if not path.is_dir():
                    raise
                return  # a folder is no object
            for folder in path.parents:
                self._durable.pop(folder, None)
                if folder == self.root or not _remove_empty(folder):
                    return

    def version(self, key: str) -> str | None:
        """Return a hash of the content: the file is read."""
        path = self._path(key, follow=True)
        try:
            with self._errors(key, "reading it"):
                return _hash_of(path)
        except StorageMissingError:
            return None

    def replace(self, key: str, data: Buffers, version: str | None) -> None:
        """Compare and write while the folder is locked.

        Other calls of ``replace`` wait; ``put`` and ``delete`` of the same key do not, and are not noticed between the
        comparison and the renaming.
        """
        if version is None:
            try:
                return self.create(key, data)
            except StorageExistsError as error:
                raise self._conflict(key) from error
        target = self._path(key)
        if self.version(key) != version:  # the usual case of a conflict makes no folder
            raise self._conflict(key)
        with self._errors(key, "writing it"):
            temporary = self._write_temporary(target, data)  # keeps the folder from being removed as empty
            with _removed_on_error(temporary), _locked(target, self._where(key)):
                if self.version(key) != version:
                    raise self._conflict(key)
                files.system.rename(temporary, target)
            _flush_names(target.parent)

    def local_path(self, key: str) -> Path:
        """Return the file's path, whether it exists or not."""
        return self._path(key, follow=True)

    def _fetch_into(self, handle: int, key: str) -> None:
        path = self._path(key, follow=True)
        with self._errors(key, "reading it"), open(path, "rb") as file:
            expected, copied = os.fstat(file.fileno()).st_size, 0
            while block := file.read(files.BLOCK_BYTES):
                copied += len(block)
                view = memoryview(block)
                while view:
                    view = view[os.write(handle, view) :]
        if copied != expected:
            raise StorageTransientError(f"{self._where(key)}: got {copied} bytes. Expected {expected}. Fetch it again.")

    def _where(self, key: str) -> str:
        return join_url(self.url, key)

    def _conflict(self, key: str) -> StorageConflictError:
        return StorageConflictError(
            f"{self._where(key)}: somebody else changed it in the meantime. Read it again, then decide."
        )

    def _path(self, key: str, follow: bool = False, own: bool = False) -> Path:
        """Return where ``key`` lies. A link that leads out of the root is refused; with ``follow`` the file's own too."""
        path = self.root / check_key(key, self.url, own)
        real = Path(os.path.realpath(path if follow else path.parent))
        if not real.is_relative_to(os.path.realpath(self.root)):
            raise StorageKeyError(
                f"{self._where(key)}: a link leads out of {self.root}, to {real}. Expected files below that folder. "
                "Open the storage on the folder the link leads to."
            )
        return path

    def _folder(self, prefix: str) -> Path:
        prefix = check_prefix(prefix, self.url)
        return self._path(prefix, follow=True) if prefix else self.root

    def _errors(self, key: str, doing: str) -> Any:
        return _storage_errors(self._where(key), doing)

    def _write_temporary(self, target: Path, data: Buffers) -> Path:
        """Write a file beside ``target`` and wait until it is on the disk."""
        temporary = target.with_name(temporary_name())
        handle = self._create_beside(temporary)
        with _removed_on_error(temporary):
            try:
                for block in blocks(data, files.BLOCK_BYTES):
                    while block:
                        block = block[files.system.write(handle, block) :]
                files.system.fsync(handle)
            finally:
                files.system.close(handle)
        return temporary

    def _create_beside(self, temporary: Path) -> int:
        for attempt in range(1, _TRIES + 1):
            try:
                self._make_folder(temporary.parent)
                return files.system.create(temporary)
            except FileNotFoundError:  # another delete found the folder empty and removed it
                if attempt == _TRIES:
                    raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: Path) -> None:
        """Make the folder; return when it and the way to it are on the disk.

        A folder that another process made may not be there yet, so that the first use of any waits for it as well.
        """
        with suppress(FileNotFoundError):
            if self._durable.get(folder) == os.stat(folder).st_ino:
                return
        made = False
        if self.root in folder.parents or not folder.parent.exists():
            self._make_folder(folder.parent)
        try:
            files.system.mkdir(folder)
            made = True
        except FileExistsError:
            if not stat.S_ISDIR(
                os.stat(folder).st_mode
            ):  # gone meanwhile: FileNotFoundError, and the caller tries again
                raise NotADirectoryError(errno.ENOTDIR, "a file is where a folder must be", str(folder)) from None
        try:
            files.system.fsync_folder(folder.parent)
        except PermissionError:
            if made:
                raise
        self._durable[folder] = os.stat(folder).st_ino


def _path_of(root: str) -> str:
    """Return the path of a ``file://`` URL; a path is one already."""
    if not root.startswith("file:"):
        return root
    parts = urlsplit(root)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise StorageRootError(
            f"{root}: it names no folder of this machine. Expected file:///absolute/path, or a path."
        )
    return unquote(parts.path)


def _flush_names(folder: Path) -> None:
    """Wait until a new name in ``folder`` is on the disk, unless it was deleted at once and the folder with it."""
    with suppress(FileNotFoundError):
        files.system.fsync_folder(folder)


def _remove_empty(folder: Path) -> bool:
    """Remove a folder, durably, if it is empty; say whether it is gone."""
    try:
        files.system.rmdir(folder)
        files.system.fsync_folder(folder.parent)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            return False
        raise
    return True


@contextmanager
def _removed_on_error(temporary: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        with suppress(OSError):
            files.system.unlink(temporary)
        raise


@contextmanager
def _locked(target: Path, where: str) -> Iterator[None]:
    """Hold the lock of the folder of ``target``, or where folders have none (NFS) that of a file beside it.

    The lock file is removed by who holds it; one who waited for it finds another file there, or none, and starts again.
    """
    deadline = time.monotonic() + LOCK_TIME_LIMIT_S
    path, is_file = target.parent, False
    while True:
        try:
            handle = files.system.lock(path, create=is_file)
        except OSError as error:
            if is_file or error.errno not in _NO_FOLDER_LOCKS:
                raise
            name = hashlib.sha256(target.name.encode()).hexdigest()[:16]
            path, is_file = target.parent / f".lock-{name}", True
            continue
        if handle is not None:
            if _is_still(path, handle):
                break
            os.close(handle)
        elif time.monotonic() > deadline:
            raise StorageTransientError(
                f"{where}: another process has locked it for {LOCK_TIME_LIMIT_S:g} s. Find out which."
            )
        time.sleep(0.002)
    try:
        yield
    finally:
        if is_file:
            files.system.unlink(path)
        os.close(handle)


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def _scan(folder: Path) -> builtins.list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return builtins.list(entries)
    except (FileNotFoundError, NotADirectoryError):  # not there, or removed meanwhile
        return []


def _walk(folder: Path) -> Iterator[tuple[Path, int]]:
    """Yield the files below a folder with their sizes."""
    for entry in _scan(folder):
        with suppress(FileNotFoundError):
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name)
            elif entry.is_file():
                yield folder / entry.name, entry.stat().st_size


def _hash_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _storage_errors(where: str, doing: str) -> Iterator[None]:
    """Turn what the operating system says into the storage errors."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise _translated(error, where, doing) from error


_ADVICE: tuple[tuple[set[int], type[StorageError], str], ...] = (
    ({errno.EEXIST}, StorageExistsError, "Choose another key, or delete it first."),
    (
        {errno.EACCES, errno.EPERM, errno.EROFS},
        StorageForbiddenError,
        "Ask for the right to do so, or use another folder.",
    ),
    ({errno.ENOSPC, errno.EDQUOT}, StorageFullError, "Make room, or use another disk."),
    ({errno.ENAMETOOLONG}, StorageKeyError, "Use shorter names."),
    (
        {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT},
        StorageTransientError,
        "Try again; if it stays so, look at the file system.",
    ),
)


def _translated(error: OSError, where: str, doing: str) -> StorageError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) and doing.startswith("reading"):
        return missing(where)
    said = f"{where}: {doing} failed: {error.strerror or error}."
    for numbers, kind, advice in _ADVICE:
        if error.errno in numbers:
            return kind(f"{said} {advice}")
    return StorageError(f"{said} Look at the folder and the disk.")
