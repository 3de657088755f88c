"""What a run holds goes out whole or in parts and into any engine; optimizers, several trainers and randomness on ranks."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_core import Algorithm, TrainableModel, Trainer, hookimpl
from kernel_core.testing.ranks import run_on_ranks
from torch import Tensor, nn

ENGINES: dict[str, Any] = {
    "ddp": "ddp",
    "full": {"fsdp": {}},
    "no_shard": {"fsdp": {"sharding_strategy": "NO_SHARD"}},
}
ROWS, WIDTH, WORDS = 8, 5, 7  # neither is divided by 2 or 4


class Net(TrainableModel):
    """A language model in small: tied weights, a buffer, and parameters with fewer rows than there are ranks."""

    def __init__(self, seed: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.dropout = nn.Dropout(dropout)
        self.double()
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: Any) -> Tensor:
        if self.training:
            self.passes += 1
        x = self.words(batch[0])
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.dropout(x * self.scale))  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class Losses(Algorithm):
    """Writes down the loss of each batch over all ranks, which have as many rows each."""

    def __init__(self) -> None:
        self.found: list[float] = []

    @hookimpl
    def batch_end(self, state: Any) -> None:
        loss = state.loss.detach().clone()
        state.engine.all_reduce(loss)
        self.found.append(float(loss) / state.world_size)


def batches() -> list[Any]:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(20):
        words = torch.randint(0, WORDS, (ROWS,), generator=generator)
        labels = torch.randint(0, WORDS, (ROWS,), generator=generator)
        found.append((words.chunk(world_size)[rank], labels.chunk(world_size)[rank]))
    return found


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    blocks = list(model.blocks.parameters())  # type: ignore[union-attr,operator]
    rest = [one for one in model.parameters() if all(one is not other for other in blocks)]
    groups = [{"params": blocks[:3], "lr": 0.02}, {"params": blocks[3:]}]
    return [torch.optim.AdamW(groups, lr=0.05), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]


def make(parallelism: Any, model: Net, **more: Any) -> tuple[Trainer, Losses]:
    losses = Losses()
    arguments = {
        "model": model,
        "train_dataloader": batches(),
        "max_duration": "3ba",
        "optimizers": optimizers_of(model),
        "algorithms": losses,
        "parallelism": parallelism,
        "seed": 0,
        "device": "cpu",
        "progress_bar": False,
    }
    return Trainer(**{**arguments, **more}), losses


def state_of(trainer: Trainer, full: bool = True) -> dict[str, Any]:
    state, engine = trainer.state, trainer.state.engine
    return {
        "model": engine.model_state(state.model, full=full),
        "optimizers": [engine.optimizer_state(state.model, one, full=full) for one in state.optimizers],
    }


def load(trainer: Trainer, saved: dict[str, Any]) -> None:
    state, engine = trainer.state, trainer.state.engine
    engine.load_model_state(state.model, saved["model"])
    for optimizer, one in zip(state.optimizers, saved["optimizers"], strict=True):
        engine.load_optimizer_state(state.model, optimizer, one)


def go_on(parallelism: Any, saved: dict[str, Any]) -> list[float]:
    """Load into a model with other values and train batches 0 and 1 of a fresh epoch: two losses."""
    trainer, losses = make(parallelism, Net(seed=9), max_duration="2ba")
    with trainer:
        load(trainer, saved)
        trainer.fit()
    return losses.found


def shape_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [type(value).__name__, list(value.shape), value.device.type]
    return {str(key): shape_of(one) for key, one in value.items()} if isinstance(value, dict) else str(value)


def exchange(folder: str) -> dict[str, Any]:
    """Save with each engine; load what each, and one process, has saved with each."""
    found: dict[str, Any] = {}
    rank, saved = int(os.environ["RANK"]), {"single": torch.load(f"{folder}/single.pt")}
    for name, parallelism in ENGINES.items():
        trainer, losses = make(parallelism, Net())
        with trainer:
            trainer.fit()
            whole, parts = state_of(trainer), state_of(trainer, full=False)
            if rank == 0:
                torch.save(whole, f"{folder}/{name}.pt")
            found[f"{name} whole"] = {key: shape_of(value) for key, value in whole["model"].items()}
            found[f"{name} whole optimizers"] = [bool(one) for one in whole["optimizers"]]
            found[f"{name} parts"] = {key: type(value).__name__ for key, value in parts["model"].items()}
            found[f"{name} losses"] = losses.found
            # its own parts go back where they came from: into a second trainer of the same engine
            found[f"{name} from parts"] = go_on(parallelism, parts)
        dist.barrier()
        saved[name] = torch.load(f"{folder}/{name}.pt")
    for source, state in saved.items():
        found |= {f"{source} into {name}": go_on(parallelism, state) for name, parallelism in ENGINES.items()}
    return found


def refuses_other_names() -> str:
    trainer, _ = make("ddp", Net())
    with trainer:
        state = dict(state_of(trainer)["model"])
        state.pop("scale", None)
        try:
            trainer.state.engine.load_model_state(trainer.state.model, state)
        except KeyError as error:
            return str(error)
    return ""


def optimizer_is_pointed_at_the_shards() -> dict[str, bool]:
    """Step optimizers that were built before the model was sharded: by the trainer, and with torch alone."""
    from torch.distributed.fsdp import fully_shard

    def moved(model: Any, before: dict[str, Tensor]) -> bool:
        after = {name: one.full_tensor() for name, one in model.named_parameters()}
        return all(not torch.equal(after[name], before[name]) for name in before)

    model = Net()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    ready = torch.optim.SGD(model.parameters(), lr=0.5)
    with make({"fsdp": {}}, model, optimizers=ready, max_duration="2ba")[0] as trainer:
        trainer.fit()
        ours = moved(trainer.state.model, before)
        same = trainer.state.optimizers[0] is ready
    model = Net()
    ready = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard(model)
    batch = batches()[0]
    model.loss(model(batch), batch).backward()
    ready.step()
    return {"ours": ours, "same": same, "torch alone": moved(model, before)}


def several_trainers() -> dict[str, Any]:
    """Train with two trainers in turns, and close them twice."""
    alone = {}
    for name, parallelism in ENGINES.items():
        trainer, losses = make(parallelism, Net(), max_duration="4ba")
        with trainer:
            trainer.fit()
        trainer.close()
        alone[name] = losses.found
    pairs = [make(parallelism, Net(), max_duration="4ba") for parallelism in ENGINES.values()]
    running = [trainer.steps() for trainer, _ in pairs]
    for _ in range(4):
        for steps in running:
            next(steps)
    for trainer, _ in pairs:
        trainer.close()
        trainer.close()
    del trainer, running
    gc.collect()
    return {"alone": alone, "in turns": {name: losses.found for name, (_, losses) in zip(ENGINES, pairs, strict=True)}}


class Draws(Algorithm):
    """Keeps what modules and its own generators draw in the first batch."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    @hookimpl
    def after_forward(self, state: Any) -> None:
        if state.progress.batch == 0:
            self.found["outputs"] = nn.functional.dropout(torch.ones(64), 0.5).tolist()
            for scope in ("batch", "rank", "microbatch"):
                self.found[scope] = torch.rand(4, generator=state.generator(self, scope)).tolist()
            self.found["sample"] = torch.rand(4, generator=state.generator(self, "sample", sample=3)).tolist()


def draws() -> dict[str, Any]:
    found = {}
    for name, parallelism in ENGINES.items():
        algorithm = Draws()
        trainer, _ = make(parallelism, Net(dropout=0.5), algorithms=algorithm, max_duration="1ba")
        with trainer:
            trainer.fit()
        found[name] = algorithm.found
    return found


def on_ranks(folder: str) -> dict[str, Any]:
    return {
        "exchange": exchange(folder),
        "names": refuses_other_names(),
        "pointed": optimizer_is_pointed_at_the_shards(),
        "several": several_trainers(),
        "draws": draws(),
    }


def check_close(found: list[float], expected: list[float], what: str) -> None:
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=0, msg=lambda m: f"{what}: {m}"
    )


def check_exchange(results: list[dict[str, Any]], folder: Path, losses: list[float], next_losses: list[float]) -> None:
    names = list(Net().state_dict())
    for rank, result in enumerate(results):
        found = result["exchange"]
        for name in ENGINES:
            check_close(found[f"{name} losses"], losses, name)
            whole = found[f"{name} whole"]
            if rank:
                assert whole == {}, name
                assert found[f"{name} whole optimizers"] == [False, False], name
            else:
                shapes = {key: [list(value.shape), "cpu"] for key, value in Net().state_dict().items()}
                assert {key: value[1:] for key, value in whole.items()} == shapes, name
                assert {value[0] for value in whole.values()} == {"Tensor"}, name
            parts = found[f"{name} parts"]
            assert list(parts) == names, name  # no prefix of any wrapper
            assert ("DTensor" in parts.values()) == (name != "ddp"), name
            for source in (f"{name} from parts", *(f"{source} into {name}" for source in ("single", *ENGINES))):
                check_close(found[source], next_losses, source)


def check(world_size: int, folder: Path) -> None:
    trainer, losses = make("single", Net())
    with trainer:
        trainer.fit()
        saved = state_of(trainer)
        torch.save(saved, folder / "single.pt")
    next_losses = go_on("single", saved)
    results = run_on_ranks(world_size, __file__, "on_ranks", str(folder), timeout_s=240)
    check_exchange(results, folder, losses.found, next_losses)
    for name in ENGINES:
        check_close(go_on("single", torch.load(folder / f"{name}.pt")), next_losses, f"{name} into single")

    for result in results:
        assert "missing" in result["names"] or "scale" in result["names"]
        assert result["pointed"] == {"ours": True, "same": True, "torch alone": False}
        assert result["several"]["alone"] == result["several"]["in turns"]
        for name in ENGINES:
            check_close(result["several"]["alone"][name][:3], losses.found, name)

    first, *others = [result["draws"] for result in results]
    for name in ENGINES:
        for other in others:
            for same in ("batch", "sample"):
                assert other[name][same] == first[name][same] == first["ddp"][same]
            for differs in ("rank", "microbatch", "outputs"):
                assert other[name][differs] != first[name][differs], f"{name}: {differs}"


@pytest.mark.ranks
def test_state_goes_from_any_engine_into_any_other(tmp_path: Path) -> None:
    check(2, tmp_path)


@pytest.mark.ranks
@pytest.mark.slow
def test_state_goes_between_engines_on_four_ranks(tmp_path: Path) -> None:
    check(4, tmp_path)
