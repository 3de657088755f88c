"""Computes when it is imported."""

import math

from kernel_core import Algorithm, hookimpl

TABLE = [math.sin(x) for x in range(20_000_000)]


class Importer(Algorithm):
    """Computes when it is imported."""

    @hookimpl
    def fit_start(self) -> None:
        pass
