"""Dying at every operation of a save, and losing power there: the newest complete checkpoint loads, and nothing stays behind."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kernel_core.checkpoint import retention
from kernel_core.checkpoint.locate import Found, checkpoints_in, locate, read_pointer
from kernel_core.checkpoint.retention import clear_up
from kernel_core.checkpoint.writer import Writer
from kernel_core.errors import CheckpointMissingError, SaveFailedError
from kernel_core.storage import LocalStorage, Storage, files, local
from kernel_core.testing.checkpoints import DictBoard, everything, good, named, save, save_job
from kernel_core.testing.crashes import Counted, Died, Dying, PowerCut, Quick, When, using, write_tree

KEEP = 2
WHENS: tuple[When, ...] = ("before", "half", "after")


def fits(name: str) -> bool:
    return name.startswith("ba")


def begin_again(root: Path, latest: str | None) -> None:
    """What a saver does when the run starts."""
    clear_up(LocalStorage(root), "run", "saver", KEEP, latest=latest, fits=fits)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "system", Quick())


class Scenario:
    """A folder as it was, and what is done in it.

    ``old`` are the batches that were saved, ``new`` the one that is being saved.
    """

    old: tuple[int, ...] = (3, 6)
    new = 9
    latest: str | None = "latest"

    def prepare(self, root: Path) -> None:
        writer = Writer(0, 1, None)
        root.mkdir(parents=True)
        for batch in self.old:
            save(writer, self.job(LocalStorage(root), batch))

    def job(self, storage: Storage, batch: int, **options: Any) -> Any:
        return save_job(storage, batch, keep=KEEP, latest=self.latest, **options)

    def act(self, root: Path) -> None:
        save(Writer(0, 1, None), self.job(LocalStorage(root), self.new))


class First(Scenario):
    """The first save of a run; the folder is made for it."""

    old = ()

    def prepare(self, root: Path) -> None:
        root.parent.mkdir(exist_ok=True)


class OneName(Scenario):
    """Every checkpoint replaces the one before."""

    def job(self, storage: Storage, batch: int, **options: Any) -> Any:
        return save_job(storage, batch, name="ba-last", overwrite=True, latest="latest", **options)


class OnceMore(Scenario):
    """The run went back, and comes to the same batch again."""

    old = (3, 6)
    new = 6


class Resumed(Scenario):
    """The run starts after a crash that left an unfinished save and a deletion half-way, clears up, and saves."""

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        with using(Dying(30)), pytest.raises(SaveFailedError):  # while it writes
            save(Writer(0, 1, None), self.job(LocalStorage(root), 9))
        assert (root / "ba9" / "lock.json").exists()
        old = next(one for one in checkpoints_in(LocalStorage(root)) if one.name == "ba3")
        assert isinstance(old, Found)
        with using(Dying(3)), pytest.raises(Died):
            retention.delete_checkpoint(old)
        assert not (root / "ba3" / "manifest.json").exists()
        (root / ".tmp-0123456789abcdef").write_bytes(b"half")  # of latest
        (root / "ba12").mkdir()

    def act(self, root: Path) -> None:
        begin_again(root, self.latest)
        super().act(root)


SCENARIOS = (Scenario(), First(), OneName(), OnceMore(), Resumed())
each = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: type(one).__name__)


def check_what_is_left(root: Path, scenario: Scenario) -> int:
    """A fresh reader finds what was saved before, or the new one; every checkpoint is as it was written."""
    storage = LocalStorage(root)
    found = good(storage)
    newest = max(found.values(), default=0)
    assert newest in (max(scenario.old, default=0), scenario.new)
    if found:
        one = locate(str(root))
        assert one.manifest.timestamp.batch == newest
        if (root / "latest").exists():  # it may be behind by one, and never leads to nothing
            assert locate(f"{root}/latest").manifest.timestamp.batch in (*scenario.old, scenario.new)
    else:
        with pytest.raises(CheckpointMissingError):
            locate(str(root))
    return newest


def check_that_it_goes_on(root: Path, scenario: Scenario, newest: int) -> None:
    """The run starts again, saves once more, and nothing is in the folder but checkpoints."""
    begin_again(root, scenario.latest)
    if newest:
        assert max(good(LocalStorage(root)).values()) == newest
    following = scenario.new if newest < scenario.new else scenario.new + 3
    storage = LocalStorage(root)
    saved = save(Writer(0, 1, None), scenario.job(storage, following))
    assert saved.manifest.timestamp.batch == following
    assert everything(root) == named(storage, *([scenario.latest] if scenario.latest else []))
    if scenario.latest:
        assert read_pointer(storage)[0] == saved.name
        assert locate(f"{root}/latest").name == saved.name
    batches = sorted(good(storage).values())
    assert batches[-1] == following
    assert len(batches) == (
        1 if isinstance(scenario, OneName) else min(2, len({*scenario.old, newest, following} - {0}))
    )


def count(scenario: Scenario, root: Path) -> list[str]:
    scenario.prepare(root)
    with using(system := Counted()):
        scenario.act(root)
    newest = check_what_is_left(root, scenario)
    assert newest == scenario.new
    check_that_it_goes_on(root, scenario, newest)
    return system.done


def copies(scenario: Scenario, root: Path) -> Iterator[Path]:
    """Yield folders in which everything is as it was before."""
    original = root / "original"
    scenario.prepare(original)
    number = 0
    while True:
        number += 1
        copy = root / str(number) / "checkpoints"
        if original.exists():
            shutil.copytree(original, copy)
        else:
            copy.parent.mkdir()
        yield copy


@each
def test_every_kind_of_operation_is_among_those_that_are_counted(scenario: Scenario, tmp_path: Path) -> None:
    done = count(scenario, tmp_path / "checkpoints")
    kinds = {operation.split()[0] for operation in done}
    assert kinds >= {"create", "write", "fsync", "close", "rename", "mkdir", "fsync_folder", "link", "unlink"}
    assert ("rmdir" in kinds) == (not isinstance(scenario, First))
    assert 30 < len(done) < 200


@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
@each
def test_dying_at_any_operation_loses_nothing(scenario: Scenario, tmp_path: Path, stride: int) -> None:
    done = count(scenario, tmp_path / "counted")
    fresh, outcomes = copies(scenario, tmp_path), set()
    for at in range(int(os.environ.get("KERNEL_TEST_SEED", "0")) % stride, len(done), stride):
        for when in WHENS:
            if when == "half" and not done[at].startswith("write"):
                continue
            root = next(fresh)
            with using(system := Dying(at, when)), suppress(Died, SaveFailedError):
                scenario.act(root)
            assert system.dead
            newest = check_what_is_left(root, scenario)
            outcomes.add(newest)
            check_that_it_goes_on(root, scenario, newest)
    assert outcomes == {max(scenario.old, default=0), scenario.new}


def in_a_child(act: Callable[[], None]) -> int:
    """Run ``act`` in a process of its own; return its exit code."""
    child = os.fork()
    if child == 0:
        try:
            act()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("stride", [13, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scenario", [Scenario(), Resumed()], ids=lambda one: type(one).__name__)
def test_a_process_that_ends_at_any_operation_loses_nothing(scenario: Scenario, tmp_path: Path, stride: int) -> None:
    done = count(scenario, tmp_path / "counted")
    fresh = copies(scenario, tmp_path)
    for at in range(0, len(done), stride):
        for when in WHENS:
            if when == "half" and not done[at].startswith("write"):
                continue
            root = next(fresh)

            def act(root: Path = root, at: int = at, when: When = when) -> None:
                files.system = Dying(at, when, lambda: os._exit(77))
                scenario.act(root)

            assert in_a_child(act) == 77, (at, when, done[at])
            check_that_it_goes_on(root, scenario, check_what_is_left(root, scenario))


class Two(Scenario):
    """Two ranks, as threads, that die together."""

    def prepare(self, root: Path) -> None:
        root.mkdir(parents=True)
        for batch in self.old:
            self.save(root, batch)

    def act(self, root: Path) -> None:
        self.save(root, self.new)

    def save(self, root: Path, batch: int) -> None:
        board, storage = DictBoard(lambda: getattr(files.system, "dead", False)), LocalStorage(root)
        writers = [Writer(rank, 2, board) for rank in range(2)]
        for rank, writer in enumerate(writers):
            writer.start(self.job(storage, batch, rank=rank, world_size=2))
        errors = []
        for writer in reversed(writers):
            try:
                writer.take()
            except SaveFailedError as error:
                errors.append(error)
        assert len(errors) in (0, 2), "a save fails on every rank, or on none"
        if errors:
            raise errors[0]


@pytest.mark.parametrize("stride", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_two_ranks_that_die_at_any_operation_lose_nothing(tmp_path: Path, stride: int) -> None:
    scenario = Two()
    done = count(scenario, tmp_path / "counted")
    assert sum("00001" in operation or operation.startswith("create") for operation in done) >= 4
    fresh = copies(scenario, tmp_path)
    for at in range(0, len(done) - 1, stride):
        for when in WHENS:
            root = next(fresh)
            with using(Dying(at, when)), suppress(Died, SaveFailedError):
                scenario.act(root)
            check_that_it_goes_on(root, scenario, check_what_is_left(root, scenario))


# --- power cuts ------------------------------------------------------------------------------------------------------


def survive(scenario: Scenario, folder: Path) -> int:
    """Check every folder that may be found after a power cut; return how many there are."""
    scenario.prepare(folder / "checkpoints")
    with using(system := PowerCut(folder / "checkpoints", seed=int(os.environ.get("KERNEL_TEST_SEED", "0")))):
        scenario.act(folder / "checkpoints")
    for index, (_, tree) in enumerate(system.trees):
        root = folder / str(index)
        write_tree(tree, root)
        check_that_it_goes_on(root, scenario, check_what_is_left(root, scenario))
    write_tree(system.on_disk(), folder / "at last")
    saved = good(LocalStorage(folder / "at last"))
    assert max(saved.values(), default=0) == scenario.new, "what was reported as saved is gone"
    return len(system.trees)


class MadeBefore(First):
    """As ``First``, in a folder that is there."""

    def prepare(self, root: Path) -> None:
        root.mkdir(parents=True)


class NoPointer(MadeBefore):
    """Without ``latest``, and nothing to delete: both sync the folder, and could hide that nobody else does."""

    latest = None


CUT = (Scenario(), NoPointer(), MadeBefore(), OneName(), OnceMore(), Resumed())


@pytest.mark.parametrize("scenario", CUT, ids=lambda one: type(one).__name__)
def test_a_power_cut_at_any_operation_loses_nothing(scenario: Scenario, tmp_path: Path) -> None:
    assert survive(scenario, tmp_path) > 15


class NoFileSync(PowerCut):
    def _model_fsync(self, *_: Any) -> None:
        pass


class NoFolderSync(PowerCut):
    def _model_fsync_folder(self, *_: Any) -> None:
        pass


def no_parent_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_folder(self: LocalStorage, folder: Path) -> None:
        if not folder.exists():
            files.system.mkdir(folder)

    monkeypatch.setattr(LocalStorage, "_make_folder", make_folder)


def manifest_before_data(monkeypatch: pytest.MonkeyPatch) -> None:
    put, held = LocalStorage.put, []

    def hold(self: LocalStorage, key: str, data: Any) -> None:
        if "/" in key and not key.endswith("manifest.json"):
            held.append((key, data))
            return
        put(self, key, data)
        while held:
            put(self, *held.pop(0))

    monkeypatch.setattr(LocalStorage, "put", hold)
    monkeypatch.setattr("kernel_core.checkpoint.writer._check_that_all_is_there", lambda *_: None)


def manifest_deleted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(found: Found) -> None:
        for name in [*found.manifest.files, "manifest.json"]:
            found.storage.delete(found.key(name))

    monkeypatch.setattr(retention, "delete_checkpoint", delete)


def renamed_before_it_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(self: LocalStorage, key: str, data: Any) -> None:
        target = self.root / key
        temporary = target.with_name(".tmp-" + "0" * 16)
        handle = self._create_beside(temporary)
        for block in local.blocks(data, 1 << 20):
            files.system.write(handle, block)
        files.system.rename(temporary, target)
        files.system.fsync_folder(target.parent)
        files.system.fsync(handle)
        files.system.close(handle)

    monkeypatch.setattr(LocalStorage, "put", put)


def no_file_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PowerCut", NoFileSync)


def no_folder_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PowerCut", NoFolderSync)


@pytest.mark.parametrize(
    "mutate",
    [
        no_file_sync,
        no_folder_sync,
        no_parent_sync,
        manifest_before_data,
        manifest_deleted_last,
        renamed_before_it_is_synced,
    ],
    ids=lambda one: one.__name__,
)
def test_the_power_cuts_find_what_is_done_wrong(
    mutate: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)

    def survive_both() -> None:
        survive(NoPointer(), tmp_path / "new")
        survive(Scenario(), tmp_path / "old")

    with pytest.raises((AssertionError, CheckpointMissingError)):
        survive_both()


def test_threads_of_a_crash_do_not_outlive_the_test() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]
