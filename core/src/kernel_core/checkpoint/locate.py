"""Finding checkpoints: by their manifests, whatever their folders are called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from kernel_core.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from kernel_core.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointMissingError,
    StorageConflictError,
    StorageKeyError,
    StorageMissingError,
)
from kernel_core.storage import Storage, join_url, open_storage
from kernel_core.storage.base import check_key

LATEST = "latest"
POINTER_TRIES = 5  # of changing it while other runs do


@dataclass(frozen=True)
class Found:
    """A checkpoint with a manifest that can be read.

    Attributes:
        storage: What the folder of checkpoints was opened as.
        name: The checkpoint's own folder in it, empty for the root itself.
        manifest: What it consists of.
    """

    storage: Storage
    name: str
    manifest: Manifest

    @property
    def url(self) -> str:
        """Where it is, for people and for ``load_path``."""
        return join_url(self.storage.url, self.name) if self.name else self.storage.url

    def key(self, file: str) -> str:
        """Return the key of one of its files."""
        return f"{self.name}/{file}" if self.name else file


@dataclass(frozen=True)
class Damaged:
    """A folder with a manifest that cannot be used."""

    storage: Storage
    name: str
    problem: CheckpointError


def read_manifest(storage: Storage, name: str = "") -> Manifest:
    """Return the manifest in the folder ``name``.

    Raises:
        StorageMissingError: there is none.
        CheckpointCorruptError, CheckpointFormatError: it cannot be used.
    """
    key = f"{name}/{MANIFEST}" if name else MANIFEST
    where = join_url(storage.url, key)
    try:
        path = storage.local_path(key)
    except StorageKeyError as error:  # a link that leads out of the folder
        raise CheckpointFormatError(f"{where}: is not a file: {error}") from error
    if path is not None and (path.is_symlink() or (path.exists() and not path.is_file())):
        raise CheckpointFormatError(
            f"{where}: is a link, a folder or a pipe. Expected a file. Copy the checkpoint anew."
        )
    return Manifest.from_bytes(storage.get(key, 0, MAX_MANIFEST_BYTES), where)


def checkpoints_in(storage: Storage) -> Iterator[Found | Damaged]:
    """Yield what has a manifest, one folder below the root: the newest first, damaged ones last.

    A folder without a manifest is no checkpoint: writing it was not finished, or it is something else.
    """
    found: list[Found] = []
    damaged: list[Damaged] = []
    for name in storage.list_folders():
        try:
            check_key(name, storage.url)
            found.append(Found(storage, name, read_manifest(storage, name)))
        except (StorageMissingError, StorageKeyError):  # no checkpoint, or a folder of somebody else's with an odd name
            continue
        except CheckpointError as error:
            damaged.append(Damaged(storage, name, error))
    yield from sorted(found, key=lambda one: (one.manifest.sequence, one.manifest.created), reverse=True)
    yield from damaged


def locate(path: str) -> Found:
    """Return the checkpoint that ``path`` means: its own folder, a folder of checkpoints (the newest), or ``…/latest``.

    Raises:
        CheckpointMissingError: there is none. Refused access and the like come as StorageErrors, never as this.
        CheckpointCorruptError, CheckpointFormatError: its manifest cannot be used.
    """
    path = str(path).rstrip("/") or "/"
    base, slash, last = path.rpartition("/")
    if last == LATEST and "://" not in last:
        return _pointed_at(open_storage(base or "/" if slash else "."), path)
    storage = open_storage(path)
    try:
        return Found(storage, "", read_manifest(storage))
    except StorageMissingError:
        pass
    if found := _newest(storage):
        return found
    raise CheckpointMissingError(
        f"checkpoint: there is no checkpoint in {path}: no {MANIFEST}, neither there nor one folder below. Expected the folder "
        f"of a checkpoint, a folder of checkpoints, or {LATEST!r} in one. Check the path; unfinished saves have none."
    )


def _newest(storage: Storage) -> Found | None:
    """Return the newest checkpoint, None if there is none; where all are damaged, raise what is wrong with one."""
    first = next(checkpoints_in(storage), None)
    if isinstance(first, Damaged):
        raise first.problem
    return first


def _pointed_at(storage: Storage, path: str) -> Found:
    try:
        name = read_pointer(storage)[0]
    except StorageMissingError:
        name = ""
    if name:
        try:
            return Found(storage, name, read_manifest(storage, name))
        except StorageMissingError:
            pass  # a pointer that is behind: its checkpoint was deleted by hand
    if found := _newest(storage):
        return found
    raise CheckpointMissingError(
        f"checkpoint: {path} leads to no checkpoint: there is none in {storage.url}. Check the path, or begin anew without one."
    )


def read_pointer(storage: Storage, key: str = LATEST) -> tuple[str, int]:
    """Return the folder and sequence number that the file ``latest`` tells; an empty name if it tells nothing.

    Raises:
        StorageMissingError: there is no such file.
    """
    try:
        told = json.loads(storage.get(key, 0, 1 << 16))
        name, sequence = told["checkpoint"], told["sequence"]
    except (ValueError, TypeError, KeyError):
        return "", 0
    is_name = isinstance(name, str) and name and "/" not in name and "\\" not in name and name not in (".", "..")
    return (name, sequence) if is_name and type(sequence) is int else ("", 0)


def point_to(storage: Storage, key: str, found: Found) -> None:
    """Let the file ``key`` tell that ``found`` is the newest checkpoint, unless it tells of a newer one that is there.

    Raises:
        StorageConflictError: others change it again and again.
    """
    now = found.manifest
    told = {"checkpoint": found.name, "sequence": now.sequence, "batch": int(now.timestamp.batch)}
    for attempt in range(1, POINTER_TRIES + 1):
        version = storage.version(key)
        if version is not None and _tells_newer(storage, key, now.sequence):
            return
        try:
            return storage.replace(key, json.dumps(told).encode(), version)
        except StorageConflictError:
            if attempt == POINTER_TRIES:
                raise


def _tells_newer(storage: Storage, key: str, sequence: int) -> bool:
    try:
        name, told = read_pointer(storage, key)
        return told > sequence and read_manifest(storage, name).sequence == told
    except (StorageMissingError, StorageKeyError, CheckpointError):
        return False
