"""Metrics of an evaluation over several ranks are those of one process: every sample counts once, whatever the split."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_core import Callback, DataSpec, Evaluator, TrainableModel, Trainer, hookimpl
from kernel_core.testing.ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

FEATURES, CLASSES = 4, 3
ENGINES: dict[str, Any] = {"ddp": {"ddp": {}}, "fsdp": {"fsdp": {}}}


class Net(TrainableModel):
    """A classifier in blocks; batches are ``(number of the sample, features, label)``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(FEATURES, CLASSES)
        self.double()

    def forward(self, batch: Any) -> Tensor:
        x = batch[1]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[2])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        metrics: dict[str, Any] = {"ids": CatMetric(), "accuracy": MulticlassAccuracy(CLASSES, average="micro")}
        if not is_train:
            # whole numbers and rows of scores in lists, of which a rank without samples has none to show its shape
            metrics |= {"area": MulticlassAUROC(CLASSES, thresholds=None), "mean": MeanMetric()}
        return metrics

    def update_metric(self, batch: Any, outputs: Tensor, metric: Any) -> None:
        if isinstance(metric, CatMetric | MeanMetric):
            metric.update(batch[0].double())
        else:
            metric.update(outputs.softmax(1), batch[2])  # scores as such would be scaled batch by batch


def dataset(num_samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(64, FEATURES, generator=generator, dtype=torch.float64)[:num_samples]
    labels = torch.randint(0, CLASSES, (64,), generator=generator)[:num_samples]
    return TensorDataset(torch.arange(num_samples), features, labels)


class Stream:
    """Batches of this rank's own without a known length; ``sizes`` are those of its batches, by rank."""

    def __init__(self, sizes: list[list[int]], rank: int | None, length: bool = False) -> None:
        self.sizes, self.rank = sizes, rank
        if length:
            self.__class__ = SizedStream

    def __iter__(self) -> Iterator[Any]:
        tensors, start = dataset(64).tensors, 0
        for rank, sizes in enumerate(self.sizes):
            for size in sizes:
                if self.rank in (rank, None):
                    yield tuple(tensor[start : start + size] for tensor in tensors)
                start += size


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.sizes[self.rank]) if self.rank is not None else sum(map(len, self.sizes))


def plain(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as JSON has them; which rank read a sample does not count."""
    found = {name.partition("/")[2]: torch.as_tensor(value) for name, value in values.items()}
    found["ids"] = found["ids"].flatten().sort().values
    return {name: value.tolist() for name, value in found.items()}


def evaluate_all(engine: str | None, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Evaluate each case with one trainer; without an engine, in one process what all ranks read together."""
    rank = int(os.environ["RANK"]) if engine else None
    results = []
    parallelism = ENGINES[engine] if engine else None
    with Trainer(model=Net(), parallelism=parallelism, seed=0, device="cpu", progress_bar=False) as trainer:
        for case in cases:
            if "samples" in case:
                size = case["batch_size"] * (case["world_size"] if rank is None else 1)
                loader: Any = DataLoader(dataset(case["samples"]), size)
            else:
                loader = DataSpec(Stream(case["sizes"], rank, case.get("length", False)))
            subset = case.get("subset", -1)
            if subset < 0 and "sizes" in case and not case.get("length"):
                subset = 1000
            evaluator = Evaluator("eval", loader, None, subset, None, case.get("microbatch"))
            values = plain(trainer.eval(evaluator))
            results.append({**values, "samples": trainer.state.eval_progress.sample})
    return results


class TrainMetrics(Callback):
    """Writes down what the metrics of each epoch of training came to."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    @hookimpl
    def epoch_end(self, state: Any) -> None:
        self.found.append(plain({f"train/{name}": value for name, value in state.train_metric_values.items()}))


def train_metrics(engine: str | None) -> list[dict[str, Any]]:
    model, world_size, metrics = Net(), int(os.environ["WORLD_SIZE"]) if engine else 1, TrainMetrics()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(dataset(9), 4 // world_size, shuffle=True),  # the last batch has one sample
        max_duration=2,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        callbacks=metrics,
        parallelism=ENGINES[engine] if engine else None,
        seed=0,
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
    return metrics.found


def nothing_on_a_rank(engine: str) -> Any:
    """Evaluate what comes without a length, and on rank 0 without a batch."""
    rank, sizes = int(os.environ["RANK"]), [[], [3, 2], [], [1]][: int(os.environ["WORLD_SIZE"])]
    with Trainer(model=Net(), parallelism=ENGINES[engine], seed=0, device="cpu", progress_bar=False) as trainer:
        return plain(trainer.eval(Stream(sizes, rank), subset_num_batches=9))["ids"]


def predict(engine: str | None) -> list[Any]:
    """Return this rank's predictions: of a DataLoader that is shared, and of a stream of its own, by batch."""
    rank, world_size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if engine else (None, 1)
    sizes = [[3, 1], [2], [5, 1, 1], [1]][: world_size if engine else 4]
    parallelism = ENGINES[engine] if engine else None
    with Trainer(model=Net(), parallelism=parallelism, seed=0, device="cpu", progress_bar=False) as trainer:
        shared = trainer.predict(DataLoader(dataset(13), 12 // world_size), device_microbatch_size=2)
        own = trainer.predict(Stream(sizes, rank), subset_num_batches=9)
    return [[[part.tolist() for part in parts] for parts in (shared, own)], sizes]


def on_ranks(cases: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {engine: evaluate_all(engine, cases) for engine in ENGINES}
    found |= {f"train {engine}": train_metrics(engine) for engine in ENGINES}
    found |= {f"predict {engine}": predict(engine) for engine in ENGINES}
    return {**found, "nothing": nothing_on_a_rank("ddp")}


def grid(world_size: int, sizes: range, batch_sizes: range) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = [
        {"samples": samples, "batch_size": batch_size, "world_size": world_size}
        for samples in sizes
        for batch_size in batch_sizes
    ]
    cases += [{**case, "microbatch": 1} for case in cases if case["batch_size"] == 3]
    # the first batches only: of 13 samples two global batches
    cases += [{"samples": 13, "batch_size": 2, "world_size": world_size, "subset": 2}]
    uneven = [[2, 1, 3], [4], [1, 1], [2]][:world_size]
    cases += [{"sizes": uneven}, {"sizes": uneven, "length": True}]
    # microbatches in other numbers on each rank, and a rank that has none left
    cases += [{"sizes": [[5, 2], [1], [3], [2, 7]][:world_size], "length": True, "microbatch": 2}]
    return cases


def check(world_size: int, cases: list[dict[str, Any]]) -> None:
    expected = evaluate_all(None, cases)
    results = run_on_ranks(world_size, __file__, "on_ranks", cases, timeout_s=300)
    for engine in ENGINES:
        check_predictions(results, engine)
    for rank, found in enumerate(results):
        for engine in ENGINES:
            for case, ours, theirs in zip(cases, found[engine], expected, strict=True):
                what = f"{engine}, rank {rank} of {world_size}, {case}"
                total = sum(map(sum, case["sizes"])) if "sizes" in case else case["samples"]
                if "subset" in case:
                    total = min(total, case["subset"] * case["batch_size"] * world_size)
                assert ours["ids"] == list(range(total)), what
                assert ours["samples"] == theirs["samples"] == total, what
                assert ours["accuracy"] == theirs["accuracy"], what
                assert ours["mean"] == theirs["mean"], what
                torch.testing.assert_close(
                    torch.tensor(ours["area"]),
                    torch.tensor(theirs["area"]),
                    rtol=1e-6,
                    atol=0,
                    equal_nan=True,
                    msg=what,
                )
            assert found[f"train {engine}"] == train_metrics(None), f"{engine}: training metrics"
        assert found["nothing"] == list(range(5 if world_size == 2 else 6))


def check_predictions(results: list[dict[str, Any]], engine: str) -> None:
    (shared, own), _ = predict(None)
    parts = [result[f"predict {engine}"][0] for result in results]
    # every sample once: those of a rank are its slice of each global batch
    for batch, whole in enumerate(shared):
        rows = [row for part in parts for row in (part[0][batch] if batch < len(part[0]) else [])]
        torch.testing.assert_close(torch.tensor(rows), torch.tensor(whole), msg=engine)
    rows = [row for part in parts for batch in part[1] for row in batch]
    sizes = results[0][f"predict {engine}"][1]
    assert [[len(batch) for batch in part[1]] for part in parts] == sizes, engine
    expected = [row for batch in own for row in batch][: len(rows)]
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected), msg=engine)


@pytest.mark.ranks
def test_metrics_of_two_ranks_are_those_of_one_process() -> None:
    check(2, grid(2, range(1, 6), range(2, 4)))


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_metrics_do_not_depend_on_the_number_of_ranks_or_samples(world_size: int) -> None:
    check(world_size, grid(world_size, range(1, 14), range(1, 5)))
