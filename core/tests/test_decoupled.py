"""DecoupledSGDW and DecoupledAdamW against their update rules written out, one number at a time, in float64."""

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from kernel_core.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler
from kernel_core.optim.decoupled import decay_weights
from kernel_core.registry.options import bind_options
from torch import nn

LRS = [1.0, 0.5, 0.8, 0.0, 0.25, 0.1]  # what a schedule multiplies the initial rates by, step after step
IMPLEMENTATIONS: list[dict[str, Any]] = [{}, {"foreach": False}, {"foreach": True}, {"fused": True}]
ids = [str(options) for options in IMPLEMENTATIONS]


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def start() -> list[nn.Parameter]:
    return [nn.Parameter(numbers(3, 2, seed=1)), nn.Parameter(numbers(4, seed=2)), nn.Parameter(numbers(2, seed=3))]


def gradient(parameter: int, step: int) -> torch.Tensor:
    return numbers(*start()[parameter].shape, seed=100 * parameter + step)


def train(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = len(LRS), first: int = 0
) -> None:
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * LRS[step]
        for index, parameter in enumerate(parameters):
            parameter.grad = gradient(index, step)
        optimizer.step()


def sgdw(
    weight: float,
    grads: list[float],
    lr: float,
    wd: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> float:
    """One weight, over all steps."""
    velocity = None
    for multiplier, grad in zip(LRS, grads, strict=True):
        grad = -grad if maximize else grad
        velocity = grad if velocity is None else momentum * velocity + (1 - dampening) * grad
        direction = grad + momentum * velocity if nesterov else velocity
        weight = weight * (1 - multiplier * wd) - lr * multiplier * direction
    return weight


def adamw(
    weight: float,
    grads: list[float],
    lr: float,
    wd: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    amsgrad: bool = False,
    maximize: bool = False,
) -> float:
    """One weight, over all steps."""
    mean = square = largest = 0.0
    for step, (multiplier, grad) in enumerate(zip(LRS, grads, strict=True), 1):
        grad = -grad if maximize else grad
        mean = betas[0] * mean + (1 - betas[0]) * grad
        square = betas[1] * square + (1 - betas[1]) * grad**2
        largest = max(largest, square) if amsgrad else square
        size = math.sqrt(largest / (1 - betas[1] ** step)) + eps
        weight = weight * (1 - multiplier * wd) - lr * multiplier * mean / (1 - betas[0] ** step) / size
    return weight


def by_hand(rule: Callable[..., float], index: int, lr: float, wd: float, **options: Any) -> torch.Tensor:
    parameter = start()[index].detach()
    grads = torch.stack([gradient(index, step).flatten() for step in range(len(LRS))], dim=1)
    weights = [
        rule(weight, row, lr, wd, **options)
        for weight, row in zip(parameter.flatten().tolist(), grads.tolist(), strict=True)
    ]
    return torch.tensor(weights, dtype=torch.float64).reshape(parameter.shape)


def check(cls: Any, rule: Callable[..., float], implementation: dict[str, Any], **options: Any) -> None:
    """Three groups with rates and decays of their own, against the rule."""
    parameters = start()
    groups = [
        {"params": parameters[:1]},
        {"params": parameters[1:2], "lr": 0.3, "weight_decay": 0.0},
        {"params": parameters[2:], "lr": 0.02, "weight_decay": 0.2},
    ]
    optimizer = cls(groups, lr=0.1, weight_decay=0.05, **options, **implementation)
    train(optimizer, parameters)
    for index, (lr, wd) in enumerate([(0.1, 0.05), (0.3, 0.0), (0.02, 0.2)]):
        expected = by_hand(rule, index, lr, wd, **options)
        torch.testing.assert_close(parameters[index].detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=ids)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3},
        {"momentum": 0.8, "nesterov": True},
        {"maximize": True},
    ],
    ids=str,
)
def test_sgdw_is_its_rule(options: dict[str, Any], implementation: dict[str, Any]) -> None:
    check(DecoupledSGDW, sgdw, implementation, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=ids)
@pytest.mark.parametrize(
    "options",
    [{}, {"betas": (0.8, 0.99), "eps": 1e-3}, {"amsgrad": True}, {"maximize": True, "amsgrad": True}],
    ids=str,
)
def test_adamw_is_its_rule(options: dict[str, Any], implementation: dict[str, Any]) -> None:
    check(DecoupledAdamW, adamw, implementation, **options)


BOTH: list[tuple[Any, dict[str, Any]]] = [
    (DecoupledSGDW, {"momentum": 0.9}),
    (DecoupledAdamW, {}),
]


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_without_decay_it_is_torch_s_optimizer_bit_for_bit(cls: Any, options: dict[str, Any]) -> None:
    torchs: Any = torch.optim.SGD if cls is DecoupledSGDW else torch.optim.Adam
    betas = {} if cls is DecoupledSGDW else {"betas": (0.9, 0.95)}
    ours, theirs = start(), start()
    train(cls(ours, lr=0.1, weight_decay=0.0, **options), ours)
    reference = torchs(theirs, lr=0.1, **options, **betas)
    for group in reference.param_groups:
        group["initial_lr"] = 0.1
    train(reference, theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("cls", "options"), BOTH)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=ids)
def test_weights_decay_after_the_closure_and_only_where_there_is_a_gradient(
    cls: Any, options: dict[str, Any], implementation: dict[str, Any]
) -> None:
    parameters = start()
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = cls(parameters, lr=0.1, weight_decay=0.5, **options, **implementation)
    seen: list[Any] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        seen.extend(torch.equal(a, b) for a, b in zip(parameters, before, strict=True))
        seen.append(optimizer.param_groups[0]["weight_decay"])
        loss = 0 * parameters[0].sum() + 0 * parameters[1].sum()
        loss.backward()  # type: ignore[union-attr]
        return loss + 7

    assert optimizer.step(closure).item() == 7
    assert seen == [True, True, True, 0.5]
    torch.testing.assert_close([p.detach() for p in parameters], [before[0] / 2, before[1] / 2, before[2]])
    for parameter in parameters:
        parameter.grad = None
    assert optimizer.step() is None
    torch.testing.assert_close(parameters[0].detach(), before[0] / 2)


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_saved_and_loaded_it_goes_on_as_before(cls: Any, options: dict[str, Any]) -> None:
    whole = start()
    train(cls(whole, lr=0.1, weight_decay=0.05, **options), whole)
    parts = start()
    first = cls(parts, lr=0.1, weight_decay=0.05, **options)
    train(first, parts, steps=3)
    state = copy.deepcopy(first.state_dict())
    assert state["param_groups"][0]["weight_decay"] == 0.05
    assert state["param_groups"][0]["initial_lr"] == 0.1
    second = cls(parts, lr=9.0, weight_decay=0.0, **options)  # what it was made with is what was saved
    second.load_state_dict(state)
    train(second, parts, steps=3, first=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_the_state_of_torch_s_optimizer_can_be_loaded(cls: Any, options: dict[str, Any]) -> None:
    parameters = start()
    torchs: Any = torch.optim.SGD if cls is DecoupledSGDW else torch.optim.AdamW
    optimizer = cls(parameters, lr=0.1, **options)
    optimizer.load_state_dict(torchs(parameters, lr=0.3, weight_decay=0.25).state_dict())
    assert optimizer.param_groups[0]["initial_lr"] == 0.3
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.zeros_like(parameters[0])
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), before * 0.75)


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_a_group_added_later_decays_against_its_own_rate(cls: Any, options: dict[str, Any]) -> None:
    one, two = start()[:2]
    optimizer = cls([one], lr=0.1, weight_decay=0.0, **options)
    optimizer.add_param_group({"params": [two], "lr": 0.4, "weight_decay": 0.5})
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.1, 0.4]
    before = two.detach().clone()
    two.grad = torch.zeros_like(two)
    optimizer.param_groups[1]["lr"] = 0.2  # half the rate, so half the decay
    optimizer.step()
    torch.testing.assert_close(two.detach(), before * 0.75)


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_a_group_that_starts_at_rate_zero_does_not_decay(cls: Any, options: dict[str, Any]) -> None:
    parameters = start()
    optimizer = cls(parameters, lr=0.0, weight_decay=0.5, **options)
    before = parameters[0].detach().clone()
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer.step()
    assert torch.equal(parameters[0], before)


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_step_hooks_run_once(cls: Any, options: dict[str, Any]) -> None:
    """Also where torch has put hooks into the step of the class it is derived from."""
    parameters = start()
    torch.optim.SGD(parameters, lr=0.1)
    torch.optim.AdamW(parameters, lr=0.1)
    optimizer = cls(parameters, lr=0.1, **options)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("before"))
    optimizer.register_step_post_hook(lambda *args: calls.append("after"))
    parameters[0].grad = torch.zeros_like(parameters[0])
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_an_error_in_the_step_leaves_the_user_s_decay_in_place(cls: Any, options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.zeros(2, 2))
    optimizer = cls([parameter], lr=0.1, weight_decay=0.25, **options)
    parameter.grad = torch.zeros(2, 2)
    optimizer.param_groups[0]["foreach"] = optimizer.param_groups[0]["fused"] = None
    del optimizer.param_groups[0]["maximize"]
    with pytest.raises(KeyError):
        optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_fused_steps_under_loss_scaling_skip_the_decay_of_a_skipped_step() -> None:
    """torch's scaler hands its findings to a fused step, which skips itself; a step that cannot is not called at all."""
    for cls in (DecoupledSGDW, DecoupledAdamW):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = cls([parameter], lr=0.1, weight_decay=0.5, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((parameter * torch.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert parameter.tolist() == [1.0, 1.0, 1.0]
        optimizer.zero_grad()
        scaler.scale((parameter * 0).sum()).backward()
        scaler.step(optimizer)
        assert parameter.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_a_rate_held_in_a_tensor_is_compared_with_the_number_it_was(cls: Any, options: dict[str, Any]) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = cls([parameter], lr=rate, weight_decay=0.5, foreach=False, **options)
    rate.fill_(0.25)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert parameter.tolist() == [0.75] * 3


def test_decay_takes_tensors_that_are_not_plain_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(torch.Tensor):
        pass

    called: list[int] = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factor: called.append(len(tensors)))
    odd = torch.ones(2).as_subclass(Odd)
    decay_weights([odd, torch.ones(2)], 0.25)
    assert odd.tolist() == [0.75, 0.75]
    assert called == []
    decay_weights([torch.ones(2), nn.Parameter(torch.ones(2))], 0.25)
    decay_weights([], 0.25)
    assert called == [2]


@pytest.mark.parametrize(("cls", "options"), BOTH)
def test_sharded_parameters_step_as_whole_ones(cls: Any, options: dict[str, Any], tmp_path: Any) -> None:
    """One process is enough to have DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = start()
        sharded = [nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in whole]
        mixed = [*sharded[:2], start()[2]]
        train(cls(whole, lr=0.1, weight_decay=0.05, **options), whole)
        optimizer = cls(mixed, lr=0.1, weight_decay=0.05, **options)
        for step in range(len(LRS)):
            optimizer.param_groups[0]["lr"] = 0.1 * LRS[step]
            for index, parameter in enumerate(mixed):
                grad = gradient(index, step)
                parameter.grad = distribute_tensor(grad, mesh, [Shard(0)]) if index < 2 else grad  # type: ignore[assignment]
            optimizer.step()
        for one, other in zip(whole, mixed, strict=True):
            full = other.full_tensor() if hasattr(other, "full_tensor") else other
            torch.testing.assert_close(one.detach(), full.detach(), rtol=0, atol=1e-12)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("cls", [DecoupledSGDW, DecoupledAdamW])
def test_a_decay_meant_for_torch_s_adamw_warns(cls: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kernel_core"):
        cls(start(), lr=0.1, weight_decay=9e-4)
        assert not caplog.records
        cls([{"params": start()}, {"params": start(), "weight_decay": 1e-3}], lr=0.1, weight_decay=0.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"{cls.__name__}: weight_decay=0.001 is high. Every step at the initial learning rate shrinks the weights by that "
        "share, however small the rate is. 1e-5 to 1e-4 is usual; coming from torch's AdamW, use its lr * weight_decay."
    ]


def test_defaults_are_composer_s() -> None:
    sgd, adam = (cls(start(), lr=0.1).defaults for cls in (DecoupledSGDW, DecoupledAdamW))
    assert [sgd[name] for name in ("momentum", "dampening", "weight_decay", "nesterov")] == [0, 0, 0, False]
    adam_defaults = DecoupledAdamW(start()).defaults
    assert [adam_defaults[name] for name in ("lr", "betas", "eps", "weight_decay", "amsgrad")] == [
        1e-3,
        (0.9, 0.95),
        1e-8,
        1e-5,
        False,
    ]
    assert adam["lr"] == 0.1
    bound = bind_options(DecoupledAdamW, "optimizer", ([],), {"lr": 0.1, "betas": [0.9, 0.99]}, trusted=("params",))
    assert bound.arguments["betas"] == (0.9, 0.99)


def test_in_training_the_decay_follows_the_schedule() -> None:
    class Still(TrainableModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, batch: Any) -> Any:
            return self.weight * 0

        def loss(self, outputs: Any, batch: Any) -> Any:
            return outputs.sum()

    class Weights(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        @hookimpl
        def batch_end(self, state: Any) -> None:
            self.seen.append(state.model.weight.item())

    for cls in (DecoupledSGDW, DecoupledAdamW):
        weights = Weights()
        Trainer(
            model=Still(),
            train_dataloader=[torch.ones(2, 1)] * 4,
            max_duration="4ba",
            optimizers=lambda parameters, cls=cls: cls(parameters, lr=0.1, weight_decay=0.5),
            schedulers=LinearScheduler(),
            callbacks=weights,
            device="cpu",
            progress_bar=False,
        ).fit()
        factors = [1 - 0.5 * (1 - t / 4) for t in range(4)]
        assert weights.seen == pytest.approx([math.prod(factors[: t + 1]) for t in range(4)])
