"""Checkpoints of models on an accelerator; nothing here runs without one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kernel_core import Trainer
from kernel_core.models import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.gpu


def run(folder: Path, **options: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.5), nn.Linear(64, 4)), num_classes=4)
    data = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, 8, shuffle=True),
        max_duration="2ep",
        optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        device="gpu",
        precision="amp_fp16",  # the loss scale is part of the state
        deterministic_mode=True,
        seed=1,
        progress_bar=False,
        save_folder=folder,
        save_interval="5ba",
        **options,  # type: ignore[arg-type]
    ) as trainer:
        trainer.fit()
        return {name: value.clone() for name, value in trainer.state.model.state_dict().items()}


def test_a_resumed_run_on_a_gpu_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    straight = run(tmp_path / "a")
    resumed = run(tmp_path / "b", load_path=tmp_path / "a" / "ep0-ba5")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_weights_that_change_after_the_copy_are_not_in_the_checkpoint(tmp_path: Path) -> None:
    model = Classifier(nn.Linear(4096, 4096), num_classes=4096)
    with Trainer(model=model, device="gpu", progress_bar=False) as trainer:
        before = model.module.weight.detach().cpu().clone()
        saves = trainer._checkpoints.saves
        assert saves is not None
        from kernel_core import SaveRequest

        saves.save(SaveRequest(str(tmp_path), "one"))
        with torch.no_grad():
            model.module.weight.zero_()
        saves.settle()
    with Trainer(model=model, device="gpu", progress_bar=False, load_path=tmp_path, load_weights_only=True):
        assert torch.equal(model.module.weight.cpu(), before)
