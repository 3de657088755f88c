"""Which checkpoints are deleted: examples, and a model that saves, fails, is killed, is damaged and resumes at random."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kernel_core.checkpoint import retention
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in, locate, point_to, read_pointer
from kernel_core.checkpoint.retention import clear_up, first_name, is_called, owner_of, prune, remove_unfinished, sweep
from kernel_core.checkpoint.writer import Writer
from kernel_core.errors import SaveFailedError, StorageConflictError, StorageForbiddenError, StorageMissingError
from kernel_core.storage import LocalStorage, files
from kernel_core.testing.checkpoints import content, everything, good, named, save, save_job
from kernel_core.testing.crashes import Counted, Died, Dying, Failing, Quick, using


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "system", Quick())


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


def saved(storage: LocalStorage, *batches: int, **options: Any) -> None:
    writer = Writer(0, 1, None)
    for batch in batches:
        save(writer, save_job(storage, batch, **options))


def flip(storage: LocalStorage, name: str, file: str = "model-00000.safetensors") -> None:
    path = storage.root / name / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the names of checkpoints are added that are read in full."""
    read: list[str] = []
    intact = retention.is_intact

    def note(found: Found) -> bool:
        read.append(found.name)
        return intact(found)

    monkeypatch.setattr(retention, "is_intact", note)
    return read


def test_the_oldest_are_deleted_until_as_many_are_left_as_shall_be_kept(storage: LocalStorage) -> None:
    saved(storage, 1, 2, 3, 4, 5)
    assert prune(storage, "run", "saver", 2) == ["ba1", "ba2", "ba3"]
    assert everything(storage.root) == named(storage)
    assert list(good(storage).values()) == [5, 4]
    assert prune(storage, "run", "saver", 2) == []


def test_all_are_kept_when_all_shall_be(storage: LocalStorage) -> None:
    saved(storage, 1, 2, 3)
    assert prune(storage, "run", "saver", -1) == []
    assert len(good(storage)) == 3


@pytest.mark.parametrize("keep", [1, 2])
def test_a_damaged_one_does_not_count_as_one_that_is_kept(storage: LocalStorage, keep: int) -> None:
    saved(storage, 1, 2, 3, 4)
    flip(storage, "ba4")
    assert prune(storage, "run", "saver", keep) == ["ba1", "ba2"][: 3 - keep]
    assert {one.name for one in checkpoints_in(storage)} == {"ba4", "ba3", "ba2"} - ({"ba2"} if keep == 1 else set())


def test_nothing_is_deleted_when_none_is_good(storage: LocalStorage) -> None:
    saved(storage, 1, 2, 3)
    for name in ("ba1", "ba2", "ba3"):
        flip(storage, name)
    assert prune(storage, "run", "saver", 1) == []


@pytest.mark.parametrize("harm", ["removed", "cut", "longer"])
def test_a_file_that_is_missing_or_has_another_size_makes_a_checkpoint_not_count(
    storage: LocalStorage, harm: str
) -> None:
    saved(storage, 1, 2)
    path = storage.root / "ba2" / "state.json"
    if harm == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if harm == "cut" else path.read_bytes() + b" ")
    assert prune(storage, "run", "saver", 1) == []


def test_other_runs_and_other_savers_are_left_alone(storage: LocalStorage) -> None:
    saved(storage, 1, 2, run_name="other", name=None)
    saved(storage, 3, 4, saver="weights")
    saved(storage, 5, 6, 7)
    assert prune(storage, "run", "saver", 1) == ["ba5", "ba6"]
    assert {one.name for one in checkpoints_in(storage)} == {"ba1", "ba2", "ba3", "ba4", "ba7"}


def test_only_what_the_manifest_names_is_deleted(storage: LocalStorage) -> None:
    saved(storage, 1, 2)
    (storage.root / "ba1" / "notes.txt").write_text("mine")
    (storage.root / "ba1" / "state-00000.safetensors").write_text("mine too")
    prune(storage, "run", "saver", 1)
    assert everything(storage.root / "ba1") == {"notes.txt", "state-00000.safetensors"}


def test_the_manifest_is_the_first_to_go_and_the_lock_the_last(storage: LocalStorage) -> None:
    saved(storage, 1, 2)
    with using(system := Counted()):
        prune(storage, "run", "saver", 1)
    unlinked = [one.split()[1] for one in system.done if one.startswith("unlink")]
    assert unlinked[0] == "manifest.json"
    assert unlinked[-1] == "lock.json"
    assert len(unlinked) == 5


def test_what_was_read_before_is_believed_when_one_was_read_now(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, writer = reads(monkeypatch), Writer(0, 1, None)
    for batch in range(1, 6):
        save(writer, save_job(storage, batch, keep=3))
    assert read == ["ba4", "ba3", "ba2", "ba5"]  # once each: the first time all three, then the new one only
    read.clear()
    assert prune(storage, "run", "saver", 2) == ["ba3"]
    assert read == ["ba5", "ba4"]  # another process has read none


def test_what_was_read_before_is_read_again_when_the_newest_is_damaged(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: retention.Known = set()
    saved(storage, 1, 2, 3)
    prune(storage, "run", "saver", 2, known=known)
    saved(storage, 4)
    flip(storage, "ba4")
    flip(storage, "ba3")  # it was good when it was read
    read = reads(monkeypatch)
    assert prune(storage, "run", "saver", 1, known=known) == []
    assert read == ["ba4", "ba3", "ba2"]


def test_one_that_lost_a_file_is_not_believed(storage: LocalStorage) -> None:
    known: retention.Known = set()
    saved(storage, 1, 2, 3)
    prune(storage, "run", "saver", 2, known=known)
    (storage.root / "ba3" / "state.json").unlink()
    saved(storage, 4, 5)
    assert prune(storage, "run", "saver", 3, known=known) == []


def test_of_several_at_one_batch_for_one_name_the_newest_stays(storage: LocalStorage) -> None:
    saved(storage, 1, 2, 2)
    assert [one.name for one in checkpoints_in(storage)] == ["ba2.2", "ba1"]
    assert list(good(storage).values()) == [2, 1]


def test_the_new_one_must_be_good_before_the_one_it_replaces_goes(storage: LocalStorage) -> None:
    saved(storage, 1)
    found = save(Writer(0, 1, None), save_job(storage, 2))
    shutil.copytree(storage.root / "ba2", storage.root / "ba1.2")
    assert found.name == "ba2"
    saved(storage, 4, name="last")
    flip(storage, "last")
    saved(storage, 5, name="last", overwrite=True)
    assert good(storage)["last.2"] == 5
    flip(storage, "last.2")
    assert prune(storage, "run", "saver", -1, replaces="last") == []


def test_names_that_only_look_as_if_they_were_taken_twice_are_not_taken_for_it(storage: LocalStorage) -> None:
    assert [first_name(name) for name in ("ba3.2", "ba3.10", "ba3.1", "ba3.0", "ba3", "v1.20", ".2")] == [
        "ba3", "ba3", "ba3.1", "ba3.0", "ba3", "v1", ".2",
    ]  # fmt: skip
    for batch, name in enumerate(("v1.20", "v1.40", "v1.60"), start=1):
        saved(storage, batch, name=name, overwrite=True, saver="")
    assert len(good(storage)) == 3
    assert not is_called(next(one for one in checkpoints_in(storage) if isinstance(one, Found)), "v1.6")


def test_one_that_cannot_be_deleted_is_told_and_not_counted_as_deleted(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    saved(storage, 1, 2, 3)
    with using(Failing(OSError(errno.EACCES, "no"), lambda number, name: name == "unlink" and number == 0)):
        assert prune(storage, "run", "saver", 1) == ["ba2"]
    assert "ba1: could not be deleted" in caplog.text


def test_a_spared_one_stays(storage: LocalStorage) -> None:
    saved(storage, 1, 2, 3)
    assert prune(storage, "run", "saver", 1, spare=lambda found: found.name == "ba1") == ["ba2"]


# --- sweeping --------------------------------------------------------------------------------------------------------


def unfinished(storage: LocalStorage, batch: int, run_name: str = "run", name: str | None = None) -> None:
    for file, data in content(run_name, batch).items():
        storage.put(f"{name or f'ba{batch}'}/{file}", data)


def test_unfinished_saves_of_the_run_are_swept_and_those_of_others_stay(storage: LocalStorage) -> None:
    saved(storage, 1)
    unfinished(storage, 2)
    unfinished(storage, 3, "other")
    assert owner_of(storage, "ba3") == "other"
    sweep(storage, "run", lambda name: True)
    assert everything(storage.root) == named(storage) | {"ba3/", *(f"ba3/{file}" for file in content("other", 3))}


def test_what_is_left_without_a_lock_is_swept_where_the_name_is_that_of_a_checkpoint(storage: LocalStorage) -> None:
    for name in ("ba1", "mine"):
        storage.put(f"{name}/state.json", b"{}")
        storage.put(f"{name}/notes.txt", b"mine")
    (storage.root / "ba2").mkdir()
    (storage.root / "empty").mkdir()
    for folder in ("", "half/"):
        (storage.root / folder).mkdir(exist_ok=True)
        (storage.root / f"{folder}.tmp-0123456789abcdef").write_bytes(b"half")
    sweep(storage, "run", lambda name: name.startswith("ba"))
    assert everything(storage.root) == {
        "ba1/", "ba1/notes.txt", "mine/", "mine/notes.txt", "mine/state.json", "empty/",
    }  # fmt: skip


def test_a_lock_that_cannot_be_read_belongs_to_nobody(storage: LocalStorage) -> None:
    for index, lock in enumerate((b"", b"[]", b"{}", b'{"run_name": 3}', b"\xff", b"[" * 100_000)):
        storage.put(f"x{index}/lock.json", lock)
        assert owner_of(storage, f"x{index}") is None
    sweep(storage, "run")
    assert len(list(storage.list())) == 6


def test_folders_with_odd_names_are_nothing_to_do_with_checkpoints(storage: LocalStorage) -> None:
    saved(storage, 1)
    for name in ("back\\slash", "line\nbreak"):
        (storage.root / name).mkdir()
        (storage.root / name / "manifest.json").write_text("{}")
    os.symlink(storage.root / "ba1", storage.root / "link")
    sweep(storage, "run", lambda name: True)
    assert list(good(storage)) == ["ba1"]
    saved(storage, 2)
    assert locate(str(storage.root)).name == "ba2"


def test_nothing_to_sweep_is_no_error(storage: LocalStorage) -> None:
    sweep(storage, "run")
    clear_up(storage, "run", "saver", 2, latest="latest")
    assert not storage.root.exists()


def test_a_folder_that_cannot_be_read_is_loud(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(storage, 1)

    def refuse(*_: Any) -> Any:
        raise StorageForbiddenError("no.")

    monkeypatch.setattr(LocalStorage, "get", refuse)
    with pytest.raises(StorageForbiddenError):
        clear_up(storage, "run", "saver", 2)


def test_clearing_up_does_what_a_killed_process_had_not_come_to(storage: LocalStorage) -> None:
    saved(storage, 1, 2, latest="latest", keep=2)
    saved(storage, 3, 3)
    assert read_pointer(storage)[0] == "ba2"
    clear_up(storage, "run", "saver", 2, latest="latest")
    assert read_pointer(storage) == ("ba3.2", 4)
    assert list(good(storage).values()) == [3, 2]


def test_latest_is_not_pointed_to_one_that_is_damaged(storage: LocalStorage) -> None:
    saved(storage, 1, latest="latest")
    saved(storage, 2)
    flip(storage, "ba2")
    clear_up(storage, "run", "saver", 2, latest="latest")
    assert read_pointer(storage)[0] == "ba1"


def test_latest_never_goes_back_to_an_older_one_while_the_newer_is_there(storage: LocalStorage) -> None:
    saved(storage, 1, 2)
    new, old = (one for one in checkpoints_in(storage) if isinstance(one, Found))
    point_to(storage, "latest", new)
    point_to(storage, "latest", old)
    assert read_pointer(storage)[0] == "ba2"
    shutil.rmtree(storage.root / "ba2")
    point_to(storage, "latest", old)
    assert read_pointer(storage)[0] == "ba1"


def test_latest_that_others_change_all_the_time_is_told(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(storage, 1)
    (one,) = (one for one in checkpoints_in(storage) if isinstance(one, Found))
    tries = []

    def conflict(self: Any, key: str, data: Any, version: Any) -> None:
        tries.append(key)
        if len(tries) < 3 or key == "never":
            raise StorageConflictError("changed.")

    monkeypatch.setattr(LocalStorage, "replace", conflict)
    point_to(storage, "latest", one)
    assert len(tries) == 3
    with pytest.raises(StorageConflictError):
        point_to(storage, "never", one)


# --- the model -------------------------------------------------------------------------------------------------------


def is_name(name: str) -> bool:
    return name.startswith("ba")


class Retention(RuleBasedStateMachine):
    """A run that saves with ``keep``, in a folder it shares with another one, on a disk that fails.

    The model knows which checkpoints were complete, which of those it has damaged itself, and what is somebody else's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kernel-retention-"))
        self.storage = LocalStorage(self.folder)
        self.batch, self.other_batch = 0, 0
        self.damaged: set[str] = set()  # names of complete checkpoints that were harmed
        self.unreadable: set[str] = set()  # those of them whose manifest was
        self.users: dict[str, bytes] = {}
        self.others: dict[str, bytes] = {}
        self.alive = True
        self.writer = Writer(0, 1, None)
        files.system = Quick()

    def teardown(self) -> None:
        files.system = Quick()
        shutil.rmtree(self.folder)

    @initialize(keep=st.sampled_from([1, 2, 3]))
    def begin(self, keep: int) -> None:
        self.keep = keep

    def job(self, batch: int) -> Any:
        return save_job(self.storage, batch, keep=self.keep, latest="latest", num_bytes=40)

    def complete(self) -> dict[str, tuple[int, int]]:
        """Return sequence number and batch of this run's checkpoints with a manifest that can be read, the newest first."""
        found = [one for one in checkpoints_in(self.storage) if isinstance(one, Found)]
        mine = [(one.name, one.manifest) for one in found if one.manifest.run_name == "run"]
        return {name: (told.sequence, int(told.timestamp.batch)) for name, told in mine}

    def good(self) -> dict[str, tuple[int, int]]:
        return {name: place for name, place in self.complete().items() if name not in self.damaged}

    def check_deletions(self, before: dict[str, tuple[int, int]]) -> None:
        """What is gone was older than as many good ones as shall be kept, or was made anew at the same batch."""
        after, still = self.complete(), self.good()
        for name, (sequence, batch) in before.items():
            if name not in after and name not in self.unreadable:
                newer = [one for one in still.values() if one[0] > sequence]
                assert len(newer) >= self.keep or batch in [one[1] for one in newer], (name, before, after)
        self.damaged &= after.keys() | self.unreadable

    @precondition(lambda self: self.alive)
    @rule()
    def save(self) -> None:
        before, num_good = self.complete(), len({place[1] for place in self.good().values()} | {self.batch + 1})
        self.batch += 1
        found = save(self.writer, self.job(self.batch))
        self.check_deletions(before)
        assert self.complete()[found.name][1] == self.batch
        assert read_pointer(self.storage)[0] == found.name
        assert len(self.good()) >= min(self.keep, num_good)
        if not self.damaged:
            assert len(self.complete()) <= self.keep

    def disturbed(self, system: Any) -> None:
        before, num_good = self.complete(), len(self.good())
        self.batch += 1
        with using(system):
            self.writer.start(self.job(self.batch))
            with suppress(SaveFailedError, Died):
                self.writer.take()
        self.check_deletions(before)
        assert len(self.good()) >= min(self.keep, num_good)

    @precondition(lambda self: self.alive)
    @rule(at=st.integers(0, 70), lasts=st.booleans(), number=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EACCES]))
    def fail(self, at: int, lasts: bool, number: int) -> None:
        """An operation fails, once or from then on; the run ends as it would, and starts again."""
        self.disturbed(Failing(OSError(number, "failed"), lambda now, name: now == at or (lasts and now > at)))
        self.resume()

    @precondition(lambda self: self.alive)
    @rule(at=st.integers(0, 70), when=st.sampled_from(["before", "half", "after"]))
    def kill(self, at: int, when: Any) -> None:
        self.disturbed(Dying(at, when))
        self.alive = False

    @rule(at=st.one_of(st.none(), st.integers(0, 30)))
    def resume(self, at: int | None = None) -> None:
        """The run starts again from its newest good checkpoint; it may be killed while it clears up."""
        before = self.complete()
        with using(Quick() if at is None else Dying(at)), suppress(Died):
            clear_up(LocalStorage(self.folder), "run", "saver", self.keep, latest="latest", fits=is_name)
        self.check_deletions(before)
        self.storage, self.writer, self.alive = LocalStorage(self.folder), Writer(0, 1, None), at is None
        self.batch = next((batch for _, batch in self.good().values()), 0)

    @precondition(lambda self: self.alive)
    @rule()
    def a_save_after_a_start_leaves_nothing_behind(self) -> None:
        self.resume()
        self.save()
        mine = named(self.storage, "latest", *self.users, *self.others)
        mine |= {f"{Path(path).parent}/" for path in [*self.users, *self.others] if "/" in path}
        for name in self.unreadable:
            mine |= {one for one in everything(self.folder) if one.startswith(f"{name}/")}
        for name in self.damaged - self.unreadable:
            mine |= {f"{name}/"}
        left = everything(self.folder) - mine
        assert not left, left
        assert not {path for path in mine - everything(self.folder) if path.split("/")[0] not in self.damaged}

    @rule(which=st.integers(0, 5), harm=st.sampled_from(["flip", "cut", "remove", "manifest"]))
    def damage(self, which: int, harm: str) -> None:
        names = list(self.good())
        assume(names)
        name = names[which % len(names)]
        path = self.folder / name / ("manifest.json" if harm == "manifest" else "model-00000.safetensors")
        if harm == "remove":
            path.unlink()
        elif harm == "cut":
            path.write_bytes(path.read_bytes()[:-3])
        else:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        self.damaged.add(name)
        if harm == "manifest":
            self.unreadable.add(name)
        # what a process has read before it believes, so that a flip behind its back goes unnoticed until it is read again
        self.writer = Writer(0, 1, None)

    @rule()
    def another_run_saves(self) -> None:
        self.other_batch += 1
        job = save_job(self.storage, self.other_batch, run_name="other", name=f"other-{self.other_batch}", num_bytes=40)
        found = save(Writer(0, 1, None), job)
        for file in [*found.manifest.files, "manifest.json"]:
            self.others[f"{found.name}/{file}"] = self.storage.get(f"{found.name}/{file}")

    @rule()
    def another_run_is_in_the_middle_of_a_save(self) -> None:
        self.other_batch += 1
        for file, data in content("other", self.other_batch, 0, 40).items():
            self.others[f"ba{1000 + self.other_batch}/{file}"] = data
            self.storage.put(f"ba{1000 + self.other_batch}/{file}", data)

    @rule(which=st.integers(0, 5), inside=st.booleans())
    def the_user_keeps_a_file_there(self, which: int, inside: bool) -> None:
        names = list(self.complete())
        name = names[which % len(names)] if names and inside else f"ba{2000 + which}"
        key = f"{name}/notes.txt"
        self.users[key] = b"mine"
        self.storage.put(key, b"mine")

    @invariant()
    def what_belongs_to_others_is_as_it_was(self) -> None:
        for key, data in {**self.users, **self.others}.items():
            assert self.storage.get(key) == data, key

    @invariant()
    def every_complete_checkpoint_that_was_not_damaged_is_as_it_was_written(self) -> None:
        for one in checkpoints_in(self.storage):
            if isinstance(one, Damaged):
                assert one.name in self.unreadable
            elif one.manifest.run_name == "run" and one.name not in self.damaged:
                written = content("run", int(one.manifest.timestamp.batch), 0, 40)
                assert {file: self.storage.get(one.key(file)) for file in one.manifest.files} == written


def run_the_model(examples: int, steps: int, shrink: bool = True) -> None:
    number = int(os.environ.get("KERNEL_TEST_SEED", "0"))
    machine: Callable[[], Any] = seed(number)(Retention)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_retention_does_what_its_model_says() -> None:
    run_the_model(examples=15, steps=20)


@pytest.mark.slow
def test_retention_does_what_its_model_says_at_length() -> None:
    run_the_model(examples=80, steps=40)


@pytest.mark.slow
def test_the_model_finds_a_retention_that_trusts_what_it_has_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "is_intact", lambda found: True)
    with pytest.raises(AssertionError):
        run_the_model(examples=200, steps=30, shrink=False)


@pytest.mark.slow
def test_the_model_finds_a_deletion_that_leaves_the_manifest_for_last(monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(found: Found) -> None:
        for name in [*found.manifest.files, "manifest.json"]:
            found.storage.delete(found.key(name))

    monkeypatch.setattr(retention, "delete_checkpoint", delete)
    with pytest.raises((AssertionError, StorageMissingError, BaseExceptionGroup)):
        run_the_model(examples=200, steps=30, shrink=False)


@pytest.mark.slow
def test_the_model_finds_a_sweep_that_takes_what_others_are_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_all(storage: LocalStorage, *_: Any, **__: Any) -> None:
        for name in list(storage.list_folders()):
            if not storage.exists(f"{name}/manifest.json"):
                remove_unfinished(storage, name)

    monkeypatch.setattr(retention, "sweep", take_all)
    with pytest.raises((AssertionError, StorageMissingError, BaseExceptionGroup)):
        run_the_model(examples=200, steps=30, shrink=False)
