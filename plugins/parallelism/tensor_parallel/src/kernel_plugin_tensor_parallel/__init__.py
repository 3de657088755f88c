"""Split the layers themselves over several processes."""

from kernel_plugin_tensor_parallel.plans import resolve_plan
from kernel_plugin_tensor_parallel.plugin import TensorParallel, apply_tensor_parallel
from kernel_plugin_tensor_parallel.styles import STYLES

__all__ = ["STYLES", "TensorParallel", "apply_tensor_parallel", "resolve_plan"]
