"""Messages among the ranks that no collective carries, so that threads beside training may exchange them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

POLL_S = 0.02


class Board:
    """Short texts by key in the store of the run.

    Args:
        store: A connection of its own: one that waits blocks whoever shares it.
        name: Keeps the keys of several boards apart.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name

    def post(self, key: str, text: str) -> None:
        """Let the other ranks read ``text`` under ``key``."""
        self._store.set(f"{self._name}/{key}", text)

    def remove(self, key: str) -> None:
        """Forget ``key``, which all have read; nothing there is no error."""
        self._store.delete_key(f"{self._name}/{key}")

    def read(self, key: str, timeout_s: float, given_up: Callable[[], bool] = lambda: False) -> str:
        """Wait until some rank has posted ``key``, and return it.

        Args:
            key: What is waited for.
            timeout_s: How long.
            given_up: Asked now and then; ends the waiting when it says so.

        Raises:
            TimeoutError: nobody has, or the store is gone.
        """
        key, end = f"{self._name}/{key}", time.monotonic() + timeout_s
        try:
            while not self._store.check([key]):
                if given_up() or time.monotonic() > end:
                    raise TimeoutError(f"no word from another rank ({key}); it has ended, or does something else.")
                time.sleep(POLL_S)
            return str(self._store.get(key).decode())
        except RuntimeError as error:  # torch's network errors are RuntimeErrors
            raise TimeoutError(f"no word from another rank ({key}): {error}") from error
