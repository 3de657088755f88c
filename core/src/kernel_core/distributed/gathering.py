"""Tensors of every rank, whatever their shapes: what metrics put together before they compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
MAX_DIMS = 8


def gather_ragged(tensor: Tensor, group: Any = None) -> list[Tensor]:
    """Return the tensor of each rank of ``group``, in their order; hosts wait for one another and for their devices.

    torchmetrics has such a function, and a rank that has seen no sample breaks it: what it holds in the place of a list is
    empty and does not know the number of dimensions and the dtype of the others. Here it takes those of the first rank that
    has entries.
    """
    header = torch.tensor([DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape] + [0] * (MAX_DIMS - tensor.ndim))
    headers = [found.tolist() for found in _all_gather(header.to(tensor.device), group)]
    kinds = [(DTYPES[dtype], tuple(shape[:ndim])) for dtype, ndim, *shape in headers]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in kinds]  # in bytes
    sent = torch.zeros(max(sizes), dtype=torch.uint8, device=tensor.device)
    own = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    sent[: own.numel()] = own
    found = [
        part[:size].view(dtype).reshape(shape)
        for part, size, (dtype, shape) in zip(_all_gather(sent, group), sizes, kinds, strict=True)
    ]
    found[dist.get_rank(group)] = tensor  # with its graph
    model = next((part for part in found if part.numel()), tensor)
    return [part if part.numel() or not model.ndim else model.new_empty((0, *model.shape[1:])) for part in found]


def _all_gather(tensor: Tensor, group: Any) -> list[Tensor]:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group)
    return found
