"""A thread beside the loop that notices when ranks stand still, or when another one has failed, and ends this process.

What ranks tell one another goes through the store:

* ``abort``: the first error of any rank. That rank then has ``OWN_S`` to close; when it has (``closed``), or the time is over,
  the others have ``GRACE_S`` to come out by themselves. All end within ``ALL_S``.
* ``hang``: the first rank that stands still. All write down where they stand (``standing/<rank>``), and end.

A rank comes out when its trainer closes: that ends the watchdog.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from kernel_core.distributed import hang
from kernel_core.errors import KernelError, StartAgain
from kernel_core.train.shared_microbatch import REPORT_DIR, write_size
from kernel_core.train.state import State

log = logging.getLogger(__name__)
ABORT, HANG = "abort", "hang"
OWN_S = 10.0  # how long a rank that failed may take to close
GRACE_S = 5.0  # how long a rank may take to come out by itself when another one has failed
ALL_S = 25.0  # from the first error to the end of the last rank, whatever they do
OTHERS_S = 5.0  # how long the others get to write down where they stand
HEARD_S = 3.0  # how long the process with the store waits until all have heard of an error
STORE_S = 10.0  # how long an answer of the store may take
T = TypeVar("T")


class Watchdog:
    """Looks about once a second at counters that the loop keeps anyway.

    Args:
        rank, world_size: This process among all.
        store: What all ranks see; a connection of its own, since a client that waits blocks other users.
        limit_s: How long the counters may stand still.
    """

    def __init__(self, rank: int, world_size: int, store: Any, limit_s: float) -> None:
        self._rank, self._world_size, self._store, self._limit_s = rank, world_size, store, limit_s
        self._interval_s = min(1.0, limit_s / 4)
        self._state: State | None = None
        self._busy: Callable[[], bool] = lambda: False
        self._seen: Any = None
        self._still_s = 0.0
        self._first: dict[str, Any] | None = None  # the first error of another rank
        self._first_at = self._closed_at = 0.0
        self._own: tuple[float, str, int] | None = None  # when this rank failed, its traceback, its exit code
        self._ended = threading.Event()
        self._store_gone = False
        store.set_timeout(timedelta(seconds=STORE_S))
        self._thread = threading.Thread(target=self._run, name="kernel-watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._leave)

    def watch(self, state: State, busy: Callable[[], bool]) -> None:
        """Look at ``state`` from now on; before, only at what other ranks say."""
        self._busy, self._state = busy, state

    def end(self) -> None:
        """Stop watching: this rank has closed, in order or after an error. May be called twice."""
        if self._ended.is_set():
            return
        self._look_for_first()
        if self._own is not None or self._first is not None:
            self._ask(lambda: self._store.set(f"heard/{self._rank}", ""), None)
            if self._own is not None:
                self._ask(lambda: self._store.set(f"closed/{self._rank}", ""), None)
            if self._rank == 0:  # the store may be in this process: it must not end before all have heard
                self._wait_for("heard", HEARD_S)
        self._leave()

    def _leave(self) -> None:
        atexit.unregister(self._leave)
        self._ended.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)  # a thread inside the store's client, when Python goes, would abort the process

    def abort(self, error: BaseException) -> None:
        """Tell the others that this one ends because of ``error``; if another was first, note that in ``error``.

        Never raises.
        """
        if self._ended.is_set() or self._own is not None or (isinstance(error, SystemExit) and not error.code):
            return
        try:
            self._tell(error)
        except Exception:
            log.debug("rank %d could not tell the others", self._rank, exc_info=True)
        self._own = time.monotonic(), "".join(traceback.format_exception(error)), exit_code(error)

    def _tell(self, error: BaseException) -> None:
        size = error.size if isinstance(error, StartAgain) else None
        name, code = type(error).__name__, exit_code(error)
        mine = {"rank": self._rank, "type": name, "message": str(error), "code": code, "size": size}
        given = self._ask(lambda: self._store.compare_set(ABORT, "", json.dumps(mine)), b"")
        first = json.loads(given.decode()) if given else self._first
        if first is None:
            return  # nobody can be told
        if first["rank"] == self._rank:
            _leave_word(self._rank, error)
            return
        error.add_note(f"rank {first['rank']} failed first: {first['type']}: {first['message']}")
        if first["size"] is not None:
            write_size(first["size"])

    def _run(self) -> None:
        """Watch until ``end``. Whatever goes wrong here must not disturb the run."""
        last = time.monotonic()
        while not self._ended.wait(self._interval_s):
            now = time.monotonic()
            # a process that was stopped did not hang meanwhile
            passed_s, last = min(now - last, self._interval_s + STORE_S), now
            try:
                self._look(passed_s)
            except Exception:
                log.debug("the watchdog of rank %d failed", self._rank, exc_info=True)

    def _look(self, passed_s: float) -> None:
        self._look_for_first()
        if self._own is not None or self._first is not None:
            self._end_if_late()
        elif self._state is not None:
            self._look_for_hang(self._state, passed_s)

    # --- an error ---------------------------------------------------------------------------------------------------

    def _look_for_first(self) -> None:
        """Take note of another rank's error, and let it know."""
        if self._first is not None or not self._ask(lambda: self._store.check([ABORT]), False):
            return
        text = self._ask(lambda: self._store.get(ABORT), b"")
        told = json.loads(text.decode()) if text else None
        if told is not None and told["rank"] != self._rank:
            self._first, self._first_at = told, time.monotonic()
            self._ask(lambda: self._store.set(f"heard/{self._rank}", ""), None)

    def _end_if_late(self) -> None:
        now, first, own = time.monotonic(), self._first, self._own
        if own is not None and (now - own[0] > OWN_S or (first is not None and now - self._first_at > ALL_S)):
            self._ask(lambda: self._store.set(f"closed/{self._rank}", ""), None)
            late = f"rank {self._rank} failed, and could not close within {now - own[0]:.0f} s; it ends."
            self._quit(f"{own[1]}{late}", own[2] if first is None else first["code"])
        if own is not None or first is None:
            return
        closed = self._ask(lambda: self._store.check([f"closed/{first['rank']}"]), True)
        if not self._closed_at and (closed or now - self._first_at > OWN_S + 1):
            self._closed_at = now
        if self._closed_at and now - self._closed_at > GRACE_S:
            if first["size"] is not None:
                write_size(first["size"])
            said = f"rank {first['rank']} failed: {first['type']}: {first['message']}"
            self._quit(f"{said}\nrank {self._rank} ends with it.", first["code"])

    # --- standing still ---------------------------------------------------------------------------------------------

    def _look_for_hang(self, state: State, passed_s: float) -> None:
        now = _counters(state)
        self._still_s = self._still_s + passed_s if now == self._seen and self._busy() else 0.0
        self._seen = now
        if self._still_s > self._limit_s:
            rank = str(self._rank)
            first = self._ask(lambda: self._store.compare_set(HANG, "", rank), rank.encode()).decode() == rank
            self._report(state, f"nothing has moved for {self._limit_s:g} s", first)
        elif self._ask(lambda: self._store.check([HANG]), False):
            other = self._ask(lambda: self._store.get(HANG), b"?").decode()
            self._report(state, f"rank {other} stands still", False)

    def _report(self, state: State, why: str, first: bool) -> None:
        told = os.environ.get(REPORT_DIR)
        folder = Path(told or f"hang-{state.run_name}")
        found = hang.write(state, folder, self._still_s)
        place = hang.in_words(json.loads(found.read_text()))
        self._ask(lambda: self._store.set(f"standing/{self._rank}", ""), None)
        self._wait_for("standing", OTHERS_S)
        if self._ended.is_set():
            return
        text = f"rank {self._rank}: {why}; this rank is {place}. All stacks: {found}"
        if first and not told:  # no launcher puts the records together
            text += "\n" + hang.combine([json.loads(one.read_text()) for one in sorted(folder.glob("hang-rank*.json"))])
        self._quit(text, 1)

    # --- the store --------------------------------------------------------------------------------------------------

    def _ask(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what the store says, or ``otherwise`` when it is gone: its process may have ended before this one."""
        try:
            return otherwise if self._store_gone else call()
        except Exception as error:
            # its client does not connect again, and torch writes a long warning each time
            self._store_gone = isinstance(error, dist.DistNetworkError)
            log.debug("rank %d: the store does not answer", self._rank, exc_info=True)
            return otherwise

    def _wait_for(self, what: str, timeout_s: float) -> None:
        """Wait until every rank has set its key; the process with the store a little longer, so that others see it too."""
        keys = [f"{what}/{rank}" for rank in range(self._world_size)]
        until = time.monotonic() + timeout_s
        while time.monotonic() < until and not self._ask(lambda: self._store.check(keys), True):
            time.sleep(0.1)
        if self._rank == 0:
            time.sleep(0.3)

    def _quit(self, text: str, code: int) -> None:
        """End the process at once: its main thread cannot be reached."""
        if self._ended.is_set():
            return
        # the main thread may hold the lock of the stream
        writer = threading.Thread(target=_say, args=(text,), daemon=True)
        writer.start()
        writer.join(2.0)
        os._exit(code)


def _counters(state: State) -> tuple[Any, ...]:
    """Return what changes when the run moves; each evaluation and prediction counts in an object of its own."""
    of_eval, of_predict = state.eval_progress, state.predict_progress
    train = state.progress
    return train.batch, train.epoch, train.iteration, of_eval, of_eval.batch, of_predict, of_predict.batch


def _say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def exit_code(error: BaseException) -> int:
    """Return what a process ends with that ``error`` ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, KernelError) else 1


def _leave_word(rank: int, error: BaseException) -> None:
    """Write down for the launcher that this rank was the first, and its traceback."""
    if folder := os.environ.get(REPORT_DIR):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "failed-first").write_text(str(rank))
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
