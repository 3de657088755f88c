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
        weights: Take parameters and optimizer state too, for a step that may fail half-way.
    """

    def __init__(self, state: State, metrics: dict[str, Any], weights: bool = False) -> None:
        self._state, self._metrics = state, metrics
        model = state.model
        tensors = [*model.buffers(), *(model.parameters() if weights else ())]
        self._tensors = [(tensor, _kept(tensor)) for tensor in tensors]
        self._optimizers = (
            [(optimizer, _hold(optimizer.state_dict())) for optimizer in state.optimizers] if weights else []
        )
        self._kept_metrics = copy.deepcopy(metrics)
        self._batch = state.batch
        self._kept_batch = copy.deepcopy(state.batch)
        plugins = [one.plugin for one in state.plan.plugins if type(one.plugin).state_dict is not Plugin.state_dict]
        self._plugins = [(plugin, _hold(plugin.state_dict())) for plugin in plugins]
        self._evaluation = state.evaluation
        self._randomness = capture_randomness()

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. May be called again after another failed try."""
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        for optimizer, kept_state in self._optimizers:
            optimizer.load_state_dict(_given_back(kept_state))
        self._metrics.update(copy.deepcopy(self._kept_metrics))
        for plugin, plugin_state in self._plugins:
            plugin.load_state_dict(_given_back(plugin_state))
        self._state.batch = copy.deepcopy(self._kept_batch)
        self._state.outputs = self._state.loss = None
        self._state.evaluation = self._evaluation
        for parameter in self._state.model.parameters():
            parameter.grad = None
        self._randomness()


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if tensor.device.type == "cpu" else tensor.detach().cpu()


class _Held:
    """A tensor's value, and the device it goes back to."""

    def __init__(self, tensor: Tensor) -> None:
        self.value, self.device = _kept(tensor), tensor.device


def _hold(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Held(value)
    if isinstance(value, dict):
        return {key: _hold(item) for key, item in value.items()}
    return type(value)(map(_hold, value)) if type(value) in (list, tuple) else copy.deepcopy(value)


def _given_back(value: Any) -> Any:
    if isinstance(value, _Held):
        return value.value.to(value.device, copy=True)
    if isinstance(value, dict):
        return {key: _given_back(item) for key, item in value.items()}
    return type(value)(map(_given_back, value)) if type(value) in (list, tuple) else copy.deepcopy(value)
