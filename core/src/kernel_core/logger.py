"""One place to log to; it hands everything on to the logger plugins."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kernel_core.registry.base import LoggerDestination, Plugin
from kernel_core.timing import Progress

log = logging.getLogger(__name__)
MAX_FAILURES = 3


class Logger:
    """Fans out to the active ``LoggerDestination`` plugins.

    A destination that fails with an ``OSError`` (network, disk) is warned about and, after three failures in a row,
    left out for the rest of the run; training goes on. Any other error is the plugin's fault and stops the run.

    Attributes:
        listening: Whether anybody takes what is logged. Ask it before you build something costly.
    """

    def __init__(self, destinations: Sequence[LoggerDestination], progress: Progress) -> None:
        self._destinations = tuple(destinations)
        self._failures: dict[tuple[LoggerDestination, str], int] = {}
        self._progress = progress

    @property
    def listening(self) -> bool:
        """Whether at least one destination is active."""
        return bool(self._destinations)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log ``metrics``, name to number or 0-d tensor; the step is the number of finished batches."""
        step = self._progress.batch if step is None else step
        for destination in self._destinations:
            try:  # as _hand_over, without its calls: this runs every batch
                destination.log_metrics(metrics, step)
            except OSError as error:
                self._count_failure(destination, "log_metrics", error)
            else:
                if self._failures:
                    self._failures.pop((destination, "log_metrics"), None)

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Log settings that hold for the whole run."""
        for destination in self._destinations:
            self._hand_over(destination, "log_hyperparameters", destination.log_hyperparameters, hyperparameters)

    def log_table(
        self, columns: list[str], rows: list[list[Any]], name: str = "table", step: int | None = None
    ) -> None:
        """Log a table of ``rows`` under ``columns``."""
        step = self._progress.batch if step is None else step
        for destination in self._destinations:
            self._hand_over(destination, "log_table", destination.log_table, columns, rows, name, step)

    def log_images(
        self, images: Any, name: str = "images", step: int | None = None, channels_last: bool = False
    ) -> None:
        """Log images: one (C, H, W) or (H, W, C) array, or a sequence of them."""
        step = self._progress.batch if step is None else step
        for destination in self._destinations:
            self._hand_over(destination, "log_images", destination.log_images, images, name, step, channels_last)

    def guard(self, plugin: Plugin, hook: str, call: Callable[[], Any]) -> Callable[[], Any]:
        """Put the same policy around a hook of a logger; what opens and closes it may fail loudly."""
        if not isinstance(plugin, LoggerDestination) or hook in ("init", "fit_start", "eval_standalone_start", "close"):
            return call
        return partial(self._hand_over, plugin, hook, call)

    def _hand_over(self, destination: LoggerDestination, what: str, take: Callable[..., None], *args: Any) -> None:
        if destination not in self._destinations:
            return
        try:
            take(*args)
        except OSError as error:
            self._count_failure(destination, what, error)
        else:
            if self._failures:
                self._failures.pop((destination, what), None)

    def _count_failure(self, destination: LoggerDestination, what: str, error: OSError) -> None:
        failures = self._failures[destination, what] = self._failures.get((destination, what), 0) + 1
        if failures < MAX_FAILURES:
            log.warning("%s: %s failed (%s). Going on; it is tried again.", destination.name, what, error)
            return
        self._destinations = tuple(one for one in self._destinations if one is not destination)
        log.error(
            "%s: %s failed %d times in a row (%s). It is switched off for the rest of the run; training goes on.",
            destination.name,
            what,
            failures,
            error,
        )
