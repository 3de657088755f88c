"""What must be so before transformers, torchmetrics or peft is imported."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from kernel_core.errors import PluginLoadError


def prepare_imports() -> None:
    """Import torchvision where it is installed: transformers and torchmetrics do, and fail if it does not fit torch.

    kernel-plugin-torchvision knows how to import one that was built for another torch, so it is used if it is there.

    Raises:
        PluginLoadError: torchvision is installed, cannot be imported, and kernel-plugin-torchvision is missing.
    """
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    if importlib.util.find_spec("kernel_plugin_torchvision") is not None:
        importlib.import_module("kernel_plugin_torchvision.compat").import_torchvision()
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        raise PluginLoadError(
            f"huggingface: transformers imports torchvision, and the installed one does not fit this torch: {error}. "
            "Expected one that fits, or none. Install kernel-plugin-torchvision, which knows a way round it, or "
            "uninstall torchvision."
        ) from error
