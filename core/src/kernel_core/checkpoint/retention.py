"""Deleting old checkpoints, and what unfinished saves have left: only what their own files name, never the last good one.

The first file of a save is ``lock.json``, which only one can create and which tells whose it is; the manifest is the last. A
checkpoint is deleted the other way round, so that a half-written and a half-deleted one look alike: a lock and no manifest.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from kernel_core.checkpoint.codec import read_json
from kernel_core.checkpoint.files import is_intact
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in, point_to, read_pointer
from kernel_core.checkpoint.manifest import FILE_NAME, LOCK, MANIFEST, MAX_MANIFEST_BYTES
from kernel_core.errors import CheckpointError, StorageError, StorageKeyError, StorageMissingError
from kernel_core.storage import Storage, is_temporary

log = logging.getLogger(__name__)
AGAIN = re.compile(r"\.(?:[2-9]|[1-9][0-9]+)")  # what a name that is taken gets appended

Known = set[tuple[str, int]]  # checkpoints that were read and found good, by URL and sequence number


def first_name(name: str) -> str:
    """Return the name that was asked for, where a checkpoint got another because that one was taken."""
    head, dot, number = name.rpartition(".")
    return head if head and AGAIN.fullmatch(dot + number) else name


def is_called(found: Found, name: str) -> bool:
    """Say whether a checkpoint has ``name``, or was meant to have it."""
    return found.name == name or (found.name.startswith(name) and AGAIN.fullmatch(found.name[len(name) :]) is not None)


def delete_checkpoint(found: Found) -> None:
    """Delete a checkpoint: its manifest first, so that a half-deleted one is none; then what this names, the lock last."""
    found.storage.delete(found.key(MANIFEST))
    for name in _lock_last(found.manifest.files):
        found.storage.delete(found.key(name))


def prune(
    storage: Storage,
    run_name: str,
    saver: str,
    keep: int,
    *,
    replaces: str | None = None,
    known: Known | None = None,
    spare: Callable[[Found], bool] = lambda found: False,
    found: Sequence[Found | Damaged] | None = None,
) -> list[str]:
    """Delete the oldest checkpoints of a run until ``keep`` good ones are left; return the names of those deleted.

    Of several for one name and batch only the newest stays: the run went back and came there once more. Nothing is deleted
    before the newer ones that make it superfluous are known to be good, one of them by being read now.

    Args:
        storage: The folder of checkpoints.
        run_name, saver: Whose checkpoints they are; others are left alone.
        keep: How many stay, at least 1; -1 for all.
        replaces: The name of which only the newest checkpoint stays, of whatever batch.
        known: Those that were read and found good before: their sizes are enough. What is found good now is added.
        spare: Says which are not to be deleted now.
        found: The checkpoints there, if they were looked for already.
    """
    mine = _of_saver(checkpoints_in(storage) if found is None else found, run_name, saver)

    def place(found: Found) -> tuple[str, int]:
        if replaces is not None and is_called(found, replaces):
            return replaces, -1
        return first_name(found.name), int(found.manifest.timestamp.batch)

    wanted = len(mine) if keep < 0 else keep
    of_place = Counter(map(place, mine))
    is_good = _Check(set() if known is None else known)
    doomed, num_good, places = [], 0, set()
    for one in mine:
        if num_good >= wanted or place(one) in places:
            doomed.append(one)
        elif (len(mine) > wanted or of_place[place(one)] > 1) and is_good(one):  # else nothing is to be read for
            num_good += 1
            places.add(place(one))
    return _delete([one for one in reversed(doomed) if not spare(one)])  # the oldest first


def _of_saver(found: Iterable[Found | Damaged], run_name: str, saver: str) -> list[Found]:
    """Return the checkpoints of one saver of a run, in their order."""
    usable = [one for one in found if isinstance(one, Found)]
    return [one for one in usable if (one.manifest.run_name, one.manifest.saver) == (run_name, saver)]


class _Check:
    """Says whether a checkpoint is good; believes what is known once it has read a good one itself."""

    def __init__(self, known: Known) -> None:
        self._known, self._has_read = known, False

    def __call__(self, found: Found) -> bool:
        key = found.url, found.manifest.sequence
        if self._has_read and key in self._known:
            return _has_its_sizes(found)
        self._known.discard(key)
        if not is_intact(found):
            return False
        self._known.add(key)
        self._has_read = True
        return True


def _has_its_sizes(found: Found) -> bool:
    try:
        sizes = ((found.storage.size(found.key(name)), record.size) for name, record in found.manifest.files.items())
        return all(size == written for size, written in sizes)
    except (StorageMissingError, StorageKeyError):
        return False


def _delete(doomed: Iterable[Found]) -> list[str]:
    deleted = []
    for found in doomed:
        try:
            delete_checkpoint(found)
            deleted.append(found.name)
        except StorageError as error:
            log.warning("checkpoint %s: could not be deleted: %s", found.url, error)
    return deleted


# --- what unfinished saves, and unfinished deletions, have left ------------------------------------------------------


def owner_of(storage: Storage, name: str) -> str | None:
    """Return the run that a folder's lock names, None if there is no lock that names any."""
    try:
        told = read_json(storage.get(f"{name}/{LOCK}", 0, MAX_MANIFEST_BYTES), name)
    except (StorageMissingError, CheckpointError):
        return None
    owner = told.get("run_name") if isinstance(told, dict) else None
    return owner if isinstance(owner, str) else None


def remove_unfinished(storage: Storage, name: str, but: str | None = None) -> None:
    """Delete files with the names of a checkpoint's in a folder without manifest, all ``but`` one; the lock last."""
    files = [entry.key.removeprefix(f"{name}/") for entry in storage.list(name)]
    for file in _lock_last(files):
        if file != but and (FILE_NAME.fullmatch(file) or is_temporary(file)):
            storage.delete(f"{name}/{file}")
    if but is None and storage.local_path(f"{name}/{MANIFEST}") is not None:
        storage.delete(f"{name}/{MANIFEST}")  # there is none: this removes the folder if it is empty


def sweep(
    storage: Storage,
    run_name: str,
    fits: Callable[[str], bool] = lambda name: False,
    complete: Collection[str] = (),
) -> None:
    """Delete what unfinished saves of a run have left in ``storage``. What other runs are writing is left alone.

    Args:
        storage: The folder of checkpoints.
        run_name: The run. No other process must be saving it.
        fits: Whether a folder has the name of a checkpoint of this run, so that it is the run's even without a lock.
        complete: Folders that are known to have a manifest.
    """
    for name in list(storage.list_folders()):
        if name in complete:
            continue
        try:
            if not storage.exists(f"{name}/{MANIFEST}") and _is_left_over(storage, name, run_name, fits):
                remove_unfinished(storage, name)
        except StorageKeyError:
            continue  # not a folder of ours
    root = storage.local_path(MANIFEST)
    if root is not None and root.parent.is_dir():
        for file in filter(is_temporary, os.listdir(root.parent)):
            storage.delete(file)


def _is_left_over(storage: Storage, name: str, run_name: str, fits: Callable[[str], bool]) -> bool:
    owner = owner_of(storage, name)
    if owner is not None or fits(name):
        return owner in (None, run_name)
    files = [entry.key.removeprefix(f"{name}/") for entry in storage.list(name)]
    return bool(files) and all(map(is_temporary, files))


def clear_up(
    storage: Storage,
    run_name: str,
    saver: str,
    keep: int,
    *,
    replaces: str | None = None,
    latest: str | None = None,
    fits: Callable[[str], bool] = lambda name: False,
    spare: Callable[[Found], bool] = lambda found: False,
) -> None:
    """Do what a process that was killed while it saved had not come to: sweep, prune, and point ``latest`` to the newest."""
    found = list(checkpoints_in(storage))
    sweep(storage, run_name, fits, {one.name for one in found})
    prune(storage, run_name, saver, keep, replaces=replaces, spare=spare, found=found)
    newest = next(iter(_of_saver(found, run_name, saver)), None)
    if latest is None or newest is None:
        return
    try:
        told = read_pointer(storage, latest)[1]
    except StorageMissingError:
        told = 0
    if told < newest.manifest.sequence and is_intact(newest):
        point_to(storage, latest, newest)


def _lock_last(files: Iterable[str]) -> list[str]:
    return sorted(files, key=lambda file: file == LOCK)
