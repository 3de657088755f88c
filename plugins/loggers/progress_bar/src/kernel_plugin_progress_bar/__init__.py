"""Show how a run goes: a live bar in a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from kernel_core import LoggerDestination, State, hookimpl
from kernel_core.train.evaluation import number
from pydantic import Field

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

__all__ = ["ProgressBar", "progress_line", "seconds_as_clock"]

REFRESH_S = 0.25


def seconds_as_clock(seconds: float) -> str:
    """Write a time as ``m:ss`` or ``h:mm:ss``.

    >>> seconds_as_clock(75), seconds_as_clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def progress_line(label: str, done: float | None, count: str, elapsed_s: float, values: Mapping[str, float]) -> str:
    """Write one line: what, how far, since when, how long still, and the latest values."""
    parts = [label]
    if done is not None:
        parts.append(f"{100 * min(done, 1.0):3.0f}%")
    clock = seconds_as_clock(elapsed_s)
    if done and 0 < done < 1:
        clock += f" (about {seconds_as_clock(elapsed_s * (1 - done) / done)} left)"
    shown = "  ".join(
        f"{name.removeprefix('loss/').removeprefix('metrics/')} {value:.4g}" for name, value in values.items()
    )
    return "  ".join(part for part in (*parts, count, clock, shown) if part)


class ProgressBar(LoggerDestination):
    """Show progress, the loss and the metrics on standard error.

    Values are read from the device when they are shown, four times a second at most, never in each step.

    Args:
        interval_s: Seconds between two lines where there is no terminal.
    """

    def __init__(self, interval_s: Annotated[float, Field(gt=0)] = 5.0) -> None:
        self.interval_s = interval_s
        self._latest: dict[str, Any] = {}
        self._bar: Bar | None = None
        self._task: Any = None
        self._next = 0.0
        self._started = 0.0

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Keep the latest values; what is shown is chosen when it is shown."""
        self._latest.update(metrics)

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Open the bar, on the first rank and in a terminal only."""
        self._started = time.perf_counter()
        self._next = self._started
        if state.rank == 0 and sys.stderr.isatty():
            self._bar = _open_bar()
            self._task = self._bar.add_task("train", total=1.0, values="")

    @hookimpl
    def batch_end(self, state: State) -> None:
        """Show something if it is time to (about 0.1 µs when it is not)."""
        now = time.perf_counter()
        if now < self._next or state.rank:
            return
        self._next = now + (REFRESH_S if self._bar else self.interval_s)
        self._show(state, now)

    def _show(self, state: State, now: float) -> None:
        elapsed = state.get_elapsed_duration()
        done = None if elapsed is None else float(elapsed)
        values = self._values("loss/")
        count = f"epoch {state.progress.epoch}, batch {state.progress.batch}"
        if self._bar is None:
            self._print(progress_line("train", done, count, now - self._started, values))
        else:
            shown = "  ".join(f"{name.removeprefix('loss/')} {value:.4g}" for name, value in values.items())
            self._bar.update(self._task, completed=done or 0.0, values=f"{count}  {shown}")

    @hookimpl
    def eval_end(self, state: State) -> None:
        """Write the metrics of the evaluator above the bar."""
        values = self._values(f"metrics/{state.dataloader_label}/")
        if values and not state.rank:
            self._print(progress_line("eval ", None, f"batch {state.progress.batch}", self._since(), values))

    def _values(self, prefix: str) -> dict[str, float]:
        """Return the latest scalars under ``prefix`` (one device sync for each)."""
        read = {name: number(value) for name, value in self._latest.items() if name.startswith(prefix)}
        return {name: value for name, value in read.items() if value is not None}

    def _since(self) -> float:
        return time.perf_counter() - self._started if self._started else 0.0

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._bar.console.print(line, highlight=False, markup=False)

    @hookimpl
    def fit_end(self, state: State) -> None:
        """Show the last state and close the bar."""
        if not state.rank:
            self._show(state, time.perf_counter())
        self._stop()

    @hookimpl
    def fit_failed(self) -> None:
        """Close the bar, so that the error stands below it."""
        self._stop()

    @hookimpl
    def close(self) -> None:
        """Close the bar."""
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _open_bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[values]}"),
        console=Console(stderr=True),
        refresh_per_second=4,
    )
    bar.start()
    return bar
