"""Residual blocks that are skipped at random."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

Method = Literal["block", "sample"]
PARTS = ("conv1", "bn1", "conv2", "bn2", "relu")


def is_residual(module: nn.Module) -> bool:
    """Return whether a module has the parts of a residual block as torchvision names them; ``conv3`` and ``bn3`` are optional."""
    return all(hasattr(module, name) for name in PARTS) and hasattr(module, "downsample")


def branch(block: Any, x: Tensor) -> Tensor:
    """Return what a residual block adds to its shortcut."""
    x = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    return block.bn3(block.conv3(block.relu(x))) if hasattr(block, "conv3") else x  # type: ignore[no-any-return]


def shortcut(block: Any, x: Tensor) -> Tensor:
    """Return what the branch is added to."""
    return x if block.downsample is None else block.downsample(x)  # type: ignore[no-any-return]


class StochasticBlock(nn.Module):
    """What a block becomes: its branch is left out in training with probability ``drop_rate``, and scaled in evaluation.

    What is left out is decided by whoever trains: ``dropped`` for the whole block, or ``seed`` for each sample; where both
    are None, torch's global generator decides.

    Attributes:
        drop_rate: The probability, now.
        method: Whether the block is left out for all samples at once, or for each by itself.
        dropped: Whether the block is left out in the present batch.
        seed: What the samples that are left out in the present microbatch are drawn with: the same each time it is computed.
    """

    drop_rate: float
    method: Method
    dropped: bool | None
    seed: int | None

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W), as the block did."""
        block: Any = self  # it has the parts of a residual block too, which no type knows
        if not self.training:
            added = branch(block, x) * (1 - self.drop_rate)
        elif self.method == "sample":
            added = branch(block, x) * self._kept(x)
        elif self._is_dropped():
            added = _nothing(self)
        else:
            added = branch(block, x)
        return block.relu(added + shortcut(block, x))  # type: ignore[no-any-return]

    def _is_dropped(self) -> bool:
        return bool(torch.rand(()) < self.drop_rate) if self.dropped is None else self.dropped

    def _kept(self, x: Tensor) -> Tensor:
        generator = None if self.seed is None else torch.Generator(x.device).manual_seed(self.seed)
        draws = torch.rand(x.shape[0], 1, 1, 1, device=x.device, generator=generator)
        return (draws >= self.drop_rate).to(x.dtype)


def _nothing(block: nn.Module) -> Tensor:
    """Return 0, with a gradient for every parameter, which is zero: engines wait for all of them."""
    return 0.0 * torch.stack([one.sum() for one in block.parameters() if one.requires_grad]).sum()


@cache
def stochastic_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a block of class ``cls`` gets: its parameters keep their names."""
    return type(f"Stochastic{cls.__name__}", (StochasticBlock, cls), {})


def make_stochastic(block: nn.Module, drop_rate: float, method: Method) -> None:
    """Let a residual block be skipped at random, in place."""
    target: Any = block
    target.__class__ = stochastic_class(type(block))  # type: ignore[arg-type]
    target.drop_rate, target.method, target.dropped, target.seed = drop_rate, method, None, None
