"""Start a training script on several processes and machines, on torchrun's elastic agent."""

from kernel_plugin_torchrun.launcher import TorchrunLauncher

__all__ = ["TorchrunLauncher"]
