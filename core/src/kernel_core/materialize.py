"""From the meta device to real values: a model too large to be built whole gets them module by module.

Which values a module gets depends on the seed and its path alone, so neither the order nor the number of ranks changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernel_core.errors import SurgeryError
from kernel_core.train.randomness import forked_randomness


def is_meta(module: nn.Module) -> bool:
    """Say whether anything in ``module`` is on the meta device."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


class Materializer:
    """Gives the modules of one model that are on the meta device a place and initial values.

    A module is initialised by the ``param_init_fn(module)`` of the nearest module around it that has one, else by its own
    ``reset_parameters()``. Parameters that several modules share stay shared.

    Args:
        model: The whole model; paths and ``param_init_fn`` are found in it.
        device: Where the values go.
        seed: Of the run.
    """

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._device, self._seed = device, seed
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._initializers: dict[int, Callable[[nn.Module], Any]] = {}
        self._find_initializers(model, None)
        self._real: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # by id of the one on meta, which is kept so that no other gets it

    def _find_initializers(self, module: nn.Module, inherited: Callable[[nn.Module], Any] | None) -> None:
        own = getattr(module, "param_init_fn", inherited)
        if own is not None:
            self._initializers[id(module)] = own
        for child in module.children():
            self._find_initializers(child, own)

    def __call__(self, module: nn.Module) -> None:
        """Materialise ``module`` with all its submodules; does nothing where everything is real.

        Raises:
            SurgeryError: nobody says which values a module starts with.
        """
        for part in module.modules():
            if any(
                tensor.is_meta for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None
            ):
                self._materialize_one(part)

    def _materialize_one(self, module: nn.Module) -> None:
        path = self._paths.get(id(module), "")
        initialize = self._initializers.get(id(module)) or _own_initializer(module)
        if initialize is None:
            raise SurgeryError(
                f"model: {path or 'its root'} is a {type(module).__name__} on the meta device, and nothing says which values it "
                "starts with. Expected reset_parameters() of that class, or param_init_fn(module) on a module around it."
            )
        shared = {
            name: id(tensor) for name, tensor in module._parameters.items() if tensor is not None and tensor.is_meta
        }
        before = dict(module._parameters)
        module.to_empty(device=self._device, recurse=False)
        with forked_randomness(self._seed, "materialize", path), torch.no_grad():
            initialize(module)
        for name, key in shared.items():
            if key in self._real:
                module._parameters[name] = self._real[key][1]  # type: ignore[assignment]
            else:
                self._real[key] = before[name], module._parameters[name]  # type: ignore[assignment]


def _own_initializer(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    reset = getattr(type(module), "reset_parameters", None)
    return reset if callable(reset) else None
