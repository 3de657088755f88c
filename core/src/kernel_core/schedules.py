"""Learning rate schedules on training time, and the triggers that fire every so often.

A schedule is a callable ``state -> multiplier`` of each group's initial learning rate. The loop asks it before batch
*t* with *t* batches finished, so the rate for batch *t* is in force at batch *t*.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from kernel_core.errors import TimeStringError, TrainerError
from kernel_core.timing import Time, TimeUnit
from kernel_core.train.state import State

Schedule = Callable[[State], float]


def share_of(time: Time | str, state: State) -> float:
    """Return ``time`` as a share of the run, so that times of any unit can be compared with the elapsed share.

    Raises:
        TimeStringError: the unit cannot be compared with that of ``max_duration``.
    """
    time = Time.from_input(time)
    limit = state.max_duration
    if time.unit is TimeUnit.DURATION:
        return float(time.value)
    if limit is not None and limit.value and time.unit is limit.unit:
        return time.value / limit.value
    batches = {TimeUnit.EPOCH: state.dataloader_len, TimeUnit.BATCH: 1}
    if (
        limit is not None
        and limit.value
        and (per_limit := batches.get(limit.unit))
        and (per_time := batches.get(time.unit))
    ):
        return time.value * per_time / (limit.value * per_limit)
    raise TimeStringError(
        f"schedule: {time} cannot be compared with max_duration={limit}. Use the unit of max_duration, or 'dur'."
    )


class CosineAnnealingWithWarmupScheduler:
    """Linear from 0 to 1 over ``t_warmup``, then half a cosine down to ``alpha_f`` at ``t_max``.

    Args:
        t_warmup: How long the warm-up takes.
        t_max: When the cosine ends.
        alpha_f: The multiplier at the end.

    Source: Loshchilov and Hutter, SGDR, 2017, section 3, without restarts.
    """

    def __init__(self, t_warmup: str | Time = "0dur", t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.t_warmup = Time.from_input(t_warmup)
        self.t_max = Time.from_input(t_max)
        self.alpha_f = alpha_f

    def __call__(self, state: State) -> float:
        """Return the multiplier for the next batch."""
        elapsed = state.get_elapsed_duration()
        done = 0.0 if elapsed is None else float(elapsed)
        warmup = share_of(self.t_warmup, state)
        if done < warmup:
            return done / warmup
        end = share_of(self.t_max, state)
        progress = min(1.0, (done - warmup) / (end - warmup)) if end > warmup else 1.0
        return self.alpha_f + (1 - self.alpha_f) * 0.5 * (1 + math.cos(math.pi * progress))


def constant(alpha: float = 1.0) -> Schedule:
    """Return a schedule that multiplies by ``alpha`` throughout."""
    return lambda state: alpha


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "cosine_with_warmup": CosineAnnealingWithWarmupScheduler,
}


def apply_schedules(state: State, schedules: Sequence[Schedule]) -> None:
    """Set the learning rate of every group to its initial one times all ``schedules``."""
    multiplier = 1.0
    for schedule in schedules:
        multiplier *= schedule(state)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier


def check_schedulers(schedulers: Sequence[Any]) -> None:
    """Refuse what is neither a scheduler nor a schedule.

    Raises:
        TrainerError: it cannot be called, or its ``step`` wants an argument that the loop does not have.
    """
    for scheduler in schedulers:
        step = getattr(scheduler, "step", None)
        if step is None:
            if not callable(scheduler):
                raise TrainerError(
                    f"schedulers: got {scheduler!r}. Expected one of torch's, or a function state -> multiplier."
                )
            continue
        for parameter in inspect.signature(step).parameters.values():
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                raise TrainerError(
                    f"schedulers: {type(scheduler).__name__}.step needs {parameter.name!r}, which the loop does not have. "
                    "Step it in a callback of your own, where the value is known."
                )


def split_schedules(schedulers: Sequence[Any]) -> tuple[list[LRScheduler], list[Schedule]]:
    """Part torch's schedulers, which are stepped, from schedules, which are asked."""
    stepped = [
        scheduler for scheduler in schedulers if isinstance(scheduler, LRScheduler) or hasattr(scheduler, "step")
    ]
    return stepped, [scheduler for scheduler in schedulers if scheduler not in stepped]


class Trigger:
    """Fires each time training time crosses a multiple of ``interval``.

    Args:
        interval: Any unit; a share ``dur`` is measured in the unit of ``max_duration``.
        state: The run, with ``max_duration`` set.
    """

    def __init__(self, interval: Time, state: State) -> None:
        unit, value = interval.unit, float(interval.value)
        if unit is TimeUnit.DURATION:
            limit = state.max_duration
            if limit is None:
                raise TimeStringError(f"interval: {interval} is a share of the run, and no max_duration is set.")
            unit, value = limit.unit, value * limit.value
            if unit is TimeUnit.EPOCH and state.dataloader_len:
                unit, value = TimeUnit.BATCH, value * state.dataloader_len
        self.unit = unit
        self._value = value
        self._progress = state.progress
        self._last = self._count()

    def _count(self) -> int:
        # a hair of slack, so that a tenth of 100 batches fires at batch 10 and not at 11
        return int(self._progress.value(self.unit) / self._value + 1e-9)

    def __call__(self) -> bool:
        """Say whether a multiple was crossed since the last call."""
        count = self._count()
        crossed = count != self._last
        self._last = count
        return crossed
