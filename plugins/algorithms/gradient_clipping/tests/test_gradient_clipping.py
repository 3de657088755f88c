"""Against torch's own clipping, the formula of the paper worked by hand, and an unclipped run."""

from typing import Any

import pytest
import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptionError
from kernel_plugin_gradient_clipping import GradientClipping, adaptive_clip_grad, apply_gradient_clipping
from torch import nn


class Net(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 4 * 4, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return 50 * nn.functional.cross_entropy(outputs, batch[1])


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 1, 6, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def with_gradients() -> Net:
    model = Net()
    model.loss(model(batch()), batch()).backward()
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def test_norm_is_that_of_torch_and_the_norm_before_is_returned() -> None:
    model = with_gradients()
    before = torch.cat([gradient.flatten() for gradient in gradients(model)]).norm()
    returned = apply_gradient_clipping(model, "norm", 0.5)
    assert returned is not None
    torch.testing.assert_close(returned, before)
    after = torch.cat([gradient.flatten() for gradient in gradients(model)]).norm()
    torch.testing.assert_close(after, torch.tensor(0.5), rtol=1e-5, atol=0)


def test_value_clamps_every_entry() -> None:
    model = with_gradients()
    expected = [gradient.clamp(-0.01, 0.01) for gradient in gradients(model)]
    assert apply_gradient_clipping(model, "value", 0.01) is None
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), expected, strict=True))


@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
def test_a_model_without_gradients_is_left_alone(clipping_type: Any) -> None:
    model = nn.Linear(2, 2)
    apply_gradient_clipping(model, clipping_type, 0.1)
    assert gradients(model) == []


def test_adaptive_clips_unit_by_unit_as_in_the_paper() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]]))
    bias = nn.Parameter(torch.tensor([2.0, -0.5, 0.0]))
    weight.grad = torch.tensor([[0.3, 0.4], [3.0, 4.0], [0.6, 0.8]])
    bias.grad = torch.tensor([0.1, 1.0, -1.0])
    adaptive_clip_grad([weight, bias, nn.Parameter(torch.ones(2))], 0.2)
    # row norms 5, 0.5, 0 → floor 1e-3; allowed 1, 0.1, 2e-4; gradient norms 0.5, 5, 1
    torch.testing.assert_close(weight.grad, torch.tensor([[0.3, 0.4], [0.06, 0.08], [0.6 * 2e-4, 0.8 * 2e-4]]))
    torch.testing.assert_close(bias.grad, torch.tensor([0.1, 0.1, -2e-4]))


def test_adaptive_treats_a_filter_as_a_unit() -> None:
    conv = nn.Conv2d(2, 3, 3)
    conv.weight.grad = torch.randn_like(conv.weight) * 10
    by_hand = torch.stack(
        [
            g * min(1.0, 0.05 * max(float(w.norm()), 1e-3) / float(g.norm()))
            for g, w in zip(conv.weight.grad, conv.weight.detach(), strict=True)
        ]
    )
    adaptive_clip_grad([conv.weight], 0.05)
    torch.testing.assert_close(conv.weight.grad, by_hand)


def test_a_parameter_that_starts_at_zero_can_leave_it() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    parameter.grad = torch.ones(4, 4)
    adaptive_clip_grad([parameter], 0.01)
    assert float(parameter.grad.abs().min()) > 0


@pytest.mark.parametrize("clipping_type", ["norm", "value", "adaptive"])
def test_a_threshold_out_of_reach_changes_nothing_bit_for_bit(clipping_type: Any) -> None:
    model = with_gradients()
    before = gradients(model)
    apply_gradient_clipping(model, clipping_type, 1e9)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), before, strict=True))


def train(*plugins: Any, **kwargs: Any) -> Net:
    model = Net()
    Trainer(
        model=model,
        train_dataloader=[batch()] * 3,
        max_duration="3ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=list(plugins),
        device="cpu",
        progress_bar=False,
        **kwargs,
    ).fit()
    return model


def by_hand(clip: Any) -> Net:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(model(batch()), batch()).backward()
        clip(model.parameters())
        optimizer.step()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_in_training_it_is_clip_grad_norm_before_the_step() -> None:
    expected = by_hand(lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.7))
    assert same(train(("gradient_clipping", {"clipping_threshold": 0.7})), expected)
    assert not same(train(), expected)


def test_in_training_value_and_adaptive_too() -> None:
    assert same(train(GradientClipping("value", 0.01)), by_hand(lambda p: nn.utils.clip_grad_value_(p, 0.01)))
    assert same(train(GradientClipping("adaptive", 0.01)), by_hand(lambda p: adaptive_clip_grad(p, 0.01)))


def test_it_sees_the_gradient_of_the_whole_batch() -> None:
    norms = []

    class Watch(Callback):
        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            norms.append(float(torch.cat([p.grad.flatten() for p in state.model.parameters()]).norm()))

    train(GradientClipping("norm", 0.5), Watch(), device_train_microbatch_size=2)
    assert norms == pytest.approx([0.5] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"clipping_type": "norms"},
            r"gradient_clipping\.clipping_type: got 'norms', expected .*'norm', 'value', 'adaptive'",
        ),
        ({"clipping_threshold": 0.0}, r"gradient_clipping\.clipping_threshold: got 0\.0, .*greater than 0"),
        ({"threshold": 1.0}, r"gradient_clipping\.threshold: unknown option\. Did you mean 'clipping_threshold'\?"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        GradientClipping(**kwargs)
    with pytest.raises(OptionError, match="expected 'norm', 'value' or 'adaptive'"):
        apply_gradient_clipping(Net(), "norms")  # type: ignore[arg-type]
