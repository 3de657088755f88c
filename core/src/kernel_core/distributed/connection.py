"""Joining the other processes of a run, and leaving them, when the process ends, in an order that cannot crash.

Which process this is follows from the environment that torchrun and every launcher set: ``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``. Without them a run is alone.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from kernel_core.errors import ParallelismError, TrainerError
from kernel_core.train.place import Place

_stores: Any = dist  # torch's stubs leave the stores out
COLLECTIVE_MARGIN_S = 30.0  # a collective may wait so much longer than a step: whoever watches the steps speaks first


@dataclass
class _Process:
    """What trainers of one process share."""

    store: Any = None
    connections: int = 0  # how many were made: each has keys of its own in the store
    owner: bool = False
    engines: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # those that hold parts of the group
    meshes: dict[Any, DeviceMesh] = field(default_factory=dict)


_process = _Process()


class Connection:
    """This process as one of several: what they agree on through a store, and the process group.

    Attributes:
        place: This process's numbers.
        store: Keys and values that every rank sees; those of this connection only.
    """

    def __init__(self, place: Place, store: Any) -> None:
        self.place = place
        self.store = store
        self._asked = 0

    def agree(self, key: str, value: str) -> str:
        """Return rank 0's ``value``; every rank must call it, with the same keys in the same order."""
        key = self._next("agree", key)
        if self.place.rank == 0:
            self.store.set(key, value)
            return value
        return self._read(key, 0)

    def gather(self, key: str, value: str) -> list[str]:
        """Return every rank's ``value`` in the order of ranks; every rank must call it."""
        key = self._next("gather", key)
        ranks = range(self.place.world_size)
        self.store.set(f"{key}/{self.place.rank}", value)
        found = [self._read(f"{key}/{rank}", rank) for rank in ranks]
        self.store.set(f"{key}/read/{self.place.rank}", "")
        if self.place.rank == 0:  # the store may be in this process: it must not end before all have read
            for rank in ranks:
                self._read(f"{key}/read/{rank}", rank)
        return found

    def _read(self, key: str, rank: int) -> str:
        """Return what ``rank`` has set.

        Raises:
            ParallelismError: it does not come.
        """
        try:
            return str(self.store.get(key).decode())
        except RuntimeError as error:  # torch's network errors are RuntimeErrors
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ParallelismError(
                f"parallelism: rank {self.place.rank} waits for rank {rank}, which does not answer: it has ended, or does "
                f"something else. Look at its own output, and start all ranks with the same script. ({first})"
            ) from error

    def _next(self, kind: str, key: str) -> str:
        self._asked += 1
        return f"{kind}/{self._asked}/{key}"


def connect(place: Place, device: torch.device, timeout_s: float) -> Connection:
    """Join the other processes; a second trainer of a process uses the group that is there.

    The group stays until the process ends: torch keeps what it worked out about a mesh, with the group in it, for every later
    mesh of the same shape.

    Args:
        place: This process.
        device: This rank's; decides which communication library carries its tensors.
        timeout_s: How long to wait for the others, now and in every collective.

    Raises:
        ParallelismError: the others cannot be reached, or there are other processes than there should be.
    """
    if dist.is_initialized():
        if dist.get_world_size() != place.world_size or dist.get_rank() != place.rank:
            raise ParallelismError(
                f"parallelism: a process group of rank {dist.get_rank()} of {dist.get_world_size()} exists already, and the "
                f"environment says rank {place.rank} of {place.world_size}. Leave making it to the trainer."
            )
        _process.store = _process.store or dist.distributed_c10d._get_default_store()
        return Connection(place, _next_store())
    if _process.store is None:
        _process.store = _open_store(place, timeout_s)
    store = _next_store()
    _wait_for_all(place, store, timeout_s)
    _make_group(place, device, store, timeout_s + COLLECTIVE_MARGIN_S)
    return Connection(place, store)


def close_at_exit(engine: Any) -> None:
    """Let ``engine`` be closed, if it still exists, before the group is destroyed at the end of the process."""
    _process.engines.add(engine)


def agree_early(place: Place, key: str, value: str, timeout_s: float = 300.0) -> str:
    """Return rank 0's ``value`` before there is a trainer; each key once in a process.

    Raises:
        ParallelismError: rank 0 cannot be reached.
    """
    if _process.store is None:
        _process.store = _open_store(place, timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = _stores.PrefixStore(f"kernel/{restart}/early", _process.store)
    if place.rank == 0:
        store.set(key, value)
        return value
    return str(store.get(key).decode())


def _next_store() -> Any:
    """Return a part of the store that no other trainer of this process, and no start before, has written to."""
    _process.connections += 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _stores.PrefixStore(f"kernel/{restart}/{_process.connections}", _process.store)


def _make_group(place: Place, device: torch.device, store: Any, timeout_s: float) -> None:
    excepthook = sys.excepthook
    dist.init_process_group(
        _backend(device),
        store=_stores.PrefixStore("group", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    if _process.owner:
        sys.excepthook = excepthook  # torch puts the rank before each line, once more each time
    else:
        atexit.register(_leave)
    _process.owner = True
    _process.meshes.clear()


def _backend(device: torch.device) -> str:
    """Return gloo for tensors on the host, and for those on an accelerator what torch has for it beside it.

    Raises:
        ParallelismError: torch has nothing for this device.
    """
    if device.type == "cpu":
        return "gloo"
    backend = dist.get_default_backend_for_device(device)
    if not backend or backend == "gloo":
        raise ParallelismError(
            f"parallelism: torch has no communication between processes for {device.type}. Expected cpu, cuda or xpu. "
            "Train in one process there, or use device='cpu'."
        )
    return f"cpu:gloo,{device.type}:{backend}"


def _open_store(place: Place, timeout_s: float) -> Any:
    if place.world_size == 1 and "MASTER_ADDR" not in os.environ:
        return _stores.HashStore()
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or not port.isdigit():
        raise ParallelismError(
            f"parallelism: {place.world_size} processes were started, and MASTER_ADDR={address!r}, MASTER_PORT={port!r}. "
            "Expected the address and port where rank 0 can be reached. Start with kernel launch or torchrun, which set them."
        )
    serves = place.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return _stores.TCPStore(
            address, int(port), is_master=serves, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except (RuntimeError, ValueError) as error:  # torch's network errors are RuntimeErrors
        if serves and "EADDRINUSE" in str(error):
            raise ParallelismError(
                f"parallelism: port {port} of {address} is taken. Expected a free one. Set MASTER_PORT to another, the same "
                "for all ranks, or let the launcher choose."
            ) from error
        raise ParallelismError(
            f"parallelism: rank {place.rank} cannot reach rank 0 at {address}:{port} within {timeout_s:g} s. Check that rank 0 "
            "runs, that the name leads to its machine from here, that all ranks have the same port, and that no firewall "
            f"closes it. ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error


def _wait_for_all(place: Place, store: Any, timeout_s: float) -> None:
    """Make sure that every rank is there, and of one mind about how many there are.

    Raises:
        ParallelismError: names the ranks that are missing.
    """
    store.set(f"here/{place.rank}", str(place.world_size))
    names = [f"here/{rank}" for rank in range(place.world_size)]
    try:
        store.wait(names, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise ParallelismError(
            f"parallelism: {place.world_size} processes were announced, and after {timeout_s:g} s rank {', '.join(missing)} "
            "is missing. Look at that rank's own output: it may have failed before its trainer was made, or have another "
            "MASTER_ADDR, MASTER_PORT or WORLD_SIZE. dist_timeout=<seconds> waits longer."
        ) from error
    worlds = {int(store.get(name)) for name in names}
    if worlds != {place.world_size}:
        raise ParallelismError(
            f"parallelism: the ranks disagree about WORLD_SIZE: {', '.join(map(str, sorted(worlds)))}. "
            "Expected one number. Start all of them with the same."
        )


def _leave() -> None:
    """Destroy the group if it is ours and still there; at the end of the process.

    Threads of gloo that outlive Python abort the process. They end with the group, which lives as long as anything holds it.
    """
    if not _process.owner or not dist.is_initialized():
        return
    for engine in list(_process.engines):
        engine.close()
    gc.collect()
    dist.destroy_process_group()


def place_device(place: Place, device: torch.device) -> torch.device:
    """Return this rank's own device: on a machine with several accelerators the one of its local rank.

    Raises:
        TrainerError: there are more ranks on this machine than accelerators.
    """
    if device.type in ("cpu", "meta") or device.index is not None:
        return device
    count = torch.accelerator.device_count()
    if place.local_rank >= count:
        raise TrainerError(
            f"device: local rank {place.local_rank} needs {device.type}:{place.local_rank}, and this machine has {count} of "
            f"them. Start at most {count} processes on it, or use device='cpu'."
        )
    torch.accelerator.set_device_index(place.local_rank)
    return torch.device(device.type, place.local_rank)


def make_mesh(device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of ``axes``, the same one to every trainer of the process; a collective."""
    key = (device_type, tuple(axes.items()))
    if key not in _process.meshes:
        shape, names = tuple(axes.values()), tuple(axes)
        _process.meshes[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _process.meshes[key]


def broadcast_from_first(tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the values of rank 0, in place."""
    works = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors if tensor.numel()]
    for work in works:
        work.wait()
