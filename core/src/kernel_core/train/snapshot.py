"""What a try of a batch may have changed when memory ran out, kept so that it can be undone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kernel_core.registry.base import Plugin
from kernel_core.train.randomness import capture_randomness
from kernel_core.train.state import State


def is_out_of_memory(error: BaseException) -> bool:
    """Say by the type of ``error``, not its text, whether the device ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return (
        isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == 2
    )  # cudaErrorMemoryAllocation


class Snapshot:
    """Buffers, metrics, plugin state, global randomness and the batch as they are now.

    Copies of tensors on an accelerator go to the host: there is no memory to spare where it ran out.

    Args:
        state: The run.
        metrics: What the try updates.
        weights: Take parameters and optimizer state too, for a step that may fail half-way.
    """

    def __init__(self, state: State, metrics: dict[str, Any], weights: bool = False) -> None:
        self._state, self._metrics = state, metrics
        # by name: a module may put a new tensor in the place of a buffer
        self._buffers = {name: _value(buffer) for name, buffer in state.model.named_buffers()}
        self._weights = [(weight, _value(weight)) for weight in state.model.parameters()] if weights else []
        self._optimizers = [(one, _hold(one.state_dict())) for one in state.optimizers] if weights else []
        self._kept_metrics = copy.deepcopy(metrics)
        self._batch = _hold(state.batch)
        plugins = [one.plugin for one in state.plan.plugins if type(one.plugin).state_dict is not Plugin.state_dict]
        self._plugins = [(plugin, _hold(plugin.state_dict())) for plugin in plugins]
        self._evaluation = state.evaluation
        self._randomness = capture_randomness()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. May be called again after another failed try."""
        state = self._state
        for name, buffer in state.model.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])
        for weight, value in self._weights:
            weight.copy_(value)
        for optimizer, held in self._optimizers:
            optimizer.load_state_dict(_given_back(held))
        self._metrics.update(copy.deepcopy(self._kept_metrics))
        for plugin, held in self._plugins:
            plugin.load_state_dict(_given_back(held))
        state.batch, state.outputs, state.loss = _given_back(self._batch), None, None
        state.loss_parts, state.latest_parts, state.evaluation = {}, {}, self._evaluation
        for parameter in state.model.parameters():
            parameter.grad = None
        self._randomness()


class _Held:
    """A tensor's value, and where it goes back to."""

    def __init__(self, tensor: Tensor) -> None:
        self.value, self.device, self.requires_grad = _value(tensor), tensor.device, tensor.requires_grad

    def give_back(self) -> Tensor:
        return self.value.to(self.device, copy=True).requires_grad_(self.requires_grad)


def _value(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()


def _hold(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Held(value)
    if type(value) is dict:
        return {key: _hold(item) for key, item in value.items()}
    return type(value)(map(_hold, value)) if type(value) in (list, tuple) else copy.deepcopy(value)


def _given_back(value: Any) -> Any:
    if isinstance(value, _Held):
        return value.give_back()
    if type(value) is dict:
        return {key: _given_back(item) for key, item in value.items()}
    return type(value)(map(_given_back, value)) if type(value) in (list, tuple) else copy.deepcopy(value)
