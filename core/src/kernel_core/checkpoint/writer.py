"""Writing checkpoints while training goes on: each rank its own files from a thread of its own, rank 0 the manifest last.

The ranks' threads talk through a board, never through collectives, which belong to training.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kernel_core.checkpoint.failures import FILE as FAILURES
from kernel_core.checkpoint.files import is_intact
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in, point_to
from kernel_core.checkpoint.manifest import LOCK, MANIFEST, FileRecord, Manifest, checksum
from kernel_core.checkpoint.retention import Known, delete_checkpoint, is_called, owner_of, prune, remove_unfinished
from kernel_core.errors import CheckpointError, SaveFailedError, StorageError, StorageExistsError, StorageMissingError
from kernel_core.storage import Storage, join_url

log = logging.getLogger(__name__)
# for another rank's files; a rank that fails says so at once, and one that ends is noticed by the watchdog
WAIT_S = 3600.0
LAST_WAIT_S = 60.0  # the same when the main thread is over, so that nothing else ends a process whose peers are gone
CLAIM_TRIES = 3


class Board(Protocol):
    """Short messages among the ranks of a run, by key; any thread may use it."""

    def post(self, key: str, text: str) -> None:
        """Let the other ranks read ``text`` under ``key``."""

    def remove(self, key: str) -> None:
        """Forget ``key``; nothing there is no error."""

    def read(self, key: str, timeout_s: float, given_up: Callable[[], bool]) -> str:
        """Wait until some rank has posted ``key``, and return it; ``given_up`` ends the waiting.

        Raises:
            TimeoutError: nobody has.
        """


@dataclass(frozen=True)
class SaveJob:
    """What one rank has to write, and where the whole goes.

    Attributes:
        storage: The folder of checkpoints.
        name: The folder of this one in it; another is taken if there is a checkpoint under that name already.
        files: This rank's, as pieces of memory that do not change until the job is done. Rank 0's hold ``lock.json``.
        manifest: What the manifest says, but for files and sequence number.
        latest: The name of the file that tells the newest checkpoint, None for no such file.
        overwrite: Whether a checkpoint of that name may be replaced: it is deleted once the new one is there.
        keep: How many checkpoints of this saver stay; -1 for all.
    """

    storage: Storage
    name: str
    files: Sequence[tuple[str, Sequence[Any]]]
    manifest: Manifest
    latest: str | None = None
    overwrite: bool = False
    keep: int = -1


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is durable.

    Attributes:
        url: Where it is.
        name: Its folder.
        manifest: What it consists of.
        stall_s: How long training stood still for it.
        durable_s: How long after that it was durable.
        deleted: The checkpoints that were deleted for it.
    """

    url: str
    name: str
    manifest: Manifest
    stall_s: float
    durable_s: float
    deleted: tuple[str, ...] = ()


class Writer:
    """Writes one checkpoint at a time.

    Args:
        rank, world_size: This process among all.
        board: How the ranks talk; None for one process.
    """

    def __init__(self, rank: int, world_size: int, board: Board | None) -> None:
        self._rank, self._world_size, self._board = rank, world_size, board
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self._count = 0
        self._given_up = False
        self._over_since: float | None = None
        self._written: dict[tuple[str, str], str | None] = {}  # versions of ``latest`` that this run wrote
        self._known: Known = set()

    @property
    def pending(self) -> bool:
        """Whether a checkpoint was begun whose outcome nobody has taken yet."""
        return self._thread is not None

    @property
    def settled(self) -> bool:
        """Whether the outcome of the one begun is there to be taken."""
        return self._thread is not None and not self._thread.is_alive()

    def start(self, job: SaveJob) -> None:
        """Begin to write; the outcome of the one before must have been taken."""
        assert self._thread is None, "the checkpoint before has not been settled"
        self._count += 1
        self._outcome = None
        # not a daemon: a process that ends in order finishes what it is writing
        self._thread = threading.Thread(target=self._run, args=(job, self._count), name="checkpoint writer")
        self._thread.start()

    def take(self) -> Saved:
        """Wait for the outcome and return it.

        Raises:
            SaveFailedError: the checkpoint was not written; on every rank alike.
        """
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        if isinstance(outcome, Saved):
            return outcome
        assert outcome is not None
        raise outcome

    def give_up(self, after_s: float) -> None:
        """Wait no longer than ``after_s`` for other ranks: the run has failed, and they may be gone."""
        if self._thread is not None:
            self._thread.join(after_s)
            self._given_up = True

    # --- in the thread -------------------------------------------------------------------------------------------

    def _run(self, job: SaveJob, number: int) -> None:
        began = time.perf_counter()
        try:
            saved = self._first(job, number) if self._rank == 0 else self._other(job, number)
            self._outcome = replace(saved, durable_s=time.perf_counter() - began)
        except BaseException as error:
            where = join_url(job.storage.url, job.name)
            self._outcome = SaveFailedError(
                f"checkpoint {where}: was not saved: {error} Those saved before are as they were. Mend the cause and start "
                "again from the last one."
            )
            self._outcome.__cause__ = error

    def _first(self, job: SaveJob, number: int) -> Saved:
        """Choose the folder, write, wait for the others, and make it a checkpoint by writing the manifest."""
        name = None
        try:
            self._forget(number - 2)  # every rank that began the one before has read all of that
            name, sequence, replaced = _choose(job)
            self._post(f"{number}/go", {"name": name})
            mine = _write(job, name)
            records = dict(mine)
            for rank in range(1, self._world_size):
                records |= self._records(number, rank)
            _check_that_all_is_there(job, name, mine)
            manifest = replace(job.manifest, sequence=sequence, files=records)
            data = manifest.to_bytes()
            Manifest.from_bytes(data, name)  # what could not be read again is no checkpoint
            job.storage.put(f"{name}/{MANIFEST}", data)
        except BaseException as error:
            if name is not None:
                _clean(job, name)
            with suppress(Exception):  # whoever waits for it gives up by itself
                self._post(f"{number}/go", {"error": str(error)})
                self._post(f"{number}/done", {"error": str(error)})
            raise
        deleted = self._tidy(job, Found(job.storage, name, manifest), replaced)
        try:
            self._post(f"{number}/done", {"name": name, "manifest": manifest.to_bytes().decode(), "deleted": deleted})
        except Exception as error:
            log.warning("checkpoint %s: is saved, and other ranks could not be told: %s", name, error)
        return Saved(join_url(job.storage.url, name), name, manifest, 0.0, 0.0, tuple(deleted))

    def _other(self, job: SaveJob, number: int) -> Saved:
        """Write when rank 0 has chosen the folder, and wait for the manifest."""
        name = self._read(f"{number}/go")["name"]
        try:
            records = _write(job, name)
        except BaseException as error:
            _clean(job, name)
            self._post(f"{number}/{self._rank}", {"error": f"rank {self._rank}: {error}"})
            raise
        files = {file: [one.size, one.checksum] for file, one in records.items()}
        self._post(f"{number}/{self._rank}", {"files": files})
        try:
            done = self._read(f"{number}/done")
        except CheckpointError:  # rank 0 says that there will be no manifest; without a word from it there may be one
            _clean(job, name)
            raise
        manifest = Manifest.from_bytes(done["manifest"].encode(), name)
        return Saved(join_url(job.storage.url, name), name, manifest, 0.0, 0.0, tuple(done["deleted"]))

    def _records(self, number: int, rank: int) -> dict[str, FileRecord]:
        files = self._read(f"{number}/{rank}")["files"]
        return {file: FileRecord(size, digest) for file, (size, digest) in files.items()}

    def _post(self, key: str, content: dict[str, Any]) -> None:
        if self._board is not None:
            self._board.post(key, json.dumps(content))

    def _forget(self, number: int) -> None:
        """Take the messages about a checkpoint off the board, which would else grow with every save."""
        if self._board is not None and number > 0:
            for what in ("go", "done", *range(1, self._world_size)):
                self._board.remove(f"{number}/{what}")

    def _read(self, key: str) -> dict[str, Any]:
        assert self._board is not None
        content: dict[str, Any] = json.loads(self._board.read(key, WAIT_S, self._waits_no_longer))
        if "error" in content:
            raise CheckpointError(content["error"])
        return content

    def _waits_no_longer(self) -> bool:
        if threading.main_thread().is_alive():
            return self._given_up
        if self._over_since is None:
            self._over_since = time.monotonic()
        return self._given_up or time.monotonic() - self._over_since > LAST_WAIT_S

    def _tidy(self, job: SaveJob, found: Found, replaced: Sequence[Found]) -> list[str]:
        """Point ``latest`` to the new checkpoint and delete what it makes superfluous; it is durable whatever happens here."""
        deleted: list[str] = []
        try:
            if job.latest is not None:
                self._point(job, job.latest, found)
            if replaced and not is_intact(found):
                raise CheckpointError("it is not what was written when it is read again; nothing is deleted.")
            for one in replaced:
                delete_checkpoint(one)
                deleted.append(one.name)
            whose = found.manifest.run_name, found.manifest.saver
            replaces = job.name if job.overwrite else None
            deleted += prune(job.storage, *whose, job.keep, replaces=replaces, known=self._known)
        except Exception as error:
            log.warning("checkpoint %s: is saved, and tidying up after it failed: %s", found.url, error)
        return deleted

    def _point(self, job: SaveJob, latest: str, found: Found) -> None:
        storage, key = job.storage, (job.storage.url, latest)
        if key in self._written and storage.version(latest) != self._written[key]:
            log.warning(
                "checkpoint %s: somebody else has changed %s since this run wrote it. Does another run save to the same folder?",
                found.url,
                join_url(*key),
            )
        point_to(storage, latest, found)
        self._written[key] = storage.version(latest)


def _choose(job: SaveJob) -> tuple[str, int, list[Found]]:
    """Claim a folder; return its name, the sequence number, and the checkpoints of other runs that will be replaced.

    Raises:
        CheckpointError: there is a checkpoint of that name, and it may not be replaced.
    """
    _check_name(job)
    taken, sequence, replaced = set(), 0, []
    for one in checkpoints_in(job.storage):
        taken.add(one.name)
        if isinstance(one, Damaged):
            continue
        sequence = max(sequence, one.manifest.sequence)
        if one.name == job.name and not (job.overwrite or _same_place(one.manifest, job.manifest)):
            saver = f" by {one.manifest.saver}" if one.manifest.saver else ""
            raise CheckpointError(
                f"there is a checkpoint of that name already, of the run {one.manifest.run_name!r} at batch "
                f"{int(one.manifest.timestamp.batch)}{saver}. Expected a free name. Use placeholders such as {{batch}} in "
                "save_filename, another save_folder, or save_overwrite=True."
            )
        if job.overwrite and _replaces(job, one):
            replaced.append(one)
    name, number = job.name, 1
    while name in taken or not _claim(job, name):
        number += 1
        name = f"{job.name}.{number}"
    return name, sequence + 1, replaced


def _check_name(job: SaveJob) -> None:
    name = job.name
    if not name or "/" in name or "\\" in name or name.startswith(".") or name in (job.latest, FAILURES):
        taken = ", ".join(repr(one) for one in (job.latest, FAILURES) if one is not None)
        raise CheckpointError(
            f"its name is {name!r}. Expected a plain name, without slashes, that begins with no dot and is not that of "
            f"another file there ({taken}). Choose another save_filename."
        )


def _replaces(job: SaveJob, one: Found) -> bool:
    """Whether the checkpoint of another run goes for the new one; those of this run are seen to when old ones are deleted."""
    old, new = one.manifest, job.manifest
    return old.run_name != new.run_name and (
        one.name == job.name or (old.saver == new.saver and is_called(one, job.name))
    )


def _claim(job: SaveJob, name: str) -> bool:
    """Make a folder this save's by creating the lock in it; False if another run writes there, or has died over it."""
    storage, lock = job.storage, dict(job.files).get(LOCK)
    assert lock is not None, f"rank 0 writes {LOCK}"
    for attempt in range(1, CLAIM_TRIES + 1):
        try:
            storage.create(f"{name}/{LOCK}", lock)
            remove_unfinished(storage, name, but=LOCK)
            return True
        except StorageExistsError:
            mine = job.overwrite or owner_of(storage, name) == job.manifest.run_name
            if not mine or storage.exists(f"{name}/{MANIFEST}"):
                return False
            remove_unfinished(storage, name)  # an earlier process of this run left it
        except StorageError as error:
            # another run that starts may take a lock that is half-written for something left behind
            if type(error) is not StorageError or attempt == CLAIM_TRIES:
                with suppress(Exception):
                    if owner_of(storage, name) == job.manifest.run_name or not storage.exists(f"{name}/{LOCK}"):
                        storage.delete(f"{name}/{LOCK}")  # and the folder, if it was made for that
                raise
    return False


def _same_place(saved: Manifest, now: Manifest) -> bool:
    """Whether both are the same run at the same batch: it went back and came here once more."""
    return saved.run_name == now.run_name and saved.timestamp.batch == now.timestamp.batch


def _write(job: SaveJob, name: str) -> dict[str, FileRecord]:
    """Write this rank's files; the lock is there already, and is as large as it should be."""
    records = {}
    for file, pieces in job.files:
        records[file] = FileRecord(sum(len(piece) for piece in pieces), checksum(pieces))
        if file != LOCK:
            job.storage.put(f"{name}/{file}", pieces)
    return records


def _check_that_all_is_there(job: SaveJob, name: str, mine: Mapping[str, FileRecord]) -> None:
    """Look whether somebody has taken away what this rank has written.

    Raises:
        CheckpointError: somebody has.
    """
    for file, record in mine.items():
        try:
            size = job.storage.size(f"{name}/{file}")
        except StorageMissingError:
            size = -1
        if size != record.size:
            raise CheckpointError(
                f"{file} was {'removed' if size < 0 else 'replaced'} while it was being saved. Expected the folder to be left "
                "alone. Look whether another process saves the same run there."
            )


def _clean(job: SaveJob, name: str) -> None:
    """Delete this rank's files of a checkpoint that will not be one, as far as that goes."""
    try:
        if not job.storage.exists(f"{name}/{MANIFEST}"):
            for file in sorted((file for file, _ in job.files), key=lambda file: file == LOCK):
                job.storage.delete(f"{name}/{file}")
    except Exception:
        pass  # the folder has no manifest, so that it is no checkpoint; the run's next start removes it
