"""The arithmetic of learning rate schedules: curves of the progress, and times as plain numbers of one run.

Times are resolved once for a run: whole units round down, epochs become batches where the loader's length is known, and
``ssr`` (the scale schedule ratio) stretches every time but ``dur``, since it has stretched ``max_duration`` already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kernel_core.errors import TimeStringError
from kernel_core.timing import Progress, Time, TimeUnit, reader

SLACK = 1e-6  # so that 0.29 of 100 batches are 29, though 0.29 * 100 is a hair less


# --- shapes: functions of the progress, 0 to 1 ----------------------------------------------------------------------


def linear(progress: float, alpha_i: float, alpha_f: float) -> float:
    """Return the point of the line from ``alpha_i`` to ``alpha_f``."""
    return alpha_i + progress * (alpha_f - alpha_i)


def cosine(progress: float, alpha_f: float) -> float:
    """Return the point of half a cosine from 1 down to ``alpha_f``."""
    return alpha_f + (1 - alpha_f) * 0.5 * (1 + math.cos(math.pi * progress))


def polynomial(progress: float, power: float, alpha_f: float) -> float:
    """Return the point of ``(1 - progress) ** power``, from 1 down to ``alpha_f``."""
    return float(alpha_f + (1 - alpha_f) * (1 - progress) ** power)


def progress_between(now: float, start: float, end: float) -> float:
    """Return how far ``now`` is from ``start`` to ``end``, within 0 and 1; 1 if there is nothing between them."""
    return min(1.0, max(0.0, (now - start) / (end - start))) if end > start else 1.0


def progress_in_cycle(now: float, t_0: float, t_mult: float, whole: bool = True) -> float:
    """Return how far ``now`` is in its cycle: the first takes ``t_0``, each later one ``t_mult`` times the one before.

    Args:
        now: At least 0.
        t_0: Greater than 0.
        t_mult: At least 1.
        whole: Round the length of each cycle down.
    """
    length = t_0
    while now >= length:
        longer = math.floor(length * t_mult + SLACK) if whole else length * t_mult
        if longer == length:
            return now % length / length
        now, length = now - length, longer
    return now / length


# --- times of one run -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A time as a number of one run.

    Attributes:
        value: In ``unit``.
        unit: ``ba`` for epochs of known length.
        read: Reads the elapsed time in the same unit.
    """

    value: float
    unit: TimeUnit
    read: Callable[[Progress], float]


@dataclass(frozen=True, slots=True)
class RunTimes:
    """What the times of schedules depend on.

    Attributes:
        max_duration: When the run ends.
        dataloader_len: Batches in an epoch, None if unknown: epochs then stay epochs.
        ssr: Stretches every time but ``dur``.
    """

    max_duration: Time | None
    dataloader_len: int | None
    ssr: float = 1.0

    def span(self, time: Time, scaled: bool = True) -> Span:
        """Return ``time`` as a number, stretched by ``ssr`` unless ``scaled`` is false.

        Raises:
            TimeStringError: a share of a run that has no ``max_duration``.
        """
        value, unit = float(time.value), time.unit
        if unit is TimeUnit.DURATION:
            if self.max_duration is None:
                raise TimeStringError(
                    f"schedule: {time} is a share of the run, and no max_duration is set. Set it, or use another unit."
                )
            value, unit, scaled = value * self.max_duration.value, self.max_duration.unit, False
        read: Callable[[Progress], float] = reader(unit)
        if unit is TimeUnit.EPOCH and self.dataloader_len:
            value, unit, read = value * self.dataloader_len, TimeUnit.BATCH, _epochs_in_batches(self.dataloader_len)
        value *= self.ssr if scaled else 1.0
        return Span(value if unit is TimeUnit.SECOND else math.floor(value + SLACK), unit, read)


def _epochs_in_batches(length: int) -> Callable[[Progress], float]:
    # not the count of all batches: after a fit on a longer or shorter loader that would not end with the epochs
    return lambda progress: progress.epoch * length + progress.batch_in_epoch
