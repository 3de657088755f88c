"""Time in training: how far a run has come, and the strings people write for it.

``Time`` is a number with a unit. ``Progress`` holds the loop's counters, changed in place once a batch because that
costs a tenth of a microsecond; ``Timestamp`` is the immutable picture of them that plugins read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from operator import attrgetter
from typing import Any

from kernel_core.errors import TimeStringError
from kernel_core.naming import did_you_mean


class TimeUnit(StrEnum):
    """The units of training time, by the suffix they are written with."""

    ITERATION = "iter"
    EPOCH = "ep"
    BATCH = "ba"
    SAMPLE = "sp"
    TOKEN = "tok"
    DURATION = "dur"
    SECOND = "sec"


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_TIME = re.compile(rf"\s*({_NUMBER})\s*([a-z]+)\s*", re.IGNORECASE)
_WALL_CLOCK = re.compile(r"\s*(?=[\d.])(?:(\d*\.?\d+)h)?(?:(\d*\.?\d+)m)?(?:(\d*\.?\d+)s)?\s*", re.IGNORECASE)
_EXAMPLES = "Expected a number and a unit, such as '10ep', '500ba', '1e6tok', '0.3dur', or a wall clock '1h30m', '90s'."


@dataclass(frozen=True, slots=True, eq=False)
class Time:
    """A number of epochs, batches, samples, tokens, iterations, seconds, or a share of the whole run.

    Arithmetic and order need equal units; a plain number takes the unit of the other side, in ``==`` too. ``==`` between
    unlike units is False. Values are whole numbers for every unit but ``dur``.

    >>> Time(3, "ep") + 2 == Time.from_timestring("5ep")
    True
    """

    value: int | float
    unit: TimeUnit

    def __init__(self, value: int | float, unit: TimeUnit | str) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TimeStringError(f"time: the value {value!r} is not a number. {_EXAMPLES}")
        try:
            unit = TimeUnit(unit)
        except ValueError:
            units = [member.value for member in TimeUnit]
            raise TimeStringError(
                f"time: unknown unit {unit!r}.{did_you_mean(str(unit), units)} The units are {', '.join(units)}."
            ) from None
        if value != value or value in (float("inf"), float("-inf")):
            raise TimeStringError(f"time: {value} {unit} is not finite. {_EXAMPLES}")
        if unit is not TimeUnit.DURATION:
            if value != int(value):
                raise TimeStringError(
                    f"time: {value}{unit} is not a whole number. Only 'dur', a share of the run, takes fractions."
                )
            value = int(value)
        object.__setattr__(self, "value", float(value) if unit is TimeUnit.DURATION else value)
        object.__setattr__(self, "unit", unit)

    @classmethod
    def from_timestring(cls, text: str) -> Time:
        """Read ``text``, such as ``10ep``, ``1e6tok``, ``0.5dur``, ``24h``, ``90m`` or ``1h30m15s``.

        Raises:
            TimeStringError: the text is not a time.
        """
        if match := _WALL_CLOCK.fullmatch(text):
            hours, minutes, seconds = (float(part or 0) for part in match.groups())
            return cls(round(hours * 3600 + minutes * 60 + seconds), TimeUnit.SECOND)
        match = _TIME.fullmatch(text)
        if match is None:
            raise TimeStringError(f"time: cannot read {text!r}. {_EXAMPLES}")
        number, unit = match.groups()
        return cls(float(number) if not number.lstrip("+-").isdigit() else int(number), unit.lower())

    @classmethod
    def from_input(cls, value: Time | str | int | timedelta, default_unit: TimeUnit | str | None = None) -> Time:
        """Turn what a user may write (a Time, a time string, a timedelta, or a plain int of ``default_unit``) into a Time."""
        if isinstance(value, Time):
            return value
        if isinstance(value, str):
            return cls.from_timestring(value)
        if isinstance(value, timedelta):
            return cls(int(value.total_seconds()), TimeUnit.SECOND)
        if default_unit is None:
            raise TimeStringError(f"time: {value!r} has no unit. {_EXAMPLES}")
        return cls(value, default_unit)

    def to_timestring(self) -> str:
        """Write the time in the form that ``from_timestring`` reads."""
        return f"{self.value}{self.unit}"

    def _other(self, other: Any, operation: str) -> int | float:
        if isinstance(other, str):
            other = Time.from_timestring(other)
        if isinstance(other, Time):
            if other.unit is not self.unit:
                raise TimeStringError(f"time: cannot {operation} {self} and {other}. The units must be equal.")
            return other.value
        if isinstance(other, int | float) and not isinstance(other, bool):
            return other
        raise TypeError(f"time: cannot {operation} {self} and {other!r}")

    def __add__(self, other: Time | str | int | float) -> Time:
        return Time(self.value + self._other(other, "add"), self.unit)

    __radd__ = __add__

    def __sub__(self, other: Time | str | int | float) -> Time:
        return Time(self.value - self._other(other, "subtract"), self.unit)

    def __rsub__(self, other: int | float) -> Time:
        return Time(self._other(other, "subtract") - self.value, self.unit)

    def __neg__(self) -> Time:
        return Time(-self.value, self.unit)

    def __mod__(self, other: Time | str | int | float) -> Time:
        return Time(self.value % self._other(other, "divide"), self.unit)

    def __mul__(self, other: Time | int | float) -> Time:
        """Scale by a number or by a share of the run; whole units round down."""
        if isinstance(other, Time):
            if TimeUnit.DURATION not in (self.unit, other.unit):
                raise TimeStringError(f"time: cannot multiply {self} by {other}. One of them must be a 'dur'.")
            unit = other.unit if self.unit is TimeUnit.DURATION else self.unit
            return _rounded(self.value * other.value, unit)
        return _rounded(self.value * other, self.unit)

    __rmul__ = __mul__

    def __truediv__(self, other: Time | str | int | float) -> Time:
        """Divide by a time of the same unit (giving a share, ``dur``) or by a number (whole units round down)."""
        if isinstance(other, Time | str):
            return Time(self.value / self._other(other, "divide"), TimeUnit.DURATION)
        return _rounded(self.value / other, self.unit)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            try:
                other = Time.from_timestring(other)
            except TimeStringError:
                return False
        if isinstance(other, Time):
            return self.unit is other.unit and self.value == other.value
        if isinstance(other, int | float) and not isinstance(other, bool):
            return self.value == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.value)  # as the number it is equal to

    def __lt__(self, other: Time | str | int | float) -> bool:
        return self.value < self._other(other, "compare")

    def __le__(self, other: Time | str | int | float) -> bool:
        return self.value <= self._other(other, "compare")

    def __gt__(self, other: Time | str | int | float) -> bool:
        return self.value > self._other(other, "compare")

    def __ge__(self, other: Time | str | int | float) -> bool:
        return self.value >= self._other(other, "compare")

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return self.to_timestring()

    def __repr__(self) -> str:
        return f"Time({self.value!r}, {self.unit.value!r})"


def _rounded(value: float, unit: TimeUnit) -> Time:
    return Time(value if unit is TimeUnit.DURATION else int(value), unit)


_FIELDS = (
    "iteration",
    "epoch",
    "batch",
    "sample",
    "token",
    "epoch_in_iteration",
    "token_in_iteration",
    "batch_in_epoch",
    "sample_in_epoch",
    "token_in_epoch",
    "total_wct",
    "iteration_wct",
    "epoch_wct",
    "batch_wct",
)
_COUNTER = {
    TimeUnit.ITERATION: "iteration",
    TimeUnit.EPOCH: "epoch",
    TimeUnit.BATCH: "batch",
    TimeUnit.SAMPLE: "sample",
    TimeUnit.TOKEN: "token",
    TimeUnit.SECOND: "total_wct",
}


_read_all = attrgetter(*_FIELDS)


class _Count:
    """A field of ``Timestamp`` that is read as a ``Time`` (built when read: 0.1 µs)."""

    def __init__(self, unit: TimeUnit) -> None:
        self._unit = unit

    def __set_name__(self, owner: type, name: str) -> None:
        self._index = _FIELDS.index(name)

    def __get__(self, timestamp: Timestamp, owner: type) -> Time:
        return Time(timestamp.counts[self._index], self._unit)


class _WallClock(_Count):
    """A field of ``Timestamp`` that is read as a ``timedelta``."""

    def __init__(self) -> None:
        super().__init__(TimeUnit.SECOND)

    def __get__(self, timestamp: Timestamp, owner: type) -> timedelta:  # type: ignore[override]
        return timedelta(seconds=timestamp.counts[self._index])


class Timestamp:
    """How far a run has come, at one instant. Counts are of finished work and read as ``Time``, clocks as ``timedelta``.

    Attributes:
        counts: The plain numbers, in the order of the fields; clocks in seconds.

    Example:
        >>> Timestamp(batch=3).batch == "3ba" and Timestamp(batch=3).batch == 3
        True
    """

    __slots__ = ("counts",)

    iteration = _Count(TimeUnit.ITERATION)
    epoch = _Count(TimeUnit.EPOCH)
    batch = _Count(TimeUnit.BATCH)
    sample = _Count(TimeUnit.SAMPLE)
    token = _Count(TimeUnit.TOKEN)
    epoch_in_iteration = _Count(TimeUnit.EPOCH)
    token_in_iteration = _Count(TimeUnit.TOKEN)
    batch_in_epoch = _Count(TimeUnit.BATCH)
    sample_in_epoch = _Count(TimeUnit.SAMPLE)
    token_in_epoch = _Count(TimeUnit.TOKEN)
    total_wct = _WallClock()
    iteration_wct = _WallClock()
    epoch_wct = _WallClock()
    batch_wct = _WallClock()

    counts: tuple[Any, ...]

    def __init__(self, **fields: int | float) -> None:
        unknown = sorted(set(fields) - set(_FIELDS))
        if unknown:
            raise TypeError(f"Timestamp has no field {unknown[0]!r}. It has {', '.join(_FIELDS)}.")
        object.__setattr__(self, "counts", tuple(fields.get(name, 0) for name in _FIELDS))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("a timestamp does not change")

    @classmethod
    def of(cls, counts: Sequence[int | float]) -> Timestamp:
        """Return the timestamp with those ``counts``, in the order of the fields.

        Raises:
            ValueError: there are more or fewer of them, or one is no number of at least 0.
        """
        return cls.from_json(dict(zip(_FIELDS, counts, strict=True)))

    def to_json(self) -> dict[str, int | float]:
        """Return the counts that are not 0, by field."""
        return {name: count for name, count in zip(_FIELDS, self.counts, strict=True) if count}

    @classmethod
    def from_json(cls, fields: Mapping[str, int | float]) -> Timestamp:
        """Return the timestamp with those counts.

        Raises:
            ValueError: one is no number of at least 0; clocks may have a fraction.
        """
        for name, count in fields.items():
            kinds = (int, float) if name.endswith("_wct") else (int,)
            if type(count) not in kinds or not 0 <= count < 2**63:
                raise ValueError(f"timestamp: {name} is {count!r}. Expected a number of at least 0.")
        return cls(**fields)

    def get(self, unit: TimeUnit | str) -> Time:
        """Return the total in ``unit``; seconds are whole.

        Raises:
            TimeStringError: ``dur``, which needs to know where the run ends (``State.get_elapsed_duration``).
        """
        unit = TimeUnit(unit)
        if unit is TimeUnit.DURATION:
            raise TimeStringError("time: a timestamp has no 'dur'. Ask state.get_elapsed_duration().")
        return Time(int(self.counts[_FIELDS.index(_COUNTER[unit])]), unit)

    def __eq__(self, other: object) -> bool:
        return self.counts == other.counts if isinstance(other, Timestamp) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.counts)

    def __lt__(self, time: Time | str) -> bool:
        time = Time.from_input(time)
        return self.get(time.unit) < time

    def __le__(self, time: Time | str) -> bool:
        time = Time.from_input(time)
        return self.get(time.unit) <= time

    def __gt__(self, time: Time | str) -> bool:
        time = Time.from_input(time)
        return self.get(time.unit) > time

    def __ge__(self, time: Time | str) -> bool:
        time = Time.from_input(time)
        return self.get(time.unit) >= time

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in zip(_FIELDS, self.counts, strict=True) if value)
        return f"Timestamp({shown})"


def reader(unit: TimeUnit) -> Callable[[Progress], float]:
    """Return the function that reads the total in ``unit`` off a ``Progress``."""
    return attrgetter(_COUNTER[unit])


class Progress:
    """The counters behind ``Timestamp``, advanced in place by the loop."""

    __slots__ = _FIELDS

    iteration: int
    epoch: int
    batch: int
    sample: int
    token: int
    epoch_in_iteration: int
    token_in_iteration: int
    batch_in_epoch: int
    sample_in_epoch: int
    token_in_epoch: int
    total_wct: float
    iteration_wct: float
    epoch_wct: float
    batch_wct: float

    def __init__(self, start: Timestamp | None = None) -> None:
        self.restore(start or Timestamp())

    def restore(self, timestamp: Timestamp) -> None:
        """Set every counter to that of ``timestamp``."""
        for name, count in zip(_FIELDS, timestamp.counts, strict=True):
            setattr(self, name, count)

    def value(self, unit: TimeUnit) -> int | float:
        """Return the total in ``unit``; seconds with their fraction."""
        return getattr(self, _COUNTER[unit])  # type: ignore[no-any-return]

    def timestamp(self) -> Timestamp:
        """Return the immutable picture of now (about 1 µs: built when read, not each batch)."""
        timestamp = Timestamp.__new__(Timestamp)
        object.__setattr__(timestamp, "counts", _read_all(self))
        return timestamp

    def finish_batch(self, num_samples: int, num_tokens: int, duration_s: float) -> None:
        """Count one trained batch of ``num_samples`` rows that took ``duration_s`` seconds."""
        self.batch += 1
        self.batch_in_epoch += 1
        self.sample += num_samples
        self.sample_in_epoch += num_samples
        if num_tokens:
            self.token += num_tokens
            self.token_in_epoch += num_tokens
            self.token_in_iteration += num_tokens
        self.total_wct += duration_s
        self.iteration_wct += duration_s
        self.epoch_wct += duration_s
        self.batch_wct = duration_s

    def finish_epoch(self) -> None:
        """Count an epoch and start the counters inside it anew."""
        self.epoch += 1
        self.epoch_in_iteration += 1
        self.batch_in_epoch = self.sample_in_epoch = self.token_in_epoch = 0
        self.epoch_wct = 0.0

    def restart_epoch(self) -> None:
        """Forget what was done of the present epoch, though not in all."""
        self.batch_in_epoch = self.sample_in_epoch = self.token_in_epoch = 0
        self.epoch_wct = 0.0

    def finish_iteration(self) -> None:
        """Count an iteration and start the counters inside it anew."""
        self.iteration += 1
        self.epoch_in_iteration = self.token_in_iteration = 0
        self.iteration_wct = 0.0
