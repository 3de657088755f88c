"""Runs with blocks left out: resumed, evaluated from a checkpoint, in another trainer, and on two ranks."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.testing.ranks import run_on_ranks
from kernel_plugin_stochastic_depth import StochasticDepth, apply_stochastic_depth
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS = 4  # of each rank


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def branch(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()  # type: ignore[no-any-return]

    def shortcut(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) + self.shortcut(x)


class Looks(Callback):
    affects_training = False

    def __init__(self) -> None:
        self.dropped: list[list[bool | None]] = []
        self.seeds: list[list[int | None]] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        blocks = list(state.model.module)[:4]
        self.dropped.append([one.dropped for one in blocks])
        self.seeds.append([one.seed for one in blocks])


def net() -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Sequential(*[Block() for _ in range(4)], nn.Linear(3, 2)))


def batches(rows: slice) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    whole = [(torch.randn(2 * ROWS, 3, generator=generator), torch.arange(2 * ROWS) % 2) for _ in range(6)]
    return [(x[rows], y[rows]) for x, y in whole]


def trainer_of(model: Classifier, plugins: list[Any], rows: slice = slice(None), **kwargs: Any) -> Trainer:
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plugins=plugins,
        device="cpu",
        progress_bar=False,
        seed=5,
        **({"train_dataloader": batches(rows), "max_duration": "1ep"} | kwargs),
    )


def depth(method: Any = "block", **options: Any) -> StochasticDepth:
    return StochasticDepth("Block", method, **({"drop_rate": 0.6, "drop_distribution": "uniform"} | options))


def fitted(plugins: list[Any], **kwargs: Any) -> dict[str, Any]:
    with trainer_of(net(), plugins, **kwargs) as trainer:
        trainer.fit()
        return {name: whole(value).tolist() for name, value in trainer.state.model.named_parameters()}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", ["block", "sample"])
def test_a_run_that_is_resumed_in_the_warmup_is_the_run_that_went_on(method: str, tmp_path: Path) -> None:
    options = {"drop_warmup": "4ba"}
    going_on, without = fitted([depth(method, **options)]), fitted([])
    cut = {"save_folder": str(tmp_path), "save_interval": "1ba"}
    assert fitted([depth(method, **options)], **cut) == going_on != without
    assert fitted([depth(method, **options)], load_path=str(tmp_path / "ep0-ba2")) == going_on


@pytest.mark.parametrize("warmup", ["4ba", 0.5])
def test_a_checkpoint_is_evaluated_at_the_rates_it_was_saved_with(warmup: Any, tmp_path: Path) -> None:
    fitted([depth(drop_warmup=warmup)], save_folder=str(tmp_path), save_interval="1ba")
    alone: dict[str, Any] = {"train_dataloader": None, "max_duration": None}
    share = {"4ba": {1: 1 / 4, 6: 1.0}, 0.5: {1: 1 / 3, 6: 1.0}}[warmup]
    for batch, name in ((1, "ep0-ba1"), (6, "latest")):
        plugins = [depth(drop_warmup=warmup)]
        with trainer_of(net(), plugins, load_path=str(tmp_path / name), **alone) as trainer:
            trainer.eval(batches(slice(None)))
            rates = [one.drop_rate for one in list(trainer.state.model.module)[:4]]  # type: ignore[arg-type]
        assert rates == pytest.approx([0.6 * share[batch]] * 4)


def test_a_model_is_trained_again_by_another_trainer_and_a_plugin_on_another_model() -> None:
    model, plugin = net(), depth()
    for other in (model, model, net()):
        with trainer_of(other, [plugin, looks := Looks()]) as trainer:
            trainer.fit()
            assert len(trainer.surgery_report.changes) == 4
        assert any(map(any, looks.dropped))
        assert [type(one).__name__ for one in list(other.module)[:4]] == ["StochasticBlock"] * 4


def test_microbatches_draw_samples_of_their_own() -> None:
    looks = Looks()
    fitted([depth("sample"), looks], device_train_microbatch_size=ROWS)
    seeds = [seed for microbatch in looks.seeds for seed in microbatch]
    assert len(seeds) == len(set(seeds)) == 4 * 2 * 6


@pytest.mark.parametrize("method", ["block", "sample"])
def test_a_batch_that_the_optimizer_evaluates_twice_leaves_out_the_same(method: str) -> None:
    pytest.importorskip("kernel_plugin_sam")
    twice, once = Looks(), Looks()
    fitted([depth(method), "sam", twice])
    fitted([depth(method), once])
    for found, expected in ((twice.dropped, once.dropped), (twice.seeds, once.seeds)):
        assert found[::2] == found[1::2] == expected


@pytest.mark.parametrize(("method", "what"), [("block", {"dropped": True}), ("sample", {"seed": 7}), ("block", {})])
def test_what_is_computed_again_for_the_backward_pass_leaves_out_the_same(method: Any, what: dict[str, Any]) -> None:
    gradients = []
    for again in (False, True):
        model, (x, _) = net().module, batches(slice(None))[0]
        apply_stochastic_depth(model, "Block", method, 0.5, "uniform")
        torch.manual_seed(2)
        for block in model[:4]:
            vars(block).update(what)
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        x.sum().backward()
        gradients.append([one.grad for one in model[:4].parameters()])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def on_ranks() -> dict[str, Any]:
    start = int(os.environ["RANK"]) * ROWS
    found: dict[str, Any] = {}
    for engine in ("ddp", "fsdp"):
        for method in ("block", "sample"):
            looks = Looks()
            run = {"rows": slice(start, start + ROWS), "parallelism": {engine: {}}}
            weights = fitted([depth(method), looks], **run)
            found[f"{engine} {method}"] = {"weights": weights, "dropped": looks.dropped, "seeds": looks.seeds}
    return found


@pytest.mark.slow  # two processes import torch; what the conformance kit proves of ranks is quick, and of method block only
def test_ranks_leave_out_the_same_blocks_and_samples_of_their_own() -> None:
    first, second = run_on_ranks(2, __file__, "on_ranks")
    looks = Looks()
    expected = fitted([depth(), looks])
    assert {dropped for blocks in looks.dropped for dropped in blocks} == {True, False}
    for engine in ("ddp", "fsdp"):
        one, other = (rank[f"{engine} block"] for rank in (first, second))
        assert one["dropped"] == other["dropped"] == looks.dropped
        for name, value in expected.items():
            for rank in (one, other):
                torch.testing.assert_close(torch.tensor(rank["weights"][name]), torch.tensor(value))
        one, other = (rank[f"{engine} sample"] for rank in (first, second))
        assert one["weights"] == other["weights"]
        assert not {seed for seeds in one["seeds"] for seed in seeds} & {
            seed for seeds in other["seeds"] for seed in seeds
        }
