"""Blocks that are left out: by the paper's formulas, and beside torchvision's own operation."""

from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, Time, Trainer, hookimpl
from kernel_core.errors import OptionError, SurgeryError
from kernel_plugin_stochastic_depth import (
    StochasticDepth,
    apply_stochastic_depth,
    branch,
    drop_rates,
    read_warmup,
    shortcut,
)
from kernel_plugin_torchvision import import_torchvision
from torch import nn

import_torchvision()
from torchvision.models.resnet import BasicBlock, Bottleneck  # noqa: E402
from torchvision.ops import stochastic_depth  # noqa: E402


def net(block: Any = BasicBlock) -> nn.Sequential:
    torch.manual_seed(0)
    width = 8 * block.expansion
    blocks = [block(width, 8) for _ in range(3)]
    for one in blocks:  # batch norm would make rows depend on each other
        for name in ("bn1", "bn2", "bn3"):
            if hasattr(one, name):
                setattr(one, name, nn.Identity())
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2)]
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *blocks, *head)


X = torch.randn(6, 1, 5, 5, generator=torch.Generator().manual_seed(3))


def test_rates_rise_linearly_to_that_of_the_last_block_or_are_all_alike() -> None:
    assert drop_rates(5, 0.5, "linear") == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert drop_rates(3, 0.5, "uniform") == [0.5] * 3


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_in_evaluation_a_branch_counts_by_its_chance_to_be_there(block: Any) -> None:
    plain, changed = net(block).eval(), net(block).eval()
    names = list(changed.state_dict())
    assert apply_stochastic_depth(changed, block.__name__, "block", 0.6, "linear") == ["1", "2", "3"]
    assert list(changed.state_dict()) == names
    h = plain[0](X)
    for one, rate in zip(list(plain)[1:4], (0.2, 0.4, 0.6), strict=True):
        h = torch.relu((1 - rate) * branch(one, h) + shortcut(one, h))
    torch.testing.assert_close(changed(X), nn.Sequential(*list(plain)[4:])(h))


def test_a_block_that_is_left_out_is_its_shortcut_and_its_gradients_are_zero() -> None:
    changed = net()
    apply_stochastic_depth(changed, "BasicBlock", "block", 0.5)
    for index, dropped in ((1, False), (2, True), (3, False)):
        changed[index].dropped = dropped
    h = torch.relu(branch(changed[1], h0 := changed[0](X)) + h0)
    h = torch.relu(branch(changed[3], h) + h)
    found = changed(X)
    torch.testing.assert_close(found, nn.Sequential(*list(changed)[4:])(h))
    found.sum().backward()
    for parameter in changed[2].parameters():
        assert parameter.grad is not None
        assert not parameter.grad.any()
    assert all(one.grad.any() for one in changed[3].parameters())


@pytest.mark.parametrize("weight", [float("inf"), 3e4])
def test_what_is_left_out_has_no_say_whatever_its_weights(weight: float) -> None:
    changed = net().half()
    apply_stochastic_depth(changed, "BasicBlock", "block", 0.5)
    x = torch.rand(1, 8, 2, 2, dtype=torch.half)
    changed[2].dropped = True
    nn.init.constant_(changed[2].conv1.weight, weight)  # 3e4: the sum of the weights is no number of half precision
    changed[2](x).sum().backward()
    assert torch.equal(changed[2](x), x)
    assert not changed[2].conv1.weight.grad.any()


def test_a_block_without_trainable_parameters_can_be_left_out() -> None:
    changed = net()
    apply_stochastic_depth(changed, "BasicBlock", "block", 0.5)
    changed[2].requires_grad_(False).dropped = True
    h = torch.rand(1, 8, 2, 2)
    assert torch.equal(changed[2](h), h)


class PreActivation(nn.Module):
    """The parts of torchvision's block by name, put together in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.bn2, self.relu, self.downsample = nn.Identity(), nn.Identity(), nn.ReLU(), None
        self.conv1, self.conv2 = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.relu(self.bn2(self.conv1(self.relu(self.bn1(x))))))  # type: ignore[no-any-return]


class DependsOnValues(PreActivation):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum() > 0 else x


def test_parts_that_are_put_together_otherwise_are_refused_rather_than_rearranged() -> None:
    before = nn.Sequential(nn.Identity(), PreActivation())
    with pytest.raises(
        SurgeryError,
        match=r"stochastic_depth: at 1 \(PreActivation\) the forward computes "
        r"add\(conv2\(relu\(bn2\(conv1\(relu\(bn1\(x\)\)\)\)\)\), x\)\. "
        r"Expected relu\(add\(bn2\(.*\), x\)\)\. Give the class the methods branch\(x\) and shortcut\(x\)",
    ):
        apply_stochastic_depth(before, "PreActivation")
    assert type(before[1]) is PreActivation
    with pytest.raises(SurgeryError, match=r"the forward computes what cannot be told from outside\."):
        apply_stochastic_depth(nn.Sequential(DependsOnValues()), "DependsOnValues")


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_torchvisions_blocks_with_another_shortcut_are_known(block: Any) -> None:
    one = block(4, 8, stride=2, downsample=nn.Conv2d(4, 8 * block.expansion, 1, 2)).eval()
    x = torch.randn(2, 4, 6, 6)
    expected = one(x)
    assert apply_stochastic_depth(nn.Sequential(one), block.__name__, drop_rate=0.0) == ["0"]
    torch.testing.assert_close(one(x), expected)


class Attends(nn.Module):
    """A block of another kind, (B, T, C), that says what its branch and its shortcut are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))  # type: ignore[no-any-return]

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branch(x) + self.shortcut(x)


class Bends(Attends):
    def output(self, added: torch.Tensor) -> torch.Tensor:
        return added.tanh()


@pytest.mark.parametrize(("cls", "after"), [(Attends, torch.clone), (Bends, torch.tanh)])
def test_a_class_with_methods_of_its_own_is_left_out_by_block_and_by_sample(cls: Any, after: Any) -> None:
    model, x = nn.Sequential(cls()), torch.randn(64, 3, 4)
    added = model[0].branch(x)
    apply_stochastic_depth(model, "Attends", "block", 0.25)  # the class or a base of it
    model[0].dropped = True
    torch.testing.assert_close(model(x), after(2 * x))
    model[0].dropped = False
    torch.testing.assert_close(model(x), after(added + 2 * x))
    torch.testing.assert_close(model.eval()(x), after(0.75 * added + 2 * x))
    apply_stochastic_depth(model.train(), cls.__name__, "sample", 0.25)  # again, with other options
    there = (model(x) - after(2 * x)).abs().flatten(1).amax(1) > 1e-6
    assert 0 < there.sum() < 64
    torch.testing.assert_close(model.eval()(x), after(0.75 * added + 2 * x))


def test_in_training_what_comes_out_on_average_is_what_evaluation_computes() -> None:
    block = net()[1]
    block.relu = nn.Identity()  # so that the mean goes through
    model, x = nn.Sequential(block), torch.randn(1, 8, 3, 3)
    apply_stochastic_depth(model, "BasicBlock", "sample", 0.3, "uniform")
    many = model(x.expand(20000, -1, -1, -1)).mean(0, keepdim=True)
    torch.testing.assert_close(many, model.eval()(x), atol=0.02, rtol=0)


def test_by_sample_a_branch_is_what_torchvision_leaves_of_it_but_for_its_scale() -> None:
    block = net()[1]
    x = torch.randn(4000, 8, 1, 1)
    expected = stochastic_depth(branch(block, x), 0.3, "row") * 0.7  # which scales by 1 / (1 - p)
    model = nn.Sequential(block)
    apply_stochastic_depth(model, "BasicBlock", "sample", 0.3, "uniform")
    model[0].seed = 1
    kept = model(x) - torch.relu(shortcut(block, x))
    ours, theirs = (kept.flatten(1).abs().sum(1) > 0, expected.flatten(1).abs().sum(1) > 0)
    assert ours.float().mean() == pytest.approx(0.7, abs=0.03)  # four standard errors
    assert theirs.float().mean() == pytest.approx(0.7, abs=0.03)
    rows = ours.nonzero().flatten()
    torch.testing.assert_close(model(x)[rows], torch.relu(branch(block, x) + x)[rows])
    assert torch.equal(model(x), model(x))  # the same mask each time: a pass that is computed again sees it too


def test_by_itself_a_model_draws_from_torchs_generator() -> None:
    model = net()
    apply_stochastic_depth(model, "BasicBlock", "block", 0.5, "uniform")
    torch.manual_seed(0)
    outputs = [model(X).sum().item() for _ in range(20)]
    assert 1 < len(set(outputs)) <= 8  # of three blocks, each there or not
    torch.manual_seed(0)
    assert outputs == [model(X).sum().item() for _ in range(20)]


class Looks(Callback):
    affects_training = False

    def __init__(self) -> None:
        self.rates: list[list[float]] = []
        self.dropped: list[list[bool]] = []

    @hookimpl
    def before_forward(self, state: Any) -> None:
        blocks = list(state.model.module)[1:4]
        self.rates.append([one.drop_rate for one in blocks])
        self.dropped.append([one.dropped for one in blocks])


def train(batches: int = 8, micro: int | None = None, looks: Looks | None = None, **options: Any) -> Any:
    model = Classifier(net())
    looks = looks or Looks()
    data = [(X, torch.tensor([0, 1] * 3))] * batches
    with Trainer(
        model=model,
        train_dataloader=data,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.01),
        plugins=[StochasticDepth("BasicBlock", **options), looks],
        device_train_microbatch_size=micro,
        device="cpu",
        progress_bar=False,
        seed=3,
    ) as trainer:
        trainer.fit()
    return list(model.module)[1:4], looks


@pytest.mark.parametrize("warmup", [0.5, "0.5dur", "4ba", Time(4, "ba"), "24sp"])
def test_rates_rise_in_the_warmup_and_are_exactly_the_final_ones_after_it(warmup: Any) -> None:
    blocks, looks = train(drop_rate=0.4, drop_distribution="uniform", drop_warmup=warmup)
    shares = [min(batch / 4, 1) for batch in range(8)]
    assert looks.rates == [[pytest.approx(0.4 * share)] * 3 for share in shares]
    assert [one.drop_rate for one in blocks] == [0.4] * 3


def test_a_whole_number_of_epochs_is_a_warmup_too() -> None:
    assert str(read_warmup(2)) == "2ep"
    with pytest.raises(OptionError, match=r"stochastic_depth\.drop_warmup: got '2 potatoes'\."):
        StochasticDepth(drop_warmup="2 potatoes")
    with pytest.raises(OptionError, match=r"stochastic_depth\.drop_warmup: got -1\. Expected a time of at least 0\."):
        StochasticDepth(drop_warmup=-1)
    with pytest.raises(OptionError, match=r"got '1\.5dur'\. Expected a share of the run of at most 1\."):
        StochasticDepth(drop_warmup="1.5dur")


def test_microbatches_of_a_batch_leave_out_the_same_blocks_as_often_as_the_rate_says() -> None:
    _, whole = train(batches=200, drop_rate=0.5, drop_distribution="uniform")
    _, split = train(batches=200, micro=3, drop_rate=0.5, drop_distribution="uniform")
    assert split.dropped[::2] == split.dropped[1::2] == whole.dropped
    shares = torch.tensor(whole.dropped, dtype=torch.float).mean(0)
    assert shares.tolist() == pytest.approx([0.5] * 3, abs=0.14)  # four standard errors


def test_after_training_nothing_is_decided_any_more() -> None:
    blocks, _ = train(drop_rate=0.5)
    assert [one.dropped for one in blocks] == [None] * 3
