"""What happens every so often in training: each time a multiple of an interval is crossed."""

from __future__ import annotations

from kernel_core.errors import TimeStringError
from kernel_core.timing import Time, TimeUnit
from kernel_core.train.state import State


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
