"""Trying again what may succeed the next time; one rule for every store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kernel_core.errors import StorageTransientError

T = TypeVar("T")
_random = random.SystemRandom()  # never the global stream, whose draws belong to the user


@dataclass(frozen=True)
class Retry:
    """How often and for how long an operation is tried that ends with a ``StorageTransientError``. Others are final.

    The waits double, and each is shortened by chance by up to a half, so that many ranks do not come back together.

    Attributes:
        attempts: Tries in all.
        time_limit_s: No try begins later than this after the first one began. A try that is under way is ended by the
            time limit of its requests.
        first_wait_s: Longest wait before the second try.
        longest_wait_s: Longest wait before any.
        sleep: Waits. Replaced in tests.
        clock: Reads the time in seconds. Replaced in tests.
    """

    attempts: int = 6
    time_limit_s: float = 300.0
    first_wait_s: float = 0.2
    longest_wait_s: float = 20.0
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    def wait_s(self, attempt: int) -> float:
        """Return the wait after try number ``attempt``, counted from 1."""
        longest = min(self.longest_wait_s, self.first_wait_s * 2.0 ** (attempt - 1))
        return longest * _random.uniform(0.5, 1.0)

    def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, trying it until it does not end with a ``StorageTransientError``.

        Raises:
            StorageTransientError: the last one, with the number of tries.
        """
        started = self.clock()
        attempt = 0
        while True:
            attempt += 1
            try:
                return function()
            except StorageTransientError as error:
                wait_s, passed_s = self.wait_s(attempt), self.clock() - started
                if attempt >= self.attempts or passed_s + wait_s > self.time_limit_s:
                    tries = f"Tried {attempt} {'time' if attempt == 1 else 'times'} in {passed_s:.1f} s."
                    raise StorageTransientError(f"{error} {tries}", attempt) from (error.__cause__ or error)
            self.sleep(wait_s)
