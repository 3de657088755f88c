"""From a checkpoint back into a run: each rank reads what it needs of the files, whoever wrote them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_core.checkpoint.capture import Ignore, drop
from kernel_core.checkpoint.codec import decode
from kernel_core.checkpoint.metric_state import load_metric_state
from kernel_core.checkpoint.per_rank import value_for, without_dropped
from kernel_core.checkpoint.reader import Reader, StoredTensor
from kernel_core.errors import CheckpointFormatError, CheckpointMismatchError
from kernel_core.timing import Timestamp
from kernel_core.train.randomness import keyed_seed, restore_randomness, seed_all

if TYPE_CHECKING:
    from kernel_core.train.precision import Precision
    from kernel_core.train.state import State

log = logging.getLogger(__name__)
SHOWN = 8  # names in a message


@dataclass(frozen=True)
class Restored:
    """What of a checkpoint is put back later, when training begins.

    Attributes:
        rng: The state of the global generators of this rank, None if it has to draw anew.
        position: The place in the training data as the ranks saved it, each its own.
        loop: What the loop remembers.
    """

    rng: Mapping[str, Any] | None
    position: Sequence[Mapping[str, Any] | None]
    loop: Mapping[str, Any]


def load_weights(state: State, reader: Reader, strict: bool = True, ignore: Ignore = None) -> None:
    """Copy the model's parameters and buffers from a checkpoint.

    Args:
        state: The run, with its model prepared.
        reader: The checkpoint.
        strict: Refuse names that only one side has; shapes must be equal in any case.
        ignore: Globs of names that are left out, ``model/…``.

    Raises:
        CheckpointMismatchError: names or shapes differ, or none at all is equal.
    """
    stored: dict[str, Any] = dict(reader.tensors("model"))
    own = state.engine.model_state(state.model, full=False)
    kept = {"model": {**stored, **{name: None for name in own if name not in stored}}}
    drop(kept, ignore)
    wanted = kept.get("model", {})
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
    check_names(
        {name: list(value.shape) for name, value in tensors.items() if name in wanted},
        {name: list(value.shape) for name, value in stored.items() if name in wanted},
        strict,
        reader.found.url,
    )
    for name, target in tensors.items():
        found = stored.get(name)
        if name in wanted and found is not None:
            found.copy_into(target)
    extra = decode(reader.ranks[0].get("extra", {}), _no_tensor, reader.found.url)
    for name, value in extra.items():
        if name in own:
            state.model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def check_names(own: Mapping[str, list[int]], stored: Mapping[str, list[int]], strict: bool, where: str) -> None:
    """Report names and shapes that differ, and refuse what cannot or should not be loaded.

    Raises:
        CheckpointMismatchError: shapes differ, no name is equal, or with ``strict`` any name differs.
    """
    missing, unexpected = [name for name in own if name not in stored], [name for name in stored if name not in own]
    reshaped = [name for name in own if name in stored and own[name] != stored[name]]
    lines = [
        *(f"  missing      {name}  {own[name]}: the model has it, the checkpoint does not" for name in missing[:SHOWN]),
        *(
            f"  unexpected   {name}  {stored[name]}: the checkpoint has it, the model does not"
            for name in unexpected[:SHOWN]
        ),
        *(
            f"  reshaped     {name}: {stored[name]} in the checkpoint, {own[name]} in the model"
            for name in reshaped[:SHOWN]
        ),
    ]
    counts = f"{len(missing)} missing, {len(unexpected)} unexpected, {len(reshaped)} reshaped of {len(own)} tensors"
    if not any(name in stored for name in own) and own:
        problem = "no tensor of the model is in the checkpoint"
        remedy = "Is it of another model, or are its names prefixed?"
    elif reshaped:
        problem = f"shapes differ: {counts}"
        remedy = "Build the model as it was, or leave those out: load_ignore_keys=['model/<name>']."
    elif strict and (missing or unexpected):
        problem = f"the names differ: {counts}"
        remedy = "Build the model as it was, name what may differ in load_ignore_keys=['model/<name>'], or give strict=False "
        remedy += "(load_strict_model_weights=False) to load what fits."
    else:
        if lines:
            log.warning("checkpoint %s: %s\n%s", where, counts, "\n".join(lines))
        return
    raise CheckpointMismatchError("\n".join([f"checkpoint {where}: {problem}. {remedy}", *lines]))


def load_state(state: State, reader: Reader, precision: Precision, ignore: Ignore = None) -> Restored:
    """Put back everything but the model: optimizers, schedulers, loss scale, plugins, metrics, counters.

    Raises:
        CheckpointMismatchError: it does not fit the run.
    """
    document: dict[str, Any] = {**reader.state, **_of_ranks(reader)}
    drop(document, ignore)
    stored = reader.tensors("state")
    url = reader.found.url
    if "optimizers" in document:
        _check_optimizers(state, reader.lock.get("optimizer_classes"), url)
        _load_optimizers(state, document["optimizers"], stored, url)

    def plain(name: str, default: Any) -> Any:
        value = decode(document[name], _getter(stored, {}, url), url) if name in document else default
        if default is not None and not isinstance(value, type(default)):
            raise CheckpointFormatError(
                f"{url}: {name} is a {type(value).__name__}. Expected a {type(default).__name__}."
            )
        return value

    _load_schedulers(state, plain("schedulers", None), url)
    precision.load_state_dict(plain("scaler", {}))
    _load_plugins(state, reader, document.get("plugins", {}), stored)
    _load_metrics(state, reader, document.get("metrics"))
    values = plain("values", {})
    state.train_metric_values, state.eval_metric_values = values.get("train", {}), values.get("eval", {})
    if (size := plain("device_train_microbatch_size", None)) is not None and state.auto_microbatching:
        state.device_train_microbatch_size = size
    if "timestamp" in document:
        state.progress.restore(plain("timestamp", Timestamp()))
    same = reader.manifest.world_size == state.world_size
    if same and state.rank and "buffers" in reader.ranks[state.rank].get("state", {}):
        _load_buffers(state, _private(reader, state.rank, "buffers"))
    rng = _private(reader, state.rank, "rng") if same and "rng" in document else None
    ranks = range(reader.manifest.world_size)
    positions = [_private(reader, rank, "position") for rank in ranks] if "position" in document else []
    return Restored(rng, positions, plain("loop", {}))


def put_back_randomness(state: State, restored: Restored) -> None:
    """Let this rank's global generators go on as they were; on another number of ranks they begin anew, by key."""
    if restored.rng is not None:
        restore_randomness(restored.rng)
    else:
        seed_all(keyed_seed(state.seed, "rank", state.engine.data_rank, "resumed at batch", state.progress.batch))


def _of_ranks(reader: Reader) -> dict[str, Any]:
    """Return stand-ins for what each rank keeps of itself, so that it can be ignored by name too."""
    own = reader.ranks[0].get("state", {})
    return {name: {} for name in ("rng", "position", "metrics") if name in own}


def _private(reader: Reader, rank: int, name: str) -> Any:
    saved = reader.ranks[rank].get("state", {})
    if name not in saved:
        raise CheckpointFormatError(f"{reader.found.url}: rank {rank} has saved no {name!r:.80}.")
    return decode(saved[name], lambda tensor: reader.private(rank, tensor), reader.found.url)


def _getter(stored: Mapping[str, StoredTensor], likes: Mapping[str, Tensor], url: str) -> Any:
    """Return ``name -> tensor``: sharded and placed as the parameter that the last part of its name names, if there is one."""

    def get(name: str) -> Tensor:
        if name not in stored:
            raise CheckpointFormatError(f"has no tensor {name!r:.80}.")
        return stored[name].like(likes.get(name.rpartition("/")[2].partition("#")[0]))

    return get


def _check_optimizers(state: State, saved: Any, url: str) -> None:
    """Refuse the state of another optimizer: it would be taken, and lead to an error or to nonsense at the first step."""
    now = [type(optimizer).__name__ for optimizer in state.optimizers]
    if isinstance(saved, list) and len(saved) == len(now) and saved != now:
        raise CheckpointMismatchError(
            f"checkpoint {url}: was saved with the optimizers {', '.join(map(str, saved))}, and the run has {', '.join(now)}. "
            "Expected the same. load_ignore_keys=['optimizers'] loads without their state."
        )


def _load_optimizers(state: State, document: Any, stored: Mapping[str, StoredTensor], url: str) -> None:
    optimizers = state.optimizers
    if not isinstance(document, list) or len(document) != len(optimizers):
        raise CheckpointMismatchError(
            f"checkpoint {url}: has {len(document)} optimizers, and the run has {len(optimizers)}. Expected as many. "
            "load_weights_only=True or load_ignore_keys=['optimizers'] loads without them."
        )
    parameters = dict(state.model.named_parameters(remove_duplicate=False))
    for index, (optimizer, saved) in enumerate(zip(optimizers, document, strict=True)):
        entries = {
            name: decode(entry, _like(stored, parameters.get(name), url), url) for name, entry in saved["state"].items()
        }
        rest = {key: value for key, value in saved.items() if key != "state"}
        loaded = {**decode(rest, _getter(stored, {}, url), url), "state": entries}
        try:
            state.engine.load_optimizer_state(state.model, optimizer, loaded, copy=False)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointMismatchError(
                f"checkpoint {url}: optimizer {index} ({type(optimizer).__name__}) has other parameters or groups than it: "
                f"{error} Expected the same. load_ignore_keys=['optimizers'] loads without them."
            ) from error


def _like(stored: Mapping[str, StoredTensor], parameter: Tensor | None, url: str) -> Any:
    def get(name: str) -> Tensor:
        if name not in stored:
            raise CheckpointFormatError(f"{url}: has no tensor {name!r:.80}.")
        return stored[name].like(parameter)

    return get


def _load_schedulers(state: State, saved: Any, url: str) -> None:
    if saved is None:
        return
    mine = [hasattr(one, "state_dict") for one in state.schedulers]
    if mine != [one is not None for one in saved]:
        raise CheckpointMismatchError(
            f"checkpoint {url}: has {len(saved)} schedulers, and the run has {len(mine)}, or others. Expected the same. "
            "load_ignore_keys=['schedulers'] loads without them."
        )
    for scheduler, one in zip(state.schedulers, saved, strict=True):
        if one is not None:
            scheduler.load_state_dict(one)


def _load_plugins(
    state: State, reader: Reader, document: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    likes = dict(state.model.named_parameters(remove_duplicate=False))
    world_size, url = reader.manifest.world_size, reader.found.url

    def get_rank(where: str, elastic: str) -> Any:
        ranks = range(world_size) if world_size != state.world_size else [state.rank]
        saved = [_private(reader, rank, where) for rank in ranks]
        if len(ranks) == 1 and world_size == state.world_size:
            return saved[0]
        return value_for(state.rank, state.world_size, saved, elastic, where)

    for active in state.plan.plugins:
        if active.id in state.silent or active.id not in document:
            continue
        value = decode(document[active.id], _getter(stored, likes, url), url, get_rank)
        active.plugin.load_state_dict(without_dropped(value))


def _load_metrics(state: State, reader: Reader, document: Any) -> None:
    if document is None or not state.train_metrics:
        return
    saved = [_private(reader, rank, "metrics") for rank in range(reader.manifest.world_size)]
    for name, metric in state.train_metrics.items():
        if all(name in one for one in saved):
            load_metric_state(metric, [one[name] for one in saved], state.rank, state.world_size, name)


@torch.no_grad()
def _load_buffers(state: State, saved: Mapping[str, Tensor]) -> None:
    own = state.engine.model_state(state.model, full=False)
    for name, value in saved.items():
        if name in own and own[name].shape == value.shape:
            own[name].copy_(value)


def _no_tensor(name: str) -> Any:
    raise CheckpointFormatError(f"has a tensor {name!r:.80} where none belongs.")
