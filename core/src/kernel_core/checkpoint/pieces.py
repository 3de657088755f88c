"""From tensors to the pieces of them that this rank writes. No rank asks another: all work it out from what they hold alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_core.checkpoint.safetensors_file import NAME_OF_DTYPE
from kernel_core.errors import CheckpointMismatchError, UnsavableError
from kernel_core.shards import local

SPREAD_BYTES = 1 << 16  # smaller tensors that all ranks hold alike are rank 0's
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where a piece begins in the whole tensor, and its shape


@dataclass(frozen=True)
class Piece:
    """What one rank writes of one tensor.

    Attributes:
        name: The name of the whole tensor.
        tensor: The values, on any device; what it is shared with may change once ``stage`` has copied it.
        shape: The shape of the whole tensor.
        offset: Where the piece begins in it.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return tuple(self.tensor.shape) == self.shape


def check_savable(tensor: Tensor, name: str) -> None:
    """Refuse what has no place in a file of plain numbers.

    Raises:
        UnsavableError: names the tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise UnsavableError(
            f"{name}: is a {kind} tensor. Expected a dense one. Save its parts, such as indices and values."
        )
    if tensor.dtype not in NAME_OF_DTYPE:
        raise UnsavableError(f"{name}: has dtype {tensor.dtype}. Expected one of {', '.join(NAME_OF_DTYPE.values())}.")
    if name == "__metadata__" or (not name.isascii() and name.encode(errors="ignore").decode() != name):
        raise UnsavableError(
            f"{name!r}: is no name for a tensor in a safetensors file. Expected valid Unicode. Rename it."
        )
    if tensor.is_meta:
        raise UnsavableError(f"{name}: is on the meta device and has no values. Materialise it first.")


def pieces_of(tensors: Mapping[str, Tensor], rank: int, world_size: int, spread: bool) -> list[Piece]:
    """Return what this rank writes of ``tensors``, which every rank has under the same names.

    Of a sharded tensor each rank writes its shards; where several hold the same shard, the first of them. Of a tensor that
    all hold alike, one rank writes all.

    Args:
        tensors: By name, sharded ones as DTensor.
        rank, world_size: This process among all.
        spread: Whether large tensors that all hold alike are shared out; else rank 0 writes them.

    Raises:
        UnsavableError: a tensor cannot be expressed.
    """
    found: list[Piece] = []
    alike: list[tuple[str, Tensor]] = []
    firsts: dict[Any, bool] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "device_mesh") and tensor.numel():
            mesh = tensor.device_mesh
            if mesh not in firsts:
                firsts[mesh] = _is_first(mesh)
            found += _shards(name, tensor) if firsts[mesh] else []
            continue
        is_empty = hasattr(tensor, "device_mesh") and not tensor.numel()  # of which a rank holds another shape
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype) if is_empty else local(tensor)
        check_savable(tensor, name)
        alike.append((name, tensor))
    owners = _owners([(name, tensor.nbytes) for name, tensor in alike], world_size if spread else 1)
    return found + [
        Piece(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim) for name, tensor in alike if owners[name] == rank
    ]


def _owners(sizes: Iterable[tuple[str, int]], world_size: int) -> dict[str, int]:
    """Share out tensors so that every rank writes about as much; the largest first, ties by name."""
    loads, owners = [0] * world_size, {}
    for name, size in sorted(sizes, key=lambda one: (-one[1], one[0])):
        owner = loads.index(min(loads)) if size >= SPREAD_BYTES else 0
        owners[name] = owner
        loads[owner] += size
    return owners


def _shards(name: str, tensor: Any) -> list[Piece]:
    """Return this rank's shards of a DTensor, none if another rank that holds the same ones writes them."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return []
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UnsavableError(
                f"{name}: is a sum that the ranks have not added up yet. Expected a sharded or whole tensor."
            )
        if placement.is_replicate() and coordinate[dim] and mesh.size(dim) > 1:
            return []
    local = tensor.to_local()
    check_savable(local, name)
    # the protocol of torch's checkpoints: it knows every kind of shard, the strided ones of two meshes too
    chunks = [chunk for chunk in tensor.__create_chunk_list__() if all(size > 0 for size in chunk.sizes)]
    if len(chunks) > 1 or _is_scattered(tensor):
        raise UnsavableError(
            f"{name}: is sharded in a way that leaves a rank several separate pieces ({tensor.placements}). Expected one "
            "piece. Shard by rows that lie together, or give tensors sizes that the mesh divides."
        )
    return [Piece(name, local, tuple(tensor.shape), tuple(chunk.offsets)) for chunk in chunks]


def _is_first(mesh: Any) -> bool:
    """Say whether this rank's part of a larger mesh is the first: the others hold the same, such as what is sharded along
    one axis only in a run that has two.
    """
    root = mesh._get_root_mesh()
    here = root.get_coordinate()
    if root is mesh or here is None:
        return True
    members = torch.isin(root.mesh, mesh.mesh).nonzero()
    return all(one == 0 or bool((members[:, axis] != members[0, axis]).any()) for axis, one in enumerate(here))


def _is_scattered(tensor: Any) -> bool:
    """Say whether this rank's rows of a strided shard do not lie together; torch tells only where the first one is."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    for axis in {one.dim for one in tensor.placements if hasattr(one, "split_factor")}:
        rows = torch.arange(tensor.shape[axis])
        for dim, placement in enumerate(tensor.placements):
            if getattr(placement, "dim", None) == axis:
                groups = rows.chunk(getattr(placement, "split_factor", 1))
                parts = [group.chunk(mesh.size(dim))[coordinate[dim] :][:1] for group in groups]
                rows = torch.cat([rows[:0], *(one for part in parts for one in part)])
        if len(rows) and int(rows[-1] - rows[0]) + 1 != len(rows):
            return True
    return False


def box_of(target: Tensor) -> tuple[Tensor, Box] | None:
    """Return the local tensor of ``target`` and where it lies in the whole; None if this rank has none of it."""
    if not hasattr(target, "device_mesh"):
        return target, ((0,) * target.ndim, tuple(target.shape))
    sharded: Any = target
    local = sharded.to_local()
    chunks = [chunk for chunk in sharded.__create_chunk_list__() if all(size > 0 for size in chunk.sizes)]
    if not chunks:
        return None
    if len(chunks) > 1 or _is_scattered(sharded):
        raise CheckpointMismatchError(
            f"a tensor of shape {list(target.shape)} is sharded in a way that leaves a rank several separate pieces "
            f"({sharded.placements}). Expected one piece. Shard by rows that lie together."
        )
    return local, (tuple(chunks[0].offsets), tuple(chunks[0].sizes))


def overlap(a: Box, b: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes meet, as slices of each; None if they do not."""
    in_a, in_b = [], []
    for a_start, a_size, b_start, b_size in zip(a[0], a[1], b[0], b[1], strict=True):
        start, end = max(a_start, b_start), min(a_start + a_size, b_start + b_size)
        if start >= end:
            return None
        in_a.append(slice(start - a_start, end - a_start))
        in_b.append(slice(start - b_start, end - b_start))
    return tuple(in_a), tuple(in_b)
