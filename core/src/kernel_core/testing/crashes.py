"""File systems for tests that stop in the middle, that fail, and that lose power.

Each stands in for ``kernel_core.storage.files.system``, by which local storage changes the file system. Run once with
``Counted`` to learn how many operations there are, then once more for each of them.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from kernel_core.storage import files

When = Literal["before", "half", "after"]
_OPERATIONS = [name for name in vars(files.FileSystem) if not name.startswith("_")]


class Died(BaseException):
    """Raised by every operation of a process that plays dead."""


class Quick(files.FileSystem):
    """Does not wait for the disk, which changes nothing that a process can see."""

    def fsync(self, handle: int) -> None:
        """Fail as the real one would."""
        os.fstat(handle)

    def fsync_folder(self, path: Path) -> None:
        """Fail as the real one would."""
        os.stat(path)


class Counted(Quick):
    """Counts the operations, and writes down which they were.

    Attributes:
        done: What was done: the operation's name and the last part of the path.
    """

    def __init__(self) -> None:
        self.done: list[str] = []
        self._lock = threading.RLock()

    def __getattribute__(self, name: str) -> Any:
        method = object.__getattribute__(self, name)
        if name not in _OPERATIONS:
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                number = len(self.done)
                self.done.append(" ".join([name, *(one.name for one in arguments if isinstance(one, Path))]))
            return self.operation(number, name, lambda: method(*arguments, **options), arguments)

        return call

    def operation(self, number: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Do operation ``number``, or something else in its place."""
        return call()


class Dying(Counted):
    """Dies at one operation.

    Args:
        at: Its number, from 0.
        when: Before it is done, after, or half-way: only writing has a half.
        die: Ends the process, say by ``os._exit``. None plays dead: this operation and all later ones raise ``Died``.
    """

    def __init__(self, at: int, when: When = "before", die: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.at, self.when, self.die = at, when, die
        self.dead = False

    def operation(self, number: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Do it, or die."""
        if self.dead:
            if name == "close":
                return call()  # the system closes the files of a process that is gone
            raise Died
        if number != self.at:
            return call()
        if self.when == "half" and name == "write":
            handle, data = arguments
            os.write(handle, data[: len(data) // 2])
        elif self.when != "before":
            with suppress(OSError):  # it may be one that fails
                result = call()
                if name == "lock" and result is not None:
                    os.close(result)  # as the system does for a process that is gone
        self.dead = True
        if self.die is not None:
            self.die()
        if name == "close" and self.when == "before":
            call()
        raise Died


class Failing(Counted):
    """Lets operations fail, and goes on.

    Args:
        error: What they raise.
        fails: Says which, by number and name.
    """

    def __init__(self, error: OSError, fails: Callable[[int, str], bool]) -> None:
        super().__init__()
        self.error, self.fails = error, fails

    def operation(self, number: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Do it, or raise."""
        if self.fails(number, name):
            if name == "close":
                call()
            raise type(self.error)(self.error.errno, self.error.strerror)
        return call()


@contextmanager
def using(system: files.FileSystem) -> Iterator[None]:
    """Let local storage use ``system`` inside the block."""
    before, files.system = files.system, system
    try:
        yield
    finally:
        files.system = before


# --- a power cut -----------------------------------------------------------------------------------------------------


class _File:
    """What is in a file: as processes see it, and as it is on the disk."""

    def __init__(self, content: bytes = b"") -> None:
        self.seen = bytearray(content)
        self.on_disk = bytes(content)


class _Folder:
    """The names in a folder: as processes see them, on the disk, and the changes in between, each done or not."""

    def __init__(self) -> None:
        self.seen: dict[str, _File | _Folder] = {}
        self.on_disk: dict[str, _File | _Folder] = {}
        self.changes: list[dict[str, _File | _Folder | None]] = []  # a renaming changes two names at once

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        _apply(self.seen, names)
        self.changes.append(names)


def _apply(names: dict[str, Any], change: dict[str, Any]) -> None:
    for name, what in change.items():
        if what is None:
            names.pop(name, None)
        else:
            names[name] = what


Tree = dict[str, bytes | None]  # path to content, None for a folder


class PowerCut(Counted):
    """Does every operation, and keeps a model of what of it would survive a power cut just then.

    On the disk is what was synced: the content of files, and the names in folders. Of the rest nothing need be there, and
    any of it may: names without the content, this name and not that one.

    Args:
        root: The folder that is looked at; what is in it now is on the disk.
        seed: Of the draw which changes survive.

    Attributes:
        trees: What may be found after a cut behind each operation, several for each, without those seen before.
    """

    def __init__(self, root: Path, seed: int = 0) -> None:
        super().__init__()
        self.root = root
        self._tree = _read(root)
        self._handles: dict[int, _File] = {}
        self._chance = random.Random(seed)
        self._known: set[tuple[tuple[str, bytes | None], ...]] = set()
        self.trees: list[tuple[int, Tree]] = []

    def operation(self, number: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        """Do it, model it, and keep what may be found if power failed now."""
        before = os.lseek(arguments[0], 0, os.SEEK_CUR) if name == "write" else 0
        result = call()
        with self._lock:
            getattr(self, f"_model_{name}", lambda *_: None)(result, before, *arguments)
            # nothing that was not synced; all names; any of the names
            for picks in (lambda: False, lambda: True, lambda: self._chance.random() < 0.5):
                self._keep(number, picks)
        return result

    def on_disk(self) -> Tree:
        """Return what is there for sure if power fails now."""
        tree: Tree = {}
        _survivors(self._tree, "", lambda: False, tree)
        return tree

    def _keep(self, number: int, picks: Callable[[], bool]) -> None:
        tree: Tree = {}
        _survivors(self._tree, "", picks, tree)
        key = tuple(sorted(tree.items()))
        if key not in self._known:
            self._known.add(key)
            self.trees.append((number, tree))

    def _folder(self, path: Path) -> _Folder:
        folder: Any = self._tree
        for part in path.relative_to(self.root).parts:
            folder = folder.seen[part]
        return folder  # type: ignore[no-any-return]

    def _model_create(self, handle: int, _: int, path: Path) -> None:
        self._handles[handle] = _File()
        self._folder(path.parent).change({path.name: self._handles[handle]})

    def _model_write(self, written: int, offset: int, handle: int, data: memoryview) -> None:
        self._handles[handle].seen[offset : offset + written] = data[:written]

    def _model_fsync(self, _: None, __: int, handle: int) -> None:
        self._handles[handle].on_disk = bytes(self._handles[handle].seen)

    def _model_rename(self, _: None, __: int, source: Path, target: Path) -> None:
        folder = self._folder(source.parent)
        assert source.parent == target.parent
        folder.change({target.name: folder.seen[source.name], source.name: None})

    def _model_link(self, _: None, __: int, source: Path, target: Path) -> None:
        folder = self._folder(source.parent)
        folder.change({target.name: folder.seen[source.name]})

    def _model_unlink(self, _: None, __: int, path: Path) -> None:
        self._folder(path.parent).change({path.name: None})

    def _model_mkdir(self, _: None, __: int, path: Path) -> None:
        self._folder(path.parent).change({path.name: _Folder()})

    _model_rmdir = _model_unlink

    def _model_fsync_folder(self, _: None, __: int, path: Path) -> None:
        if path == self.root or self.root in path.parents:
            folder = self._folder(path)
            folder.on_disk, folder.changes = dict(folder.seen), []


def _read(path: Path) -> _Folder:
    folder = _Folder()
    for one in path.iterdir():
        folder.seen[one.name] = _read(one) if one.is_dir() else _File(one.read_bytes())
    folder.on_disk = dict(folder.seen)
    return folder


def _survivors(folder: _Folder, prefix: str, picks: Callable[[], bool], into: Tree) -> None:
    names = dict(folder.on_disk)
    for change in folder.changes:
        if picks():
            _apply(names, change)
    for name, one in names.items():
        if isinstance(one, _File):
            into[prefix + name] = one.on_disk
        else:
            into[prefix + name] = None
            _survivors(one, f"{prefix}{name}/", picks, into)


def write_tree(tree: Tree, root: Path) -> None:
    """Make the folders and files of ``tree`` below ``root``, which must not exist."""
    root.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
