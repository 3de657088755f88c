"""Seeds the global generators when it is imported."""

import torch
from kernel_core import Algorithm, hookimpl

torch.manual_seed(0)


class Importer(Algorithm):
    """Seeds the global generators when it is imported."""

    @hookimpl
    def fit_start(self) -> None:
        pass
