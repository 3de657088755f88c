"""Reading a checkpoint whose files were verified: documents, and tensors put together from the pieces that ranks wrote."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_core.checkpoint.codec import read_json
from kernel_core.checkpoint.files import LocalFiles
from kernel_core.checkpoint.locate import Found
from kernel_core.checkpoint.manifest import LOCK, STATE
from kernel_core.checkpoint.pieces import Box, box_of, overlap
from kernel_core.checkpoint.safetensors_file import TensorFile
from kernel_core.errors import CheckpointFormatError, CheckpointMismatchError

PRIVATE = "rank/"  # keys of tensors that belong to one rank
_KINDS: dict[str, dict[str, type]] = {
    LOCK: {"plan": dict, "run": dict},
    STATE: {"plugins": dict, "optimizers": list},
    "rank": {"parts": dict, "state": dict, "aliases": dict, "extra": dict},
}


@dataclass(frozen=True)
class StoredPiece:
    """A piece of a tensor in a file."""

    file: TensorFile
    key: str
    box: Box

    def read(self) -> Tensor:
        """Return it, sharing the mapped memory."""
        return self.file.tensor(self.key)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
        name: Its name.
        shape, dtype: Of the whole.
        pieces: They cover the whole, each place once.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]

    @torch.no_grad()
    def copy_into(self, target: Tensor) -> None:
        """Copy into ``target`` the part of the tensor that it holds; it has the same shape.

        Raises:
            CheckpointMismatchError: another shape.
        """
        if tuple(target.shape) != self.shape:
            raise CheckpointMismatchError(
                f"{self.name}: has shape {list(self.shape)} in the checkpoint, and {list(target.shape)} is expected."
            )
        place = box_of(target)
        if place is None:
            return
        local, box = place
        for piece in self.pieces:
            if piece.box == box:
                local.copy_(piece.read())
            elif meeting := overlap(box, piece.box):
                mine, theirs = meeting
                local[mine].copy_(piece.read()[theirs])

    def whole(self) -> Tensor:
        """Return all of it, on the CPU, in memory of its own."""
        result = torch.empty(self.shape, dtype=self.dtype)
        self.copy_into(result)
        return result

    def like(self, parameter: Tensor | None) -> Tensor:
        """Return it on the device of ``parameter`` and sharded as that is, if it has its shape; else whole, on the CPU."""
        if parameter is None or tuple(parameter.shape) != self.shape:
            return self.whole()
        # zeros: parts of a local tensor may be padding that belongs to nothing
        sharded = hasattr(parameter, "device_mesh")
        result = (torch.zeros_like if sharded else torch.empty_like)(
            parameter.detach(), dtype=self.dtype, requires_grad=False
        )
        self.copy_into(result)
        return result


class Reader:
    """An open checkpoint.

    Args:
        found: The checkpoint.
        files: Its files; verify them first.
    """

    def __init__(self, found: Found, files: LocalFiles) -> None:
        self.found, self.manifest, self._files = found, found.manifest, files
        self._open: dict[str, TensorFile] = {}
        self._ranks: list[dict[str, Any]] | None = None
        self._check_files()

    def _check_files(self) -> None:
        """Refuse a manifest that does not name the files of every rank, or names others."""
        manifest = self.manifest
        world_size, names = manifest.world_size, set(manifest.files)
        if world_size <= len(names):  # or the ranks are not worth counting
            ranks = range(world_size)
            needed = {LOCK, *map(rank_file, ranks), *(() if manifest.weights_only else (STATE,))}
            allowed = needed | {tensor_file(family, rank) for family in ("model", "state") for rank in ranks}
            if needed <= names <= allowed:
                return
        raise CheckpointFormatError(
            f"{self.found.url}: its files are not those of a checkpoint of {world_size} ranks. Expected {LOCK}, {STATE} and "
            "those of each rank."
        )

    def document(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the checkpoint, not yet decoded.

        Raises:
            CheckpointFormatError: it is not one, or the checkpoint has no such file.
        """
        where = f"{self.found.url}/{name}"
        if name not in self.manifest.files:
            raise CheckpointFormatError(f"{where}: is not among the files of the checkpoint.")
        document = read_json(self._files.path(name).read_bytes(), where)
        if not isinstance(document, dict):
            raise CheckpointFormatError(f"{where}: is no object.")
        for key, kind in _KINDS[name if name in _KINDS else "rank"].items():
            if key in document and not isinstance(document[key], kind):
                raise CheckpointFormatError(
                    f"{where}: {key} is a {type(document[key]).__name__}. Expected a {kind.__name__}."
                )
        for one in document.get("optimizers", ()) if name == STATE else ():
            if not isinstance(one, dict) or not isinstance(one.get("state"), dict):
                raise CheckpointFormatError(f"{where}: holds an optimizer without a state by name.")
        return document

    @property
    def lock(self) -> dict[str, Any]:
        """What the run was made of."""
        return self.document(LOCK)

    @property
    def state(self) -> dict[str, Any]:
        """What rank 0 wrote of the state of the run."""
        return self.document(STATE)

    @property
    def ranks(self) -> list[dict[str, Any]]:
        """What each rank wrote of itself."""
        if self._ranks is None:
            self._ranks = [self.document(rank_file(rank)) for rank in range(self.manifest.world_size)]
        return self._ranks

    def file(self, name: str) -> TensorFile:
        """Return a file of tensors."""
        if name not in self._open:
            self._open[name] = TensorFile(self._files.path(name), f"{self.found.url}/{name}")
        return self._open[name]

    def tensors(self, family: str) -> dict[str, StoredTensor]:
        """Return the tensors of ``model`` or ``state`` by name, those that belong to one rank left out.

        Raises:
            CheckpointFormatError: pieces are missing, overlap, or do not fit together.
        """
        pieces: dict[str, list[tuple[tuple[int, ...], StoredPiece]]] = {}
        for rank, document in enumerate(self.ranks):
            name = tensor_file(family, rank)
            if name not in self.manifest.files:
                continue
            file, parts = self.file(name), _parts(document, name)
            for key, entry in file.entries.items():
                if family == "model" or not key.startswith(PRIVATE):
                    shape, offset = parts.get(key, (entry.shape, (0,) * len(entry.shape)))
                    pieces.setdefault(key, []).append((shape, StoredPiece(file, key, (offset, entry.shape))))
        tensors = {name: _stored(name, found, self.found.url) for name, found in pieces.items()}
        if family == "model":
            for alias, name in self._aliases().items():
                if name not in tensors or alias in tensors:
                    raise CheckpointFormatError(
                        f"{self.found.url}: {alias!r:.80} stands for {name!r:.80}, which cannot be."
                    )
                tensors[alias] = tensors[name]
        return tensors

    def _aliases(self) -> dict[str, str]:
        aliases = self.ranks[0].get("aliases", {})
        if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
            raise CheckpointFormatError(f"{self.found.url}: its aliases are no names.")
        return dict(aliases)

    def private(self, rank: int, name: str) -> Tensor:
        """Return a copy of a tensor that belongs to ``rank``.

        Raises:
            CheckpointFormatError: there is none of that name.
        """
        file = tensor_file("state", rank)
        if file not in self.manifest.files or PRIVATE + name not in self.file(file).entries:
            raise CheckpointFormatError(f"{self.found.url}: rank {rank} has no tensor {name!r:.80}.")
        return self.file(file).tensor(PRIVATE + name).clone()


def rank_file(rank: int) -> str:
    """Return the name of the document that a rank writes."""
    return f"rank-{rank:05d}.json"


def tensor_file(family: str, rank: int) -> str:
    """Return the name of the file of tensors that a rank writes."""
    return f"{family}-{rank:05d}.safetensors"


def _parts(document: Mapping[str, Any], file: str) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return shape of the whole and offset of the pieces in ``file`` that are not the whole."""
    found = {}
    try:
        for key, (shape, offset) in document["parts"].get(file, {}).items():
            numbers = [*shape, *offset]
            if any(type(number) is not int or number < 0 for number in numbers) or len(shape) != len(offset):
                raise ValueError(key)
            found[key] = (tuple(shape), tuple(offset))
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(f"{file}: its pieces are described wrongly: {error!r:.120}.") from None
    return found


def _stored(name: str, found: Iterable[tuple[tuple[int, ...], StoredPiece]], url: str) -> StoredTensor:
    shapes, pieces = {shape for shape, _ in found}, [piece for _, piece in found]
    dtypes = {piece.file.entries[piece.key].dtype for piece in pieces}
    (shape, *other_shapes), (dtype, *other_dtypes) = shapes, dtypes
    if other_shapes or other_dtypes:
        raise CheckpointFormatError(f"{url}: the pieces of {name!r:.80} have several shapes or dtypes.")
    for offset, size in (piece.box for piece in pieces):
        if len(size) != len(shape) or any(o + s > whole for o, s, whole in zip(offset, size, shape, strict=True)):
            raise CheckpointFormatError(f"{url}: a piece of {name!r:.80} leads out of its shape {list(shape)}.")
    covered = sum(math.prod(piece.box[1]) for piece in pieces)
    boxes = [piece.box for piece in pieces]
    apart = len(boxes) == 1 or _are_apart(boxes)
    if covered != math.prod(shape) or not apart:
        raise CheckpointFormatError(f"{url}: the pieces of {name!r:.80} overlap, or some are missing.")
    return StoredTensor(name, shape, dtype, tuple(pieces))


def _are_apart(boxes: list[Box]) -> bool:
    """Say whether no two boxes meet; they are sorted first, so that those cut along the first axis cost little."""
    boxes = sorted(boxes)
    for index, one in enumerate(boxes):
        end = one[0][0] + one[1][0] if one[0] else 0
        for other in boxes[index + 1 :]:
            if other[0] and other[0][0] >= end:
                break
            if overlap(one, other):
                return False
    return True
