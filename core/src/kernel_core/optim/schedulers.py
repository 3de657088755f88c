"""Learning rate schedules under Composer's names: each says what multiplies the initial rate at a point of the run.

Called as ``schedule(state, ssr)``. Times take any unit but seconds; ``ssr`` is the scale schedule ratio.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernel_core.errors import OptionError, TimeStringError, TrainerError
from kernel_core.optim.schedule_shapes import (
    RunTimes,
    Span,
    cosine,
    linear,
    polynomial,
    progress_between,
    progress_in_cycle,
)
from kernel_core.timing import Progress, Time, TimeUnit

if TYPE_CHECKING:
    from kernel_core.train.state import State

log = logging.getLogger(__name__)

Multiplier = Callable[[Progress], float]


class Scheduler(ABC):
    """A schedule whose times are resolved once for each ``max_duration``, length of the loader and ratio.

    Called with the state and ``ssr`` it returns the multiplier for the next batch.
    """

    _compiled: tuple[Time | None, int | None, float, Multiplier] | None = None

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        """Return the multiplier of the initial learning rate for the next batch (about 1 µs)."""
        compiled, limit, length = self._compiled, state.max_duration, state.dataloader_len
        # the limit by identity: times do not change, and comparing them costs more than all the rest
        if compiled is None or compiled[0] is not limit or compiled[1] != length or compiled[2] != ssr:
            compiled = (limit, length, ssr, self.compile(RunTimes(limit, length, ssr)))
            self._compiled = compiled
        return compiled[3](state.progress)

    @abstractmethod
    def compile(self, run: RunTimes) -> Multiplier:
        """Return the function from counters to the multiplier for a run with these times.

        Raises:
            TimeStringError, TrainerError: the times do not fit the run, or each other.
        """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_compiled"}  # functions do not pickle

    def _time(self, name: str, value: str | Time) -> Time:
        time = Time.from_input(value)
        if time.unit is TimeUnit.SECOND:
            raise TimeStringError(
                f"{type(self).__name__}.{name}: got {value!s}, a wall clock, which no two runs share. "
                "Use ep, ba, sp, tok, iter, or a share of the run, 'dur'."
            )
        if time.value < 0:
            raise TimeStringError(f"{type(self).__name__}.{name}: got {time}. Expected a time of at least 0.")
        return time

    def _period(self, name: str, time: Time, run: RunTimes) -> Span:
        """Return the span of a time that something is divided by."""
        span = run.span(time)
        if span.value <= 0:
            raise TimeStringError(
                f"{type(self).__name__}.{name}: {time} is {span.value:g}{span.unit} in this run, at a "
                f"scale_schedule_ratio of {run.ssr:g}. Expected more than 0: use a longer time."
            )
        return span


class StepScheduler(Scheduler):
    """Multiply by ``gamma`` every ``step_size``.

    Args:
        step_size: The time between two changes.
        gamma: The factor of each.
    """

    def __init__(self, step_size: str | Time, gamma: float = 0.1) -> None:
        self.step_size = self._time("step_size", step_size)
        self.gamma = gamma

    def compile(self, run: RunTimes) -> Multiplier:
        """Return ``gamma`` to the number of whole steps."""
        size = self._period("step_size", self.step_size, run)
        return lambda progress: float(self.gamma ** (size.read(progress) // size.value))


class MultiStepScheduler(Scheduler):
    """Multiply by ``gamma`` at each milestone.

    Args:
        milestones: Times, of any units.
        gamma: The factor at each.
    """

    def __init__(self, milestones: Sequence[str | Time], gamma: float = 0.1) -> None:
        self.milestones = [self._time("milestones", milestone) for milestone in milestones]
        self.gamma = gamma

    def compile(self, run: RunTimes) -> Multiplier:
        """Return ``gamma`` to the number of milestones reached."""
        spans = [run.span(milestone) for milestone in self.milestones]
        return lambda progress: float(self.gamma ** sum(span.read(progress) >= span.value for span in spans))


class ConstantScheduler(Scheduler):
    """Multiply by ``alpha`` up to ``t_max``, by 1 from then on.

    Args:
        alpha: The multiplier.
        t_max: Until when.
    """

    def __init__(self, alpha: float = 1.0, t_max: str | Time = "1dur") -> None:
        self.alpha = alpha
        self.t_max = self._time("t_max", t_max)

    def compile(self, run: RunTimes) -> Multiplier:
        """Return ``alpha``, then 1."""
        end = run.span(self.t_max)
        return lambda progress: self.alpha if end.read(progress) < end.value else 1.0


class ExponentialScheduler(Scheduler):
    """Decay by ``gamma`` every ``decay_period``, a little with each batch.

    Args:
        gamma: The factor over one period.
        decay_period: The period.
    """

    def __init__(self, gamma: float, decay_period: str | Time = "1ep") -> None:
        self.gamma = gamma
        self.decay_period = self._time("decay_period", decay_period)

    def compile(self, run: RunTimes) -> Multiplier:
        """Return ``gamma`` to the elapsed number of periods and their parts."""
        period = self._period("decay_period", self.decay_period, run)
        return lambda progress: float(self.gamma ** (period.read(progress) / period.value))


class CosineAnnealingWarmRestartsScheduler(Scheduler):
    """Half a cosine from 1 down to ``alpha_f``, again and again.

    Args:
        t_0: How long the first takes.
        t_mult: Each takes so many times as long as the one before; at least 1.
        alpha_f: The multiplier that each approaches.

    Source: Loshchilov and Hutter, SGDR, 2017, section 3.
    """

    def __init__(self, t_0: str | Time, t_mult: float = 1.0, alpha_f: float = 0.0) -> None:
        if t_mult < 1:
            raise OptionError(
                f"{type(self).__name__}.t_mult: got {t_mult}. Expected at least 1: cycles that shrink come to nothing."
            )
        self.t_0 = self._time("t_0", t_0)
        self.t_mult = t_mult
        self.alpha_f = alpha_f

    def compile(self, run: RunTimes) -> Multiplier:
        """Return the cosine of the present cycle."""
        first = self._period("t_0", self.t_0, run)
        whole = first.unit is not TimeUnit.SECOND
        return lambda progress: cosine(
            progress_in_cycle(first.read(progress), first.value, self.t_mult, whole), self.alpha_f
        )


class _Decay(Scheduler):
    """A schedule that is a shape from 0 to ``t_max``."""

    t_max: Time

    @abstractmethod
    def shape(self, progress: float) -> float:
        """Return the multiplier at ``progress``, 0 to 1."""

    def compile(self, run: RunTimes) -> Multiplier:
        """Return the shape at the present share of ``t_max``."""
        end = run.span(self.t_max)
        return lambda progress: self.shape(progress_between(end.read(progress), 0.0, end.value))


class LinearScheduler(_Decay):
    """A line from ``alpha_i`` to ``alpha_f`` over ``t_max``.

    Args:
        alpha_i: The multiplier at the start.
        alpha_f: The multiplier at ``t_max`` and after.
        t_max: When the line ends.
    """

    def __init__(self, alpha_i: float = 1.0, alpha_f: float = 0.0, t_max: str | Time = "1dur") -> None:
        self.alpha_i = alpha_i
        self.alpha_f = alpha_f
        self.t_max = self._time("t_max", t_max)

    def shape(self, progress: float) -> float:
        """Return the point of the line."""
        return linear(progress, self.alpha_i, self.alpha_f)


class CosineAnnealingScheduler(_Decay):
    """Half a cosine from 1 down to ``alpha_f`` over ``t_max``.

    Args:
        t_max: When the cosine ends.
        alpha_f: The multiplier at ``t_max`` and after.

    Source: Loshchilov and Hutter, SGDR, 2017, section 3, without restarts.
    """

    def __init__(self, t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.t_max = self._time("t_max", t_max)
        self.alpha_f = alpha_f

    def shape(self, progress: float) -> float:
        """Return the point of the cosine."""
        return cosine(progress, self.alpha_f)


class PolynomialScheduler(_Decay):
    """A power of the share of ``t_max`` that is left, from 1 down to ``alpha_f``.

    Args:
        power: The power.
        t_max: When nothing is left.
        alpha_f: The multiplier at ``t_max`` and after.
    """

    def __init__(self, power: float, t_max: str | Time = "1dur", alpha_f: float = 0.0) -> None:
        self.power = power
        self.t_max = self._time("t_max", t_max)
        self.alpha_f = alpha_f

    def shape(self, progress: float) -> float:
        """Return the point of the curve."""
        return polynomial(progress, self.power, self.alpha_f)


# --- the same after a warm-up ---------------------------------------------------------------------------------------


class _Warmup(Scheduler):
    """A line from 0 up to where the schedule begins, over ``t_warmup``."""

    t_warmup: Time
    scale_warmup: bool
    _warned = False

    def _set_warmup(self, t_warmup: str | Time, scale_warmup: bool) -> None:
        self.t_warmup = self._time("t_warmup", t_warmup)
        self.scale_warmup = scale_warmup

    def _warmup(self, run: RunTimes) -> Span:
        warmup = run.span(self.t_warmup, scaled=self.scale_warmup)
        if warmup.value == 0 and not self._warned:
            self._warned = True
            log.warning(
                "%s: t_warmup=%s is 0%s in this run, so there is no warm-up. Use a longer time, or the schedule without one.",
                type(self).__name__,
                self.t_warmup,
                warmup.unit,
            )
        return warmup


def _ramp(warmup: Span, peak: float, after: Multiplier) -> Multiplier:
    def multiplier(progress: Progress) -> float:
        now = warmup.read(progress)
        return peak * now / warmup.value if now < warmup.value else after(progress)

    return multiplier


class _WarmupDecay(_Warmup, _Decay):
    """A shape from the end of the warm-up to ``t_max``, which must not come before the end of the run."""

    def compile(self, run: RunTimes) -> Multiplier:
        """Return the line up to the start of the shape, then the shape."""
        warmup, end = self._warmup(run), run.span(self.t_max)
        self._check(run, warmup, end)
        warmup = replace(warmup, read=end.read)
        return _ramp(
            warmup,
            self.shape(0.0),
            lambda progress: self.shape(progress_between(end.read(progress), warmup.value, end.value)),
        )

    def _check(self, run: RunTimes, warmup: Span, end: Span) -> None:
        if warmup.unit is not end.unit:
            other = (
                f"max_duration={run.max_duration}" if self.t_max.unit is TimeUnit.DURATION else f"t_max={self.t_max}"
            )
            raise TimeStringError(
                f"schedule: {self.t_warmup} cannot be compared with {other}. {type(self).__name__} needs t_warmup and "
                f"t_max in one unit, and they are in {warmup.unit} and {end.unit}. Use one unit for both, or 'dur'."
            )
        if run.max_duration is None:
            return
        last = run.span(Time(1.0, TimeUnit.DURATION))
        if last.unit is end.unit and end.value < last.value:
            raise TrainerError(
                f"{type(self).__name__}.t_max: {self.t_max} ends before max_duration={run.max_duration}, at "
                f"{end.value:g} of {last.value:g}{end.unit}. Expected at least the whole run: use t_max='1dur'."
            )


class MultiStepWithWarmupScheduler(_Warmup, MultiStepScheduler):
    """A line from 0 to 1 over ``t_warmup``, then multiply by ``gamma`` for each milestone that is past.

    Args:
        t_warmup: How long the warm-up takes.
        milestones: Times, of any units, counted from the start of the run.
        gamma: The factor at each.
        scale_warmup: Whether ``ssr`` stretches the warm-up too.
    """

    def __init__(
        self, t_warmup: str | Time, milestones: Sequence[str | Time], gamma: float = 0.1, scale_warmup: bool = False
    ) -> None:
        super().__init__(milestones, gamma)
        self._set_warmup(t_warmup, scale_warmup)

    def compile(self, run: RunTimes) -> Multiplier:
        """Return the line up to 1, then the steps."""
        return _ramp(self._warmup(run), 1.0, super().compile(run))


class ConstantWithWarmupScheduler(_Warmup, ConstantScheduler):
    """A line from 0 to ``alpha`` over ``t_warmup``, then ``alpha`` up to ``t_max``, and 1 from then on.

    Args:
        t_warmup: How long the warm-up takes.
        alpha: The multiplier.
        t_max: Until when.
        scale_warmup: Whether ``ssr`` stretches the warm-up too.
    """

    def __init__(
        self, t_warmup: str | Time, alpha: float = 1.0, t_max: str | Time = "1dur", scale_warmup: bool = False
    ) -> None:
        super().__init__(alpha, t_max)
        self._set_warmup(t_warmup, scale_warmup)

    def compile(self, run: RunTimes) -> Multiplier:
        """Return the line up to ``alpha``, then ``alpha``."""
        return _ramp(self._warmup(run), self.alpha, super().compile(run))


class LinearWithWarmupScheduler(_WarmupDecay, LinearScheduler):
    """A line from 0 to ``alpha_i`` over ``t_warmup``, then one to ``alpha_f`` at ``t_max``.

    Args:
        t_warmup: How long the warm-up takes.
        alpha_i: The multiplier after the warm-up.
        alpha_f: The multiplier at ``t_max``.
        t_max: When the second line ends; not before the run.
        scale_warmup: Whether ``ssr`` stretches the warm-up too.
    """

    def __init__(
        self,
        t_warmup: str | Time,
        alpha_i: float = 1.0,
        alpha_f: float = 0.0,
        t_max: str | Time = "1dur",
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(alpha_i, alpha_f, t_max)
        self._set_warmup(t_warmup, scale_warmup)


class CosineAnnealingWithWarmupScheduler(_WarmupDecay, CosineAnnealingScheduler):
    """A line from 0 to 1 over ``t_warmup``, then half a cosine down to ``alpha_f`` at ``t_max``.

    Args:
        t_warmup: How long the warm-up takes.
        t_max: When the cosine ends; not before the run.
        alpha_f: The multiplier at ``t_max``.
        scale_warmup: Whether ``ssr`` stretches the warm-up too.

    Source: Loshchilov and Hutter, SGDR, 2017, section 3, without restarts.
    """

    def __init__(
        self, t_warmup: str | Time, t_max: str | Time = "1dur", alpha_f: float = 0.0, scale_warmup: bool = False
    ) -> None:
        super().__init__(t_max, alpha_f)
        self._set_warmup(t_warmup, scale_warmup)


class PolynomialWithWarmupScheduler(_WarmupDecay, PolynomialScheduler):
    """A line from 0 to 1 over ``t_warmup``, then a power of what is left, down to ``alpha_f`` at ``t_max``.

    Args:
        t_warmup: How long the warm-up takes.
        power: The power.
        t_max: When nothing is left; not before the run.
        alpha_f: The multiplier at ``t_max``.
        scale_warmup: Whether ``ssr`` stretches the warm-up too.
    """

    def __init__(
        self,
        t_warmup: str | Time,
        power: float = 2.0,
        t_max: str | Time = "1dur",
        alpha_f: float = 0.0,
        scale_warmup: bool = False,
    ) -> None:
        super().__init__(power, t_max, alpha_f)
        self._set_warmup(t_warmup, scale_warmup)
