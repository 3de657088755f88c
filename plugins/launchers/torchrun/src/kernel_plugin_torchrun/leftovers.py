"""Processes that ranks have started and left behind: they carry the launcher's mark in their environment.

As a script, started by a rank whose launcher is gone: ``python -m kernel_plugin_torchrun.leftovers PID SECONDS``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

LAUNCHER_PID = "KERNEL_LAUNCHER_PID"


def find(launcher: int) -> list[int]:
    """Return the processes of a launcher's ranks, and what those started; none where there is no ``/proc``."""
    mark = f"{LAUNCHER_PID}={launcher}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except (OSError, ValueError):  # it has ended, or belongs to somebody else
            continue
    return [pid for pid in found if pid != os.getpid()]


def kill(launcher: int) -> None:
    """Kill them at once."""
    for pid in find(launcher):
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def main(launcher: int, seconds: float) -> None:
    """Wait for them to end, and kill what is left after ``seconds``."""
    end = time.monotonic() + seconds
    while find(launcher) and time.monotonic() < end:
        time.sleep(0.2)
    kill(launcher)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
