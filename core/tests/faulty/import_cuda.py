"""Asks for an accelerator when it is imported."""

import torch
from kernel_core import Algorithm, hookimpl

NUM_GPUS = torch.cuda.device_count()


class Importer(Algorithm):
    """Asks for an accelerator when it is imported."""

    @hookimpl
    def fit_start(self) -> None:
        pass
