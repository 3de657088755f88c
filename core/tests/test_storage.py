"""The local file system as a storage, opening one by URL, and trying again."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernel_core.errors import (
    PluginLoadError,
    PluginNotFoundError,
    StorageError,
    StorageExistsError,
    StorageForbiddenError,
    StorageFullError,
    StorageKeyError,
    StorageMissingError,
    StorageRootError,
    StorageTransientError,
)
from kernel_core.registry import discovery
from kernel_core.registry.discovery import PluginInfo
from kernel_core.storage import LocalStorage, Retry, Storage, files, is_temporary, join_url, local, open_storage
from kernel_core.storage.base import blocks, num_bytes
from kernel_core.testing.storage import StorageContract


class TestLocalStorage(StorageContract):
    counter = itertools.count()

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.root = tmp_path_factory.mktemp("storage")

    def make_storage(self) -> Storage:
        return LocalStorage(self.root / str(next(self.counter)))


class NoLinks(files.FileSystem):
    """A file system without hard links, and on NFS without locks of folders."""

    def link(self, source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    def lock(self, path: Path, *, create: bool) -> int | None:
        if not create:
            raise OSError(errno.EBADF, "Bad file descriptor")
        return super().lock(path, create=create)


class TestWithoutLinksAndFolderLocks(TestLocalStorage):
    num_many = 0
    large_bytes = 18 * 2**20

    @pytest.fixture(autouse=True)
    def plain(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(files, "system", NoLinks())


class Recorder(files.FileSystem):
    """Writes down every operation; lets the one with number ``fails`` fail with ``error``."""

    def __init__(self, root: Path, fails: int = -1, error: BaseException | None = None) -> None:
        self.root, self.fails, self.error, self.done = root, fails, error, list[str]()

    def __getattribute__(self, name: str) -> Any:
        method = super().__getattribute__(name)
        if name not in vars(files.FileSystem) or name.startswith("_"):
            return method

        def call(*arguments: Any, **options: Any) -> Any:
            words = [self._short(argument) for argument in arguments]
            self.done.append(" ".join([name, *filter(None, words)]))
            if len(self.done) - 1 == self.fails and self.error:
                raise self.error
            return method(*arguments, **options)

        return call

    def _short(self, argument: Any) -> str:
        if not isinstance(argument, Path):
            return ""
        parts = argument.relative_to(self.root).parts
        return "/".join("TEMPORARY" if is_temporary(part) else part for part in parts) or "."


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    def start(fails: int = -1, error: BaseException | None = None) -> Recorder:
        recorder = Recorder(tmp_path, fails, error)
        monkeypatch.setattr(files, "system", recorder)
        return recorder

    return start


def test_a_put_is_flushed_before_it_is_seen_and_its_name_after(tmp_path: Path, record: Callable[..., Recorder]) -> None:
    storage, recorder = LocalStorage(tmp_path / "root"), record()
    storage.put("a/b", b"data")
    assert recorder.done == [
        *("mkdir root", "fsync_folder .", "mkdir root/a", "fsync_folder root"),
        *("create root/a/TEMPORARY", "write", "fsync", "close"),
        *("rename root/a/TEMPORARY root/a/b", "fsync_folder root/a"),
    ]
    recorder.done.clear()
    storage.put("a/b", b"data")
    assert recorder.done == [
        *("create root/a/TEMPORARY", "write", "fsync", "close"),
        *("rename root/a/TEMPORARY root/a/b", "fsync_folder root/a"),
    ]


def test_a_folder_of_another_process_is_flushed_too(tmp_path: Path, record: Callable[..., Recorder]) -> None:
    (tmp_path / "root" / "a").mkdir(parents=True)
    recorder = record()
    LocalStorage(tmp_path / "root").put("a/b", b"")
    assert [line for line in recorder.done if line.startswith("fsync_folder")] == [
        "fsync_folder .",
        "fsync_folder root",
        "fsync_folder root/a",
    ]


def test_create_links_and_delete_removes_upwards(tmp_path: Path, record: Callable[..., Recorder]) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/b/c", b"1")
    storage.put("a/d", b"1")
    recorder = record()
    storage.create("a/e", b"1")
    assert recorder.done[4:] == ["link a/TEMPORARY a/e", "unlink a/TEMPORARY", "fsync_folder a"]
    recorder.done.clear()
    storage.delete("a/b/c")
    assert recorder.done == ["unlink a/b/c", "fsync_folder a/b", "rmdir a/b", "fsync_folder a", "rmdir a"]


def test_a_large_object_is_written_in_blocks_and_never_copied(tmp_path: Path) -> None:
    data = bytearray(40 * 2**20)
    views = list(blocks([memoryview(data), b"tail", b"", b"end"], 16 * 2**20))
    assert [view.nbytes for view in views] == [16 * 2**20, 16 * 2**20, 8 * 2**20, 7]
    assert all(view.obj is data for view in views[:3])
    assert bytes(views[3]) == b"tailend"
    assert num_bytes([memoryview(data), b"tail"]) == 40 * 2**20 + 4
    small = [bytes([i]) * 1000 for i in range(200)]
    assert b"".join(blocks(small, 2**20)) == b"".join(small)
    assert len(list(blocks(small, 2**20))) == 4


def operations(storage: LocalStorage) -> dict[str, Callable[[], None]]:
    return {
        "put": lambda: storage.put("a/b", b"new"),
        "put in a new folder": lambda: storage.put("x/y/z", b"new"),
        "create": lambda: storage.create("x/new", b"new"),
        "replace": lambda: storage.replace("a/b", b"new", storage.version("a/b")),
        "delete": lambda: storage.delete("a/b"),
    }


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=["EIO", "signal"]
)
@pytest.mark.parametrize("name", list(operations(LocalStorage("."))))
def test_wherever_it_fails_the_old_or_the_new_is_there_and_nothing_else(
    tmp_path: Path, record: Callable[..., Recorder], name: str, error: BaseException
) -> None:
    for fails in range(100):
        root = tmp_path / str(fails)
        storage = LocalStorage(root)
        storage.put("a/b", b"old")
        recorder = record(fails, error)
        try:
            operations(storage)[name]()
        except (StorageError, KeyboardInterrupt):
            assert len(recorder.done) > fails
        found = {
            entry.key: storage.get(entry.key) for entry in storage.list() if not is_temporary(entry.key.split("/")[-1])
        }
        before, after = {"a/b": b"old"}, {"a/b": b"new"}
        after = {"x/y/z": b"new", **before} if "folder" in name else after
        after = {"x/new": b"new", **before} if name == "create" else {} if name == "delete" else after
        assert found in (before, after)
        cleaned_up = "unlink" in recorder.done[fails] if len(recorder.done) > fails else False
        left = [path for path in root.rglob("*") if is_temporary(path.name)]
        assert not left or cleaned_up, recorder.done
        record()
        operations(storage)[name]() if name not in ("create", "delete") else None
        if len(recorder.done) <= fails:
            assert found == after
            return
    raise AssertionError("it never ended")


def test_what_a_dead_writer_left_is_listed_by_a_name_of_its_own_and_can_be_deleted(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/b", b"1")
    names = ["a/.tmp-0123456789abcdef", "x/.lock-0123456789abcdef"]
    (tmp_path / "x").mkdir()
    for name in names:
        (tmp_path / name).write_bytes(b"part")
    storage.put(".tmp-notes", b"somebody's")
    found = [entry.key for entry in storage.list()]
    assert found == [".tmp-notes", names[0], "a/b", names[1]]
    assert [key for key in found if is_temporary(key.split("/")[-1])] == names
    with pytest.raises(StorageKeyError, match="names of this form are the storage's own"):
        storage.get(names[0])
    for name in names:
        storage.delete(name)
    assert [entry.key for entry in storage.list()] == [".tmp-notes", "a/b"]
    assert list(storage.list_folders()) == ["a"]


@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, StorageFullError, "Make room, or use another disk"),
        (errno.EDQUOT, StorageFullError, "Make room, or use another disk"),
        (errno.EACCES, StorageForbiddenError, "Ask for the right to do so"),
        (errno.EROFS, StorageForbiddenError, "Ask for the right to do so"),
        (errno.ESTALE, StorageTransientError, "Try again"),
        (errno.ENAMETOOLONG, StorageKeyError, "Use shorter names"),
        (errno.EIO, StorageError, "Look at the folder and the disk"),
    ],
)
def test_what_the_system_says_becomes_a_storage_error(
    tmp_path: Path, record: Callable[..., Recorder], number: int, kind: type[StorageError], advice: str
) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", b"old")
    record(1, OSError(number, os.strerror(number)))
    with pytest.raises(kind, match=f"{tmp_path}/a: writing it failed: {os.strerror(number)}. {advice}") as caught:
        storage.put("a", b"new")
    assert type(caught.value) is kind
    assert isinstance(caught.value.__cause__, OSError)
    assert storage.get("a") == b"old"


@pytest.mark.skipif(os.geteuid() != 0, reason="/dev/full is written through a link")
def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class FullDisk(files.FileSystem):
        def create(self, path: Path) -> int:
            os.close(super().create(path))
            return os.open("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(files, "system", FullDisk())
    with pytest.raises(StorageFullError, match="No space left on device"):
        LocalStorage(tmp_path).put("a", b"data")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a/b", b"1")

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(Path, "stat", refuse)
    for call in (storage.list, storage.list_folders, lambda: storage.exists("a/b")):
        with pytest.raises(StorageForbiddenError, match="Permission denied"):
            list(call())  # type: ignore[call-overload]


def test_a_file_in_the_way_and_a_folder_in_the_way_are_said(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("file", b"1")
    storage.put("folder/x", b"1")
    with pytest.raises(StorageError, match="a file is where a folder must be"):
        storage.put("file/below", b"")
    with pytest.raises(StorageError, match="folder: writing it failed: Is a directory"):
        storage.put("folder", b"")
    with pytest.raises(StorageExistsError):
        storage.create("folder", b"")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "x"]


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "inside").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (root / "out").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "in").symlink_to(root / "inside")
    storage = LocalStorage(root)
    calls: list[Callable[[], Any]] = [
        lambda: storage.get("out/secret"),
        lambda: storage.get("file"),
        lambda: storage.local_path("file"),
        lambda: storage.put("out/new", b""),
        lambda: storage.create("out/new", b""),
        lambda: storage.delete("out/secret"),
        lambda: list(storage.list("out")),
    ]
    for call in calls:
        with pytest.raises(StorageKeyError, match="a link leads out of"):
            call()
    assert (outside / "secret").read_bytes() == b"secret"
    storage.put("in/a", b"1")
    assert (root / "inside" / "a").read_bytes() == b"1"
    storage.put("file", b"own")  # takes the link's place
    assert (outside / "secret").read_bytes() == b"secret"
    assert storage.get("file") == b"own"
    assert [entry.key for entry in storage.list()] == ["file", "inside/a"]
    (tmp_path / "alias").symlink_to(root)
    assert LocalStorage(tmp_path / "alias").get("file") == b"own"


def test_a_lock_that_is_held_too_long_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("a", b"1")
    monkeypatch.setattr(local, "LOCK_TIME_LIMIT_S", 0.05)
    handle = files.system.lock(tmp_path, create=False)
    assert handle is not None
    with pytest.raises(StorageTransientError, match=r"another process has locked it for 0\.05 s"):
        storage.replace("a", b"2", storage.version("a"))
    os.close(handle)
    storage.replace("a", b"2", storage.version("a"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_processes_lose_no_update(tmp_path: Path) -> None:
    code = """
import sys
from kernel_core.storage import LocalStorage
from kernel_core.errors import StorageConflictError
storage = LocalStorage(sys.argv[1])
for _ in range(25):
    while True:
        version, value = storage.version("n"), int(storage.get("n"))
        try:
            if version == storage.version("n"):
                storage.replace("n", str(value + 1).encode(), version)
                break
        except StorageConflictError:
            pass
"""
    LocalStorage(tmp_path).put("n", b"0")
    processes = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert LocalStorage(tmp_path).get("n") == b"75"


def test_files_get_the_rights_that_others_get(tmp_path: Path) -> None:
    LocalStorage(tmp_path).put("a", b"")
    (tmp_path / "plain").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


def test_local_storage_stays_below_its_root(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    with pytest.raises(StorageMissingError):
        storage.get("a/b.json")
    with pytest.raises(StorageKeyError, match="leads upwards"):
        storage.put("../elsewhere", b"")
    assert list(storage.list()) == []
    assert list(tmp_path.iterdir()) == []
    storage.put("a", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs")
    storage.put("a", b"1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert storage.get("a") == b"1"


def test_a_path_or_file_url_opens_the_file_system(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    for url in (folder, str(folder), folder.as_uri(), f"file://localhost{folder.as_uri().removeprefix('file://')}"):
        storage = open_storage(url)
        assert isinstance(storage, LocalStorage)
        assert storage.root == folder
        assert storage.url == str(url)
    with pytest.raises(StorageRootError, match=r"it names no folder of this machine\. Expected file:///absolute/path"):
        open_storage("file://server/share")


class FakeStorage(LocalStorage):
    pass


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"{__name__}:FakeStorage"
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[FakeStorage.__module__])
    plugins = (
        PluginInfo("storage", "fake", "one", "1", "", here),
        PluginInfo("storage", "broken", "one", "1", "", "json:dumps"),
    )
    monkeypatch.setattr(discovery, "installed_plugins", lambda: plugins)


def test_another_scheme_opens_the_plugin_of_that_name(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_storage("fake://bucket/prefix")
    assert type(opened).__name__ == "FakeStorage"
    assert opened.url == "fake://bucket/prefix"
    with pytest.raises(PluginNotFoundError, match=r"fakes: .*Did you mean 'fake'\?.*pip install kernel-plugin-fakes"):
        open_storage("fakes://bucket")
    with pytest.raises(PluginLoadError, match=r"broken: .*must be a subclass of kernel_core.storage.Storage"):
        open_storage("broken://bucket")


@pytest.mark.parametrize(
    ("base", "parts", "joined"),
    [
        ("s3://bucket/runs/", ("one", "latest.json"), "s3://bucket/runs/one/latest.json"),
        ("s3://bucket", ("a/b", "", "c"), "s3://bucket/a/b/c"),
        (Path("/tmp/x"), ("y",), "/tmp/x/y"),
        ("/", ("y",), "/y"),
        ("", ("y",), "y"),
        ("folder", (), "folder"),
    ],
)
def test_urls_are_joined(base: str, parts: tuple[str, ...], joined: str) -> None:
    assert join_url(base, *parts) == joined


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now, self.waits = 0.0, list[float]()

    def __call__(self) -> float:
        return self.now

    def sleep(self, wait_s: float) -> None:
        self.waits.append(wait_s)
        self.now += wait_s


def failing(times: int, error: Exception) -> Callable[[], str]:
    left = iter(range(times))

    def call() -> str:
        if next(left, None) is not None:
            raise error
        return "done"

    return call


def test_waits_double_up_to_a_limit_and_vary() -> None:
    clock = Clock()
    retry = Retry(attempts=8, first_wait_s=1.0, longest_wait_s=10.0, time_limit_s=1e9, sleep=clock.sleep, clock=clock)
    assert retry.call(failing(7, StorageTransientError("busy."))) == "done"
    for wait_s, longest_s in zip(clock.waits, (1, 2, 4, 8, 10, 10, 10), strict=True):
        assert longest_s / 2 <= wait_s <= longest_s
    assert len({retry.wait_s(1) for _ in range(10)}) > 1


def test_after_the_last_try_the_error_says_how_many() -> None:
    clock, cause = Clock(), ValueError("cause")
    retry = Retry(attempts=3, sleep=clock.sleep, clock=clock)
    error = StorageTransientError("key: busy.")
    error.__cause__ = cause
    with pytest.raises(StorageTransientError, match=r"key: busy\. Tried 3 times in \d\.\d s\.") as caught:
        retry.call(failing(9, error))
    assert caught.value.attempts == 3
    assert caught.value.__cause__ is cause
    with pytest.raises(StorageTransientError, match=r"Tried 1 time in 0\.0 s\."):
        Retry(attempts=1).call(failing(9, error))


def test_no_try_begins_after_the_time_limit() -> None:
    clock = Clock()
    retry = Retry(attempts=100, first_wait_s=1.0, longest_wait_s=1.0, time_limit_s=5.0, sleep=clock.sleep, clock=clock)
    with pytest.raises(StorageTransientError):
        retry.call(failing(100, StorageTransientError("busy.")))
    assert 4.0 <= clock.now <= 5.0


def test_only_what_may_pass_is_tried_again() -> None:
    clock = Clock()
    for error in (StorageMissingError("x"), StorageForbiddenError("x"), ValueError("x")):
        with pytest.raises(type(error)):
            Retry(sleep=clock.sleep, clock=clock).call(failing(1, error))
    assert clock.waits == []
