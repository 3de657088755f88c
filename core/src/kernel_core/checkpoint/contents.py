"""What a checkpoint says about itself, without its values: needs no torch, and reads of large files their headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernel_core.checkpoint.codec import decode, read_json
from kernel_core.checkpoint.header import Announced, header_bytes, parse_header
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in
from kernel_core.checkpoint.manifest import FILE_NAME, LOCK, checksum
from kernel_core.errors import CheckpointCorruptError, CheckpointFormatError, StorageKeyError, StorageMissingError
from kernel_core.storage import Storage


@dataclass(frozen=True)
class Described:
    """A tensor in a checkpoint: the name of its dtype as safetensors has it, and its shape, put together from its pieces."""

    dtype: str
    shape: tuple[int, ...]
    num_pieces: int


def read_document(found: Found, name: str) -> dict[str, Any]:
    """Return a JSON file of a checkpoint, compared with the manifest first; not decoded.

    Raises:
        CheckpointCorruptError: it is missing, or not what was written.
        CheckpointFormatError: it is not such a file.
    """
    where, record = f"{found.url}/{name}", found.manifest.files.get(name)
    if record is None:
        raise CheckpointFormatError(f"{where}: is not among the files of the checkpoint.")
    try:
        data = found.storage.get(found.key(name), 0, record.size + 1)
    except StorageMissingError as error:
        raise CheckpointCorruptError(f"{found.url}: {name} is missing. The checkpoint is damaged.") from error
    if len(data) != record.size or checksum([data]) != record.checksum:
        raise CheckpointCorruptError(f"{where}: its content is not what was written. The checkpoint is damaged.")
    document = read_json(data, where)
    if not isinstance(document, dict):
        raise CheckpointFormatError(f"{where}: is no object.")
    return document


def read_lock(found: Found) -> dict[str, Any]:
    """Return what the run was made of: plan, surgery, seed, environment, configuration, as plain data.

    Raises:
        CheckpointCorruptError, CheckpointFormatError: it cannot be read.
    """
    document: dict[str, Any] = decode(read_document(found, LOCK), _no_tensor, f"{found.url}/{LOCK}")
    return document


def described_tensors(found: Found, family: str = "model") -> dict[str, Described]:
    """Return the tensors of ``model`` or ``state`` by name, those that belong to one rank left out.

    Raises:
        CheckpointCorruptError, CheckpointFormatError: a header or a description cannot be read.
    """
    tensors: dict[str, Described] = {}
    for rank in range(found.manifest.world_size):
        file = f"{family}-{rank:05d}.safetensors"
        if file not in found.manifest.files:
            continue
        parts = _parts(read_document(found, f"rank-{rank:05d}.json"), file, found.url)
        for key, one in _header(found, file).items():
            if key.startswith("rank/"):
                continue
            before = tensors.get(key)
            tensors[key] = Described(one.dtype, parts.get(key, one.shape), 1 + (before.num_pieces if before else 0))
    if family == "model" and found.manifest.world_size:
        aliases = read_document(found, "rank-00000.json").get("aliases", {})
        for alias, name in aliases.items() if isinstance(aliases, dict) else ():
            if isinstance(name, str) and name in tensors:
                tensors.setdefault(alias, tensors[name])
    return tensors


def _header(found: Found, file: str) -> Mapping[str, Announced]:
    key, size, where = found.key(file), found.manifest.files[file].size, f"{found.url}/{file}"
    try:
        length = header_bytes(found.storage.get(key, 0, 8), size, where)
        return parse_header(found.storage.get(key, 0, 8 + length), size, where)
    except StorageMissingError as error:
        raise CheckpointCorruptError(f"{found.url}: {file} is missing. The checkpoint is damaged.") from error


def _parts(document: Mapping[str, Any], file: str, url: str) -> dict[str, tuple[int, ...]]:
    try:
        shapes = {key: tuple(shape) for key, (shape, _) in document["parts"].get(file, {}).items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(f"{url}: {file}: its pieces are described wrongly: {error!r:.120}.") from None
    if any(type(size) is not int or size < 0 for shape in shapes.values() for size in shape):
        raise CheckpointFormatError(f"{url}: {file}: a shape holds something that is no size.")
    return shapes


def unfinished_in(storage: Storage) -> list[str]:
    """Return the names of folders that hold files of a checkpoint and no manifest."""
    known = {one.name for one in checkpoints_in(storage)}
    return [name for name in storage.list_folders() if name not in known and _looks_like_one(storage, name)]


def _looks_like_one(storage: Storage, name: str) -> bool:
    try:
        return any(FILE_NAME.fullmatch(entry.key.removeprefix(f"{name}/")) for entry in storage.list(name))
    except StorageKeyError:  # a folder of somebody else's with an odd name
        return False


def missing_files(one: Found) -> list[str]:
    """Return what a glance finds wrong: files that are not there, or of another size. Nothing is read."""
    prefix = one.key("")
    sizes = {entry.key.removeprefix(prefix): entry.size for entry in one.storage.list(one.name)}
    problems = []
    for name, record in one.manifest.files.items():
        if name not in sizes:
            problems.append(f"{name} is missing")
        elif sizes[name] != record.size:
            problems.append(f"{name} has {sizes[name]} bytes, and {record.size} were written")
    return problems


def problem_of(one: Found | Damaged) -> str:
    """Return what a glance finds wrong with a checkpoint, empty if nothing."""
    return str(one.problem) if isinstance(one, Damaged) else "; ".join(missing_files(one))


def _no_tensor(name: str) -> Any:
    raise CheckpointFormatError(f"holds a tensor, {name!r:.80}, where none belongs.")
