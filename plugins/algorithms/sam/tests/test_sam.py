"""Against the two-step formula worked by hand, a plain two-pass loop, and one forward pass for running statistics."""

import itertools
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, TrainableModel, Trainer, hookimpl
from kernel_core.errors import ConflictError, OptimizerError, OptionError
from kernel_plugin_sam import SAM, SAMOptimizer, climb
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Net(TrainableModel):
    def __init__(self, norm: bool = False, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8, momentum=momentum) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def trainer_of(model: Net, *plugins: Any, optimizer: Any = None, count: int = 6, **kwargs: Any) -> Trainer:
    return Trainer(
        model=model,
        train_dataloader=batches(count),
        max_duration=f"{count}ba",
        optimizers=sgd(model) if optimizer is None else optimizer,
        plugins=list(plugins),
        device="cpu",
        progress_bar=False,
        **kwargs,
    )


def train(*plugins: Any, model: Net | None = None, **kwargs: Any) -> Net:
    model = Net() if model is None else model
    trainer_of(model, *plugins, **kwargs).fit()
    return model


def by_hand(rho: float, interval: int = 1, clip: float | None = None, count: int = 6) -> Net:
    """Two passes, without anything of the plugin's."""
    model = Net()
    optimizer = sgd(model)
    parameters = list(model.parameters())

    def gradients(batch: Any) -> None:
        optimizer.zero_grad()
        model.loss(model(batch), batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)

    for number, batch in enumerate(batches(count), 1):
        gradients(batch)
        if number % interval == 0:
            with torch.no_grad():
                kept = [p.clone() for p in parameters]
                norm = torch.stack([p.grad.norm() for p in parameters]).norm()
                for p in parameters:
                    p.add_(p.grad * (rho / (norm + 1e-12)))
            gradients(batch)
            with torch.no_grad():
                for p, value in zip(parameters, kept, strict=True):
                    p.copy_(value)
        optimizer.step()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def closure_of(optimizer: Any, loss: Any) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    return closure


def test_a_step_on_a_quadratic_is_the_formula() -> None:
    # loss = (w1² + 4 w2²) / 2 at w = (3, 1): g = (3, 4), norm 5; climbed w + 0.5 g/5 = (3.3, 1.4); its g = (3.3, 5.6)
    weight = nn.Parameter(torch.tensor([3.0, 1.0], dtype=torch.float64))
    scales = torch.tensor([1.0, 4.0], dtype=torch.float64)
    optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.1), rho=0.5)
    loss = optimizer.step(closure_of(optimizer, lambda: (scales * weight.square()).sum() / 2))
    assert loss.item() == 6.5  # at the weights, not at the climbed point
    expected = torch.tensor([3.0 - 0.33, 1.0 - 0.56], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=0)


def test_the_norm_is_over_all_parameters_together() -> None:
    one, other, idle = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))
    one.grad, other.grad = torch.tensor([3.0]), torch.tensor([-4.0])
    moved, before = climb([one, idle, other], rho=1.0)
    torch.testing.assert_close(torch.cat([one, other, idle]).detach(), torch.tensor([0.6, -0.8, 1.0]))
    assert moved == [one, other]
    assert torch.equal(torch.cat(before), torch.zeros(2))
    assert torch.equal(one.grad, torch.tensor([3.0]))
    assert climb([idle]) == ([], [])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_zero_gradient_moves_nothing_in_any_dtype(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.ones(3, dtype=dtype))
    weight.grad = torch.zeros(3, dtype=dtype)
    climb([weight])
    assert torch.equal(weight.detach(), torch.ones(3, dtype=dtype))


def test_the_length_of_the_climb_goes_by_the_norm_that_is_given() -> None:
    # as of a rank that holds a part of the model: the norm over all parts is longer than that over its own
    weight = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    climb([weight], rho=2.0, total_norm=lambda gradients: torch.tensor(10.0, dtype=torch.float64))
    torch.testing.assert_close(weight.detach(), torch.tensor([1.6, 2.8], dtype=torch.float64))


@pytest.mark.parametrize("interval", [1, 3])
def test_in_training_it_is_the_two_pass_loop_bit_for_bit(interval: int) -> None:
    expected = by_hand(0.2, interval)
    assert same(train(("sam", {"rho": 0.2, "interval": interval})), expected)
    assert not same(train(), expected)


def test_a_radius_of_zero_is_the_base_optimizer_bit_for_bit() -> None:
    assert same(train(SAM(rho=0.0)), train())


def test_a_step_never_waits_for_the_device() -> None:
    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: set[str] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    model = Net(norm=True)
    optimizer = SAMOptimizer(sgd(model), model=model)
    batch = batches(1)[0]
    with Operations() as operations:
        loss = optimizer.step(closure_of(optimizer, lambda: model.loss(model(batch), batch)))
    assert "_foreach_copy_" in operations.names
    assert "_local_scalar_dense" not in operations.names  # what .item(), float() and bool() end in
    with Operations() as operations:
        bool(loss)
    assert "_local_scalar_dense" in operations.names


def test_an_exactly_zero_loss_is_a_loss() -> None:
    # loss = |w| - w at w = 1 is zero; its gradient is zero too, but weight decay still acts
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = SAMOptimizer(torch.optim.SGD([weight], lr=0.5, weight_decay=1.0))
    evaluations: list[float] = []

    def loss() -> torch.Tensor:
        evaluations.append(weight.item())
        return (weight.abs() - weight).sum()

    assert optimizer.step(closure_of(optimizer, loss)).item() == 0.0
    assert evaluations == [1.0, 1.0]
    assert weight.item() == 0.5


def test_the_weights_of_the_update_are_those_before_the_climb_bit_for_bit() -> None:
    weights = [nn.Parameter(torch.randn(1000) * 10.0**power) for power in range(-6, 7)]
    before = [weight.detach().clone() for weight in weights]
    optimizer = SAMOptimizer(torch.optim.SGD(weights, lr=0.0), rho=7.3)
    seen = []

    def loss() -> Any:
        seen.append([weight.detach().clone() for weight in weights])
        return torch.stack([weight.square().sum() for weight in weights]).sum()

    optimizer.step(closure_of(optimizer, loss))
    assert all(torch.equal(weight, value) for weight, value in zip(weights, before, strict=True))
    assert not torch.equal(seen[0][0], seen[1][0]) or not torch.equal(seen[0][-1], seen[1][-1])


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_are_those_of_one_forward_pass(momentum: float | None) -> None:
    model, once = Net(norm=True, momentum=momentum), Net(norm=True, momentum=momentum)
    train(SAM(rho=0.5), model=model, count=1)
    once.train()(batches(1)[0])
    norm, expected = model.net[1], once.net[1]
    assert torch.equal(norm.running_mean, expected.running_mean)
    assert torch.equal(norm.running_var, expected.running_var)
    assert norm.num_batches_tracked.item() == 1
    assert not same(model, once)


def test_a_buffer_that_a_module_replaces_keeps_its_first_value() -> None:
    class Counting(nn.Module):
        count: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.count = self.count + 1
            return x

    model = Net()
    model.net.append(Counting())
    train(SAM(), model=model, count=4)
    assert model.net[3].count.item() == 4


def test_microbatches_are_all_evaluated_twice_and_statistics_counted_once() -> None:
    model = Net(norm=True)
    train(SAM(), model=model, count=2, device_train_microbatch_size=4)
    assert model.net[1].num_batches_tracked.item() == 4


def test_clipping_clips_both_gradients() -> None:
    clipping = ("gradient_clipping", {"clipping_threshold": 0.05})
    assert same(train(SAM(rho=0.2), clipping), by_hand(0.2, clip=0.05))


def test_state_loss_is_that_of_the_first_evaluation() -> None:
    losses: list[torch.Tensor] = []

    class Watch(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            losses.append(state.loss)

    train(SAM(rho=1.0), Watch(), count=1)
    model = Net()
    assert torch.equal(losses[0], model.loss(model(batches(1)[0]), batches(1)[0]).detach())


def test_after_a_failing_second_evaluation_weights_and_buffers_are_as_after_the_first() -> None:
    model = Net(norm=True)
    optimizer = SAMOptimizer(sgd(model), model=model)
    before = [p.detach().clone() for p in model.parameters()]
    numbers = itertools.count()
    batch = batches(1)[0]

    def loss() -> Any:
        value = model.loss(model(batch), batch)
        if next(numbers) == 1:
            raise RuntimeError("out of memory")
        return value

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(closure_of(optimizer, loss))
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    assert model.net[1].num_batches_tracked.item() == 1
    assert optimizer.num_steps == 0


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_run_in_two_parts_is_the_run_in_one(name: str) -> None:
    def make(model: nn.Module) -> Any:
        return sgd(model) if name == "sgd" else torch.optim.AdamW(model.parameters(), lr=0.01)

    whole = Net()
    trainer_of(whole, SAM(rho=0.2, interval=2), optimizer=make(whole)).fit()

    first = Net()
    trainer = trainer_of(first, SAM(rho=0.2, interval=2), optimizer=make(first))
    steps = trainer.steps()
    for _ in range(3):  # the fourth step climbs, and only the counter says so
        next(steps)
    saved = trainer.state.optimizers[0].state_dict()
    weights, timestamp = first.state_dict(), trainer.state.timestamp

    second = Net()
    second.load_state_dict(weights)
    trainer = trainer_of(second, SAM(rho=0.2, interval=2), optimizer=make(second))
    trainer.state.optimizers[0].load_state_dict(saved)
    trainer.state.progress.restore(timestamp)
    trainer.fit()
    assert same(second, whole)


def test_the_state_is_the_base_optimizers_and_a_counter() -> None:
    model = Net()
    trainer = trainer_of(model, SAM())
    trainer.fit()
    optimizer = trainer.state.optimizers[0]
    assert isinstance(optimizer, SAMOptimizer)
    saved, base = optimizer.state_dict(), optimizer.base_optimizer.state_dict()
    assert set(saved) == {"state", "param_groups", "sam_steps"}
    assert saved["sam_steps"] == 6
    assert saved["param_groups"] == base["param_groups"]
    assert torch.equal(saved["state"][0]["momentum_buffer"], base["state"][0]["momentum_buffer"])

    other = SAMOptimizer(sgd(model))
    other.load_state_dict(base)  # saved without SAM
    assert other.num_steps == 0
    assert torch.equal(other.state_dict()["state"][0]["momentum_buffer"], base["state"][0]["momentum_buffer"])
    assert "sam_steps" in saved  # what is loaded is not changed
    other.load_state_dict(saved)
    assert other.num_steps == 6


def test_groups_and_state_are_those_of_the_base_optimizer_also_after_loading() -> None:
    model = Net()
    base = sgd(model)
    optimizer = SAMOptimizer(base)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is base.param_groups
    assert optimizer.state is base.state
    assert optimizer.defaults is base.defaults
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 2.0})
    assert base.param_groups[1]["lr"] == 2.0
    assert repr(optimizer).startswith("SAMOptimizer")


@pytest.mark.parametrize("around", ["base", "wrapper"])
def test_torch_schedulers_reach_the_base_optimizer(around: str) -> None:
    model = Net()
    base = sgd(model)
    optimizer = SAMOptimizer(base, model=model)
    scheduler = torch.optim.lr_scheduler.StepLR(base if around == "base" else optimizer, step_size=1, gamma=0.1)
    batch = batches(1)[0]
    optimizer.step(closure_of(optimizer, lambda: model.loss(model(batch), batch)))
    scheduler.step()
    assert base.param_groups[0]["lr"] == pytest.approx(0.03)


def test_a_schedule_of_the_kernel_reaches_the_base_optimizer() -> None:
    assert same(train(SAM(), schedulers=lambda state: 0.0), Net())


def test_step_hooks_of_torch_work() -> None:
    optimizer = SAMOptimizer(sgd(Net()))
    called: list[str] = []
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    optimizer.step(lambda: torch.zeros(()))
    assert called == ["post"]


def test_an_optimizer_that_evaluates_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"sam: got LBFGS, which evaluates the model in its step\. Expected"):
        SAMOptimizer(torch.optim.LBFGS(Net().parameters()))


def test_a_step_without_closure_is_refused() -> None:
    optimizer = SAMOptimizer(sgd(Net()))
    with pytest.raises(OptimizerError, match=r"sam: step got None for its closure\. Expected a function"):
        optimizer.step(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="closure"):
        optimizer.step()  # type: ignore[call-arg]


def test_a_sparse_gradient_is_refused_and_nothing_moves() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    before = table.weight.detach().clone()
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match=r"sam: got a sparse gradient\. Expected dense gradients\."):
        climb(table.parameters())
    assert torch.equal(table.weight, before)


def test_several_optimizers_and_two_wrappers_are_refused() -> None:
    class Wrapper(Algorithm):
        roles = {"wraps-optimizer"}

    model = Net()
    halves = [
        torch.optim.SGD(model.net[0].parameters(), lr=0.1),
        torch.optim.SGD(model.net[2].parameters(), lr=0.1),
    ]
    with pytest.raises(OptimizerError, match="SAMOptimizer evaluates the model in its step and must be the only"):
        trainer_of(model, SAM(), optimizer=halves)
    with pytest.raises(ConflictError, match="wraps-optimizer"):
        trainer_of(Net(), SAM(), Wrapper())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rho": -1.0}, r"sam\.rho: got -1\.0, .*greater than or equal to 0"),
        ({"epsilon": 0.0}, r"sam\.epsilon: got 0\.0, .*greater than 0"),
        ({"interval": 0}, r"sam\.interval: got 0, .*greater than or equal to 1"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SAM(**kwargs)
