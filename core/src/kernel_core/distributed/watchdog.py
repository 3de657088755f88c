"""A thread beside the loop that notices when ranks stand still, or when another one has failed, and ends this process."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_core.distributed import hang
from kernel_core.errors import KernelError, StartAgain
from kernel_core.train.shared_microbatch import REPORT_DIR, write_size
from kernel_core.train.state import State

log = logging.getLogger(__name__)
ABORT, HANG = "abort", "hang"
GRACE_S = 5.0  # how long a rank may take to come out by itself when another one has failed
OTHERS_S = 3.0  # how long the others get to write down where they stand


class Watchdog(threading.Thread):
    """Looks about once a second at counters that the loop keeps anyway.

    Args:
        state: The run.
        busy: Whether the trainer is at work, as opposed to the user's own code between two calls.
        store: What all ranks see; a connection of its own, since a client that waits blocks other users.
        limit_s: How long the counters may stand still.
    """

    def __init__(self, state: State, busy: Callable[[], bool], store: Any, limit_s: float) -> None:
        super().__init__(name="kernel-watchdog", daemon=True)
        self._state, self._busy, self._store, self._limit_s = state, busy, store, limit_s
        self._interval_s = min(1.0, limit_s / 4)
        self._ended = threading.Event()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def run(self) -> None:
        """Watch until ``end``. Whatever goes wrong here must not disturb the run."""
        try:
            self._watch()
        except Exception:
            log.debug("the watchdog of rank %d ended", self._state.rank, exc_info=True)

    def _watch(self) -> None:
        seen, since = self._counters(), time.monotonic()
        while not self._ended.wait(self._interval_s):
            told = self._ask(ABORT)
            if told is not None:
                self._heed(json.loads(told))
            now = self._counters()
            if now != seen or not self._busy():
                seen, since = now, time.monotonic()
            if time.monotonic() - since > self._limit_s:
                self._tell_hang()
                self._report(f"nothing has moved for {self._limit_s:g} s")
            elif self._busy() and (other := self._ask(HANG)) is not None:
                self._report(f"rank {other} stands still")

    def _ask(self, key: str) -> str | None:
        """Return what is in the store, None if there is nothing or no store any more: then this rank is on its own."""
        try:
            if self._store is not None and self._store.check([key]):
                return str(self._store.get(key).decode())
        except RuntimeError:
            self._store = None
        return None

    def _tell_hang(self) -> None:
        try:
            if self._store is not None:
                self._store.set(HANG, str(self._state.rank))
        except RuntimeError:
            self._store = None

    def _counters(self) -> tuple[int, ...]:
        state = self._state
        return (state.progress.batch, state.progress.epoch, state.eval_progress.batch, state.predict_progress.batch)

    def _heed(self, told: dict[str, Any]) -> None:
        """End with the rank that failed, unless this is the one or comes out by itself."""
        if told["rank"] == self._state.rank or self._ended.wait(GRACE_S):
            self._ended.set()
            return
        if told["size"] is not None:
            write_size(told["size"])
        _end(
            f"rank {told['rank']} failed: {told['type']}: {told['message']}\nrank {self._state.rank} ends with it.",
            told["code"],
        )

    def _report(self, why: str) -> None:
        folder = Path(os.environ.get(REPORT_DIR) or f"hang-{self._state.run_name}")
        found = hang.write(self._state, folder)
        place = hang.where(json.loads(found.read_text()))
        time.sleep(OTHERS_S)
        if self._ended.is_set():
            return
        _end(f"rank {self._state.rank}: {why}; this rank is in {place}. All stacks: {found}", 1)


def _end(text: str, code: int) -> None:
    """End the process at once: its main thread cannot be reached."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
    os._exit(code)


def tell(store: Any, rank: int, error: BaseException) -> None:
    """Tell the other ranks that this one ends because of ``error``; if another one was first, note that in ``error``.

    Never raises.
    """
    code = error.exit_code if isinstance(error, KernelError) else 1
    size = error.size if isinstance(error, StartAgain) else None
    mine = {"rank": rank, "type": type(error).__name__, "message": str(error), "code": code, "size": size}
    try:
        first = json.loads(store.compare_set(ABORT, "", json.dumps(mine)).decode())
    except Exception:
        log.debug("rank %d could not tell the others", rank, exc_info=True)
        return
    if first["rank"] != rank:
        error.add_note(f"rank {first['rank']} failed first: {first['type']}: {first['message']}")
        return
    _leave_word(rank, error)


def _leave_word(rank: int, error: BaseException) -> None:
    """Write down for the launcher that this rank was the first, and its traceback."""
    if folder := os.environ.get(REPORT_DIR):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "failed-first").write_text(str(rank))
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
