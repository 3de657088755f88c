"""Fully sharded data parallel: parameters, gradients and optimizer state are shared out among the ranks."""

from kernel_plugin_fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
