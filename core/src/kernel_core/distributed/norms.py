"""Norms over tensors that may be sharded, on one mesh or on several, and gradients scaled by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kernel_core.shards import local


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all ``tensors`` together: one collective for each way in which some of them are sharded.

    torch's own function refuses tensors on different meshes, as fully sharded and tensor parallel layers beside each other
    have them.

    Returns:
        A plain scalar, the same on every rank.
    """
    kinds: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        kinds[(tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None].append(tensor)
    norms = []
    for kind, some in kinds.items():
        norm = torch.nn.utils.get_total_norm(some, norm_type)
        norms.append(norm.full_tensor() if kind is not None and isinstance(norm, DTensor) else norm)
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.tensor(0.0)


@torch.no_grad()
def clip_by_norm(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale ``gradients`` in place by ``max_norm / norm`` where that is below 1; no host-device sync."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    parts: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        parts[gradient.device].append(local(gradient))
    for device, some in parts.items():
        torch._foreach_mul_(some, factor.to(device))
