"""The base of engines over several processes, and by itself the engine of a model that transforms alone split up."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kernel_core.distributed.board import Board
from kernel_core.distributed.connection import (
    Connection,
    broadcast_from_first,
    close_at_exit,
    connect,
    make_mesh,
    place_device,
)
from kernel_core.distributed.mesh import resolve_axes
from kernel_core.distributed.norms import clip_by_norm, total_norm
from kernel_core.distributed.sharding import copy_part, shard_like
from kernel_core.distributed.watchdog import Watchdog
from kernel_core.engine import Engine, ModelTransform
from kernel_core.errors import ParallelismError
from kernel_core.shards import local
from kernel_core.train.composer_keywords import KEYWORDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kernel_core.train.place import Place
    from kernel_core.train.state import State


class DistributedEngine(Engine):
    """Joins the processes and lays them out; trains a model whose every rank reads the same data.

    Engines that share the data among the ranks override ``data_axes`` and average gradients.
    """

    name = "distributed"

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.mesh: DeviceMesh | None = None
        self.state: State | None = None
        self._watchdog: Watchdog | None = None

    def check(self, state: State) -> None:
        """Remember the run: what it computes in is known only when the model is prepared."""
        self.state = state

    def data_axes(self) -> dict[str, int]:
        """Return the axes of the mesh along which ranks read different data, with their numbers of ranks; -1 for the rest."""
        return {"data_parallel": -1}

    def connect(
        self, place: Place, device: torch.device, transforms: Sequence[ModelTransform], timeout_s: float
    ) -> torch.device:
        """Join the other processes and lay them out on a mesh: data axes first, then those of ``transforms``."""
        self.rank, self.world_size, self.local_rank = place.rank, place.world_size, place.local_rank
        split = {transform.axis: transform.degree for transform in transforms if transform.axis is not None}
        axes = resolve_axes({**self.data_axes(), **split}, self.world_size)
        together = math.prod(axes[axis] for axis in split)  # ranks that hold parts of one model
        self.data_world_size, self.data_rank = self.world_size // together, self.rank // together
        self.needs_all_ranks = self.needs_all_ranks or together > 1
        device = place_device(place, device)
        self.connection = connect(place, device, timeout_s)
        close_at_exit(self)
        if self.world_size > 1:
            store = self.connection.store.clone()
            self._watchdog = Watchdog(self.rank, self.world_size, store, timeout_s)
        self.mesh = make_mesh(device.type, axes)
        if together > 1 and self.data_world_size > 1:
            data_mesh = self.data_mesh
            flat = data_mesh if data_mesh.ndim == 1 else data_mesh._flatten("data_parallel")
            self.data_group = flat.get_group()
        return device

    def agree(self, key: str, value: str) -> str:
        """Return rank 0's ``value``."""
        assert self.connection is not None
        return self.connection.agree(key, value)

    def check_same(self, what: str, mine: Mapping[str, Any]) -> None:
        """Compare digests; only where they differ are the entries themselves passed around."""
        assert self.connection is not None
        text = json.dumps(mine, sort_keys=True, default=str)
        digest = hashlib.sha256(text.encode()).hexdigest()
        differs = torch.tensor(float(self.agree(what, digest) != digest))
        dist.all_reduce(differs)
        if differs.item():
            raise ParallelismError(_difference(what, [json.loads(one) for one in self.connection.gather(what, text)]))

    def all_reduce(self, tensor: Tensor) -> None:
        """Add up ``tensor`` over all ranks."""
        dist.all_reduce(tensor)

    def board(self, name: str) -> Board | None:
        """Return a board over a connection of its own to the store of the run."""
        if self.world_size == 1:
            return None
        assert self.connection is not None
        return Board(self.connection.store.clone(), name)

    def watch(self, state: State, busy: Callable[[], bool]) -> None:
        """Let the watchdog, if there are others to wait for, look at the run too."""
        if self._watchdog is not None:
            self._watchdog.watch(state, busy)

    def abort(self, error: BaseException) -> None:
        """Leave word in the store, where the watchdogs of the other ranks look."""
        if self._watchdog is not None:
            self._watchdog.abort(error)

    def axis_mesh(self, axis: str | None) -> DeviceMesh | None:
        """Return the mesh of one axis."""
        if axis is None or self.mesh is None or axis not in (self.mesh.mesh_dim_names or ()):
            return None
        return self.mesh[axis]

    @property
    def data_mesh(self) -> DeviceMesh:
        """The mesh of the ranks that read different data."""
        assert self.mesh is not None
        axes = tuple(self.data_axes())
        return self.mesh[axes] if axes != self.mesh.mesh_dim_names else self.mesh

    @torch.no_grad()
    def align(self, model: nn.Module) -> None:
        """Broadcast rank 0's values; models that were built alike stay as they are."""
        tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}
        if self.world_size > 1:
            broadcast_from_first([tensor.detach() for tensor in tensors.values()])

    @torch.no_grad()
    def begin_passes(self, model: nn.Module) -> None:
        """Give every rank rank 0's buffers: running statistics follow the batches of a rank."""
        if self.world_size > 1:
            broadcast_from_first([local(buffer) for buffer in model.buffers()])

    def prepare(self, model: nn.Module, device: torch.device, materialize: Callable[[nn.Module], None]) -> nn.Module:
        """Return the model itself: transforms have split it.

        Raises:
            ParallelismError: ranks are left that would read different data and average nothing.
        """
        if self.data_world_size > 1:
            raise ParallelismError(
                f"parallelism: the transforms split the model over {self.world_size // self.data_world_size} of "
                f"{self.world_size} ranks, and no engine is named for the rest. Name one: {KEYWORDS['fsdp_config'].plugin!r}."
            )
        materialize(model)
        return model

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Step groups that hold sharded and whole tensors one by one: torch's joint kernels refuse such a mix."""
        for group in optimizer.param_groups:
            if len({isinstance(parameter, DTensor) for parameter in group["params"]}) > 1:
                group.update({name: False for name in ("foreach", "fused") if name in group})

    def total_norm(self, tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm over all shards."""
        return total_norm(tensors, norm_type)

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients, wherever they are sharded."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = self.total_norm(gradients, norm_type)
        clip_by_norm(gradients, max_norm, norm)
        return norm

    def model_state(self, model: nn.Module, *, full: bool) -> dict[str, Tensor]:
        """Return the state; whole tensors on rank 0 only."""
        state = super().model_state(model, full=full)
        return {} if full and self.rank else state

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> dict[str, Any]:
        """Return the state; whole tensors on rank 0 only."""
        state = super().optimizer_state(model, optimizer, full=full)
        return {} if full and self.rank else state

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return super().gather(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def scatter(self, whole: Tensor, target: Tensor) -> None:
        """Copy this rank's part."""
        copy_part(whole, target)

    def like(self, value: Any, parameter: Tensor, copy: bool = True) -> Any:
        """Return ``value`` sharded as ``parameter`` is, if it has its shape."""
        return super().like(shard_like(value, parameter), parameter, copy)

    def close(self) -> None:
        """Let go of the run. The process group stays for later trainers, and is left when the process ends."""
        self.mesh = self.state = None
        if self._watchdog is not None:
            self._watchdog.end()


def _difference(what: str, given: Sequence[Mapping[str, Any]]) -> str:
    """Say which ranks differ from rank 0, and in what."""
    ranks = [rank for rank, one in enumerate(given) if one != given[0]]
    theirs = given[ranks[0]]
    keys = [key for key in (*given[0], *theirs) if given[0].get(key) != theirs.get(key)]
    key = keys[0]
    return (
        f"{what}: rank {', '.join(map(str, ranks))} {'has' if len(ranks) == 1 else 'have'} another than rank 0: {key} is "
        f"{theirs.get(key)!r:.200} on rank {ranks[0]} and {given[0].get(key)!r:.200} on rank 0. Expected the same on every "
        "rank. Start all ranks with the same code, packages and options."
    )
