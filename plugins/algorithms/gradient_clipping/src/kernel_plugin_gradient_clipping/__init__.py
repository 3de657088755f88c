"""Clip gradients before the optimizer steps: by their norm, by value, or adaptively, unit by unit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from kernel_core import Algorithm, State, hookimpl
from kernel_core.errors import OptionError
from kernel_core.shards import local
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

    Parameters may be sharded (``DTensor``), for ``norm`` on one mesh; each rank calls it then.

    Returns:
        For ``norm`` the norm before clipping, a scalar on the device; else None.

    Raises:
        OptionError: the type is unknown.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if clipping_type == "norm":
        return nn.utils.clip_grad_norm_(parameters, clipping_threshold)
    if clipping_type == "value":
        _clip_values([local(parameter.grad) for parameter in parameters], clipping_threshold)
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

    Of sharded parameters (``DTensor``) each rank scales its part; it is a collective only where units are cut through.

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
        norm, gradient = _unit_norm(parameter.grad), local(parameter.grad)
        # units within bounds keep their gradient bit for bit
        gradient.copy_(torch.where(norm > allowed, gradient * (allowed / norm), gradient))


def _unit_norm(tensor: Tensor) -> Tensor:
    """Return the norm of each unit, also of one that is cut through, shaped to broadcast against this rank's part."""
    if tensor.ndim <= 1:
        return local(tensor).abs()
    norm: Any = torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.ndim)), keepdim=True)
    if not hasattr(norm, "to_local"):
        return norm  # type: ignore[no-any-return]
    from torch.distributed.tensor import Replicate  # half a second of imports: not for one process

    whole = [Replicate() if placement.is_partial() else placement for placement in norm.placements]
    return norm.redistribute(placements=whole).to_local()  # type: ignore[no-any-return]


@torch.no_grad()
def _clip_values(gradients: list[Tensor], bound: float) -> None:
    if gradients:  # torch's clip_grad_value_ refuses whole and sharded ones beside each other
        torch._foreach_clamp_min_(gradients, -bound)
        torch._foreach_clamp_max_(gradients, bound)


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
    neutral = {"clipping_type": "value", "clipping_threshold": 1e30}

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
