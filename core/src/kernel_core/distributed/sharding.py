"""From whole tensors to the parts that a rank holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def copy_part(whole: Tensor, target: Tensor) -> None:
    """Copy into ``target`` its own part of ``whole``; no communication. A sharded ``whole`` must be sharded alike."""
    if not isinstance(target, DTensor) or isinstance(whole, DTensor):
        target.copy_(whole)
        return
    local: Any = target.to_local()
    # the protocol of torch's checkpoints: it knows every kind of shard, the strided ones of two meshes too
    chunks: Any = target
    for chunk in chunks.__create_chunk_list__():
        window = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        local.copy_(whole[window])


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Return ``value`` sharded as ``parameter`` is if it is a whole tensor of its shape; else ``value`` itself."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if value.shape != parameter.shape:
        return value
    sharded = torch.zeros_like(parameter, dtype=value.dtype)
    copy_part(value, sharded)
    return sharded
