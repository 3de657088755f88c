"""What a launcher changes in its own process while ranks run, and puts back."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from kernel_plugin_torchrun.leftovers import LAUNCHER_PID
from kernel_plugin_torchrun.rank import IS_OVER

REPORT_DIR, SIZE = "KERNEL_REPORT_DIR", "KERNEL_MICROBATCH_SIZE"  # as kernel_core reads them
START_COUNT = "KERNEL_START_COUNT"  # how often the ranks have been started before, for whatever reason
CHANGED = (
    REPORT_DIR,
    SIZE,
    START_COUNT,
    LAUNCHER_PID,
    IS_OVER,
    "OMP_NUM_THREADS",
    "PYTHONUNBUFFERED",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # torch's agent sets handlers for them


@contextlib.contextmanager
def environment(num_processes: int, reports: Path) -> Iterator[None]:
    """Set what the ranks inherit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    held = dict(os.environ)
    os.environ.update({REPORT_DIR: str(reports.resolve()), "PYTHONUNBUFFERED": "1", LAUNCHER_PID: str(os.getpid())})
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_processes)))
    try:
        yield
    finally:
        for name in CHANGED:
            if name in held:
                os.environ[name] = held[name]
            else:
                os.environ.pop(name, None)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Put back the handlers that torch's agent replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def quiet(verbose: bool) -> Iterator[None]:
    """Keep what torch's agent logs to itself: the launcher says what matters."""
    chosen = "TORCH_CPP_LOG_LEVEL" in os.environ
    if not (verbose or chosen):
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # read once, when torch is loaded
    import torch.distributed.launcher.api  # noqa: F401 (makes its loggers)

    if not (verbose or chosen):
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks decide for themselves
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if verbose else logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
