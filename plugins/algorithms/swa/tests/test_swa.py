"""Averaged weights beside torch.optim.swa_utils, and a mean of snapshots."""

from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.errors import ConflictError, OptionError
from kernel_core.optim import LinearScheduler
from kernel_plugin_swa import SWA, annealed, start_average
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

BATCHES = [
    (torch.randn(8, 3, generator=torch.Generator().manual_seed(number)), torch.arange(8) % 2) for number in range(5)
]


def net(norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6) if norm else nn.Identity(), nn.Tanh(), nn.Linear(6, 2))


class Snapshots(Callback):
    affects_training = False

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []
        self.rates: list[float] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.weights.append({name: one.detach().clone() for name, one in state.model.module.named_parameters()})


def train(swa: SWA | None, norm: bool = False, duration: str = "4ep", **options: Any) -> tuple[Classifier, Snapshots]:
    model, snapshots = Classifier(net(norm)), Snapshots()
    with Trainer(
        model=model,
        train_dataloader=BATCHES,
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01),
        plugins=[*([swa] if swa else []), snapshots],
        device="cpu",
        progress_bar=False,
        **options,
    ) as trainer:
        trainer.fit()
    return model, snapshots


@pytest.mark.parametrize(
    ("options", "averaged", "end"),
    [
        ({"swa_start": "8ba", "swa_end": "16ba", "update_interval": "2ba"}, [7, 9, 11, 13], 16),
        ({"swa_start": "0.4dur", "swa_end": "0.8dur", "update_interval": "2ba"}, [7, 9, 11, 13], 16),
        ({"swa_start": "1ep", "swa_end": "3ep", "update_interval": "1ep"}, [4, 9], 16),
        ({"swa_start": "0.25dur", "swa_end": "0.9dur", "update_interval": "1ep"}, [4, 9, 14], 18),
        ({"swa_start": "0.3dur", "swa_end": "0.9dur", "update_interval": "1ep"}, [9, 14], 18),
    ],
)
def test_the_model_ends_with_the_mean_of_the_weights_after_each_interval(
    options: dict[str, str], averaged: list[int], end: int
) -> None:
    model, snapshots = train(SWA(**options))
    plain = train(None)[1].weights
    assert all(
        torch.equal(snapshots.weights[9][name], plain[9][name]) for name in plain[9]
    )  # until then it only watches
    for name, found in model.module.named_parameters():
        mean = torch.stack([plain[index][name].double() for index in averaged]).mean(0)
        torch.testing.assert_close(found.double(), mean, atol=1e-6, rtol=0)
        assert torch.equal(found, snapshots.weights[end - 1][name])  # nothing is trained after that


def test_it_is_torchs_averaged_model_with_its_batch_norm_updated() -> None:
    model, _ = train(SWA("5ba", "15ba", "5ba"), norm=True)
    plain = net(norm=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    theirs = AveragedModel(plain)
    for batch in range(1, 16):
        x, y = BATCHES[(batch - 1) % 5]
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        if batch in (5, 10):
            theirs.update_parameters(plain)
    update_bn([x for x, _ in BATCHES], theirs)
    for name, expected in theirs.module.state_dict().items():
        torch.testing.assert_close(model.module.state_dict()[name], expected, atol=1e-6, rtol=1e-5)
    assert model.module[1].momentum == 0.1


@pytest.mark.parametrize("strategy", ["linear", "cos"])
def test_the_rate_goes_where_torchs_swalr_lets_it_go(strategy: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = SWALR(optimizer, swa_lr=0.1, anneal_epochs=4, anneal_strategy=strategy)
    for step in range(1, 7):
        optimizer.step()
        scheduler.step()
        assert annealed(0.5, 0.1, step / 4, strategy) == pytest.approx(optimizer.param_groups[0]["lr"])


def test_the_rate_is_the_schedules_until_averaging_begins_and_then_goes_to_the_users() -> None:
    swa = SWA("10ba", "18ba", "1ba", schedule_swa_lr=True, anneal_steps=4, swa_lr=0.04)
    _, snapshots = train(swa, schedulers=LinearScheduler(1.0, 0.0))
    scheduled = [0.2 * (1 - batch / 20) for batch in range(10)]
    base = scheduled[9]  # of the last batch before it begins
    going = [base + (0.04 - base) * min(step / 4, 1) for step in range(8)]
    assert snapshots.rates[:18] == pytest.approx(scheduled + going)


def test_without_a_rate_of_its_own_it_keeps_what_was_there() -> None:
    swa = SWA("10ba", "18ba", "1ba", schedule_swa_lr=True)
    _, snapshots = train(swa, schedulers=LinearScheduler(1.0, 0.0))
    assert snapshots.rates[10:18] == pytest.approx([0.2 * (1 - 9 / 20)] * 8)


def test_averages_are_float32_or_wider() -> None:
    average = start_average(net().to(torch.bfloat16))
    assert {one.dtype for one in average.values()} == {torch.float32}
    assert {one.dtype for one in start_average(net().double()).values()} == {torch.float64}


def test_a_run_that_ends_before_averaging_does_leaves_the_weights_of_training(caplog: pytest.LogCaptureFixture) -> None:
    model, snapshots = train(SWA("8ba", "30ba", "1ba"))
    assert all(torch.equal(one, snapshots.weights[-1][name]) for name, one in model.module.named_parameters())
    assert "swa: the run ended before swa_end=30ba: the model has no average." in caplog.text


def test_statistics_are_not_thrown_away_where_nothing_is_left_to_collect_them_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _ = train(SWA("0.5dur", "1dur", "1ba"), norm=True)
    plain, _ = train(None, norm=True)
    assert torch.equal(model.module[1].running_mean, plain.module[1].running_mean)
    assert (
        "swa: no batch was left after swa_end=1.0dur, so that the statistics of batch norm are those of other"
        in caplog.text
    )


def test_a_finished_run_that_is_made_longer_trains_on_and_averages_again(caplog: pytest.LogCaptureFixture) -> None:
    model = Classifier(net(norm=True))
    swa, snapshots = SWA("0.25dur", "0.5dur", "1ba"), Snapshots()
    with Trainer(
        model=model,
        train_dataloader=BATCHES,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.2),
        plugins=[swa, snapshots],
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        assert (swa.done, swa.collecting, model.module[1].momentum) == (True, True, None)
        trainer.fit(duration="6ep")  # of 40 batches 10 are done
        assert (swa.done, swa.count) == (True, 9)  # after the batches 11 to 19
    moved = [not torch.equal(snapshots.weights[n]["0.weight"], snapshots.weights[n + 1]["0.weight"]) for n in range(39)]
    assert moved[:4] == [True] * 4
    assert moved[5:9] == [False] * 4
    assert all(moved[9:19])
    assert not any(moved[20:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"swa_start": "0.9dur", "swa_end": "0.5dur"},
            r"swa\.swa_end: got '0\.5dur' with swa_start='0\.9dur'\. Expected",
        ),
        (
            {"swa_start": "1ep"},
            r"swa\.swa_end: got '0\.97dur' with swa_start='1ep'\. Expected a later time in the same unit\.",
        ),
        ({"swa_start": "5tok"}, r"swa\.swa_start: got '5tok'\. Expected a time of at least 0 in dur, ep, ba"),
        ({"swa_end": "1.5dur"}, r"swa\.swa_end: got '1\.5dur'\. Expected a time of at least 0"),
        ({"update_interval": "0ba"}, r"swa\.update_interval: got '0ba'\. Expected at least 1\."),
        ({"swa_lr": 0.1}, r"swa\.swa_lr: got 0\.1 without schedule_swa_lr\. Expected both"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SWA(**options)


def test_two_averages_of_one_model_are_refused() -> None:
    with pytest.raises(ConflictError, match=r"swa: cannot run together with ema"):
        train(SWA(), algorithms=["ema"])
