"""Train in mixed precision, in the format that suits the hardware."""

from __future__ import annotations

import logging

import torch
from kernel_core import Algorithm, State, hookimpl
from kernel_core.train.precision import default_precision, mixed_precision

__all__ = ["MixedPrecision", "choose_precision"]

log = logging.getLogger(__name__)


def choose_precision(precision: str | None, device: torch.device) -> str:
    """Return ``precision``, or for None the mixed precision that suits ``device``.

    >>> choose_precision(None, torch.device("cpu"))
    'amp_bf16'
    """
    return mixed_precision(device) if precision is None else precision


class MixedPrecision(Algorithm):
    """Compute forward and loss in 16 bits where that is safe, and keep weights, gradients and sums in 32.

    The same as ``Trainer(precision=…)``, as a plugin: it sets ``state.precision`` in ``init``, before anything is computed.
    In ``amp_fp16`` the loss is scaled, so that small gradients are not lost. It wins over ``Trainer(precision=…)``, and
    says so in one line; ``fit(precision=…)`` comes later and wins over it.

    Args:
        precision: ``amp_bf16``, ``amp_fp16``, ``amp_fp8`` or ``fp32``; None means ``amp_bf16``, or ``amp_fp16`` on a GPU
            without it.

    Source: Micikevicius, Narang, Alben, Diamos, Elsen, Garcia, Ginsburg, Houston, Kuchaiev, Venkatesh, Wu, Mixed Precision
        Training, 2018, section 3.
    """

    neutral = {"precision": "fp32"}
    split_invariant = False  # in 16 bits the rounding of sums is large

    def __init__(self, precision: str | None = None) -> None:
        self.precision = precision

    @hookimpl
    def init(self, state: State) -> None:
        """Set the precision of the run."""
        before, state.precision = state.precision, choose_precision(self.precision, state.device)
        if state.rank == 0 and before not in ("fp32", default_precision(state.device), state.precision):
            log.warning("mixed_precision: %s takes the place of precision=%r.", state.precision, before)
