"""What to say when a job has failed: first who, then why, in that rank's own words."""

from __future__ import annotations

import json
import re
import signal
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

TAIL = 40  # lines of a log
TOLD_TO_END = (-signal.SIGTERM, 128 + signal.SIGTERM)
# what gloo, NCCL and sockets say on a rank whose peer is gone
PEER_GONE = re.compile(
    r"[Cc]onnection (closed|reset) by (remote )?peer|Broken pipe|remote process exited|ncclRemoteError"
)


def first(error: ChildFailedError, reports: Path) -> tuple[int, ProcessFailure]:
    """Return rank and failure of the one that failed first: the one that said so, else by time.

    Ranks that were told to end, or whose peer was gone, come after all others.
    """
    word = reports / "failed-first"
    rank = int(word.read_text()) if word.exists() else -1
    if rank in error.failures:
        return rank, error.failures[rank]
    return min(error.failures.items(), key=lambda item: (_is_consequence(item[1]), failed_at(item[1])))


def exit_code(failure: ProcessFailure) -> int:
    """Return the exit code, 128 + n for an end by signal n."""
    return 128 - failure.exitcode if failure.exitcode < 0 else failure.exitcode or 1


def failed_at(failure: ProcessFailure) -> float:
    """Return when it failed, in seconds since the epoch: when it said so, else when torch's agent noticed, rounded up."""
    path = Path(failure.error_file)
    return path.stat().st_mtime if path.is_file() else failure.timestamp + 1.0


def _is_consequence(failure: ProcessFailure) -> bool:
    if failure.exitcode in TOLD_TO_END:
        return True
    message = failure.message
    text = message.get("message", "") if isinstance(message, dict) else message
    return PEER_GONE.search(str(text)) is not None


def describe(error: ChildFailedError, stderrs: Mapping[int, str], folder: Path, reports: Path) -> str:
    """Return the report: hanging ranks if there are any, the other ranks in a line each, then the first one with its words."""
    rank, failure = first(error, reports)
    parts = [_hangs(reports)]
    others = [
        f"  rank {number}: {_ending(other)}" for number, other in sorted(error.failures.items()) if number != rank
    ]
    if others:
        parts.append("\n".join(["ended because of it, or after it:", *others]))
    when = time.strftime("%H:%M:%S", time.localtime(failure.timestamp))
    words = _words(failure, stderrs.get(failure.local_rank, ""))
    parts.append(f"rank {rank} failed first, at {when}: {_ending(failure)}\n{words}")
    parts.append(f"Output of the ranks: {folder}")
    return "\n".join(part for part in parts if part)


def _ending(failure: ProcessFailure) -> str:
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    names = {number.value: number.name for number in signal.Signals}
    return f"killed by {names.get(-failure.exitcode, f'signal {-failure.exitcode}')}"


def _words(failure: ProcessFailure, stderr: str) -> str:
    """Return the traceback that the rank wrote down, else the end of its log, else where to look."""
    path = Path(failure.error_file)
    if path.is_file():
        message: Any = json.loads(path.read_text()).get("message", "")
        if isinstance(message, dict):
            message = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
        return str(message).rstrip()
    if not stderr:
        return "(its output is above)"
    with open(stderr, errors="replace") as lines:
        tail = "".join(deque(lines, TAIL)).rstrip()
    return tail or "(it wrote nothing)"


def _hangs(reports: Path) -> str:
    records = [json.loads(path.read_text()) for path in sorted(reports.glob("hang-rank*.json"))]
    if not records:
        return ""
    from kernel_core.distributed.hang import combine

    return str(combine(records))
