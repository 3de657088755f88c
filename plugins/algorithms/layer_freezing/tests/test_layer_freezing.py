"""Layers that stop moving: how many, which, and beside a loop written by hand."""

from typing import Any

import pytest
import torch
from kernel_core import Callback, Classifier, LoggerDestination, Trainer, hookimpl
from kernel_core.errors import OptionError
from kernel_core.optim import DecoupledAdamW, DecoupledSGDW
from kernel_plugin_layer_freezing import LayerFreezing, freeze_layers, layers_of, num_frozen
from torch import nn

DATA = [(torch.randn(4, 3, generator=torch.Generator().manual_seed(n)), torch.tensor([0, 1, 0, 1])) for n in range(2)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    "decoupled_sgdw": lambda parameters: DecoupledSGDW(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "decoupled_adamw": lambda parameters: DecoupledAdamW(parameters, lr=0.05, weight_decay=0.01),
}


class Snapshots(Callback):
    affects_training = False

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    @hookimpl
    def epoch_end(self, state: Any) -> None:
        self.weights.append({name: one.detach().clone() for name, one in state.model.module.named_parameters()})


class Numbers(LoggerDestination):
    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        if "layer_freezing/layers_frozen" in metrics:
            self.found.append((metrics["layer_freezing/layers_frozen"], metrics["layer_freezing/percentage_frozen"]))


def train(optimizer: str = "adamw", epochs: int = 4, plugins: Any = (), **options: Any) -> Any:
    model = Classifier(net())
    trainer = Trainer(
        model=model,
        train_dataloader=DATA,
        max_duration=f"{epochs}ep",
        optimizers=OPTIMIZERS[optimizer](model.parameters()),
        plugins=[LayerFreezing(**options), *plugins],
        device="cpu",
        progress_bar=False,
    )
    with trainer:
        trainer.fit()
    return trainer


def test_the_number_of_frozen_layers_is_that_of_the_formula() -> None:
    assert [num_frozen(t / 10, 11, 0.0, 1.0) for t in range(11)] == list(range(11))
    assert num_frozen(1.0, 11, 0.2, 0.5) == 5
    assert num_frozen(0.19, 11, 0.2, 1.0) == 0
    assert [num_frozen(t / 10, 11, 0.5, 1.0) for t in range(5, 11)] == [0, 2, 4, 6, 8, 10]  # 0.6 - 0.5 is less than 0.1
    numbers = Numbers()
    train(plugins=[numbers], freeze_start=0.0)
    assert numbers.found == [(int(t / 4 * 3), int(t / 4 * 3) / 4) for t in range(1, 5)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_frozen_does_not_move_by_a_bit_and_the_rest_is_that_of_a_loop_by_hand(optimizer: str) -> None:
    snapshots = Snapshots()
    train(optimizer, plugins=[snapshots], freeze_start=0.0)
    frozen_after = {2: ["0.weight", "0.bias"], 3: ["0.weight", "0.bias", "2.weight", "2.bias"]}  # 1 and 2 of 4 layers
    model, made = net(), None
    made = OPTIMIZERS[optimizer](model.parameters())
    for epoch in range(1, 5):
        for x, y in DATA:
            made.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            for name, parameter in model.named_parameters():
                if name in frozen_after.get(epoch - 1, []):
                    parameter.grad = None
            made.step()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, snapshots.weights[epoch - 1][name]), (epoch, name)
    for name in frozen_after[3]:
        assert torch.equal(snapshots.weights[2][name], snapshots.weights[3][name])
    assert not torch.equal(snapshots.weights[2]["5.weight"], snapshots.weights[3]["5.weight"])


def test_dropping_gradients_as_on_several_ranks_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = train(freeze_start=0.0).state.model.state_dict()
    freeze = LayerFreezing._freeze

    def as_on_ranks(self: LayerFreezing, state: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(state), "world_size", 2)
            freeze(self, state)

    monkeypatch.setattr(LayerFreezing, "_freeze", as_on_ranks)
    dropped = train(freeze_start=0.0)
    assert not [change for change in dropped.surgery_report.changes if change.plugin == "layer_freezing"]
    for name, value in dropped.state.model.state_dict().items():
        assert torch.equal(value, alone[name])


def test_a_shared_parameter_is_frozen_with_the_last_layer_that_has_it() -> None:
    model = net()
    model[5] = nn.Linear(5, 5)
    model[5].weight = model[3].weight
    layers = layers_of(model)
    assert [path for path, _ in layers] == ["0", "2", "3", "5"]
    assert not any(one is model[3].weight for one in freeze_layers(layers, 3))
    assert any(one is model[3].bias for one in freeze_layers(layers, 3))
    assert any(one is model[3].weight for one in freeze_layers(layers, 4))


def test_freezing_is_reported_and_no_structure_changes_without_a_word(recwarn: pytest.WarningsRecorder) -> None:
    trainer = train(freeze_start=0.0)
    assert [(change.path, change.plugin, change.new) for change in trainer.surgery_report.changes] == [
        ("module.0", "layer_freezing", "frozen"),
        ("module.2", "layer_freezing", "frozen"),
        ("module.3", "layer_freezing", "frozen"),
    ]
    assert not [one for one in recwarn if "structure" in str(one.message)]
    assert all(parameter.requires_grad for parameter in trainer.state.model.parameters())  # the trainer is closed


@pytest.mark.parametrize(("option", "value"), [("freeze_start", 1.0), ("freeze_start", -0.1), ("freeze_level", 1.1)])
def test_shares_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(OptionError, match=rf"layer_freezing\.{option}: got {value}, expected float"):
        LayerFreezing(**{option: value})


def test_what_the_user_had_frozen_stays_so() -> None:
    model = Classifier(net())
    model.module[0].weight.requires_grad_(False)
    with Trainer(
        model=model,
        train_dataloader=DATA,
        max_duration="2ep",
        optimizers=OPTIMIZERS["sgd"]([one for one in model.parameters() if one.requires_grad]),
        plugins=[LayerFreezing(freeze_start=0.0)],
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["module.0.weight"]


def test_the_last_layer_that_is_trained_is_never_frozen() -> None:
    """Else a model whose head the user has frozen would end with nothing that has a gradient."""
    model, numbers = Classifier(net()), Numbers()
    model.module[5].requires_grad_(False)
    with Trainer(
        model=model,
        train_dataloader=DATA,
        max_duration="4ep",
        optimizers=OPTIMIZERS["sgd"]([one for one in model.parameters() if one.requires_grad]),
        plugins=[LayerFreezing(freeze_start=0.0), numbers],
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    assert numbers.found == [(0, 0.0), (1, 1 / 3), (1, 1 / 3), (2, 2 / 3)]  # of three layers
