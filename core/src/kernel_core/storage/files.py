"""Every operation by which local storage changes the file system, each a method of one object.

A test puts another object in its place (``files.system = ...``) to record the operations, to let one of them fail, or to
stop in the middle. Nothing here retries or cleans up: that is the caller's.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

BLOCK_BYTES = 16 * 2**20  # of one write


class FileSystem:
    """The operating system's own operations."""

    def create(self, path: Path) -> int:
        """Make a new file and return its descriptor, for writing."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, handle: int, data: memoryview) -> int:
        """Write some of ``data`` and return how many bytes."""
        return os.write(handle, data)

    def fsync(self, handle: int) -> None:
        """Wait until what was written to the file is on the disk."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a descriptor."""
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Put ``source`` in the place of ``target``, at once."""
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give the file ``source`` a second name, which must not exist."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def mkdir(self, path: Path) -> None:
        """Make one folder, which must not exist."""
        os.mkdir(path)

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def fsync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that knows no such thing
                raise
        finally:
            os.close(handle)

    def lock(self, path: Path, *, create: bool) -> int | None:
        """Open a folder, or with ``create`` a file, and lock it. Return the descriptor, or None while another has it."""
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY | os.O_DIRECTORY
        handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except BaseException:
            os.close(handle)
            raise
        return handle


system = FileSystem()
