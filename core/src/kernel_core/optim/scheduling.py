"""Learning rates on training time as the loop sets them.

A schedule is a callable ``state -> multiplier`` of each group's initial learning rate, or ``(state, ssr) -> multiplier``
as Composer's are. The loop asks it before batch *t* with *t* batches finished, so the rate for batch *t* is in force at
batch *t*. The schedules that come with the kernel are in ``kernel_core.optim``.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from kernel_core.errors import TrainerError
from kernel_core.optim.schedule_shapes import SLACK
from kernel_core.optim.schedulers import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
)
from kernel_core.timing import Time

if TYPE_CHECKING:
    from kernel_core.train.state import State

Schedule = Callable[["State"], float]


def constant(alpha: float = 1.0) -> Schedule:
    """Return a schedule that multiplies by ``alpha`` throughout."""
    return ConstantScheduler(alpha)


def cosine_with_warmup(
    t_warmup: str | Time = "0dur", t_max: str | Time = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
) -> Schedule:
    """Return half a cosine down to ``alpha_f`` at ``t_max``, after a warm-up if ``t_warmup`` is not 0."""
    if Time.from_input(t_warmup).value == 0:
        return CosineAnnealingScheduler(t_max, alpha_f)
    return CosineAnnealingWithWarmupScheduler(t_warmup, t_max, alpha_f, scale_warmup)


# what a configuration may name
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": ConstantScheduler,
    "constant_with_warmup": ConstantWithWarmupScheduler,
    "cosine_annealing": CosineAnnealingScheduler,
    "cosine_annealing_warm_restarts": CosineAnnealingWarmRestartsScheduler,
    "cosine_annealing_with_warmup": CosineAnnealingWithWarmupScheduler,
    "cosine_with_warmup": cosine_with_warmup,
    "exponential": ExponentialScheduler,
    "linear": LinearScheduler,
    "linear_with_warmup": LinearWithWarmupScheduler,
    "multi_step": MultiStepScheduler,
    "multi_step_with_warmup": MultiStepWithWarmupScheduler,
    "polynomial": PolynomialScheduler,
    "polynomial_with_warmup": PolynomialWithWarmupScheduler,
    "step": StepScheduler,
}


def apply_schedules(state: State, schedules: Sequence[Schedule]) -> None:
    """Set the learning rate of every group to its initial one times all ``schedules``, as ``split_schedules`` returns them."""
    multiplier = 1.0
    for schedule in schedules:
        multiplier *= schedule(state)
    for optimizer in state.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * multiplier


def times_of(schedule: Any) -> Iterator[Time]:
    """Return the times that a schedule holds, to see in which units it measures."""
    schedule = schedule.func if isinstance(schedule, partial) else schedule
    for value in getattr(schedule, "__dict__", {}).values():
        yield from (item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, Time))


def check_ratio(ssr: float) -> None:
    """Refuse a scale schedule ratio that is not a number above 0.

    Raises:
        TrainerError: it is not.
    """
    if isinstance(ssr, bool) or not isinstance(ssr, int | float) or not 0 < ssr < math.inf:
        raise TrainerError(f"scale_schedule_ratio: got {ssr!r}. Expected a number above 0; 0.5 halves the run.")


def bind_ratio(schedule: Callable[..., float], ssr: float = 1.0) -> Schedule:
    """Return ``schedule`` as a function of the state alone, with the scale schedule ratio given to it if it takes one.

    Args:
        schedule: Takes ``(state)`` or ``(state, ssr)``; a second argument that has a default must be called ``ssr``.
        ssr: The ratio.

    Raises:
        TrainerError: it takes neither, or it would have to be scaled and takes no ``ssr``.
    """
    check_ratio(ssr)
    if not callable(schedule) or isinstance(schedule, type):
        raise TrainerError(
            f"schedulers: got {schedule!r}. Expected one of torch's, or a function state -> multiplier; an instance, "
            "not its class."
        )
    try:
        signature = inspect.signature(schedule)
    except ValueError:  # made in C
        return schedule
    if ssr == 1.0 and _takes(signature, 1):
        return schedule
    if "ssr" in signature.parameters:
        return partial(schedule, ssr=ssr)
    if _takes(signature, 1):
        raise TrainerError(
            f"scale_schedule_ratio: got {ssr}, and the schedule {schedule!r} takes no ratio. Give it a second argument "
            "'ssr', by which it stretches its times."
        )
    if _takes(signature, 2):
        return lambda state: schedule(state, ssr)
    raise TrainerError(f"schedulers: {schedule!r} takes {signature}. Expected (state) or (state, ssr).")


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def check_schedulers(schedulers: Sequence[Any], ssr: float = 1.0) -> None:
    """Refuse what is neither a scheduler nor a schedule.

    Raises:
        TrainerError: it cannot be called, its ``step`` wants an argument that the loop does not have, or torch's schedulers
            and schedules are mixed, which would overwrite each other.
    """
    stepped = [scheduler for scheduler in schedulers if hasattr(scheduler, "step")]
    if stepped and len(stepped) < len(schedulers):
        raise TrainerError(
            f"schedulers: got torch's {type(stepped[0]).__name__} beside schedules on training time. Expected one kind: each "
            "sets the learning rate anew. Write both as schedules, or both with torch's ChainedScheduler."
        )
    for scheduler in schedulers:
        step = getattr(scheduler, "step", None)
        if step is None:
            bind_ratio(scheduler, ssr)
            continue
        for parameter in inspect.signature(step).parameters.values():
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                raise TrainerError(
                    f"schedulers: {type(scheduler).__name__}.step needs {parameter.name!r}, which the loop does not have. "
                    "Step it in a callback of your own, where the value is known."
                )


def split_schedules(schedulers: Sequence[Any], ssr: float = 1.0) -> tuple[list[LRScheduler], list[Schedule]]:
    """Part torch's schedulers, which are stepped, from schedules, which are asked; the latter with ``ssr`` given to them.

    Raises:
        TrainerError: a schedule cannot be called, or cannot be scaled.
    """
    stepped = [isinstance(scheduler, LRScheduler) or hasattr(scheduler, "step") for scheduler in schedulers]
    return (
        [scheduler for scheduler, is_stepped in zip(schedulers, stepped, strict=True) if is_stepped],
        [bind_ratio(schedule, ssr) for schedule, is_stepped in zip(schedulers, stepped, strict=True) if not is_stepped],
    )


def scale_torch_scheduler(scheduler: Any, ssr: float) -> None:
    """Stretch one of torch's schedulers by ``ssr`` in place, before its first step; counts round down.

    Calling it twice stretches twice.

    Raises:
        TrainerError: the ratio is not above 0, makes a count nothing, or the scheduler is of a kind without a clear meaning.
    """
    check_ratio(ssr)
    if ssr == 1.0:
        return
    if isinstance(scheduler, lr_scheduler.StepLR):
        scheduler.step_size = _scaled(scheduler, "step_size", scheduler.step_size, ssr)
    elif isinstance(scheduler, lr_scheduler.MultiStepLR):
        milestones: Counter[int] = Counter()
        for milestone, times in scheduler.milestones.items():
            milestones[_scaled(scheduler, "milestones", milestone, ssr)] += times  # two may fall on one
        scheduler.milestones = milestones
    elif isinstance(scheduler, lr_scheduler.CosineAnnealingLR):
        scheduler.T_max = _scaled(scheduler, "T_max", scheduler.T_max, ssr)
    elif isinstance(scheduler, lr_scheduler.CosineAnnealingWarmRestarts):
        scheduler.T_i = _scaled(scheduler, "T_0", scheduler.T_i, ssr)  # the present cycle, made from T_0 already
        scheduler.T_0 = _scaled(scheduler, "T_0", scheduler.T_0, ssr)
    elif isinstance(scheduler, lr_scheduler.ExponentialLR):
        scheduler.gamma = scheduler.gamma ** (1 / ssr)
    else:
        raise TrainerError(
            f"scale_schedule_ratio: got {ssr}, and there is no rule for stretching {type(scheduler).__name__}. "
            "Expected StepLR, MultiStepLR, CosineAnnealingLR, CosineAnnealingWarmRestarts, ExponentialLR, or schedules on "
            "training time from kernel_core.optim."
        )


def _scaled(scheduler: Any, name: str, count: int, ssr: float) -> int:
    scaled = math.floor(count * ssr + SLACK)
    if scaled < 1:
        raise TrainerError(
            f"scale_schedule_ratio: {ssr} makes {type(scheduler).__name__}.{name}={count} nothing. "
            f"Expected at least 1: use a larger ratio or {name}."
        )
    return scaled
