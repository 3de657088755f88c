from typing import Any

import pytest
import torch
from kernel_core import LoggerDestination, TrainableModel, Trainer
from kernel_core.optim import CosineAnnealingWithWarmupScheduler
from kernel_plugin_lr_monitor import LRMonitor, learning_rates
from torch import nn


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.two(self.one(batch))

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Keep(LoggerDestination):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.records.append({"step": step, **metrics})


def test_the_rate_logged_for_a_batch_is_the_one_it_was_trained_with() -> None:
    model, keep = Line(), Keep()
    Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)] * 4,
        max_duration="4ba",
        optimizers=torch.optim.SGD(
            [{"params": model.one.parameters()}, {"params": model.two.parameters(), "lr": 0.2}], lr=0.1
        ),
        schedulers=CosineAnnealingWithWarmupScheduler(t_warmup="0.5dur", alpha_f=1.0),
        plugins=["lr_monitor", keep],
        device="cpu",
        progress_bar=False,
    ).fit()
    logged = [(r["step"], r["lr-SGD/group0"], r["lr-SGD/group1"]) for r in keep.records if "lr-SGD/group0" in r]
    assert logged == [
        (1, 0.0, 0.0),
        (2, pytest.approx(0.05), pytest.approx(0.1)),
        (3, pytest.approx(0.1), pytest.approx(0.2)),
        (4, pytest.approx(0.1), pytest.approx(0.2)),
    ]


def test_two_optimizers_of_one_class_are_told_apart() -> None:
    made = [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=lr) for lr in (0.1, 0.2)]
    made.append(torch.optim.Adam(nn.Linear(1, 1).parameters(), lr=0.3))
    assert learning_rates(made) == {"lr-SGD/group0": 0.1, "lr-SGD2/group0": 0.2, "lr-Adam/group0": 0.3}


def test_it_takes_no_options() -> None:
    with pytest.raises(ValueError, match="It takes no options"):
        LRMonitor(interval=3)  # type: ignore[call-arg]
