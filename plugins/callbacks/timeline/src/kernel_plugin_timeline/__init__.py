"""Measure where the time of a run goes: each phase and each plugin's hooks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kernel_core import Callback, Logger, State, hookimpl

__all__ = ["Clock", "Timeline", "format_table", "timeline_table"]

COLUMNS = ("part", "seconds", "share", "calls", "µs a call")
LOOP = "loop"  # what is left: the kernel's own work between all that is measured


class Clock:
    """Adds up the time inside parts that may nest; what an inner part takes does not count for the outer one.

    Attributes:
        seconds: Own time of each part.
        calls: How often each part ran.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}
        self._inner = 0.0  # time of the parts inside the one that is running

    def around(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call`` with its time added to ``part`` (about 0.5 µs a call)."""
        self.seconds[part], self.calls[part] = 0.0, 0
        seconds, calls, now = self.seconds, self.calls, time.perf_counter

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer, self._inner = self._inner, 0.0
            started = now()
            try:
                return call(*args, **kwargs)
            finally:
                taken = now() - started
                seconds[part] += taken - self._inner
                calls[part] += 1
                self._inner = outer + taken

        return timed

    def reset(self) -> None:
        """Start all parts at zero."""
        for part in self.seconds:
            self.seconds[part], self.calls[part] = 0.0, 0
        self._inner = 0.0


def timeline_table(seconds: Mapping[str, float], calls: Mapping[str, int], wall_s: float) -> list[tuple[str, ...]]:
    """Return rows (part, seconds, share, calls, µs per call), the largest first, and what is left as ``loop``.

    The seconds of all rows add up to ``wall_s``.
    """
    rest = wall_s - sum(seconds.values())
    parts = [(part, taken, calls[part]) for part, taken in seconds.items() if calls[part]]
    rows = sorted([*parts, (LOOP, rest, 0)], key=lambda row: -row[1])
    share = 100 / wall_s if wall_s > 0 else 0.0
    return [
        (
            part,
            f"{taken:.3f}",
            f"{taken * share:.1f} %",
            str(count) if count else "",
            f"{taken / count * 1e6:.1f}" if count else "",
        )
        for part, taken, count in [*rows, ("total", wall_s, 0)]
    ]


def format_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the rows under their columns as aligned text; numbers stand to the right."""
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    texts = [
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(["", *(text.rstrip() for text in texts), ""])


class Timeline(Callback):
    """Print at the end of ``fit`` how long each phase and each plugin's hooks took, on the first rank.

    Phases are ``data``, ``forward``, ``loss``, ``backward``, ``step`` (the optimizers alone) and ``evaluation``; a hook is
    named ``<plugin>.<hook>``, and what is left is ``loop``. Times are those of the host: work that an accelerator does
    meanwhile shows where the host waits for it. The table is logged too, as ``timeline``.
    """

    affects_training = False

    def __init__(self) -> None:
        self.clock = Clock()
        self._started = 0.0

    @hookimpl
    def instrument(self, part: str, call: Callable[..., Any]) -> Callable[..., Any] | None:
        """Time every part but this plugin's own."""
        return None if part.startswith(f"{self.id or self.name}.") else self.clock.around(part, call)

    @hookimpl
    def fit_start(self) -> None:
        """Start the clock."""
        self.clock.reset()
        self._started = time.perf_counter()

    @hookimpl
    def fit_end(self, state: State, logger: Logger) -> None:
        """Stop the clock, print the table and log it."""
        wall_s = time.perf_counter() - self._started
        rows = timeline_table(self.clock.seconds, self.clock.calls, wall_s)
        if state.rank == 0:
            print(format_table(COLUMNS, rows), file=sys.stderr, flush=True)  # noqa: T201
        logger.log_table(list(COLUMNS), [list(row) for row in rows], name="timeline")
