"""The manifest: the files of a checkpoint with sizes and checksums. It is written last: without one there is no checkpoint."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from kernel_core.checkpoint.codec import read_json, write_json
from kernel_core.errors import CheckpointCorruptError, CheckpointFormatError
from kernel_core.timing import Timestamp

FORMAT = "kernel-checkpoint"
VERSION = 1  # of the format; a reader refuses what is newer
MANIFEST = "manifest.json"
LOCK = "lock.json"
STATE = "state.json"
MAX_MANIFEST_BYTES = 64 << 20
FILE_NAME = re.compile(r"(?:lock|state)\.json|rank-[0-9]{5}\.json|(?:model|state)-[0-9]{5}\.safetensors")
ALGORITHM = "xxh3_128"


@dataclass(frozen=True)
class FileRecord:
    """A file as it was written."""

    size: int
    checksum: str


def readable_size(num_bytes: int) -> str:
    """Return a number of bytes for people: ``1.2 GB``."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def checksum(pieces: Iterable[Any]) -> str:
    """Return the checksum of bytes given in pieces; threads run meanwhile."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return f"{ALGORITHM}:{digest.hexdigest()}"


@dataclass(frozen=True)
class Manifest:
    """What one checkpoint consists of.

    Attributes:
        run_name: The run that saved it.
        saver: The id of the plugin that asked for it; empty if the user did.
        sequence: A number greater than that of every earlier checkpoint in the same folder.
        timestamp: How far training was.
        world_size: The number of ranks that saved it.
        weights_only: Whether there is nothing but the model in it.
        created: Seconds since 1970.
        files: Its files by name.
        version: The version of the format.
    """

    run_name: str
    saver: str
    sequence: int
    timestamp: Timestamp
    world_size: int
    weights_only: bool
    created: float
    files: Mapping[str, FileRecord] = field(default_factory=dict)
    version: int = VERSION

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(record.size for record in self.files.values())

    def to_bytes(self) -> bytes:
        """Return the manifest as it is written: JSON with a checksum of its own content."""
        body = {
            "format": FORMAT,
            "version": self.version,
            "run_name": self.run_name,
            "saver": self.saver,
            "sequence": self.sequence,
            "timestamp": self.timestamp.to_json(),
            "world_size": self.world_size,
            "weights_only": self.weights_only,
            "created": self.created,
            "created_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.created)),
            "files": {name: {"size": record.size, "checksum": record.checksum} for name, record in self.files.items()},
        }
        return write_json({**body, "checksum": checksum([write_json(body)])})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Read what ``to_bytes`` wrote.

        Raises:
            CheckpointCorruptError: its content is not what was written.
            CheckpointFormatError: it is no manifest, or one of a newer version.
        """
        body = read_json(data, where)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointFormatError(f"{where}: is no manifest of a checkpoint.")
        version = body.get("version")
        if type(version) is int and version > VERSION:
            raise CheckpointFormatError(
                f"{where}: is of version {version!s:.20} of the format, and this kernel reads up to {VERSION}. "
                "Upgrade kernel-core."
            )
        told = body.pop("checksum", None)
        try:
            # byte for byte what was written, so that no byte of it can change unnoticed
            intact = told == checksum([write_json(body)]) and data == write_json({**body, "checksum": told})
        except (ValueError, RecursionError):  # nothing that was ever written
            intact = False
        if not intact:
            raise CheckpointCorruptError(f"{where}: its checksum does not fit its content. The checkpoint is damaged.")
        try:
            return cls(**_fields(body), version=_number(version, 1))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise CheckpointFormatError(
                f"{where}: is not a manifest as version {VERSION} has it: {error!r:.200}."
            ) from None


def _fields(body: Mapping[str, Any]) -> dict[str, Any]:
    files = {}
    for name, record in body["files"].items():
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"the file name {name!r:.60}")
        files[name] = FileRecord(_number(record["size"]), _text(record["checksum"]))
    created = body["created"]
    if type(created) not in (int, float):
        raise ValueError(f"created {created!r:.60}")
    if type(body["weights_only"]) is not bool:
        raise ValueError("weights_only")
    return {
        "run_name": _text(body["run_name"]),
        "saver": _text(body["saver"]),
        "sequence": _number(body["sequence"]),
        "timestamp": Timestamp.from_json(body["timestamp"]),
        "world_size": _number(body["world_size"], 1),
        "weights_only": body["weights_only"],
        "created": float(created),
        "files": files,
    }


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"the number {value!r:.60}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"the text {value!r:.60}")
    return value
