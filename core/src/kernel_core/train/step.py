"""One batch as one optimizer step, put together from what the run needs for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from torch import Tensor

from kernel_core.data.spec import DataSpec
from kernel_core.logger import Logger
from kernel_core.optim.scheduling import Schedule, apply_schedules
from kernel_core.train.auto_microbatch import AutoMicrobatch
from kernel_core.train.microbatch import Instrument, make_train_batch, make_weigh
from kernel_core.train.precision import Precision
from kernel_core.train.ranks import Ranks
from kernel_core.train.shared_microbatch import SharedAutoMicrobatch
from kernel_core.train.state import State


def make_run_batch(
    state: State,
    hooks: SimpleNamespace,
    logger: Logger,
    data: DataSpec,
    schedules: list[Schedule],
    precision: Precision,
    instrument: Instrument,
    ranks: Ranks | None = None,
) -> Callable[[], Tensor]:
    """Return ``run_batch()``, which trains on ``state.batch`` as the loader gave it and returns its detached mean loss."""
    weigh = make_weigh(state.model, data)
    auto = _make_auto(state, data, precision, logger, ranks) if state.auto_microbatching else None
    settle = auto.settle if isinstance(auto, SharedAutoMicrobatch) else None
    train_batch = make_train_batch(state, hooks, data, precision, instrument, ranks, settle)
    if auto is not None:
        train_batch = auto.evaluation(train_batch)
    step = instrument("step", partial(state.engine.step, precision.steppers(state.optimizers), train_batch))
    after_dataloader, batch_start = hooks.after_dataloader, hooks.batch_start

    def run_batch() -> Tensor:
        # the last changes to the rows
        for call in after_dataloader:
            call()
        if schedules:
            apply_schedules(state, schedules)
        for call in batch_start:
            call()
        if ranks is not None:
            ranks.send(weigh(state.batch))

        # forward, loss and backward of every microbatch, then the optimizers
        return step()  # type: ignore[no-any-return]

    return run_batch if auto is None else auto.batch(run_batch)


def _make_auto(
    state: State, data: DataSpec, precision: Precision, logger: Logger, ranks: Ranks | None
) -> AutoMicrobatch:
    if ranks is None:
        return AutoMicrobatch(state, data, precision, logger)
    return SharedAutoMicrobatch(state, data, precision, logger, ranks)
