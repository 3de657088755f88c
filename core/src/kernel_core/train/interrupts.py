"""Ctrl-C and SIGTERM while a trainer works: end at the next step boundary, or at once when asked twice."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kernel_core.errors import Interrupted
from kernel_core.train.state import State

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_noted(state: State) -> Iterator[None]:
    """Inside the block the first SIGINT or SIGTERM only sets ``state.interrupted``; a second one stops at once.

    The handlers that were there are put back. Outside the main thread Python allows no handlers, and nothing is done.

    Raises:
        KeyboardInterrupt, Interrupted: inside the block, at the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    process = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a child that was forked meanwhile, such as a worker of a loader
            if number != signal.SIGINT:  # Ctrl-C reaches it too, and its parent still wants its batches
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        if state.wanted_signal is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Interrupted(number)
        state.interrupt(number)
        name = signal.Signals(number).name
        log.warning("%s: the run ends after the step it is in. Once more, and it stops at once.", name)

    held: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    # None was set by C code; ignored ones are ignored by whoever started the process, as nohup does
    mine = {number for number, handler in held.items() if handler not in (None, signal.SIG_IGN)}
    handler: Any = note
    handler.held = held
    for number in mine:
        signal.signal(number, handler)
    try:
        yield
    finally:
        handler.done = True
        for number in mine:
            if signal.getsignal(number) is handler:  # else somebody has set another one since
                signal.signal(number, _before(handler, number))


def _before(handler: Any, number: signal.Signals) -> Any:
    """Return what stood before ``handler``, and before all like it that are done: trainers may be driven in turns."""
    while getattr(handler, "done", False):
        handler = handler.held[number]
    return handler
