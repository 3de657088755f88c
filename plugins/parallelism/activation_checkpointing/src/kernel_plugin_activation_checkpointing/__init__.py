"""Trade compute for memory: recompute activations in the backward pass, or keep them on the host."""

from kernel_plugin_activation_checkpointing.plugin import ActivationCheckpointing, apply_activation_checkpointing
from kernel_plugin_activation_checkpointing.selection import select_modules

__all__ = ["ActivationCheckpointing", "apply_activation_checkpointing", "select_modules"]
