"""Compute forward passes in 8-bit floating point with NVIDIA's Transformer Engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from kernel_core import Algorithm, State, hookimpl
from kernel_core.errors import OptionError, PluginLoadError

__all__ = ["FP8", "fp8_context"]

# Composer's settings: e4m3 forward, e5m2 backward, scales from the largest of the last 16 steps.
DEFAULTS = {"fp8_format": "HYBRID", "amax_history_len": 16, "amax_compute_algo": "max"}


def fp8_context(config: Mapping[str, Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes Transformer Engine's fp8 context.

    Args:
        config: Arguments of its ``DelayedScaling``, over ``DEFAULTS``; ``fp8_format`` by name.

    Raises:
        PluginLoadError: Transformer Engine is not installed.
        OptionError: its recipe does not take ``config``.
    """
    try:
        import transformer_engine.pytorch as engine
        from transformer_engine.common import recipe
    except ImportError as error:
        raise PluginLoadError(
            "fp8: needs Transformer Engine, which is not installed. Expected a CUDA machine with it. Install it: "
            "pip install transformer_engine[pytorch]."
        ) from error
    settings = {**DEFAULTS, **config}
    try:
        settings["fp8_format"] = getattr(recipe.Format, str(settings["fp8_format"]))
        scaling = recipe.DelayedScaling(**settings)
    except (AttributeError, TypeError) as error:
        raise OptionError(
            f"fp8.precision_config: got {dict(config)}. Expected arguments of DelayedScaling: {error}."
        ) from None
    return lambda: engine.fp8_autocast(enabled=True, fp8_recipe=scaling)


class FP8(Algorithm):
    """Let the layers of Transformer Engine in a model compute in fp8, under ``precision="amp_fp8"``.

    Only Transformer Engine's own layers do; all others compute in bf16. Evaluation runs in bf16, since fp8 needs sizes
    that divide by 16.

    Args:
        precision_config: Arguments of Transformer Engine's ``DelayedScaling``.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, section 3.
    """

    def __init__(self, precision_config: dict[str, Any] | None = None) -> None:
        self.precision_config = precision_config or {}

    @hookimpl
    def precision_context(self, state: State) -> Callable[[], AbstractContextManager[Any]] | None:
        """Put every forward pass and loss of training into fp8, where that is the precision of the run."""
        return fp8_context(self.precision_config) if state.precision == "amp_fp8" else None
