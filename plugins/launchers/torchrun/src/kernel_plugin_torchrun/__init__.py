"""Start a training script on several processes and machines, on torchrun's elastic agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_plugin_torchrun.launcher import TorchrunLauncher

__all__ = ["TorchrunLauncher"]


def __getattr__(name: str) -> Any:
    if name == "TorchrunLauncher":  # late: each rank imports this package, and needs no launcher
        from kernel_plugin_torchrun.launcher import TorchrunLauncher

        return TorchrunLauncher
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
