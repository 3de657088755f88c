"""Engines on GPUs: run by hand where there are any, `pytest -m gpu`. With two or more, several ranks over NCCL too."""

import os
from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.testing.ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.gpu
WIDTH, DEPTH, STEPS = 512, 8, 8


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(DEPTH)]
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Watch(Callback):
    """Keeps the losses on the device, and refuses every wait for it after the first steps."""

    def __init__(self, strict: bool = False) -> None:
        self.losses: list[torch.Tensor] = []
        self.strict = strict

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.losses.append(state.loss.detach())
        if self.strict and len(self.losses) == 3:
            torch.cuda.set_sync_debug_mode("error")

    @hookimpl
    def fit_end(self) -> None:
        torch.cuda.set_sync_debug_mode("default")

    @hookimpl
    def fit_failed(self) -> None:
        torch.cuda.set_sync_debug_mode("default")


def train(parallelism: Any, precision: str, strict: bool = False) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Classifier(Net())
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(1024, WIDTH, generator=generator), torch.randint(0, 10, (1024,), generator=generator)
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    watch = Watch(strict)
    torch.cuda.reset_peak_memory_stats()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, 128 // world_size, shuffle=True, pin_memory=True),
        max_duration=f"{STEPS}ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        callbacks=[watch],
        parallelism=parallelism,
        precision=precision,
        device="gpu",
        seed=3,
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return {"losses": [float(loss) for loss in watch.losses], "peak": torch.cuda.max_memory_allocated()}


@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("amp_bf16", 2e-2)])
def test_one_rank_trains_as_without_an_engine(engine: str, precision: str, tolerance: float) -> None:
    expected = train("single", precision)["losses"]
    assert train(engine, precision)["losses"] == pytest.approx(expected, rel=tolerance)


def test_fp8_runs_under_fsdp() -> None:
    pytest.importorskip("transformer_engine")
    losses = train("fsdp", "amp_fp8")["losses"]
    assert losses == pytest.approx(train("single", "amp_bf16")["losses"], rel=0.1)


def test_activation_checkpointing_takes_less_memory() -> None:
    plain = train({"fsdp": {}}, "amp_bf16")["peak"]
    assert train({"fsdp": {"activation_checkpointing": True}}, "amp_bf16")["peak"] < plain


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_two_ranks_train_over_nccl_as_one_does(engine: str) -> None:
    expected = train("single", "fp32")["losses"]
    first, second = run_on_ranks(2, __file__, "train", engine, "fp32")
    mean = [(one + other) / 2 for one, other in zip(first["losses"], second["losses"], strict=True)]
    assert mean == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_ranks_wait_for_no_device_in_the_steady_state() -> None:
    run_on_ranks(2, __file__, "train", "ddp", "amp_bf16", True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_shards_take_less_memory_than_copies() -> None:
    copies = run_on_ranks(2, __file__, "train", "ddp", "fp32")[0]["peak"]
    assert run_on_ranks(2, __file__, "train", "fsdp", "fp32")[0]["peak"] < copies
