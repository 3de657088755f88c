"""The arithmetic of the average: tensors by name beside a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from kernel_core import Time
from kernel_core.errors import TrainerError
from kernel_core.shards import local
from torch import Tensor, nn

Tensors = Mapping[str, Tensor]
Model = TypeVar("Model", bound=nn.Module)


def smoothing_of(half_life: Time, update_interval: Time) -> float:
    """Return the smoothing with which a weight halves its share in the average after ``half_life``."""
    return float(2.0 ** -(update_interval.value / half_life.value))


def copy_averaged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return copies, by name, of what is averaged: the parameters and the persistent buffers of ``model``.

    Buffers that hold inf or NaN (a mask of -inf, say) are left out, since an average of theirs would be NaN; so are
    buffers that are not persistent, which a model can compute anew. One device sync for each floating-point buffer.
    """
    transient = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, buffer in model.named_buffers():
        if name not in transient and (not _is_averaged(buffer) or bool(buffer.isfinite().all())):
            found[name] = buffer.clone()
    return found


@torch.no_grad()
def compute_ema(model: nn.Module, ema_model: nn.Module | Tensors, smoothing: float = 0.99) -> None:
    """Move the average in place towards the weights of ``model``: ``smoothing * average + (1 - smoothing) * weight``.

    No host-device sync. Of sharded tensors (``DTensor``) each rank moves its part, without communication.

    Args:
        model: The model in training; is only read.
        ema_model: The average: tensors by name (``copy_averaged_tensors``), or a copy of ``model``. Integer tensors in
            it, such as counters, are copied instead of averaged.
        smoothing: The share of the old average, from 0 (take the weights) to 1 (change nothing).

    Raises:
        TrainerError: a tensor of the average is not in ``model``.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992, for averaging; the
        exponential form as in Tarvainen and Valpola, Mean teachers are better role models, 2017, section 2.
    """
    tensors = _tensors_of(ema_model) if isinstance(ema_model, nn.Module) else ema_model
    averages, weights = _paired(model, tensors)
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for average, weight in zip(averages, weights, strict=True):
        ours, theirs = kinds.setdefault((average.dtype, average.device), ([], []))
        ours.append(local(average))
        theirs.append(local(weight))
    for ours, theirs in kinds.values():
        if _is_averaged(ours[0]):
            torch._foreach_lerp_(ours, theirs, 1 - smoothing)
        else:
            torch._foreach_copy_(ours, theirs)


@torch.no_grad()
def swap_weights(model: nn.Module, ema_tensors: Tensors) -> None:
    """Exchange the values of ``model`` and of the average, bit for bit. Parameters stay the same objects.

    Needs memory for one more copy of the weights while it runs.
    """
    averages, weights = _paired(model, ema_tensors)
    ours, theirs = [local(average) for average in averages], [local(weight) for weight in weights]
    held = [torch.empty_like(weight) for weight in theirs]  # first, so that running out of memory changes nothing
    torch._foreach_copy_(held, theirs)
    torch._foreach_copy_(theirs, ours)
    torch._foreach_copy_(ours, held)


@torch.no_grad()
def get_ema_model(model: Model, ema_tensors: Tensors) -> Model:
    """Return a copy of ``model`` with the averaged weights; ``model`` is not changed.

    Raises:
        TrainerError: the model is sharded.
    """
    refuse_shards(model)
    averaged = copy.deepcopy(model)
    averages, weights = _paired(averaged, ema_tensors)
    torch._foreach_copy_(weights, averages)
    return averaged


def refuse_shards(model: nn.Module) -> None:
    """Refuse to copy a model of which each rank holds a part.

    Raises:
        TrainerError: it is such a model.
    """
    sharded = [name for name, parameter in model.named_parameters() if hasattr(parameter, "to_local")]
    if sharded:
        raise TrainerError(
            f"ema: cannot copy the model, since {sharded[0]} is sharded over the ranks. Expected whole parameters. Take the "
            "average tensor by tensor, on all ranks: state.engine.gather(tensor) for each of ema.ema_tensors.values()."
        )


def _is_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _paired(model: nn.Module, ema_tensors: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of the average, and those of the same names in ``model``."""
    current = _tensors_of(model)
    if unknown := [name for name in ema_tensors if name not in current]:
        raise TrainerError(
            f"ema: the average holds {unknown[0]}, which is not in the model. "
            "Expected tensors of the same names. Use the average with the model that it was made from."
        )
    return list(ema_tensors.values()), [current[name] for name in ema_tensors]


def placed_like(
    model: nn.Module,
    saved: Tensors,
    copy_into: Callable[[Tensor, Tensor], object] = lambda saved, own: own.copy_(saved),
) -> dict[str, Tensor]:
    """Return copies of ``saved`` with the device, dtype, memory format and shards of the model's tensors.

    Args:
        model: The model in training.
        saved: The average, whole or sharded like the model.
        copy_into: ``(saved, own)``: copies a tensor, or this rank's part of it.
    """
    saved_tensors, weights = _paired(model, saved)
    missing = [name for name, _ in model.named_parameters() if name not in saved]
    other = [name for name, weight in zip(saved, weights, strict=True) if weight.shape != saved[name].shape]
    if missing or other:
        problem = f"has no {missing[0]}" if missing else f"has another shape of {other[0]}"
        raise TrainerError(
            f"ema: the saved average {problem}. Expected a tensor for every parameter of the model, in its shape. "
            "Load it with the model that it was saved with."
        )
    with torch.no_grad():
        values = [torch.empty_like(weight) for weight in weights]
        for tensor, value in zip(saved_tensors, values, strict=True):
            copy_into(tensor, value)
    return dict(zip(saved, values, strict=True))
