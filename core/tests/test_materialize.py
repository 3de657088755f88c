"""Models from the meta device: their values follow from the seed and the paths alone, on any number of ranks."""

from typing import Any

import pytest
import torch
from kernel_core import Algorithm, TrainableModel, Trainer, hookimpl
from kernel_core.errors import SurgeryError
from kernel_core.materialize import Materializer, is_meta
from kernel_core.testing.ranks import run_on_ranks
from torch import Tensor, nn

CPU = torch.device("cpu")
WORDS, WIDTH = 7, 6


class Scale(nn.Module):
    """Has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("seen", torch.empty(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(TrainableModel):
    """Embeddings tied with the head, blocks with batch statistics, and a module that only a function around it knows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, batch: Any) -> Tensor:
        x = self.words(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.scale = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), Scale()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.norm(self.line(x)))  # type: ignore[no-any-return]

    def param_init_fn(self, module: nn.Module) -> None:
        if isinstance(module, Scale):
            nn.init.constant_(module.weight, 2.0)
            module.seen.zero_()  # type: ignore[operator,union-attr]
        else:
            module.reset_parameters()  # type: ignore[operator]


def on_meta() -> Net:
    with torch.device("meta"):
        return Net()


class Watches(Algorithm):
    """Counts ``model_materialized`` and adds to what it finds."""

    def __init__(self) -> None:
        self.calls = 0

    @hookimpl
    def model_materialized(self, model: Any) -> None:
        self.calls += 1
        assert not is_meta(model)


def weights_of(parallelism: Any, seed: int = 3) -> dict[str, Any]:
    model, watches = on_meta(), Watches()
    with Trainer(
        model=model,
        train_dataloader=[(torch.arange(4), torch.arange(4))],
        max_duration=1,
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        algorithms=watches,
        parallelism=parallelism,
        seed=seed,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        state = trainer.state
        weights = state.engine.model_state(state.model, full=True)
        trained = {name: value.tolist() for name, value in weights.items()}
        tied = state.model.words.weight is state.model.head.weight
        trainer.fit()
        after = state.engine.model_state(state.model, full=True)
    return {
        "weights": trained,
        "tied": tied,
        "calls": watches.calls,
        "moved": any(after[name].tolist() != trained[name] for name in after),
    }


def on_ranks() -> dict[str, Any]:
    return {str(parallelism): weights_of(parallelism) for parallelism in ("ddp", "fsdp")}


def test_values_follow_from_the_seed_and_the_path() -> None:
    first, again, other = weights_of("single"), weights_of("single"), weights_of("single", seed=4)
    assert first == again
    assert first["weights"]["blocks.0.line.weight"] != other["weights"]["blocks.0.line.weight"]
    assert first["weights"]["blocks.0.line.weight"] != first["weights"]["blocks.1.line.weight"]
    assert first["calls"] == 1
    assert first["tied"]
    assert first["moved"]


def test_the_order_in_which_modules_get_their_values_changes_none() -> None:
    whole, parts = on_meta(), on_meta()
    Materializer(whole, CPU, 3)(whole)
    materialize = Materializer(parts, CPU, 3)
    for block in reversed(parts.blocks):
        materialize(block)
    materialize(parts)
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    assert parts.head.weight is parts.words.weight
    assert parts.blocks[0].scale.weight.tolist() == [2.0] * WIDTH  # type: ignore[union-attr,index]
    assert parts.blocks[0].norm.running_var.tolist() == [1.0] * WIDTH  # type: ignore[union-attr,operator]


def test_the_nearest_function_around_a_module_decides() -> None:
    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(2, 2))
        model = nn.Sequential(nn.Linear(2, 2), inner)
    for module, value in ((model, 1.0), (inner, 2.0)):
        module.param_init_fn = lambda one, value=value: nn.init.constant_(one.weight, value)  # type: ignore[assignment]
    Materializer(model, CPU, 0)(model)
    assert (float(model[0].weight[0, 0]), float(inner[0].weight[0, 0])) == (1.0, 2.0)


def test_what_is_real_keeps_its_values() -> None:
    real = nn.Linear(2, 2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2))
    model.append(real)
    value = real.weight.detach().clone()
    state = torch.random.get_rng_state()
    Materializer(model, CPU, 0)(model)
    assert torch.equal(real.weight, value)
    assert model[1].weight is real.weight
    assert not is_meta(model)
    assert torch.equal(torch.random.get_rng_state(), state)  # drawn from streams of their own


def test_a_module_that_nobody_can_initialise_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Scale()))
    with pytest.raises(SurgeryError) as caught:
        Materializer(model, CPU, 0)(model)
    assert "model: 1.0 is a Scale on the meta device, and nothing says which values it starts with." in str(
        caught.value
    )


@pytest.mark.ranks
@pytest.mark.parametrize(
    "world_size", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_every_engine_begins_with_the_values_of_one_process(world_size: int) -> None:
    expected = weights_of("single")
    for rank, result in enumerate(run_on_ranks(world_size, __file__, "on_ranks")):
        for engine, found in result.items():
            assert found["weights"] == ({} if rank else expected["weights"]), engine
            assert (found["tied"], found["calls"]) == (True, 1), engine
            assert found["moved"] == (rank == 0), engine
