"""The arithmetic of mixup: what is drawn, and how inputs, targets and losses are blended."""

from __future__ import annotations

import random
from typing import Any

import torch
from kernel_core.errors import DataError
from torch import Tensor, nn


def mixup_batch(
    input: Tensor,
    target: Tensor,
    mixing: float | None = None,
    alpha: float = 0.2,
    indices: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, float]:
    """Blend each sample with another one of the batch: ``(1 - mixing) * x + mixing * x[indices]``.

    Args:
        input: (N, ...), floating point; left as it is.
        target: (N, ...).
        mixing: The other sample's share; None draws it, see ``sample_mixing``.
        alpha: Parameter of the Beta distribution, at least 0; not used when ``mixing`` is given.
        indices: (N,), the partner of each sample; None draws a permutation.
        generator: Where the draws come from; None is torch's global generator. One on an accelerator costs a device
            sync when ``mixing`` has to be drawn.

    Returns:
        The blended input, the targets of the partners (N, ...), and the share of the partners.

    Raises:
        DataError: the input is not a single floating-point tensor, or the target not a single tensor.

    Example:
        >>> x, y = torch.rand(8, 3), torch.arange(8)
        >>> mixed, partners, mixing = mixup_batch(x, y, alpha=0.2)
    """
    check_tensor("target", target)
    if mixing is None:
        device = "cpu" if generator is None else generator.device
        mixing = sample_mixing(alpha, int(torch.randint(2**63 - 1, (), generator=generator, device=device)))
    if indices is None:
        indices = sample_indices(input, generator)
    return blend(input, mixing, indices), target[indices], mixing


def sample_mixing(alpha: float, seed: int) -> float:
    """Return ``min(λ, 1 - λ)`` with λ ~ Beta(alpha, alpha), in [0, 0.5]: each sample stays the larger part of its blend.

    Drawn on the host in double precision, so that no device is waited for, every device gets the same number and a
    small ``alpha`` does not end in 0 / 0. ``alpha`` 0 gives 0.
    """
    if alpha == 0:
        return 0.0
    share = random.Random(seed).betavariate(alpha, alpha)
    return min(share, 1 - share)


def sample_indices(input: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return a random permutation (N,) of the rows of ``input``, on its device."""
    check_tensor("input", input)
    device = input.device if generator is None else generator.device
    return torch.randperm(input.shape[0], generator=generator, device=device).to(input.device, non_blocking=True)


def blend(tensor: Tensor, mixing: float, indices: Tensor) -> Tensor:
    """Return ``(1 - mixing) * tensor + mixing * tensor[indices]`` as a new tensor (N, ...)."""
    check_tensor("input", tensor)
    if not tensor.is_floating_point():
        raise DataError(
            f"mixup: the input is a tensor of {tensor.dtype}. Expected floating point, which can be blended. Convert it "
            "before, in the dataset or with DataSpec(microbatch_transforms=...)."
        )
    return torch.lerp(tensor, tensor[indices], mixing)


def dense_targets(target: Tensor, outputs: Any) -> Tensor:
    """Return floating-point targets that can be blended; class numbers become one-hot.

    Args:
        target: Class numbers (N, ...); or targets that are dense already, which come back as they are.
        outputs: The model's scores, which tell the number of classes: (N, K, ...), else (N, ..., K).

    Returns:
        Targets of the shape of ``outputs``, in single precision or that of ``outputs`` if it is higher.

    Raises:
        DataError: the outputs do not tell the number of classes.
    """
    check_tensor("target", target)
    if target.is_floating_point():
        return target
    if not isinstance(outputs, Tensor):
        raise DataError(
            f"mixup: the targets are class numbers and the model's outputs are a {type(outputs).__name__}. Expected a "
            "tensor of scores, which tells the number of classes. Give one-hot targets, or use interpolate_loss=True."
        )
    dtype = torch.promote_types(outputs.dtype, torch.float32)  # half precision would round the shares
    if outputs.shape == target.shape:
        return target.to(dtype)
    dim = _class_dim(target.shape, outputs.shape)
    return nn.functional.one_hot(target.long(), outputs.shape[dim]).movedim(-1, dim).to(dtype)


def _class_dim(target: torch.Size, outputs: torch.Size) -> int:
    for dim in (1, -1):
        if len(outputs) == len(target) + 1 and target == (*outputs[:dim], *outputs[dim:][1:]):
            return dim
    raise DataError(
        f"mixup: targets of shape {tuple(target)} do not fit outputs of shape {tuple(outputs)}. Expected class numbers "
        "(N, ...) for scores (N, K, ...) or (N, ..., K). Give one-hot targets, or use interpolate_loss=True."
    )


def check_tensor(what: str, value: Any) -> None:
    """Refuse what is not one tensor with rows; ``what`` is ``input`` or ``target``."""
    if not isinstance(value, Tensor) or not value.ndim:
        found = "a scalar tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise DataError(
            f"mixup: the {what} is {found}. Expected one tensor with samples in dimension 0. Point {what}_key to it."
        )
