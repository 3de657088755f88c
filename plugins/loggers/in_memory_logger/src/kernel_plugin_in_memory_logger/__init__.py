"""Keep everything that is logged in memory, as time series by metric."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from kernel_core import LoggerDestination, State, Timestamp, hookimpl
from kernel_core.errors import OptionError
from kernel_core.naming import did_you_mean
from kernel_core.timing import Progress
from torch import Tensor

__all__ = ["InMemoryLogger", "as_timeseries", "table_as_json"]

Series = Sequence[tuple[Timestamp, Any]]
FIELDS = Progress.__slots__  # those of a Timestamp, in the order of its counts


def as_timeseries(metric: str, series: Series) -> dict[str, np.ndarray[Any, Any]]:
    """Return a metric as arrays of one length (one device sync for each tensor).

    Args:
        metric: The name that the values get.
        series: When and what.

    Returns:
        An array for each field of a Timestamp (``epoch``, ``batch``, …; clocks in seconds), and the values under
        ``metric``.
    """
    counts = np.array([timestamp.counts for timestamp, _ in series], dtype=float)
    times = {
        name: counts[:, index] if name.endswith("_wct") else counts[:, index].astype(int)
        for index, name in enumerate(FIELDS)
    }
    return {**times, metric: np.array([_plain(value) for _, value in series])}


def table_as_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return ``{"columns": […], "data": [[…], …]}``; what JSON has no word for is text, a number that is not finite null.

    >>> table_as_json(["x", "y"], [[1, "one"]])
    '{"columns": ["x", "y"], "data": [[1, "one"]]}'
    """
    data = [[_jsonable(_plain(cell)) for cell in row] for row in rows]
    return json.dumps({"columns": list(columns), "data": data}, ensure_ascii=False, default=str)


def _plain(value: Any) -> Any:
    """Return numbers and lists for tensors and arrays (one device sync for a tensor)."""
    return value.tolist() if hasattr(value, "tolist") else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _keep(value: Any) -> Any:
    """Return a copy that later changes do not reach; a tensor stays on its device, and nobody waits for it."""
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class InMemoryLogger(LoggerDestination):
    """Keep metrics, hyperparameters and tables in memory, to be looked at while a run goes or after it.

    Tensors stay as they are until ``get_timeseries`` reads them. Nothing is ever dropped. Every rank keeps its own, so that
    a script that looks at them is the same on all.

    Attributes:
        data: A metric's name to a list of (Timestamp, value).
        most_recent_values: A metric's name to its latest value.
        most_recent_timestamps: A metric's name to the Timestamp of its latest value.
        hyperparameters: Name to value.
        tables: A table's name to its latest form as JSON: ``{"columns": […], "data": [[…], …]}``.

    Example:
        >>> logger = InMemoryLogger()
        >>> logger.log_metrics({"loss": 2.0})
        >>> logger.get_timeseries("loss")["loss"]
        array([2.])
    """

    every_rank: ClassVar[bool] = True

    def __init__(self) -> None:
        self.data: dict[str, list[tuple[Timestamp, Any]]] = {}
        self.most_recent_values: dict[str, Any] = {}
        self.most_recent_timestamps: dict[str, Timestamp] = {}
        self.hyperparameters: dict[str, Any] = {}
        self._tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        self._progress = Progress()

    @property
    def tables(self) -> dict[str, str]:
        """The tables as JSON, made when read (one device sync for each tensor in them)."""
        return {name: table_as_json(columns, rows) for name, (columns, rows) in self._tables.items()}

    @hookimpl
    def init(self, state: State) -> None:
        """Take the run's clock."""
        self._progress = state.progress

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Keep ``metrics`` under the present time."""
        timestamp = self._progress.timestamp()
        for name, value in metrics.items():
            kept = _keep(value)
            self.data.setdefault(name, []).append((timestamp, kept))
            self.most_recent_values[name] = kept
            self.most_recent_timestamps[name] = timestamp

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Keep settings of the run."""
        self.hyperparameters.update(hyperparameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "table", step: int | None = None
    ) -> None:
        """Keep a table in place of an older one of that name."""
        self._tables[name] = (list(columns), [[_keep(cell) for cell in row] for row in rows])

    def get_timeseries(self, metric: str) -> dict[str, np.ndarray[Any, Any]]:
        """Return the values of ``metric`` and when they were logged, as arrays of one length.

        Args:
            metric: A name in ``data``.

        Returns:
            ``metric`` and every field of a Timestamp (``epoch``, ``batch``, ``sample``, ``total_wct``, …) to an array;
            clocks are in seconds.

        Raises:
            OptionError: nothing was logged under that name.
        """
        if metric not in self.data:
            raise OptionError(
                f"in_memory_logger.get_timeseries: nothing was logged as {metric!r}.{did_you_mean(metric, self.data)} "
                f"Expected one of {', '.join(sorted(self.data)) or 'none so far'}. Look into data."
            )
        return as_timeseries(metric, self.data[metric])
