"""One optimizer step, put together from what the run needs for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from torch import Tensor

from kernel_core.data.spec import DataSpec
from kernel_core.logger import Logger
from kernel_core.train.auto_microbatch import AutoMicrobatch
from kernel_core.train.microbatch import Instrument, make_train_batch
from kernel_core.train.precision import Precision
from kernel_core.train.state import State


def make_step(
    state: State, hooks: SimpleNamespace, logger: Logger, data: DataSpec, precision: Precision, instrument: Instrument
) -> Callable[[], Tensor]:
    """Return ``step()``: forward, loss and backward of every microbatch of ``state.batch``, then the optimizers.

    It returns the detached mean loss of the batch.
    """
    train_batch = make_train_batch(state, hooks, data, precision, instrument)
    auto = AutoMicrobatch(state, data, precision, logger) if state.auto_microbatching else None
    if auto is not None:
        train_batch = auto.train_batch(train_batch)
    step: Callable[[], Tensor] = partial(state.engine.step, precision.steppers(state.optimizers), train_batch)
    if auto is not None:
        step = auto.first_step(step)
    return instrument("step", step)
