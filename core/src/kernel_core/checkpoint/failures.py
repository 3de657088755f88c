"""How a run failed, written beside its checkpoints, so that one that fails again and again in the same way is noticed."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_core.errors import EXIT_START_AGAIN, KernelError, RepeatedFailureError, StorageMissingError
from kernel_core.storage import join_url, open_storage

if TYPE_CHECKING:
    from kernel_core.engine import Engine

log = logging.getLogger(__name__)
FILE = "failures.json"
MOST = 2  # failures alike after which starting again is refused


class Failures:
    """The failures of a run that resumes itself. A process that is killed leaves no word, and is started again as ever.

    Args:
        folder: Where its checkpoints are.
        checkpoint: The one it begins from, None if it begins at its start.
        sequence: The number of that one, which tells it from an earlier one of its name.
    """

    def __init__(self, folder: str, checkpoint: str | None, sequence: int = 0) -> None:
        self._folder = folder
        self._from = {"checkpoint": checkpoint, "sequence": sequence}
        self._start = ""  # which start of the run this is, the same on every rank

    def refuse_third(self, engine: Engine) -> None:
        """Refuse to go where the run has failed twice alike; every rank must call it.

        Raises:
            RepeatedFailureError: it has.
        """
        told = {**self._read(), "now": secrets.token_hex(8)} if engine.rank == 0 else {}
        told = json.loads(engine.agree("failures", json.dumps(told)))
        self._start = told["now"]
        if told.get("count", 0) >= MOST and _alike(told, self._from):
            name = self._from["checkpoint"]
            begin = "the start" if name is None else f"checkpoint {name}"
            raise RepeatedFailureError(
                f"autoresume: the run failed {told['count']} times from {begin}, each time at batch {told['batch']} with "
                f"{told['type']}: {told['message']} Expected that to be mended first: starting again would end alike. Then "
                f"delete {join_url(self._folder, FILE)}."
            )

    def note(self, error: BaseException, batch: int) -> None:
        """Write down that ``error`` ended the run at ``batch``; whatever keeps that from being written is only logged.

        Of several ranks the first that fails writes; what the others meet follows from it.
        """
        if not isinstance(error, Exception) or getattr(error, "exit_code", 1) == EXIT_START_AGAIN:
            return  # signals, and ends that ask for another start
        now: dict[str, Any] = {
            **self._from,
            "batch": batch,
            "type": type(error).__name__,
            "message": str(error)[:300],
        }
        try:
            before = self._read()
            if self._start and before.get("start") == self._start:
                return
            alike = _alike(before, {**self._from, "batch": now["batch"], "type": now["type"]})
            now |= {"count": before.get("count", 0) + 1 if alike else 1, "start": self._start}
            open_storage(self._folder).put(FILE, json.dumps(now, indent=1).encode())
        except (KernelError, OSError) as problem:
            log.warning("the failure could not be written down: %s", problem)

    def _read(self) -> dict[str, Any]:
        try:
            told = json.loads(open_storage(self._folder).get(FILE, 0, 1 << 16))
        except (StorageMissingError, ValueError):
            return {}
        fits = isinstance(told, dict) and type(told.get("count")) is int and {"batch", "type", "message"} <= told.keys()
        return told if fits else {}


def _alike(told: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return all(told.get(key, "") == value for key, value in now.items())
