"""The arithmetic: a mean of weights, a learning rate on its way, and statistics collected anew."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from kernel_core.shards import local
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Anneal = Literal["linear", "cos"]


@torch.no_grad()
def start_average(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters by name, in float32 or wider: a mean is more exact than its terms."""
    found = {}
    for name, parameter in model.named_parameters():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        found[name] = parameter.detach().to(wide, copy=True)
    return found


@torch.no_grad()
def add_to_average(average: dict[str, Tensor], model: nn.Module, count: int) -> None:
    """Move the mean of ``count`` models, in place, to that of ``count + 1``. Of sharded tensors each rank moves its part."""
    weights = dict(model.named_parameters())
    ours = [local(one) for one in average.values()]
    theirs = [local(weights[name]).to(one.dtype) for name, one in zip(average, ours, strict=True)]
    torch._foreach_lerp_(ours, theirs, 1 / (count + 1))


@torch.no_grad()
def take_average(model: nn.Module, average: dict[str, Tensor]) -> None:
    """Give the parameters of ``model`` the values of the mean."""
    weights = dict(model.named_parameters())
    for name, one in average.items():
        local(weights[name]).copy_(local(one))


def annealed(start: float, end: float, progress: float, strategy: Anneal) -> float:
    """Return the learning rate when the share ``progress`` of the way from ``start`` to ``end`` is done.

    >>> annealed(1.0, 0.5, 0.5, "linear"), annealed(1.0, 0.5, 2.0, "cos")
    (0.75, 0.5)
    """
    done = min(progress, 1.0)
    share = done if strategy == "linear" else (1 - math.cos(math.pi * done)) / 2
    return end * share + start * (1 - share)


def norms_of(model: nn.Module) -> Iterator[_BatchNorm]:
    """Yield the batch norms that keep statistics."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            yield module
