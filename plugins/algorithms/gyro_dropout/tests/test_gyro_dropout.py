"""Masks of a pool: how many there are, when they change, who shares them, and what they leave."""

from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.errors import OptionError
from kernel_plugin_gyro_dropout import GyroDropout, GyroDropoutLayer, active_masks, apply_gyro_dropout, mask_of_row
from torch import nn


def layer(p: float = 0.5, tau: int = 4) -> GyroDropoutLayer:
    made = GyroDropoutLayer(p, tau)
    made.seed_of = lambda number: 1000 + number
    return made


def test_the_pool_is_gone_through_once_each_group_for_as_long_as_every_other() -> None:
    groups = [active_masks(batch / 1000, 256, 16) for batch in range(1000)]
    starts = [group.start for group in groups]
    assert starts == sorted(starts)
    assert sorted(set(starts)) == list(range(0, 256, 16))
    assert {starts.count(start) for start in set(starts)} <= {62, 63}  # a sixteenth of 1000
    assert active_masks(1.0, 10, 4) == range(4, 8)  # of a pool that groups do not divide the rest is not used


@pytest.mark.parametrize("num_rows", [16, 10, 3, 1])
def test_neighbours_share_a_mask_as_evenly_as_that_goes(num_rows: int) -> None:
    rows = mask_of_row(num_rows, 4).tolist()
    assert rows == sorted(rows)
    assert set(rows) <= set(range(4))
    sizes = [rows.count(mask) for mask in range(4)]
    assert max(sizes) - min(sizes) <= 1


def test_rows_of_a_group_have_one_mask_and_what_is_left_is_scaled() -> None:
    y = layer(0.25)(torch.ones(8, 1000))
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    for first in range(0, 8, 2):
        assert torch.equal(y[first], y[first + 1])
    assert len({tuple(row.tolist()) for row in y}) == 4
    assert (y > 0).float().mean().item() == pytest.approx(0.75, abs=0.03)  # four standard errors of 4000 draws


def test_on_average_over_masks_the_input_comes_out() -> None:
    one, x = layer(0.3, tau=1), torch.randn(1, 6)
    found = torch.zeros_like(x)
    for number in range(3000):
        one.masks = range(number, number + 1)
        found += one(x)
    torch.testing.assert_close(found / 3000, x, atol=0.08, rtol=0)


def test_in_evaluation_nothing_is_left_out_and_by_itself_it_is_plain_dropout() -> None:
    x = torch.randn(4, 5)
    assert layer().eval()(x) is x
    plain = GyroDropoutLayer(0.5, 2)
    torch.manual_seed(0)
    found = plain(x)
    torch.manual_seed(0)
    assert torch.equal(found, nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_dtype_and_shape_has_the_same_masks(dtype: torch.dtype) -> None:
    y = layer()(torch.ones(4, 3, 5, dtype=dtype))
    assert y.dtype == dtype
    assert torch.equal(y > 0, layer()(torch.ones(4, 3, 5)) > 0)


class Looks(Callback):
    affects_training = False

    def __init__(self) -> None:
        self.starts: list[int] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self.starts.append(state.model.module[1].masks.start)


@pytest.mark.parametrize("duration", ["8ba", "2ep", "32sp"])
def test_masks_change_on_time_whatever_the_run_is_measured_in(duration: str) -> None:
    model, looks = Classifier(nn.Sequential(nn.Linear(3, 6), nn.Dropout(0.1), nn.Linear(6, 2))), Looks()
    with Trainer(
        model=model,
        train_dataloader=[(torch.randn(4, 3), torch.tensor([0, 1, 0, 1]))] * 4,
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[GyroDropout(p=None, sigma=8, tau=2), looks],
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        assert repr(model.module[1]) == "GyroDropoutLayer(p=0.1, tau=2)"
        assert [change.path for change in trainer.surgery_report.changes] == ["module.1"]
    assert looks.starts == [0, 0, 2, 2, 4, 4, 6, 6]
    assert model.module[1].seed_of is None


def test_layers_have_pools_of_their_own() -> None:
    model = Classifier(nn.Sequential(nn.Dropout(), nn.Dropout()))
    with Trainer(
        model=model,
        plugins=["gyro_dropout"],
        device="cpu",
        progress_bar=False,
        seed=1,
    ) as trainer:
        (active,) = [one for one in trainer.plan.plugins if one.id == "gyro_dropout"]
        active.plugin.fit_start(trainer.state)  # type: ignore[attr-defined]
        first, second = (one(torch.ones(4, 50)) for one in model.train().module)
    assert not torch.equal(first, second)


def test_the_function_replaces_every_dropout() -> None:
    model = nn.Sequential(nn.Dropout(0.1), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.2)))
    assert apply_gyro_dropout(model, p=None, tau=3) == ["0", "1.1"]
    assert (model[0].p, model[1][1].p, model[1][1].tau) == (0.1, 0.2, 3)


def test_the_function_keeps_a_dropout_that_is_used_twice_one_layer() -> None:
    shared = nn.Dropout(0.1)
    model = nn.Sequential(shared, nn.Sequential(nn.Linear(2, 2), shared), nn.Dropout(0.2))
    assert apply_gyro_dropout(model) == ["0", "1.1", "2"]
    assert type(model[0]) is GyroDropoutLayer
    assert model[0] is model[1][1] is not model[2]


def test_more_masks_at_a_time_than_there_are_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"gyro_dropout\.tau: got 16, with sigma=8\. Expected at most as many masks at a time"
    ):
        GyroDropout(sigma=8)
