"""Log the learning rate of every parameter group."""

from __future__ import annotations

from collections.abc import Sequence

from kernel_core import Callback, Logger, State, hookimpl
from torch.optim import Optimizer

__all__ = ["LRMonitor", "learning_rates"]


def learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Return ``lr-<Optimizer>/group<i>`` to the rate in force; a second optimizer of one class gets a number."""
    rates: dict[str, float] = {}
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        twins = [other for other in optimizers[:index] if type(other) is type(optimizer)]
        label = f"lr-{name}{len(twins) + 1}" if twins else f"lr-{name}"
        rates |= {f"{label}/group{number}": group["lr"] for number, group in enumerate(optimizer.param_groups)}
    return rates


class LRMonitor(Callback):
    """Log at the end of every batch the learning rates that were in force in it."""

    affects_training = False

    @hookimpl
    def batch_end(self, state: State, logger: Logger) -> None:
        """Log the rates if anybody listens."""
        if logger.listening:
            logger.log_metrics(learning_rates(state.optimizers))
