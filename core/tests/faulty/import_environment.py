"""Sets an environment variable when it is imported."""

import os

from kernel_core import Algorithm, hookimpl

os.environ["SOME_SWITCH"] = "1"


class Importer(Algorithm):
    """Sets an environment variable when it is imported."""

    @hookimpl
    def fit_start(self) -> None:
        pass
