"""The launcher: torchrun's elastic agent starts the ranks, watches them and starts them again."""

from __future__ import annotations

import math
import os
import sys
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kernel_core.errors import EXIT_INTERRUPTED, EXIT_START_AGAIN, LaunchError
from kernel_core.launcher import Job, Launcher
from pydantic import Field

from kernel_plugin_torchrun import failure, leftovers, surroundings
from kernel_plugin_torchrun.configuration import check, configure, entry_point, meeting_point, node_rank, num_processes
from kernel_plugin_torchrun.joining import interruptible, joining_failed, wait_for_first_machine
from kernel_plugin_torchrun.rank import INTERRUPTED, IS_OVER

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest

MAX_SMALLER_STARTS = 16  # each halves the size of a microbatch


@dataclass(frozen=True)
class Ending:
    """How the ranks ended: the exit code, what to tell, and whether that was their own failure."""

    code: int
    report: str = ""
    failed: bool = False


class TorchrunLauncher(Launcher):
    """Start ranks on this machine, and join those of other machines.

    The first rank of a machine has its terminal; the others write to files. When a rank fails the others are asked to end,
    and killed after a while.

    Args:
        shutdown_timeout_s: How long ranks may take to end when the launcher is asked to end.
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
        folder, reports = _folders(job)
        with surroundings.environment(num_processes(job), reports), surroundings.quiet(job.verbose):
            with surroundings.signals():
                try:
                    ending = self._until_the_end(job, folder, reports)
                finally:
                    leftovers.kill(os.getpid())
        if ending.report:
            _say(ending.report)
        return ending.code

    def _until_the_end(self, job: Job, folder: Path, reports: Path) -> Ending:
        starts = _Starts(job.max_restarts, reports)
        while True:
            ending = self._launch_once(replace(job, max_restarts=starts.max_restarts), starts, folder, reports)
            if ending.failed and starts.is_smaller():  # whatever its code: the rank may be on another machine
                starts.max_restarts = starts.uncounted
            elif ending.failed and ending.code != EXIT_START_AGAIN and starts.uncounted and job.num_nodes == (1, 1):
                starts.max_restarts = starts.uncounted - 1
                _say("kernel launch: a rank failed; all start again.")
            else:
                return ending
            leftovers.kill(os.getpid())
            starts.number += 1

    def _launch_once(self, job: Job, starts: _Starts, folder: Path, reports: Path) -> Ending:
        from torch.distributed import DistError
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher.api import elastic_launch

        started = threading.Event()

        def before(restart: int, files: LogsDest) -> None:
            started.set()
            starts.before(restart, files)

        config, logs = configure(self, job, folder, starts.number, before)
        try:
            wait_for_first_machine(job, node_rank(job), self.join_timeout_s)
            with interruptible(started):
                elastic_launch(config, sys.executable)(*entry_point(job))
        except ChildFailedError as error:
            _, found = failure.first(error, reports)
            report = failure.describe(error, logs.files.stderrs, folder, reports)
            if starts.interrupted_before(failure.failed_at(found)):
                return Ending(EXIT_INTERRUPTED, report)
            return Ending(failure.exit_code(found), report, failed=True)
        except (SignalException, KeyboardInterrupt) as error:
            number = int(error.sigval) if isinstance(error, SignalException) else 2
            return Ending(EXIT_INTERRUPTED if starts.mark.exists() else 128 + number)
        except (RendezvousError, DistError, TimeoutError) as error:
            raise joining_failed(meeting_point(job), _reason(error)) from error
        except ValueError as error:
            raise LaunchError(f"kernel launch: torch's agent refuses the job: {error}") from error
        return Ending(EXIT_INTERRUPTED if starts.mark.exists() else 0)  # see rank.py


class _Starts:
    """Counts the starts of a job, and knows what the ranks have left behind for the next one.

    Attributes:
        number: Of this start of torch's agent.
        max_restarts: How often the agent may start the ranks again after a failure.
        uncounted: How many of those it has used up for memory that ran out.
        mark: The file of an interrupted run.
    """

    def __init__(self, max_restarts: int, reports: Path) -> None:
        self.number, self.max_restarts, self.uncounted = 0, max_restarts, 0
        self.mark = reports / INTERRUPTED
        self._reports, self._num_smaller, self._num_starts = reports, 0, 0
        given = os.environ.get(surroundings.SIZE, "")
        self._size = int(given) if given.isdigit() else None

    def before(self, restart: int, files: LogsDest) -> None:
        """Clear up before the ranks start, or start again after they have left ``files``."""
        if restart == 0:
            self.uncounted = 0
        else:
            leftovers.kill(os.getpid())
            if self.is_smaller():
                self.uncounted += 1
            elif self.interrupted_before(_first_error(files)):
                os.environ[IS_OVER] = "1"
            else:
                self.mark.unlink(missing_ok=True)
                _say(f"kernel launch: a rank failed; all start again ({restart} of {self.max_restarts}).")
        self._num_starts += 1
        os.environ[surroundings.START_COUNT] = str(self._num_starts - 1)
        for stale in (self._reports / "failed-first", *self._reports.glob("hang-rank*.json")):
            stale.unlink(missing_ok=True)

    def is_smaller(self) -> bool:
        """Say whether a rank has written down a smaller size since the last start, and hand it to the next."""
        path = self._reports / "microbatch_size"
        text = path.read_text().strip() if path.exists() else ""
        if not text.isdigit() or int(text) < 1 or self._num_smaller == MAX_SMALLER_STARTS:
            return False
        if self._size is not None and int(text) >= self._size:
            return False
        self._size, self._num_smaller = int(text), self._num_smaller + 1
        os.environ[surroundings.SIZE] = text
        _say(f"kernel launch: memory ran out on a rank; all start again with microbatches of {text} rows.")
        return True

    def interrupted_before(self, moment: float) -> bool:
        """Say whether a rank was interrupted before others failed, rather than because they had."""
        return self.mark.exists() and self.mark.stat().st_mtime < moment


def _first_error(files: LogsDest) -> float:
    """Return when a rank first wrote down an error, in seconds since the epoch; infinity if none has."""
    paths = map(Path, files.error_files.values())
    return min((path.stat().st_mtime for path in paths if path.is_file()), default=math.inf)


def _folders(job: Job) -> tuple[Path, Path]:
    """Return where logs and where reports go; reports of an earlier job are removed, and nothing else."""
    try:
        folder = Path(job.log_folder or tempfile.mkdtemp(prefix="kernel-launch-"))
        reports = folder / "reports"
        reports.mkdir(parents=True, exist_ok=True)
        names = ("failed-first", INTERRUPTED, "microbatch_size")
        for stale in (*(reports / name for name in names), *reports.glob("hang-rank*.json")):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise LaunchError(
            f"kernel launch: --log-dir {job.log_folder} cannot be used ({error.strerror or error}). Expected a folder "
            "that can be written to. Give another one."
        ) from error
    return folder, reports


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error  # rendezvous says "see inner exception"
    lines = str(cause).splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
