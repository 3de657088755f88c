"""From a running trainer to what this rank writes: documents, and pieces of tensors. Changes nothing and asks no other rank."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from importlib_metadata import PackageNotFoundError, version
from torch import Tensor

from kernel_core.checkpoint.codec import encode
from kernel_core.checkpoint.manifest import LOCK, STATE
from kernel_core.checkpoint.metric_state import metric_state
from kernel_core.checkpoint.pieces import Piece, check_savable, pieces_of
from kernel_core.checkpoint.reader import PRIVATE, rank_file, tensor_file
from kernel_core.errors import UnsavableError
from kernel_core.train.randomness import randomness_state

if TYPE_CHECKING:
    from kernel_core.train.state import State

Ignore = Sequence[str] | Callable[[dict[str, Any]], None] | None


@dataclass
class Shot:
    """What one rank writes: JSON-able documents by file name, and pieces of tensors by file name and key."""

    documents: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Piece]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunParts:
    """What of a run is not in its ``state``.

    Attributes:
        scaler: The state of the loss scaling.
        position: The place in the training data, of this rank.
        loop: What the loop has to remember: plain data.
        global_batch_size: Samples in a batch over all ranks, None if unknown.
        config: The document the run was made from, if any.
    """

    scaler: Mapping[str, Any]
    position: Mapping[str, Any] | None
    loop: Mapping[str, Any]
    global_batch_size: int | None
    config: Mapping[str, Any] | None


class _Tensors:
    """Collects the tensors that documents refer to, each under a name of its own."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def put(self, tensor: Any, where: str) -> str:
        name, number = where, 1
        while name in self.found:
            number += 1
            name = f"{where}#{number}"
        if not isinstance(tensor, Tensor):
            fits = tensor.flags.writeable and min(tensor.strides, default=0) >= 0
            tensor = torch.from_numpy(tensor if fits else tensor.copy())
        self.found[name] = tensor
        return name


def capture(state: State, parts: RunParts, weights_only: bool = False, ignore: Ignore = None) -> Shot:
    """Return what this rank writes of a checkpoint. Tensors are those of the run itself: copy them before it goes on.

    Args:
        state: The run, between two steps.
        parts: What else belongs to it.
        weights_only: The model alone.
        ignore: Names or globs of what is left out, joined by ``/``: ``optimizers``, ``plugins/ema``, ``model/head.*``; or a
            function that deletes from a dict ``{"model": …, "optimizers": …, …}``.

    Raises:
        UnsavableError: something cannot be expressed; named by its path.
    """
    rank, world_size = state.rank, state.world_size
    shot = Shot()
    model = state.engine.model_state(state.model, full=False)
    kept: dict[str, Any] = {"model": dict(model)}
    if not weights_only:
        kept |= _sections(state, parts)
        if rank:  # running statistics and the like may differ from rank 0's, which are the model's
            kept["buffers"] = _own_buffers(state, model)
    drop(kept, ignore)
    weights, extra, aliases = _weights(state, kept.pop("model", {}))
    mine: dict[str, Any] = {"parts": {}}
    if rank == 0:
        shot.documents[LOCK] = encode(_lock(state, parts), _no_tensor, "lock")
        mine |= {"aliases": aliases, "extra": encode(extra, _no_tensor, "model")}
    _keep(shot, mine, tensor_file("model", rank), pieces_of(weights, rank, world_size, spread=True))
    if not weights_only:
        _keep(shot, mine, tensor_file("state", rank), _encode_state(state, kept, shot, mine))
    shot.documents[rank_file(rank)] = mine
    return shot


def _keep(shot: Shot, mine: dict[str, Any], file: str, pieces: Sequence[Piece]) -> None:
    """Put ``pieces`` into a file, and where each belongs into this rank's document."""
    if not pieces:
        return
    shot.files[file] = {piece.name: piece for piece in pieces}
    mine["parts"][file] = {
        piece.name: [list(piece.shape), list(piece.offset)] for piece in pieces if not piece.is_whole
    }


def _encode_state(state: State, kept: dict[str, Any], shot: Shot, mine: dict[str, Any]) -> list[Piece]:
    """Encode everything but the model; return the pieces of its tensors."""
    rank, world_size = state.rank, state.world_size
    spread, firsts, private = _Tensors(), _Tensors(), _Tensors()
    local: dict[str, Any] = {}
    document = {}
    for name, value in kept.items():
        if name in ("rng", "position", "metrics", "buffers"):
            local[name] = value
        else:
            put = spread.put if name == "optimizers" else firsts.put
            document[name] = encode(value, put, name, put_rank=lambda value, where: local.update({where: value}))
    mine["state"] = {name: encode(value, private.put, name) for name, value in local.items()}
    if rank == 0:
        shot.documents[STATE] = document
    pieces = pieces_of(spread.found, rank, world_size, spread=True)
    pieces += pieces_of(firsts.found, rank, world_size, spread=False)
    for name, tensor in private.found.items():
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor.detach()
        check_savable(tensor, name)
        pieces.append(Piece(PRIVATE + name, tensor, tuple(tensor.shape), (0,) * tensor.ndim))
    return pieces


def _sections(state: State, parts: RunParts) -> dict[str, Any]:
    """Return everything but the model, by section."""
    engine, model = state.engine, state.model
    devices = {state.device, *(parameter.device for parameter in model.parameters())}
    return {
        "timestamp": state.timestamp,
        "optimizers": [engine.optimizer_state(model, optimizer, full=False) for optimizer in state.optimizers],
        "schedulers": [one.state_dict() if hasattr(one, "state_dict") else None for one in state.schedulers],
        "scaler": dict(parts.scaler),
        "plugins": {
            active.id: active.plugin.state_dict() for active in state.plan.plugins if active.id not in state.silent
        },
        "values": {"train": dict(state.train_metric_values), "eval": dict(state.eval_metric_values)},
        "loop": dict(parts.loop),
        "device_train_microbatch_size": state.device_train_microbatch_size if state.auto_microbatching else None,
        "metrics": {name: metric_state(metric) for name, metric in state.train_metrics.items()},
        "rng": randomness_state(sorted(devices, key=str)),
        "position": None if parts.position is None else dict(parts.position),
    }


def _own_buffers(state: State, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the buffers among the model's tensors that this rank holds whole."""
    names = {name for name, _ in state.model.named_buffers()}
    return {name: value for name, value in model.items() if name in names and not hasattr(value, "device_mesh")}


def _weights(state: State, found: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Return the model's tensors, what else modules keep in their state, and second names of shared tensors."""
    firsts: dict[int, str] = {}
    aliases = {}
    shared = dict(state.model.named_parameters(remove_duplicate=False))
    for name in found:
        parameter = shared.get(name)
        if parameter is not None and firsts.setdefault(id(parameter), name) != name:
            aliases[name] = firsts[id(parameter)]
    weights = {name: value for name, value in found.items() if isinstance(value, Tensor) and name not in aliases}
    extra = {name: value for name, value in found.items() if not isinstance(value, Tensor)}
    return weights, extra, aliases


def _lock(state: State, parts: RunParts) -> dict[str, Any]:
    """Return what the run is made of, for people and for a run that resumes it."""
    parameters = list(state.model.parameters())
    return {
        "run_name": state.run_name,
        "seed": state.seed,
        "plan": state.plan.to_json(),
        "surgery": state.surgery_report.to_json(),
        "model": {
            "class": type(state.model).__qualname__,
            "num_parameters": sum(parameter.numel() for parameter in parameters),
            "num_tensors": len(parameters),
            "export": _export_form(state.model),
        },
        "optimizer_classes": [type(optimizer).__name__ for optimizer in state.optimizers],
        "run": {
            "engine": state.engine.name,
            "transforms": [transform.name for transform in state.transforms],
            "world_size": state.world_size,
            "data_world_size": state.engine.data_world_size,
            "device": str(state.device),
            "precision": state.precision,
            "global_batch_size": parts.global_batch_size,
            "max_duration": None if state.max_duration is None else str(state.max_duration),
        },
        "environment": {
            "python": platform.python_version(),
            "platform": sys.platform,
            "torch": str(torch.__version__),
            "kernel-core": version("kernel-core"),
            **_installed_version("kernel-cli"),
        },
        "config": parts.config,
    }


def _installed_version(distribution: str) -> dict[str, str]:
    try:
        return {distribution: version(distribution)}
    except PackageNotFoundError:
        return {}


def _export_form(model: Any) -> dict[str, Any] | None:
    form = model.export_form() if hasattr(model, "export_form") else None
    return None if form is None else dict(form)


def drop(sections: dict[str, Any], ignore: Ignore) -> None:
    """Take out of ``sections`` what ``ignore`` names; Composer's prefix ``state/`` is understood."""
    if ignore is None:
        return
    if callable(ignore):
        ignore(sections)
        return
    patterns = [
        pattern.removeprefix("state/").rstrip("/") for pattern in ([ignore] if isinstance(ignore, str) else ignore)
    ]
    _drop(sections, [pattern.removesuffix("/*") if pattern.endswith("/*") else pattern for pattern in patterns], "")


def _drop(values: dict[Any, Any], patterns: Sequence[str], path: str) -> None:
    for key in list(values):
        here = f"{path}/{key}" if path else str(key)
        if any(fnmatchcase(here, pattern) for pattern in patterns):
            del values[key]
        elif isinstance(values[key], dict):
            _drop(values[key], patterns, here)


def _no_tensor(tensor: Any, where: str) -> str:
    raise UnsavableError(f"{where}: is a tensor, which has no place there. Expected plain data.")
