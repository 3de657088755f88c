"""The launcher: torchrun's elastic agent starts the ranks, watches them and starts them again."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from kernel_core.errors import EXIT_INTERRUPTED, EXIT_START_AGAIN, LaunchError
from kernel_core.launcher import Job, Launcher
from pydantic import Field

from kernel_plugin_torchrun.configuration import check, configure, entry_point
from kernel_plugin_torchrun.failure import describe, first_exit_code

MAX_SMALLER_STARTS = 16  # each halves the size of a microbatch


class TorchrunLauncher(Launcher):
    """Start ranks on this machine, and join those of other machines.

    The first rank of a machine has its terminal; the others write to files. When a rank fails the others are asked to end,
    and killed after a while.

    Args:
        shutdown_timeout_s: How long ranks may take to end when asked to.
        join_timeout_s: How long machines wait for one another.
        monitor_interval_s: How often the ranks are looked at.

    Example:
        >>> TorchrunLauncher().launch(Job(("train.py",), num_processes=2))  # doctest: +SKIP
        0
    """

    def __init__(
        self,
        shutdown_timeout_s: Annotated[int, Field(ge=0)] = 15,
        join_timeout_s: Annotated[int, Field(ge=1)] = 300,
        monitor_interval_s: Annotated[float, Field(gt=0)] = 0.1,
    ) -> None:
        self.shutdown_timeout_s = shutdown_timeout_s
        self.join_timeout_s = join_timeout_s
        self.monitor_interval_s = monitor_interval_s

    def launch(self, job: Job) -> int:
        """Start the ranks until they end; again, if they ask for smaller microbatches."""
        check(job)
        folder = Path(job.log_folder or tempfile.mkdtemp(prefix="kernel-launch-"))
        reports = folder / "reports"
        reports.mkdir(parents=True, exist_ok=True)
        for stale in reports.iterdir():
            stale.unlink()
        size: int | None = None
        with _environment(job, reports), _quiet(job.verbose):
            for _ in range(MAX_SMALLER_STARTS):
                code = self._launch_once(job, folder, reports)
                smaller = _written_size(reports)
                if code != EXIT_START_AGAIN or smaller is None or (size is not None and smaller >= size):
                    return code
                size = smaller
                _say(f"kernel launch: memory ran out on a rank; all start again with microbatches of {size} rows.")
        return EXIT_START_AGAIN

    def _launch_once(self, job: Job, folder: Path, reports: Path) -> int:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        for stale in ("failed-first", "interrupted", *(path.name for path in reports.glob("hang-*"))):
            (reports / stale).unlink(missing_ok=True)
        config = configure(job, folder, self.join_timeout_s, self.shutdown_timeout_s, self.monitor_interval_s)
        try:
            elastic_launch(config, sys.executable)(*entry_point(job))
        except ChildFailedError as error:
            code = first_exit_code(error, reports)
            if code != EXIT_START_AGAIN:
                _say(describe(error, folder, reports))
            return code
        except SignalException as error:
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return 130
        except (RuntimeError, OSError, ValueError) as error:
            raise _joining_failed(job, error) from error
        return EXIT_INTERRUPTED if (reports / "interrupted").exists() else 0  # see rank.py


def _joining_failed(job: Job, error: Exception) -> LaunchError:
    """Return the error for machines that do not find one another."""
    where = job.rendezvous_endpoint or f"{job.master_addr or '127.0.0.1'}:{job.master_port}"
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return LaunchError(
            f"kernel launch: port {job.master_port} of this machine is taken. Expected a free one. Leave --master-port out and "
            "a free one is found, or give another, the same on all machines."
        )
    return LaunchError(
        f"kernel launch: could not join the other machines at {where} ({type(error).__name__}: {reason}). Check that the first "
        "machine has started, that its name leads to it from here, that all machines have the same address and port, and that "
        "no firewall closes that port."
    )


def _written_size(reports: Path) -> int | None:
    path = reports / "microbatch_size"
    text = path.read_text() if path.exists() else ""
    return int(text) if text.isdigit() else None


@contextlib.contextmanager
def _environment(job: Job, reports: Path) -> Iterator[None]:
    """Set what the ranks inherit, and put it back."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    wanted = {"KERNEL_REPORT_DIR": str(reports.resolve()), "PYTHONUNBUFFERED": "1"}
    if "OMP_NUM_THREADS" not in os.environ:
        wanted["OMP_NUM_THREADS"] = str(max(1, cores // (job.num_processes or 1)))
    held = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in held.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Keep what torch's agent logs to itself: this launcher says what matters."""
    import torch.distributed.launcher.api  # noqa: F401 (makes its loggers)

    loggers = [
        logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO if verbose else logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
