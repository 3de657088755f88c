"""What is looked at once, after the first batch: is the loss a number, and in which dtypes does the run really live."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from kernel_core.errors import TrainerError
from kernel_core.logger import Logger
from kernel_core.train.precision import live_dtypes
from kernel_core.train.state import State

log = logging.getLogger(__name__)


def look_at_first_step(state: State, logger: Logger) -> None:
    """Refuse a loss that is not finite, and say which dtypes are in use (one device sync, once in a ``fit``).

    Raises:
        TrainerError: the loss of the first batch of the run is nan or infinite.
    """
    if state.progress.batch == 1 and isinstance(state.loss, Tensor) and not torch.isfinite(state.loss).all():
        raise TrainerError(
            f"loss: the loss of the first batch is {state.loss.tolist()}. Expected a finite number. Look for nan or inf in the "
            "inputs, targets outside the range of the classes, a mean over no element, or, with precision="
            f"{state.precision!r}, an overflow."
        )
    rows = live_dtypes(state.model, state.optimizers)
    for what, dtype, tensors, entries in rows:
        log.info("dtypes: %s %s, %d tensors of %d entries", what, dtype, tensors, entries)
    logger.log_hyperparameters({"dtypes": {f"{what} {dtype}": entries for what, dtype, _, entries in rows}})
