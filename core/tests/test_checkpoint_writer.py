"""The writer by itself: names, sequence numbers, several ranks, what fails and what others hear of it; and recorded failures."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kernel_core.checkpoint import writer as module
from kernel_core.checkpoint.failures import Failures
from kernel_core.checkpoint.locate import locate, read_pointer
from kernel_core.checkpoint.writer import Writer
from kernel_core.engine import SingleEngine
from kernel_core.errors import (
    CheckpointError,
    Interrupted,
    RepeatedFailureError,
    SaveFailedError,
    StartAgain,
    StorageConflictError,
    StorageError,
    StorageExistsError,
)
from kernel_core.storage import LocalStorage, files
from kernel_core.testing.checkpoints import DictBoard, content, everything, good, named, save, save_job
from kernel_core.testing.crashes import Counted, Failing, Quick, using


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "system", Quick())


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "checkpoints")


@pytest.fixture
def writer() -> Writer:
    return Writer(0, 1, None)


# --- one rank --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_what_was_given_and_what_its_manifest_says(storage: LocalStorage, writer: Writer) -> None:
    assert not writer.pending
    assert not writer.settled
    writer.start(save_job(storage, 3, latest="latest"))
    assert writer.pending
    saved = writer.take()
    assert not writer.pending
    assert (saved.url, saved.name, saved.deleted) == (f"{storage.url}/ba3", "ba3", ())
    assert saved.durable_s > 0
    assert saved.manifest.files.keys() == content("run", 3).keys()
    assert good(storage) == {"ba3": 3}
    assert everything(storage.root) == named(storage, "latest")
    assert read_pointer(storage) == ("ba3", 1)


def test_the_lock_is_written_first_and_the_manifest_last(storage: LocalStorage, writer: Writer) -> None:
    with using(system := Counted()):
        save(writer, save_job(storage, 1))
    names = [one.split()[2] for one in system.done if one.split()[0] in ("link", "rename")]
    assert names[0] == "lock.json"
    assert names[-1] == "manifest.json"
    assert sorted(names[1:-1]) == ["model-00000.safetensors", "rank-00000.json", "state.json"]


def test_the_sequence_goes_up_from_what_is_there(storage: LocalStorage, writer: Writer) -> None:
    assert [save(writer, save_job(storage, batch)).manifest.sequence for batch in (1, 2)] == [1, 2]
    assert save(Writer(0, 1, None), save_job(storage, 3, run_name="other")).manifest.sequence == 3


def test_a_name_of_another_run_is_refused_and_its_checkpoint_stays(storage: LocalStorage, writer: Writer) -> None:
    save(writer, save_job(storage, 1, run_name="other", name="last"))
    with pytest.raises(SaveFailedError) as caught:
        save(writer, save_job(storage, 2, name="last"))
    assert str(caught.value) == (
        f"checkpoint {storage.url}/last: was not saved: there is a checkpoint of that name already, of the run 'other' at batch "
        "1 by saver. Expected a free name. Use placeholders such as {batch} in save_filename, another save_folder, or "
        "save_overwrite=True. Those saved before are as they were. Mend the cause and start again from the last one."
    )
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert everything(storage.root) == named(storage)
    assert good(storage, "other") == {"last": 1}


def test_a_constant_name_is_refused_at_the_second_batch(storage: LocalStorage, writer: Writer) -> None:
    save(writer, save_job(storage, 1, name="last"))
    with pytest.raises(SaveFailedError, match="of the run 'run' at batch 1"):
        save(writer, save_job(storage, 2, name="last"))


def test_overwriting_replaces_the_checkpoint_of_that_name_once_the_new_one_is_there(
    storage: LocalStorage, writer: Writer
) -> None:
    for batch, name in ((1, "last"), (2, "last.2"), (3, "last"), (4, "last.2")):
        saved = save(writer, save_job(storage, batch, name="last", overwrite=True))
        assert saved.name == name
        assert good(storage) == {name: batch}
        assert everything(storage.root) == named(storage)


def test_overwriting_replaces_those_of_other_runs_and_nothing_else(storage: LocalStorage, writer: Writer) -> None:
    save(writer, save_job(storage, 1, run_name="other", name="last", overwrite=True))
    save(writer, save_job(storage, 2, run_name="other", name="beside"))
    saved = save(writer, save_job(storage, 3, name="last", overwrite=True))
    assert saved.deleted == ("last",)
    assert good(storage, "other") == {"beside": 2}
    save(writer, save_job(storage, 4, run_name="third", name="last", overwrite=True))
    assert good(storage) == {}
    assert good(storage, "third") == {"last": 4}


def test_what_is_not_good_replaces_nothing_of_other_runs(
    storage: LocalStorage, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, save_job(storage, 1, run_name="other", name="last"))
    monkeypatch.setattr(module, "is_intact", lambda found: False)
    save(writer, save_job(storage, 2, name="last", overwrite=True))
    assert good(storage, "other") == {"last": 1}
    assert "it is not what was written when it is read again; nothing is deleted" in caplog.text


def test_the_same_batch_once_more_replaces_the_first(storage: LocalStorage, writer: Writer) -> None:
    save(writer, save_job(storage, 3))
    saved = save(writer, save_job(storage, 3))
    assert (saved.name, saved.deleted) == ("ba3.2", ("ba3",))
    assert everything(storage.root) == named(storage)


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_savers_of_a_run_with_one_name_keep_both(storage: LocalStorage, writer: Writer, overwrite: bool) -> None:
    """Weights alone must not take the place of what the run is resumed from."""
    save(writer, save_job(storage, 3, overwrite=overwrite, keep=1))
    save(writer, save_job(storage, 3, saver="weights", weights_only=True, overwrite=overwrite, keep=1))
    assert good(storage) == {"ba3.2": 3, "ba3": 3}


def test_an_unfinished_save_is_in_nobodys_way(storage: LocalStorage, writer: Writer) -> None:
    for file, data in content("run", 99).items():
        storage.put(f"ba3/{file}", data)
    storage.put("ba3/rank-00007.json", b"{}")
    saved = save(writer, save_job(storage, 3, overwrite=False))
    assert saved.name == "ba3"
    assert everything(storage.root) == named(storage)


def test_what_another_run_is_writing_under_that_name_is_left_alone(storage: LocalStorage, writer: Writer) -> None:
    for file, data in content("other", 3).items():
        storage.put(f"ba3/{file}", data)
    assert save(writer, save_job(storage, 3)).name == "ba3.2"
    assert {file: storage.get(f"ba3/{file}") for file in content("other", 3)} == content("other", 3)


def test_two_runs_that_save_under_one_name_at_the_same_time_get_a_folder_each(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, both = module._claim, threading.Barrier(2)

    def claim_together(job: Any, name: str) -> bool:
        if name == job.name:
            both.wait(10)  # both have looked, and found the name free
        return claim(job, name)

    monkeypatch.setattr(module, "_claim", claim_together)
    for batch in range(1, 9):
        writers = {name: Writer(0, 1, None) for name in ("run", "other")}
        for name, one in writers.items():
            one.start(save_job(storage, batch, run_name=name, latest="latest"))
        for one in writers.values():
            one.take()
    assert sorted(good(storage).values()) == sorted(good(storage, "other").values()) == list(range(1, 9))
    assert everything(storage.root) == named(storage, "latest")


@pytest.mark.parametrize("kind", [StorageExistsError, StorageError])
def test_a_lock_that_is_taken_away_while_it_is_made_is_made_again(
    storage: LocalStorage, writer: Writer, monkeypatch: pytest.MonkeyPatch, kind: type[StorageError]
) -> None:
    create, calls = LocalStorage.create, []

    def race(self: LocalStorage, key: str, data: Any) -> None:
        calls.append(key)
        if len(calls) == 1 and kind is StorageError:
            raise kind("gone.")
        create(self, key, data)

    monkeypatch.setattr(LocalStorage, "create", race)
    assert save(writer, save_job(storage, 1)).name == "ba1"


def test_a_lock_that_can_never_be_made_fails_the_save(
    storage: LocalStorage, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fail(self: LocalStorage, key: str, data: Any) -> None:
        calls.append(key)
        raise StorageError("no.")

    monkeypatch.setattr(LocalStorage, "create", fail)
    with pytest.raises(SaveFailedError, match=r"no\."):
        save(writer, save_job(storage, 1))
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["", "a/b", "a\\b", ".hidden", "..", "latest", "failures.json"])
def test_a_name_that_cannot_be_that_of_a_checkpoint_is_refused(
    storage: LocalStorage, writer: Writer, name: str
) -> None:
    with pytest.raises(SaveFailedError) as caught:
        save(writer, save_job(storage, 1, name=name, latest="latest"))
    assert (
        f"its name is {name!r}. Expected a plain name, without slashes, that begins with no dot and is not that of another file "
        "there ('latest', 'failures.json'). Choose another save_filename." in str(caught.value)
    )
    assert not storage.root.exists()


def test_a_failed_save_cleans_up_does_not_become_latest_and_the_next_one_works(
    storage: LocalStorage, writer: Writer
) -> None:
    save(writer, save_job(storage, 1, latest="latest", keep=1))
    with using(system := Counted()):
        save(Writer(0, 1, None), save_job(LocalStorage(storage.root.with_name("probe")), 2))
    before_manifest = next(i for i, one in enumerate(system.done) if "manifest.json" in one)
    for at in range(3, before_manifest + 1):
        with using(Failing(OSError(errno.ENOSPC, "No space left on device"), lambda now, _, at=at: now == at)):
            with pytest.raises(SaveFailedError, match="No space left on device"):
                save(writer, save_job(storage, 2, latest="latest", keep=1))
        assert read_pointer(storage)[0] == "ba1"
        assert good(storage)["ba1"] == 1
        assert {path for path in everything(storage.root) if path.startswith("ba2")} == set()
    save(writer, save_job(storage, 2, latest="latest", keep=1))
    assert good(storage) == {"ba2": 2}
    assert read_pointer(storage)[0] == "ba2"


def test_files_that_vanish_while_they_are_saved_are_noticed(
    storage: LocalStorage, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = module._check_that_all_is_there

    def remove_first(job: Any, name: str, mine: Any) -> None:
        storage.delete(f"{name}/model-00000.safetensors")
        check(job, name, mine)

    monkeypatch.setattr(module, "_check_that_all_is_there", remove_first)
    with pytest.raises(SaveFailedError, match=r"model-00000.safetensors was removed while it was being saved"):
        save(writer, save_job(storage, 1))
    assert good(storage) == {}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyError("what"), StorageError("no.")])
def test_whatever_goes_wrong_after_the_manifest_the_checkpoint_is_saved(
    storage: LocalStorage,
    writer: Writer,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(module, "prune", fail)
    assert save(writer, save_job(storage, 1)).name == "ba1"
    assert f"{storage.url}/ba1: is saved, and tidying up after it failed" in caplog.text


def test_a_pointer_that_tells_nonsense_is_replaced(storage: LocalStorage, writer: Writer) -> None:
    storage.put("latest", b"not json")
    save(writer, save_job(storage, 1, latest="latest"))
    assert read_pointer(storage) == ("ba1", 1)


def test_a_pointer_to_what_is_gone_does_not_stay_because_its_number_is_greater(
    storage: LocalStorage, writer: Writer
) -> None:
    storage.put("latest", b'{"checkpoint": "ba50", "sequence": 50, "batch": 50}')
    save(writer, save_job(storage, 1, latest="latest"))
    assert read_pointer(storage) == ("ba1", 1)


def test_a_run_says_when_another_one_changes_its_pointer(
    storage: LocalStorage, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, save_job(storage, 1, latest="latest"))
    save(writer, save_job(storage, 2, latest="latest"))
    save(writer, save_job(storage, 3, latest="weights", saver="weights"))
    save(writer, save_job(storage, 4, latest="latest"))
    assert "somebody else" not in caplog.text
    save(Writer(0, 1, None), save_job(storage, 5, latest="latest", run_name="other"))
    save(writer, save_job(storage, 6, latest="latest"))
    assert "somebody else has changed" in caplog.text


def test_a_pointer_that_cannot_be_changed_leaves_the_older_checkpoints_where_they_are(
    storage: LocalStorage, writer: Writer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, save_job(storage, 1, latest="latest", keep=1))

    def conflict(*_: Any) -> None:
        raise StorageConflictError("changed.")

    monkeypatch.setattr(LocalStorage, "replace", conflict)
    save(writer, save_job(storage, 2, latest="latest", keep=1))
    assert list(good(storage).values()) == [2, 1]
    assert locate(f"{storage.root}/latest").name == "ba1"
    assert locate(str(storage.root)).name == "ba2"
    assert "tidying up after it failed" in caplog.text


# --- several ranks ---------------------------------------------------------------------------------------------------


class Ranks:
    """Writers that are threads, over one board."""

    def __init__(self, world_size: int) -> None:
        self.board, self.world_size = DictBoard(), world_size
        self.writers = [Writer(rank, world_size, self.board) for rank in range(world_size)]

    def save(self, storages: list[LocalStorage], batch: int, **options: Any) -> list[Any]:
        """Return what each rank got."""
        for rank, writer in enumerate(self.writers):
            writer.start(save_job(storages[rank], batch, rank=rank, world_size=self.world_size, **options))
        outcomes: list[Any] = []
        for writer in self.writers:
            try:
                outcomes.append(writer.take())
            except SaveFailedError as error:
                outcomes.append(error)
        return outcomes


def test_each_rank_writes_its_files_and_all_hear_the_same(storage: LocalStorage) -> None:
    ranks = Ranks(3)
    for batch in (1, 2, 3):
        saved = ranks.save([storage] * 3, batch, keep=1, latest="latest")
        assert {one.name for one in saved} == {f"ba{batch}"}
        assert saved[0].manifest == saved[1].manifest == saved[2].manifest
        assert {one.deleted for one in saved} == {(f"ba{batch - 1}",) if batch > 1 else ()}
    assert good(storage) == {"ba3": 3}
    assert everything(storage.root) == named(storage, "latest")


def test_the_board_does_not_grow_with_every_save(storage: LocalStorage) -> None:
    ranks, sizes = Ranks(3), []
    for batch in range(1, 6):
        ranks.save([storage] * 3, batch)
        sizes.append(len(ranks.board.keys))
    assert sizes == [4, 8, 8, 8, 8]  # those of two saves: one may still be read while the next begins


def test_all_ranks_use_the_name_that_rank_0_found_free(storage: LocalStorage) -> None:
    ranks = Ranks(2)
    ranks.save([storage] * 2, 1)
    assert [one.name for one in ranks.save([storage] * 2, 1)] == ["ba1.2", "ba1.2"]


class Full(LocalStorage):
    """A disk of one rank that is full for files of some name."""

    def __init__(self, root: Path, what: str) -> None:
        super().__init__(root)
        self.what = what

    def put(self, key: str, data: Any) -> None:
        if key.endswith(self.what):
            raise StorageError(f"{key}: the disk is full.")
        super().put(key, data)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_cannot_write_fails_the_save_on_all_and_nothing_is_left(
    storage: LocalStorage, failing: int
) -> None:
    ranks = Ranks(3)
    ranks.save([storage] * 3, 1, latest="latest")
    storages: list[LocalStorage] = [storage] * 3
    storages[failing] = Full(storage.root, ".safetensors")
    outcomes = ranks.save(storages, 2, latest="latest")
    assert all(isinstance(one, SaveFailedError) for one in outcomes)
    assert all("the disk is full" in str(one) for one in outcomes)
    if failing:
        assert f"rank {failing}: " in str(outcomes[0])
    assert read_pointer(storage)[0] == "ba1"
    assert everything(storage.root) == named(storage, "latest")
    assert [one.name for one in ranks.save([storage] * 3, 2, latest="latest")] == ["ba2"] * 3


def test_a_name_that_is_taken_is_told_to_all(storage: LocalStorage) -> None:
    save(Writer(0, 1, None), save_job(storage, 1, run_name="other", name="last"))
    outcomes = Ranks(2).save([storage] * 2, 1, name="last")
    assert all("there is a checkpoint of that name already" in str(one) for one in outcomes)


def test_a_manifest_that_cannot_be_written_is_told_to_all_and_nothing_is_left(storage: LocalStorage) -> None:
    outcomes = Ranks(2).save([Full(storage.root, "manifest.json"), storage], 1)
    assert all("manifest.json: the disk is full" in str(one) for one in outcomes)
    assert everything(storage.root) == set()


@pytest.mark.parametrize("error", [KeyError("what"), OSError(errno.EIO, "broken")])
def test_the_others_do_not_wait_when_tidying_up_fails(
    storage: LocalStorage, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(module, "prune", fail)
    assert [one.name for one in Ranks(2).save([storage] * 2, 1)] == ["ba1", "ba1"]


def test_the_others_do_not_wait_when_cleaning_up_fails(storage: LocalStorage) -> None:
    class Broken(Full):
        def delete(self, key: str) -> None:
            raise OSError(errno.EIO, "broken")

    outcomes = Ranks(2).save([storage, Broken(storage.root, ".safetensors")], 1)
    assert all("the disk is full" in str(one) for one in outcomes)


def test_who_gives_up_does_not_delete_what_may_have_become_a_checkpoint(storage: LocalStorage) -> None:
    ranks = Ranks(2)
    ranks.writers[1].start(save_job(storage, 1, rank=1, world_size=2))
    ranks.board.post("1/go", json.dumps({"name": "ba1"}))  # rank 0 has chosen, and nothing more is heard of it
    ranks.writers[1].give_up(0.5)
    with pytest.raises(SaveFailedError, match="no word from another rank"):
        ranks.writers[1].take()
    assert storage.exists("ba1/rank-00001.json")


def test_rank_0_gives_up_on_a_rank_that_is_gone(storage: LocalStorage) -> None:
    ranks = Ranks(2)
    ranks.writers[0].start(save_job(storage, 1, world_size=2))
    began = time.monotonic()
    ranks.writers[0].give_up(0.3)
    with pytest.raises(SaveFailedError, match=r"no word from another rank \(1/1\)"):
        ranks.writers[0].take()
    assert time.monotonic() - began < 5
    assert everything(storage.root) == set()


def test_a_board_that_breaks_after_the_manifest_does_not_unsave_it(
    storage: LocalStorage, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(DictBoard):
        def post(self, key: str, text: str) -> None:
            if key.endswith("done"):
                raise RuntimeError("the store is gone")
            super().post(key, text)

    assert save(Writer(0, 1, Breaks()), save_job(storage, 1)).name == "ba1"
    assert "other ranks could not be told" in caplog.text


ENDS = """
import sys, time
from kernel_core.checkpoint import writer
from kernel_core.storage import LocalStorage
from kernel_core.testing.checkpoints import DictBoard, save_job
writer.LAST_WAIT_S = 0.2
one = writer.Writer(0, 2, DictBoard())
one.start(save_job(LocalStorage(sys.argv[1]), 1, world_size=2))
time.sleep(0.2)
"""


def test_a_process_ends_though_it_waits_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path / "c")], check=True, timeout=60)
    assert time.monotonic() - began < 50
    assert everything(tmp_path / "c") == set()


SAVES = """
import sys
from kernel_core.checkpoint.writer import Writer
from kernel_core.storage import LocalStorage
from kernel_core.testing.checkpoints import save_job
Writer(0, 1, None).start(save_job(LocalStorage(sys.argv[1]), 1, num_bytes=20_000_000))
"""


def test_a_process_that_ends_in_order_finishes_what_it_is_writing(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SAVES, str(tmp_path / "c")], check=True, timeout=60)
    assert good(LocalStorage(tmp_path / "c"), num_bytes=20_000_000) == {"ba1": 1}


# --- recorded failures -----------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Any:
    return SingleEngine()


def start(folder: Path, engine: Any, checkpoint: str | None = "ba3", sequence: int = 1) -> Failures:
    """Start a run, as autoresume does."""
    failures = Failures(str(folder), checkpoint, sequence)
    failures.refuse_third(engine)
    return failures


def fail(folder: Path, engine: Any, error: BaseException, batch: int, **where: Any) -> None:
    start(folder, engine, **where).note(error, batch)


def test_the_third_start_is_refused_after_two_failures_alike(tmp_path: Path, engine: Any) -> None:
    fail(tmp_path, engine, ValueError("bad sample"), 5)
    fail(tmp_path, engine, ValueError("bad sample"), 5)
    for _ in range(2):
        with pytest.raises(RepeatedFailureError) as caught:
            start(tmp_path, engine)
        assert str(caught.value) == (
            "autoresume: the run failed 2 times from checkpoint ba3, each time at batch 5 with ValueError: bad sample Expected "
            f"that to be mended first: starting again would end alike. Then delete {tmp_path}/failures.json."
        )
    (tmp_path / "failures.json").unlink()
    start(tmp_path, engine)


def test_from_the_start_of_the_run_too(tmp_path: Path, engine: Any) -> None:
    for _ in range(2):
        fail(tmp_path, engine, ValueError("bad"), 1, checkpoint=None, sequence=0)
    with pytest.raises(RepeatedFailureError, match="from the start, each time at batch 1"):
        start(tmp_path, engine, None, 0)


ONCE: dict[str, Any] = {"error": ValueError("bad"), "batch": 5, "checkpoint": "ba3", "sequence": 1}


@pytest.mark.parametrize(
    "other",
    [{"batch": 6}, {"error": TypeError("bad")}, {"checkpoint": "ba6"}, {"checkpoint": None}, {"sequence": 2}],
    ids=["another step", "another exception", "a new checkpoint", "the start", "a checkpoint saved anew"],
)
def test_what_differs_does_not_count(tmp_path: Path, engine: Any, other: dict[str, Any]) -> None:
    for where in (ONCE, {**ONCE, **other}, ONCE, {**ONCE, **other}):
        fail(tmp_path, engine, **where)
    start(tmp_path, engine)


def test_after_two_failures_a_new_checkpoint_lets_the_run_start(tmp_path: Path, engine: Any) -> None:
    for _ in range(2):
        fail(tmp_path, engine, **ONCE)
    start(tmp_path, engine, "ba6", 2)
    with pytest.raises(RepeatedFailureError):
        start(tmp_path, engine)


@pytest.mark.parametrize("end", [Interrupted(15), KeyboardInterrupt(), SystemExit(3), StartAgain("smaller", 2), None])
def test_what_is_no_failure_leaves_no_word(tmp_path: Path, engine: Any, end: BaseException | None) -> None:
    """``None`` is a process that was killed."""
    for _ in range(3):
        failures = start(tmp_path, engine)
        if end is not None:
            failures.note(end, 5)
    assert everything(tmp_path) == set()


def test_a_kill_between_two_failures_does_not_count_and_does_not_clear_them(tmp_path: Path, engine: Any) -> None:
    fail(tmp_path, engine, **ONCE)
    start(tmp_path, engine)  # killed
    fail(tmp_path, engine, **ONCE)
    with pytest.raises(RepeatedFailureError):
        start(tmp_path, engine)


def test_several_ranks_that_fail_in_one_start_count_once(tmp_path: Path, engine: Any) -> None:
    one = start(tmp_path, engine)
    other = Failures(str(tmp_path), "ba3", 1)
    other._start = one._start  # which the engine tells every rank
    one.note(ValueError("first"), 5)
    other.note(RuntimeError("connection closed"), 5)
    told = json.loads((tmp_path / "failures.json").read_text())
    assert (told["type"], told["count"]) == ("ValueError", 1)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"count": "2"}', '{"count": 2, "checkpoint": "ba3", "sequence": 1}', "\xff"]
)
def test_a_record_that_cannot_be_read_stops_nobody(tmp_path: Path, engine: Any, text: str) -> None:
    (tmp_path / "failures.json").write_text(text, "latin-1")
    fail(tmp_path, engine, **ONCE)
    assert json.loads((tmp_path / "failures.json").read_text())["count"] == 1


def test_a_record_that_cannot_be_written_hides_nothing(
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    failures = start(tmp_path, engine)
    with using(Failing(OSError(errno.ENOSPC, "full"), lambda *_: True)):
        failures.note(ValueError("bad"), 5)
    assert "the failure could not be written down" in caplog.text


def test_no_thread_is_left_over() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint writer"]
