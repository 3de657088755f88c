"""The values that transformers gives the modules of a model that was built on the meta device, one module at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

DONE = "_is_hf_initialized"  # transformers' own mark of a tensor that its initialisation leaves alone


class InitialValues:
    """Initialises modules as ``initialize_weights`` of transformers does, in any order and while others are on meta.

    Args:
        model: A transformers model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._around: dict[int, list[nn.Module]] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module) -> None:
        """Give the tensors of ``module`` itself, which are no longer on meta, their values.

        What a module around it says about them comes last, as the smaller weights at the end of each of GPT-2's residual
        branches; what that says about others is kept from them.
        """
        from transformers import PreTrainedModel, initialization

        around = self._modules_around(module)
        own = {id(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())}
        for tensor in (*self._model.parameters(), *self._model.buffers()):  # some may be sharded already
            setattr(tensor, DONE, id(tensor) not in own)
        with initialization.guard_torch_init_functions():
            for index, outer in enumerate(around):
                owner: Any = next((one for one in around[index:] if isinstance(one, PreTrainedModel)), self._model)
                owner._init_weights(outer)

    def _modules_around(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return ``module`` and those around it, the nearest first."""
        if id(module) not in self._around:
            self._around = {}
            self._note(self._model, [])
        return self._around.get(id(module), [module])

    def _note(self, module: nn.Module, around: list[nn.Module]) -> None:
        chain = [module, *around]
        self._around.setdefault(id(module), chain)
        for child in module.children():
            self._note(child, chain)
