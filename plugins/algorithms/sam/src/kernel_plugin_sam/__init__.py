"""Sharpness-aware minimisation: step by the gradient at the worst point nearby."""

from __future__ import annotations

from typing import Annotated

from kernel_core import Algorithm, State, hookimpl
from pydantic import Field
from torch.optim import Optimizer

from kernel_plugin_sam.optimizer import SAMOptimizer, climb

__all__ = ["SAM", "SAMOptimizer", "climb"]


class SAM(Algorithm):
    """Step by the gradient at the point ``rho`` uphill, where the loss nearby is about worst, so as to end in flat minima.

    Costs a second forward and backward pass on the steps that climb. Hooks between ``before_train_batch`` and
    ``after_train_batch`` run in both, so gradient clipping clips both gradients.

    Args:
        rho: How far to climb, as a length over all parameters together.
        epsilon: Is added to the norm of the gradient, so that a zero gradient does not divide by zero.
        interval: Climb on every so many-th step only, to save time.

    Source: Foret, Kleiner, Mobahi, Neyshabur, Sharpness-Aware Minimization for Efficiently Improving Generalization,
        2021, section 2 and algorithm 1.
    """

    roles = {"wraps-optimizer"}
    conflicts = {"role:wraps-optimizer"}

    def __init__(
        self,
        rho: Annotated[float, Field(ge=0)] = 0.05,
        epsilon: Annotated[float, Field(gt=0)] = 1e-12,
        interval: Annotated[int, Field(ge=1)] = 1,
    ) -> None:
        self.rho = rho
        self.epsilon = epsilon
        self.interval = interval

    @hookimpl
    def wrap_optimizer(self, optimizer: Optimizer, state: State) -> Optimizer:
        """Wrap before any state is loaded, so that the base optimizer's is saved and restored."""
        return SAMOptimizer(optimizer, self.rho, self.epsilon, self.interval, state.model, state.engine.total_norm)
