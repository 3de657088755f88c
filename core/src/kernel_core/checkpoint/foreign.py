"""Weights that somebody else saved: Composer's files, plain state dicts, safetensors, folders of Hugging Face.

Nothing in them is run. Each rank maps the files into memory and copies what it needs; no tensor is whole on an accelerator.
"""

from __future__ import annotations

import datetime
import json
import logging
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_core.checkpoint.capture import Ignore, drop
from kernel_core.checkpoint.restore import check_names
from kernel_core.checkpoint.safetensors_file import TensorFile
from kernel_core.errors import CheckpointFormatError, CheckpointMismatchError, CheckpointMissingError
from kernel_core.storage import LocalStorage, open_storage

if TYPE_CHECKING:
    from kernel_core.train.state import State

log = logging.getLogger(__name__)
INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
TORCH_INDEX, TORCH_WHOLE = "pytorch_model.bin.index.json", "pytorch_model.bin"
FOLDER_FILES = (INDEX, WHOLE, TORCH_INDEX, TORCH_WHOLE)
PACKED = re.compile(r"\.(?:tar(?:\.\w+)?|tgz|tbz2|bz2|gz|lz4|lzma|lzo|xz|zst|zip)$", re.IGNORECASE)
SINGLE = re.compile(r"\.(?:pt|pth|bin|ckpt|safetensors)$", re.IGNORECASE)
# where programs keep the model's state dict: Composer, Lightning, and what tutorials write
PLACES = (("state", "model"), ("state_dict",), ("model_state_dict",), ("model",), ("module",))
WRAPPERS = ("module.", "_orig_mod.", "model.")
MAX_INDEX_BYTES = 100_000_000


def is_foreign(path: str) -> bool:
    """Say whether ``path`` means weights of others: a file, or a folder with files of Hugging Face's names and no checkpoint."""
    path = without_scheme(path)
    if "://" in path:
        return bool(SINGLE.search(path) or PACKED.search(path))
    place = Path(path)
    if place.is_file():
        return place.name != "latest"
    if not place.is_dir():
        return bool(SINGLE.search(path) or PACKED.search(path))
    return not (place / "manifest.json").exists() and (
        any((place / name).is_file() for name in FOLDER_FILES) or (place / ".metadata").is_file()
    )


def without_scheme(path: str) -> str:
    """Return the path of a ``file://`` URL; anything else is returned as it is."""
    return str(LocalStorage(path).root) if path.startswith("file://") else path


class ForeignWeights:
    """A model's tensors by name, in memory that is mapped from files.

    Args:
        url: Where they are, for messages.
        tensors: By the names that the files give them.
    """

    def __init__(self, url: str, tensors: Mapping[str, Tensor]) -> None:
        self.url, self.tensors = url, tensors

    def load(self, state: State, strict: bool = True, ignore: Ignore = None) -> None:
        """Copy them into the model; of sharded tensors each rank its part.

        Args:
            state: The run, with its model prepared.
            strict: Refuse names that only one side has; shapes must be equal in any case.
            ignore: Globs of names that are left out, ``model/…``.

        Raises:
            CheckpointMismatchError: names or shapes differ, or none at all is equal.
        """
        own = {
            name: value
            for name, value in state.engine.model_state(state.model, full=False).items()
            if isinstance(value, Tensor)
        }
        found, note = renamed(self.tensors, own)
        if note and state.rank == 0:
            log.info("weights of %s: %s", self.url, note)
        found = {**found, **_second_names(state.model, own, found)}
        kept: dict[str, Any] = {"model": dict.fromkeys([*found, *own])}
        drop(kept, ignore)
        wanted = kept.get("model", {})
        check_names(
            {name: list(value.shape) for name, value in own.items() if name in wanted},
            {name: list(value.shape) for name, value in found.items() if name in wanted},
            strict,
            self.url,
        )
        for name, target in own.items():
            if name in wanted and name in found:
                state.engine.scatter(found[name], target)  # this rank's part; no rank asks another


def renamed(found: Mapping[str, Tensor], own: Mapping[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Return ``found`` under the names of a model, and a line that says how they were changed, empty if they were not.

    Prefixes that wrappers leave (``module.``, ``_orig_mod.``, ``model.``) are taken off, or put on where the model itself is
    a wrapper, if more names fit then.
    """
    best, note, most = dict(found), "", _matches(found, own)
    for candidate, how in _candidates(dict(found)):
        if (count := _matches(candidate, own)) > most:
            best, note, most = candidate, how, count
    return best, f"the names {note}, so that {most} of {len(own)} fit." if note else ""


def _matches(found: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    return sum(name in own for name in found)


def _candidates(found: dict[str, Tensor]) -> Iterator[tuple[dict[str, Tensor], str]]:
    """Yield ``found`` under other names, each with what was done to them."""
    lost = ""
    while True:
        inner = {name.replace("_orig_mod.", ""): value for name, value in found.items()}
        bases = [(found, lost)]
        if inner.keys() != found.keys() and len(inner) == len(found):  # of modules that were compiled by themselves
            bases.append((inner, f"{lost}, _orig_mod."))
        for names, taken in bases:
            said = f"lose {taken.lstrip(', ')}" if taken else ""
            if said:
                yield names, said
            for prefix in ("model.", "module."):
                more = {prefix + name: value for name, value in names.items()}
                yield more, f"{said} and get {prefix}" if said else f"get {prefix}"
        gone = next((one for one in WRAPPERS if found and all(name.startswith(one) for name in found)), None)
        if gone is None:
            return
        found = {name.removeprefix(gone): value for name, value in found.items()}
        lost += f", {gone}"


def _second_names(model: torch.nn.Module, own: Mapping[str, Any], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return, for parameters that have several names, what ``found`` has under another one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    more = {}
    for alike in names.values():
        known = next((name for name in alike if name in found), None)
        more.update({name: found[known] for name in alike if known is not None and name in own and name not in found})
    return more


# --- reading ---------------------------------------------------------------------------------------------------------


def open_foreign(path: str, folder: Path | None = None) -> ForeignWeights:
    """Read weights of others.

    Args:
        path: A path or URL of a file, or a path of a folder.
        folder: Where a file of a remote store has been fetched to; see ``fetch``.

    Raises:
        CheckpointMissingError: there is nothing.
        CheckpointFormatError: it is packed, needs code to be read, or holds no weights.
    """
    _refuse_packed(path)
    place = Path(path) if folder is None else folder / path.rpartition("/")[2]
    if not place.exists():
        raise CheckpointMissingError(f"load_path: there is no file {path}. Expected weights. Check the path.")
    tensors = _read_folder(place) if place.is_dir() else _read_file(place, path)
    if not tensors:
        raise CheckpointFormatError(f"{path}: holds no tensors of a model. Expected a state dict: names and tensors.")
    return ForeignWeights(path, tensors)


def fetch(path: str, folder: Path) -> None:
    """Fetch a file of a remote store into ``folder``.

    Raises:
        StorageError: it cannot be fetched.
    """
    _refuse_packed(path)
    base, _, name = path.rpartition("/")
    open_storage(base).fetch(name, folder / name)


def _refuse_packed(path: str) -> None:
    if PACKED.search(path):
        raise CheckpointFormatError(
            f"{path}: is an archive or compressed. Expected a file that can be mapped into memory. Unpack it first: `tar xf` for "
            "an archive of Composer's, in which the file is composer_states.pt; gunzip, unxz, zstd -d and their like for others."
        )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    """Read the folder of a model as Hugging Face's libraries write it."""
    if (folder / ".metadata").is_file():
        raise CheckpointFormatError(
            f"{folder}: is a checkpoint of torch.distributed.checkpoint, whose .metadata is a pickle. Expected weights that are "
            "read without running anything. Convert it where you trust it: python -m torch.distributed.checkpoint.format_utils "
            f"dcp_to_torch {folder} weights.pt."
        )
    for index in (INDEX, TORCH_INDEX):
        if (folder / index).is_file():
            tensors: dict[str, Tensor] = {}
            for name in _files_of_index(folder / index):
                tensors |= _read_file(folder / name, str(folder / name))
            return tensors
    whole = next(name for name in (WHOLE, TORCH_WHOLE) if (folder / name).is_file())
    return _read_file(folder / whole, str(folder / whole))


def _files_of_index(path: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(path.read_bytes()[:MAX_INDEX_BYTES])["weight_map"].values()))
        if not all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name) for name in names):
            raise ValueError("a file name that is none")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointFormatError(f"{path}: is not an index of weights: {error!r:.120}.") from None
    for name in names:
        if not (path.parent / name).is_file():
            raise CheckpointFormatError(f"{path}: names {name}, which is not there. Expected every file that it names.")
    return names


def _read_file(path: Path, where: str) -> dict[str, Tensor]:
    with path.open("rb") as file:
        head = file.read(16)
    if head.startswith(b"version https:"):
        raise CheckpointFormatError(
            f"{where}: is a pointer of Git LFS, not the weights. Fetch the file itself: git lfs pull."
        )
    if len(head) >= 9 and head[8:9] == b"{":
        file_of_tensors = TensorFile(path.resolve(), where)
        return {name: file_of_tensors.tensor(name) for name in file_of_tensors.entries}
    return _state_dict(_unpickle(path, where), where)


def _unpickle(path: Path, where: str) -> Any:
    """Read what ``torch.save`` wrote by torch's reader that builds tensors and plain data alone, and runs nothing."""
    mapped = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(_harmless()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointFormatError(
            f"{where}: {_needs(path)} Reading such a file may run whatever its maker wants, so that it is refused. Expected "
            "tensors and plain data. Where you trust it, write its weights anew: torch.save(model.state_dict(), 'weights.pt')."
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, LookupError, TypeError, AttributeError) as error:
        line = str(error).partition("\n")[0]
        raise CheckpointFormatError(
            f"{where}: is no file of weights: {type(error).__name__}: {line:.200} Expected what torch.save or safetensors wrote."
        ) from error


def _harmless() -> list[Any]:
    """Return what besides tensors a whole checkpoint of Composer's is made of: NumPy's generator, and clocks."""
    import numpy as np

    core = getattr(np, "_core", None) or np.core
    rebuild = core.multiarray._reconstruct
    old_and_new = [(rebuild, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    dtypes = [type(np.dtype(kind)) for kind in (np.uint32, np.uint64, np.int64, np.float32, np.float64, np.bool_)]
    return [datetime.timedelta, np.dtype, np.ndarray, *old_and_new, *dtypes]


def _needs(path: Path) -> str:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # whatever a damaged or hostile file makes of it
        names = []
    return (
        f"needs code to be read: {', '.join(sorted(names)[:4])}."
        if names
        else "is a pickle that needs code to be read."
    )


def _state_dict(loaded: Any, where: str) -> dict[str, Tensor]:
    """Return the tensors of the model in what a file holds."""
    for place in ((), *PLACES):
        found = loaded
        for key in place:
            found = found.get(key) if isinstance(found, Mapping) else None
        if isinstance(found, Mapping):
            tensors = {
                name: value for name, value in found.items() if isinstance(name, str) and isinstance(value, Tensor)
            }
            if tensors:
                return tensors
    kind = (
        f"a dict of {', '.join(map(str, list(loaded)[:6]))}"
        if isinstance(loaded, Mapping)
        else f"a {type(loaded).__name__}"
    )
    raise CheckpointMismatchError(
        f"{where}: holds {kind:.200}. Expected a state dict of a model, alone or under 'state_dict' or 'model', or a checkpoint "
        "of Composer's. Save model.state_dict()."
    )
