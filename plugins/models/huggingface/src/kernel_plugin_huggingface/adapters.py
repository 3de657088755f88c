"""LoRA adapters by way of peft, which is an optional requirement."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

from kernel_core.errors import OptionError, PluginLoadError


def import_peft() -> Any:
    """Import peft.

    Raises:
        PluginLoadError: it is not installed.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        raise PluginLoadError(
            f"huggingface.peft_config: adapters need the module {error.name!r}, which is not installed. "
            "Install it: pip install 'kernel-plugin-huggingface[peft]'."
        ) from error
    return peft


def is_peft_model(model: Any) -> bool:
    """Say whether ``model`` is one of peft's, without importing peft."""
    peft = sys.modules.get("peft")  # the model exists, so peft is there if it is one
    return peft is not None and isinstance(model, peft.PeftModel)


def add_adapters(model: Any, peft_config: Any) -> Any:
    """Freeze ``model`` and put trainable LoRA adapters into it.

    Args:
        model: A transformers model; it is changed.
        peft_config: A ``peft.LoraConfig`` or its arguments as a mapping.

    Returns:
        The peft model around it.

    Raises:
        OptionError: an argument is unknown, no module has a name among ``target_modules``, or it is not LoRA.
    """
    peft = import_peft()
    try:
        config = peft.LoraConfig(**peft_config) if isinstance(peft_config, Mapping) else peft_config
        if not isinstance(config, peft.LoraConfig):
            raise ValueError("LoRA is the only kind that is supported")
        return peft.get_peft_model(model, config)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"huggingface.peft_config: got {peft_config!r}: {error}. Expected a peft.LoraConfig or its arguments, such as "
            "r=8 and target_modules=['c_attn']."
        ) from error


def without_adapters(model: Any) -> Any:
    """Return a copy of the transformers model below the adapters, as it was before they were added."""
    return copy.deepcopy(model).unload()
