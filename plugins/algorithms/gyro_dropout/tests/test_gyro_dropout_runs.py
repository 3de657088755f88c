"""Runs with masks of a pool: resumed, in another trainer, and on two ranks."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.testing.ranks import run_on_ranks
from kernel_plugin_gyro_dropout import GyroDropout, GyroDropoutLayer
from torch import Tensor, nn


class Looks(Callback):
    """Keeps what dropout makes of ones, for each microbatch: a row for each mask in use."""

    affects_training = False

    def __init__(self) -> None:
        self.masks: list[list[list[float]]] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        layer = next(one for one in state.model.modules() if isinstance(one, GyroDropoutLayer))
        self.masks.append(layer(torch.ones(layer.tau, 20)).tolist())


def net() -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Sequential(nn.Linear(3, 20), nn.Dropout(0.1), nn.Linear(20, 2)))


def batches(first: int = 0, count: int = 7) -> list[tuple[Tensor, Tensor]]:
    """Return six batches of rows ``first`` to ``first + count`` of twelve: tau does not divide seven."""
    generator = torch.Generator().manual_seed(1)
    rows = slice(first, first + count)
    return [(torch.randn(12, 3, generator=generator)[rows], (torch.arange(12) % 2)[rows]) for _ in range(6)]


def trainer_of(model: Classifier, plugins: list[Any], **kwargs: Any) -> Trainer:
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        plugins=plugins,
        device="cpu",
        progress_bar=False,
        **({"train_dataloader": batches(), "max_duration": "1ep", "seed": 5} | kwargs),
    )


def fitted(plugins: list[Any], model: Classifier | None = None, **kwargs: Any) -> dict[str, Any]:
    with trainer_of(model or net(), plugins, **kwargs) as trainer:
        trainer.fit()
        return {name: whole(value).tolist() for name, value in trainer.state.model.named_parameters()}


def whole(value: Any) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[no-any-return]


def gyro() -> GyroDropout:
    return GyroDropout(sigma=6, tau=2)


def test_a_run_that_is_resumed_is_the_run_that_went_on(tmp_path: Path) -> None:
    going_on, without = fitted([gyro()]), fitted([])
    assert fitted([gyro()], save_folder=str(tmp_path), save_interval="1ba") == going_on != without
    for batch in (2, 3):  # between two groups of masks, and within one
        assert fitted([gyro()], load_path=str(tmp_path / f"ep0-ba{batch}")) == going_on


def test_masks_follow_from_seed_and_plugin_and_are_drawn_alike_for_every_microbatch_of_a_group() -> None:
    one, same, other, renamed = Looks(), Looks(), Looks(), Looks()
    fitted([gyro(), one])
    fitted([gyro(), same], device_train_microbatch_size=4)
    fitted([gyro(), other], seed=6)
    assert one.masks[::2] == one.masks[1::2]
    assert len({str(row) for masks in one.masks for row in masks}) == 6  # the whole pool, each mask once
    assert same.masks[::2] == one.masks
    fitted([GyroDropout(sigma=6, tau=2, id="other"), renamed])
    assert other.masks != one.masks != renamed.masks


def test_a_batch_that_the_optimizer_evaluates_twice_has_the_same_masks() -> None:
    pytest.importorskip("kernel_plugin_sam")
    once, twice = Looks(), Looks()
    fitted([gyro(), once])
    fitted([gyro(), "sam", twice])
    assert twice.masks[::2] == twice.masks[1::2] == once.masks


def test_a_model_is_trained_again_by_another_trainer_and_a_plugin_on_another_model() -> None:
    model, plugin, seen = net(), gyro(), []
    for other in (model, model, net()):
        fitted([plugin, looks := Looks()], model=other)
        seen.append(looks.masks)
    assert seen[0] == seen[1] == seen[2]


def test_what_is_in_the_place_of_dropout_can_be_pickled_in_mid_run_and_holds_no_masks_afterwards() -> None:
    model = net()
    with trainer_of(model, [gyro()]) as trainer:
        trainer.fit()
        layer = pickle.loads(pickle.dumps(model)).module[1]
        assert torch.equal(layer(torch.ones(4, 20)), model.module[1](torch.ones(4, 20)))
    assert model.module[1]._drawn is None


class Keeps(nn.Dropout):
    """Does something else than the class it is derived from."""

    def forward(self, input: Tensor) -> Tensor:
        return input + 1


def test_a_class_derived_from_dropout_is_left_alone_and_a_shared_one_stays_shared() -> None:
    shared = nn.Dropout(0.1)
    model = Classifier(nn.Sequential(nn.Linear(3, 6), shared, Keeps(), nn.Linear(6, 2), shared))
    with trainer_of(model, [gyro()]):
        assert type(model.module[2]) is Keeps
        assert type(model.module[1]) is GyroDropoutLayer
        assert model.module[1] is model.module[4]


def on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engine in ("ddp", "fsdp"):
        looks, data = Looks(), batches(6 * int(os.environ["RANK"]), 6)
        weights = fitted([gyro(), looks], train_dataloader=data, parallelism={engine: {}})
        found[engine] = {"weights": weights, "masks": looks.masks}
    return found


class ByHand(Callback):
    """Gives the rows of a whole batch the masks that they have on two ranks: 0 0 0 1 1 1 twice."""

    affects_training = False

    @hookimpl
    def before_forward(self, state: Any) -> None:
        layer = next(one for one in state.model.modules() if isinstance(one, GyroDropoutLayer))
        layer.forward = lambda x: x * layer._factors(x)[torch.tensor([0, 0, 0, 1, 1, 1] * 2)]  # type: ignore[method-assign]


@pytest.mark.slow  # two processes import torch; the conformance kit proves quickly that the ranks agree
def test_ranks_have_the_same_masks_and_each_shares_them_among_its_own_rows() -> None:
    first, second = run_on_ranks(2, __file__, "on_ranks")
    looks = Looks()
    fitted([gyro(), looks])
    expected = fitted([gyro(), ByHand()], train_dataloader=batches(0, 12))
    for engine in ("ddp", "fsdp"):
        assert first[engine]["masks"] == second[engine]["masks"] == looks.masks
        assert first[engine]["weights"] == second[engine]["weights"]
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(first[engine]["weights"][name]), torch.tensor(value))
