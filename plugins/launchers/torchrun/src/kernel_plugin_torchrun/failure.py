"""What to say when a job has failed: first who, then why, in that rank's own words."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

TAIL = 40  # lines of a log


def first_exit_code(error: ChildFailedError, reports: Path) -> int:
    """Return the exit code of the rank that failed first, 128 + n for one that ended by signal n."""
    code = _first(error, reports)[1].exitcode
    return 128 - code if code < 0 else code or 1


def _first(error: ChildFailedError, reports: Path) -> tuple[int, ProcessFailure]:
    """Return rank and failure of the one that failed first: the one that said so, else by time, those told to end last."""
    word = reports / "failed-first"
    rank = int(word.read_text()) if word.exists() else -1
    if rank in error.failures:
        return rank, error.failures[rank]
    told_to_end = (-signal.SIGTERM, 128 + signal.SIGTERM)
    return min(error.failures.items(), key=lambda item: (item[1].exitcode in told_to_end, item[1].timestamp))


def describe(error: ChildFailedError, folder: Path, reports: Path) -> str:
    """Return the report: hanging ranks if there are any, the other ranks in a line each, then the first one with its words."""
    rank, failure = _first(error, reports)
    parts = [_hangs(reports)]
    others = [
        f"  rank {number}: {_ending(other)}" for number, other in sorted(error.failures.items()) if number != rank
    ]
    if others:
        parts.append("\n".join(["ended because of it, or after it:", *others]))
    when = time.strftime("%H:%M:%S", time.localtime(failure.timestamp))
    parts.append(f"rank {rank} failed first, at {when}: {_ending(failure)}\n{_words(failure, folder)}")
    parts.append(f"Output of the ranks: {folder}")
    return "\n".join(part for part in parts if part)


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    return f"killed by {signal.Signals(-failure.exitcode).name}"


def _words(failure: ProcessFailure, folder: Path) -> str:
    """Return the traceback that the rank wrote down, else the end of its log, else where to look."""
    path = Path(failure.error_file)
    if path.is_file():
        message: Any = json.loads(path.read_text()).get("message", "")
        if isinstance(message, dict):
            message = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
        return str(message).rstrip()
    logs = sorted(folder.glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), key=lambda log: log.stat().st_mtime)
    if logs and (lines := logs[-1].read_text(errors="replace").splitlines()):
        return "\n".join(lines[-TAIL:])
    return "(its output is above)" if failure.local_rank == 0 else "(it wrote nothing)"


def _hangs(reports: Path) -> str:
    records = [json.loads(path.read_text()) for path in sorted(reports.glob("hang-rank*.json"))]
    if not records:
        return ""
    from kernel_core.distributed.hang import combine

    return str(combine(records))
