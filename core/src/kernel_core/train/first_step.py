"""What is looked at once: is the first loss one to train on, and in which dtypes does the run really live."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from kernel_core.errors import TrainerError
from kernel_core.logger import Logger
from kernel_core.train.precision import live_dtypes
from kernel_core.train.state import State

log = logging.getLogger(__name__)


def check_loss(state: State, loss: Any) -> None:
    """Refuse a loss that cannot be trained on, before it reaches a weight. Asked once in a ``fit`` (one device sync in a run).

    Raises:
        TrainerError: it is no scalar, not attached to the graph, or in the first batch of the run not finite.
    """
    if not isinstance(loss, Tensor):
        return
    if loss.numel() != 1:
        raise TrainerError(
            f"loss: got a tensor of shape {tuple(loss.shape)}. Expected a scalar, the mean over the batch. Return loss.mean(), "
            "or leave reduction='none' out."
        )
    if not loss.requires_grad:
        raise TrainerError(
            "loss: it is not attached to the graph, so nothing would be trained. Expected a tensor computed from trainable "
            "parameters. Look for .detach(), .item(), torch.no_grad() or requires_grad=False on the whole model."
        )
    if state.progress.batch == 0 and not torch.isfinite(loss).all():
        raise TrainerError(
            f"loss: the loss of the first batch is {loss.tolist()}. Expected a finite number. Look for nan or inf in the "
            "inputs, targets outside the range of the classes, a mean over no element, or, with precision="
            f"{state.precision!r}, an overflow."
        )


def look_at_first_step(state: State, logger: Logger) -> None:
    """After the first batch of a ``fit``: say which dtypes are in use, and whether microbatches are larger than batches."""
    size, num_samples = state.device_train_microbatch_size, state.progress.sample_in_epoch
    if size is not None and size > num_samples and not state.auto_microbatching:
        log.warning("device_train_microbatch_size: %d is more than the first batch has rows, %d.", size, num_samples)
    rows = live_dtypes(state.model, state.optimizers)
    lines = [
        f"  {what:<16}{dtype:<10}{tensors:>6} tensors{entries:>14,} entries" for what, dtype, tensors, entries in rows
    ]
    if state.rank == 0:
        log.info("\n".join(["dtypes after the first batch", *lines]))
    logger.log_hyperparameters({"dtypes": {f"{what} {dtype}": entries for what, dtype, _, entries in rows}})
