"""Clip gradients before the optimizer steps: by their norm, by value, or adaptively, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from kernel_core import Algorithm, State, hookimpl
from kernel_core.errors import OptionError
from pydantic import Field
from torch import Tensor, nn

__all__ = ["GradientClipping", "adaptive_clip_grad", "apply_gradient_clipping"]

ClippingType = Literal["norm", "value", "adaptive"]
MIN_UNIT_NORM = 1e-3  # the paper's floor, so that weights that start at zero can leave it


def apply_gradient_clipping(
    model: nn.Module, clipping_type: ClippingType = "norm", clipping_threshold: float = 1.0
) -> Tensor | None:
    """Clip the gradients of ``model`` in place.

    Args:
        model: Its parameters' ``grad`` are read and scaled.
        clipping_type: ``norm``: the norm of all gradients together is at most the threshold. ``value``: each entry is
            within plus or minus the threshold. ``adaptive``: see ``adaptive_clip_grad``.
        clipping_threshold: Greater than zero.

    Returns:
        For ``norm`` the norm before clipping, a scalar on the device; else None.

    Raises:
        OptionError: the type is unknown.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if clipping_type == "norm":
        return nn.utils.clip_grad_norm_(parameters, clipping_threshold)
    if clipping_type == "value":
        nn.utils.clip_grad_value_(parameters, clipping_threshold)
    elif clipping_type == "adaptive":
        adaptive_clip_grad(parameters, clipping_threshold)
    else:
        raise OptionError(
            f"gradient_clipping.clipping_type: got {clipping_type!r}, expected 'norm', 'value' or 'adaptive'."
        )
    return None


@torch.no_grad()
def adaptive_clip_grad(
    parameters: Iterable[nn.Parameter], clipping_threshold: float, min_unit_norm: float = MIN_UNIT_NORM
) -> None:
    """Scale the gradient of each unit so that its norm is at most ``clipping_threshold`` times that of its weights.

    A unit is a row of a matrix or a filter of a convolution: everything with one index in dimension 0. Biases and
    gains, with one dimension, and scalars are one unit per entry.

    Args:
        parameters: Those without gradient are passed over.
        clipping_threshold: The largest ratio of gradient norm to weight norm.
        min_unit_norm: Weight norms count as at least this, so that zero weights are not frozen.

    Source: Brock, De, Smith, Simonyan, High-Performance Large-Scale Image Recognition Without Normalization, 2021,
        section 4.
    """
    for parameter in parameters:
        if parameter.grad is None:
            continue
        allowed = _unit_norm(parameter).clamp_min(min_unit_norm) * clipping_threshold
        norm = _unit_norm(parameter.grad)
        # units within bounds keep their gradient bit for bit
        parameter.grad.copy_(torch.where(norm > allowed, parameter.grad * (allowed / norm), parameter.grad))


def _unit_norm(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, shaped to broadcast against ``tensor``."""
    if tensor.ndim <= 1:
        return tensor.abs()
    norm: Tensor = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)
    return norm


class GradientClipping(Algorithm):
    """Clip gradients when those of the batch are complete, before the optimizer steps.

    Args:
        clipping_type: ``norm``, ``value`` or ``adaptive``.
        clipping_threshold: The bound; for ``adaptive`` the paper uses 0.01 to 0.16.

    Source: Pascanu, Mikolov, Bengio, On the difficulty of training recurrent neural networks, 2013, section 3.2 (norm);
        Brock et al. 2021, section 4 (adaptive).
    """

    roles = {"clips-gradients"}
    after = {"role:scales-gradients"}

    def __init__(
        self, clipping_type: ClippingType = "norm", clipping_threshold: Annotated[float, Field(gt=0)] = 1.0
    ) -> None:
        self.clipping_type: ClippingType = clipping_type
        self.clipping_threshold = clipping_threshold

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Clip; the norm over the whole model, however it is sharded, is the engine's business."""
        if self.clipping_type == "norm":
            state.engine.clip_grad_norm(state.model.parameters(), self.clipping_threshold)
        else:
            apply_gradient_clipping(state.model, self.clipping_type, self.clipping_threshold)
