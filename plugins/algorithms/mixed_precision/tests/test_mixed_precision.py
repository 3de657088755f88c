"""Against the same run with the trainer's own argument, bit for bit, and torch's autocast by hand."""

import itertools
from typing import Any

import pytest
import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from kernel_core.errors import TrainerError
from kernel_plugin_mixed_precision import MixedPrecision, choose_precision
from torch import nn


class Net(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)) for _ in range(4)]


def train(*plugins: Any, **arguments: Any) -> list[torch.Tensor]:
    model = Net()
    Trainer(
        model=model,
        train_dataloader=batches(),
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        plugins=list(plugins),
        device="cpu",
        seed=0,
        progress_bar=False,
        **arguments,
    ).fit()
    return [parameter.detach() for parameter in model.parameters()]


def same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


def test_weights_are_those_of_the_trainers_own_precision_bit_for_bit() -> None:
    assert same(train(MixedPrecision()), train(precision="amp_bf16"))
    assert same(train("mixed_precision"), train(precision="amp_bf16"))
    assert same(train(MixedPrecision("amp_bf16")), train(precision="amp_bf16"))
    assert same(train(MixedPrecision("fp32"), precision="amp_bf16"), train())
    assert not same(train(MixedPrecision()), train())


def test_weights_are_those_of_autocast_by_hand_and_stay_in_single_precision() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches() * 2:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
    trained = train(MixedPrecision())
    assert same(trained, list(model.parameters()))
    assert {weight.dtype for weight in trained} == {torch.float32}


def test_the_place_among_other_plugins_changes_nothing() -> None:
    others = [
        "mixed_precision",
        ("gradient_clipping", {"clipping_threshold": 0.1}),
        ("ema", {"half_life": "2ba"}),
        "lr_monitor",
    ]
    expected = train(*others[1:], precision="amp_bf16")
    assert not same(expected, train(precision="amp_bf16"))
    assert all(same(train(*some), expected) for some in itertools.permutations(others))


def test_the_outputs_of_the_model_are_bf16() -> None:
    seen = set()

    class Look(Callback):
        @hookimpl
        def after_forward(self, state: Any) -> None:
            seen.add((state.precision, state.outputs.dtype))

    train(MixedPrecision(), Look())
    assert seen == {("amp_bf16", torch.bfloat16)}


@pytest.mark.parametrize(
    ("asked", "trainers", "message"),
    [
        (None, "amp_fp16", "mixed_precision: amp_bf16 takes the place of precision='amp_fp16'."),
        ("fp32", "amp_bf16", "mixed_precision: fp32 takes the place of precision='amp_bf16'."),
        (None, "fp32", None),
        (None, None, None),
        ("amp_bf16", "amp_bf16", None),
    ],
)
def test_it_wins_over_another_precision_and_says_so(
    asked: str | None, trainers: str | None, message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with Trainer(
        model=Net(), plugins=[MixedPrecision(asked)], precision=trainers, device="cpu", progress_bar=False
    ) as trainer:
        assert trainer.state.precision == (asked or "amp_bf16")
    assert caplog.messages == ([] if message is None else [message])


@pytest.mark.parametrize(("has_bf16", "expected"), [(True, "amp_bf16"), (False, "amp_fp16")])
def test_a_gpu_without_bf16_gets_fp16(monkeypatch: pytest.MonkeyPatch, has_bf16: bool, expected: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16)
    assert choose_precision(None, torch.device("cuda")) == expected
    assert choose_precision("fp32", torch.device("cuda")) == "fp32"


def test_an_unknown_precision_is_refused_by_the_kernel_in_the_name_of_the_plugin() -> None:
    with pytest.raises(TrainerError, match=r"precision: unknown precision 'bf16'.*Did you mean 'amp_bf16'") as caught:
        train(MixedPrecision("bf16"))
    assert "mixed_precision" in "".join(caught.value.__notes__)
