"""DDP averages over all ranks whatever each of them used of the model, and its options reach torch."""

import os
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptionError
from kernel_core.testing.ranks import run_on_ranks
from kernel_core.train.parallelism import resolve_parallelism
from kernel_core.train.place import Place
from torch import Tensor, nn

WIDTH, RATE = 3, 0.1


class Experts(TrainableModel):
    """Each batch names the expert that it goes through; the last one is never used, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("table", torch.zeros(2))
        self.double()

    def forward(self, batch: Any) -> Tensor:
        return self.frozen(self.experts[batch[1]](batch[0]))  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


def experts_used(rank: int) -> list[int]:
    return [rank, 0, 4 - rank]


def batches(rank: int) -> list[Any]:
    generator = torch.Generator().manual_seed(rank)
    rows = [torch.randn(2 + rank, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    return list(zip(rows, experts_used(rank), strict=True))


class Watches(Algorithm):
    """Notes which parameters have gradients, and gives rank 1 another buffer at the start."""

    def __init__(self) -> None:
        self.unused: list[list[str]] = []

    @hookimpl
    def fit_start(self, state: Any) -> None:
        state.model.table.fill_(state.rank)

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        self.unused.append([name for name, one in state.model.named_parameters() if one.grad is None])


def train(options: dict[str, Any]) -> dict[str, Any]:
    model, watches = Experts(), Watches()
    trained = [one for one in model.parameters() if one.requires_grad]
    with Trainer(
        model=model,
        train_dataloader={
            "dataloader": batches(int(os.environ["RANK"])),
            "split_batch": lambda batch, size: split(batch),
        },
        max_duration=1,
        optimizers=torch.optim.SGD(trained, lr=RATE),
        algorithms=watches,
        parallelism={"ddp": options},
        device_train_microbatch_size=1,
        seed=0,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        wrapped: Any = trainer.state.engine._wrapped  # type: ignore[attr-defined]
        live = {
            "find_unused_parameters": wrapped.find_unused_parameters,
            "static_graph": wrapped.static_graph,
            "gradient_as_bucket_view": wrapped.gradient_as_bucket_view,
            "bucket_cap_mb": wrapped.bucket_bytes_cap / 2**20,
        }
        same_model = trainer.state.model is model
        trainer.fit()
    return {
        "weights": {name: value.tolist() for name, value in model.named_parameters()},
        "table": model.table.tolist(),  # type: ignore[operator,union-attr]
        "unused": watches.unused,
        "live": live,
        "same": same_model,
        "wrapper is gone": trainer.state.engine._wrapped is None,  # type: ignore[attr-defined]
    }


def split(batch: Any) -> list[Any]:
    """Return the batch as microbatches of a row each."""
    return [(row.unsqueeze(0), batch[1]) for row in batch[0]]


CASES: dict[str, dict[str, Any]] = {
    "forced": {"sync_strategy": "forced_sync"},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": False, "bucket_cap_mb": 3},
    "multi": {"sync_strategy": "multi_auto_sync", "find_unused_parameters": True, "broadcast_buffers": False},
}


def on_ranks() -> dict[str, Any]:
    return {name: train(options) for name, options in CASES.items()}


def trained_by_hand(world_size: int) -> dict[str, Any]:
    model = Experts()
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=RATE)
    for step in zip(*[batches(rank) for rank in range(world_size)], strict=True):
        optimizer.zero_grad()
        whole = sum(len(batch[0]) for batch in step)
        for batch in step:
            (model.loss(model(batch), batch) * len(batch[0]) / whole).backward()
        optimizer.step()
    return {name: value.tolist() for name, value in model.named_parameters()}


def check(world_size: int) -> None:
    results, expected = run_on_ranks(world_size, __file__, "on_ranks"), trained_by_hand(world_size)
    for rank, result in enumerate(results):
        for name, found in result.items():
            assert found["weights"].keys() == expected.keys(), name  # no prefix of a wrapper
            for key, value in expected.items():
                weight = torch.tensor(found["weights"][key])
                torch.testing.assert_close(weight, torch.tensor(value), rtol=1e-12, atol=1e-14, msg=f"{name}: {key}")
            assert found["same"], name
            assert found["wrapper is gone"], name
            broadcast = CASES[name].get("broadcast_buffers", True) and name != "forced"
            assert found["table"] == [0.0 if broadcast else float(rank)] * 2, name
        # a parameter that no rank used has no gradient, so that momentum and weight decay leave it alone
        for step, unused in enumerate(result["forced"]["unused"]):
            used = {experts_used(other)[step] for other in range(world_size)}
            names = [name for expert in range(6) if expert not in used for name in named(expert)]
            assert unused == [*names, "frozen.weight", "frozen.bias"]
        live = result["unused"]["live"]
        assert live == {
            "find_unused_parameters": True,
            "static_graph": False,
            "gradient_as_bucket_view": False,
            "bucket_cap_mb": 3.0,
        }
        assert result["forced"]["live"]["gradient_as_bucket_view"] is True


def named(expert: int) -> list[str]:
    return [f"experts.{expert}.weight", f"experts.{expert}.bias"]


@pytest.mark.ranks
def test_gradients_are_averaged_whatever_parts_of_the_model_each_rank_used() -> None:
    check(2)


@pytest.mark.ranks
@pytest.mark.slow
def test_gradients_are_averaged_on_four_ranks() -> None:
    check(4)


def test_options_are_checked_before_anything_starts() -> None:
    def refused(options: dict[str, Any]) -> str:
        with pytest.raises(OptionError) as caught:
            resolve_parallelism({"ddp": options}, None, None, Place())
        return str(caught.value)

    assert "ddp.sync_strategy" in refused({"sync_strategy": "sometimes"})
    assert "ddp.bucket_cap_mb" in refused({"bucket_cap_mb": 0})
    message = refused({"find_unused_parameter": True})
    assert "ddp.find_unused_parameter" in message
    assert "find_unused_parameters" in message.replace("ddp.find_unused_parameter:", "")


def test_only_one_strategy_waits_for_other_ranks_in_every_pass() -> None:
    for strategy, waits in (("single_auto_sync", False), ("multi_auto_sync", True), ("forced_sync", False)):
        engine, _ = resolve_parallelism({"ddp": {"sync_strategy": strategy}}, None, None, Place())
        assert engine.needs_all_ranks == waits
