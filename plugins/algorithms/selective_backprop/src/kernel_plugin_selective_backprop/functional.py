"""The arithmetic of selective backprop: when rows are selected, which, and how a batch is cut down to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from kernel_core.errors import DataError
from torch import Tensor, nn


def should_selective_backprop(
    current_duration: float, batch_idx: int, start: float = 0.5, end: float = 0.9, interrupt: int = 2
) -> bool:
    """Say whether the rows of a batch are to be selected.

    Args:
        current_duration: The share of training that has passed, in [0, 1].
        batch_idx: The batch's number in the epoch, from 0.
        start, end: Selection takes place from ``start`` on and before ``end``.
        interrupt: Every so many batches one is trained on whole; 0 for none.
    """
    return start <= current_duration < end and (interrupt == 0 or (batch_idx + 1) % interrupt != 0)


def select_using_loss(
    input: Tensor,
    target: Tensor,
    model: Callable[[Tensor], Any],
    loss_fun: Callable[..., Tensor],
    keep: float = 0.5,
    scale_factor: float = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the rows of ``input`` and ``target`` that ``select_indices`` chooses by their losses.

    Args:
        input: (N, ...).
        target: (N, ...).
        model: Maps inputs to outputs. A module runs in eval mode and comes back as it was.
        loss_fun: ``(outputs, target, reduction="none") -> losses`` (N, ...).
        keep: The share of rows to keep, in (0, 1].
        scale_factor: The losses are computed on inputs of (N, C, H, W) resized by this factor.
        generator: Where the draws come from; None is torch's global generator.

    Returns:
        Input and target of ``max(1, int(keep * N))`` rows, in their old order.

    Raises:
        DataError: the loss is not one per row, or the inputs cannot be resized.

    Example:
        >>> x, y = torch.rand(8, 3), torch.randint(5, (8,))
        >>> x, y = select_using_loss(x, y, nn.Linear(3, 5), nn.functional.cross_entropy, keep=0.5)
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    with torch.no_grad(), EvalMode(modules):
        losses = loss_fun(model(shrink(input, scale_factor)), target, reduction="none")
    indices = select_indices(loss_per_row(losses, input.shape[0]), keep, generator)
    return input[indices], target[indices]


def select_indices(losses: Tensor, keep: float, generator: torch.Generator | None = None) -> Tensor:
    """Draw ``max(1, int(keep * N))`` different rows, the next one each time with probability in proportion to its weight.

    The row whose loss is the r-th smallest of N, r from 0, has the percentile (r + 0.5) / N and the weight
    ``percentile ** (1 / keep - 1)``. No host-device sync.

    Args:
        losses: (N,).
        keep: The share of rows to keep, in (0, 1].
        generator: On the device of ``losses``; None is torch's global generator.

    Returns:
        Row numbers in increasing order, on the device of ``losses``.
    """
    num_rows = losses.shape[0]
    percentiles = (torch.arange(num_rows, device=losses.device) + 0.5) / num_rows
    # A race: with exponential times of rate w the first to arrive are a draw without replacement by weight w (Efraimidis
    # and Spirakis 2006). torch.multinomial does the same and waits for the device. Logarithms, for a weight may underflow.
    times = torch.empty(num_rows, device=losses.device).exponential_(generator=generator)
    arrivals = times.log() - (1 / keep - 1) * percentiles.log()
    first = arrivals.topk(max(1, int(keep * num_rows)), largest=False).indices
    return losses.argsort()[first].sort().values


def loss_per_row(losses: Any, num_rows: int) -> Tensor:
    """Return the mean over everything but rows: (N, ...) to (N,).

    Raises:
        DataError: ``losses`` is no tensor with N rows.
    """
    if not isinstance(losses, Tensor) or not losses.ndim or losses.shape[0] != num_rows:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"type {type(losses).__name__}"
        raise DataError(
            f"selective_backprop: the loss with reduction='none' has {found} for {num_rows} rows. Expected one loss per "
            f"row: a tensor of shape ({num_rows},) or ({num_rows}, ...). Pass reduction on to torch's loss function."
        )
    return losses.detach().float().reshape(num_rows, -1).mean(1)


def shrink(input: Tensor, scale_factor: float) -> Tensor:
    """Resize images (N, C, H, W) bilinearly; a factor of 1 returns ``input``.

    Raises:
        DataError: the input has another number of dimensions.
    """
    if scale_factor == 1:
        return input
    if input.ndim != 4:
        raise DataError(
            f"selective_backprop.scale_factor: got {scale_factor}, and inputs of shape {tuple(input.shape)}. Expected images "
            "(N, C, H, W), which can be resized. Leave scale_factor at 1."
        )
    return nn.functional.interpolate(input, scale_factor=scale_factor, mode="bilinear", align_corners=False)


def take_rows(batch: Any, rows: Tensor | slice, num_rows: int) -> Any:
    """Return ``batch`` with the given rows of everything in it that has ``num_rows`` of them.

    Tensors by their first dimension, inside mappings, tuples and lists; a list of one entry per row costs a device sync
    where ``rows`` is a tensor. Everything else stays.
    """
    on_host = cache(lambda: list(range(num_rows)[rows]) if isinstance(rows, slice) else rows.tolist())

    def take(part: Any, nested: bool = True) -> Any:
        if isinstance(part, Tensor):
            return part[rows] if part.ndim and part.shape[0] == num_rows else part
        if isinstance(part, Mapping):
            taken = {key: take(value) for key, value in part.items()}
            return taken if type(part) is dict else type(part)(taken)  # type: ignore[call-arg]
        if isinstance(part, tuple):
            items = [take(value) for value in part]
            return type(part)(*items) if hasattr(part, "_fields") else tuple(items)
        if isinstance(part, list):
            # as the kernel counts: a list inside the batch holds one entry per row, the batch itself its parts
            if nested and len(part) == num_rows:
                return [part[row] for row in on_host()]
            return [take(value) for value in part]
        return part

    return take(batch, nested=False)


class EvalMode:
    """Puts modules into eval mode for a block, and each back into the mode it was in.

    The flags are set directly: a module's own ``train`` may do more than set one, or refuse to.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self._training = [module for module in modules if module.training]

    def __enter__(self) -> None:
        for module in self._training:
            module.training = False

    def __exit__(self, *error: object) -> None:
        for module in self._training:
            module.training = True
