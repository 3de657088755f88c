"""What each rank does in test_checkpoint_saver_ranks.py."""

from __future__ import annotations

import errno
import os
import threading
import time
from typing import Any

import torch
from kernel_core import Callback, State, TrainableModel, Trainer, hookimpl
from kernel_core.storage import files
from kernel_core.testing.crashes import Failing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class OnRank1(Callback):
    """Lets its disk be full, or raises, on rank 1 at batch 6."""

    affects_training = False

    def __init__(self, what: str) -> None:
        self.what = what

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.rank != 1 or state.progress.batch != 6:
            return
        if self.what == "raise":
            raise ZeroDivisionError("a bad sample")
        if self.what == "fill":
            while any(thread.name == "checkpoint writer" for thread in threading.enumerate()):
                time.sleep(0.01)  # the checkpoint before is to be there
            files.system = Failing(OSError(errno.ENOSPC, "No space left on device"), lambda _, name: name == "write")


def train(folder: str, what: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Line()
    data = TensorDataset(torch.arange(160, dtype=torch.float32).view(80, 2) / 40)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, 2, shuffle=True),
        max_duration="20ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[OnRank1(what)],
        save_folder=folder,
        save_interval="3ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        run_name="run",
        progress_bar=False,
        device="cpu",
        seed=1,
    )
    told: dict[str, Any] = {"error": None}
    try:
        with trainer:
            trainer.fit()
    except BaseException as error:
        told = {"error": type(error).__name__, "message": str(error)}
    told |= {
        "batch": trainer.state.progress.batch,
        "saved": [os.path.basename(one) for one in trainer.saved_checkpoints],
    }
    return told
