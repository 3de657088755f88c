"""Residual blocks that are skipped at random."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

Method = Literal["block", "sample"]
PARTS = ("conv1", "bn1", "conv2", "bn2", "relu")


# --- which blocks ------------------------------------------------------------------------------------------------


def has_methods(module: nn.Module) -> bool:
    """Return whether the class of a module has the methods ``branch`` and ``shortcut``, each of which takes the input."""
    return all(callable(getattr(type(module), name, None)) for name in ("branch", "shortcut"))


def is_residual(module: nn.Module) -> bool:
    """Return whether a module has these methods, or the parts of a residual block as torchvision names them.

    Of the parts ``conv3`` and ``bn3`` are optional.
    """
    parts = all(hasattr(module, name) for name in PARTS) and hasattr(module, "downsample")
    return parts or has_methods(module)


# --- what they compute -------------------------------------------------------------------------------------------


def branch(block: Any, x: Tensor) -> Tensor:
    """Return what a residual block adds to its shortcut."""
    if has_methods(block):
        return block.branch(x)  # type: ignore[no-any-return]
    x = block.bn2(block.conv2(block.relu(block.bn1(block.conv1(x)))))
    return block.bn3(block.conv3(block.relu(x))) if hasattr(block, "conv3") else x  # type: ignore[no-any-return]


def shortcut(block: Any, x: Tensor) -> Tensor:
    """Return what the branch is added to."""
    if has_methods(block):
        return block.shortcut(x)  # type: ignore[no-any-return]
    return x if block.downsample is None else block.downsample(x)  # type: ignore[no-any-return]


def output(block: Any, added: Tensor) -> Tensor:
    """Return what a residual block makes of the sum: with methods of its own that is ``output``, if it has one."""
    if has_methods(block):
        return block.output(added) if callable(getattr(type(block), "output", None)) else added
    return block.relu(added)  # type: ignore[no-any-return]


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
        """Return what the block did, of the same shape."""
        if self.training and self.method == "block" and self._is_dropped():
            added = _nothing(self, x)
        elif self.training:
            added = self._kept(branch(self, x))
        else:
            added = branch(self, x) * (1 - self.drop_rate)
        return output(self, added + shortcut(self, x))

    def _is_dropped(self) -> bool:
        return bool(torch.rand(()) < self.drop_rate) if self.dropped is None else self.dropped

    def _kept(self, added: Tensor) -> Tensor:
        """Return the branch of the samples (B, ...) that it is there for, else zeros."""
        if self.method == "block":
            return added
        generator = None if self.seed is None else torch.Generator(added.device).manual_seed(self.seed)
        draws = torch.rand(added.shape[0], device=added.device, generator=generator)
        return added * (draws >= self.drop_rate).to(added.dtype).view(-1, *[1] * (added.ndim - 1))


def _nothing(block: nn.Module, x: Tensor) -> Tensor:
    """Return 0, with a gradient for every parameter, which is zero: engines wait for all of them.

    The sums are of no values, so that nothing is read, and weights that are infinite do no harm.
    """
    sums = [one.unsqueeze(0)[:0].sum() for one in block.parameters() if one.requires_grad]
    return torch.stack(sums).sum() if sums else x.new_zeros(())


@cache
def stochastic_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a block of class ``cls`` gets: its parameters keep their names."""
    return type(f"Stochastic{cls.__name__}", (StochasticBlock, cls), {})


def make_stochastic(block: nn.Module, drop_rate: float, method: Method) -> None:
    """Let a residual block be skipped at random, in place; one that is already gets these options."""
    target: Any = block
    if not isinstance(block, StochasticBlock):
        target.__class__ = stochastic_class(type(block))  # type: ignore[arg-type]
    target.drop_rate, target.method, target.dropped, target.seed = drop_rate, method, None, None
