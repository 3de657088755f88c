"""The systems that the benchmarks compare: the same training run, once by hand and once with each framework.

    python bench/systems.py kernel       # train one batch and exit; startup.py times this process

Each function trains ``net`` in place on one pass over ``loader``, as the framework's own documentation says to, with the
optimizer it is given: no clipping, no schedule, no checkpoint. ``net(**batch)["loss"]`` is the loss. With ``logging`` on, a
framework shows the progress bar and writes the logs that it has by default, the loss among them. Frameworks are imported
inside the functions, so that a process pays for the one that it uses.
"""

import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

Fit = Callable[[nn.Module, torch.optim.Optimizer, DataLoader, Path, bool], None]
WARMUP = 10  # batches before the clock starts, a tenth of a run at most


def raw(net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool) -> None:
    """The hand-written loop; it never logs."""
    net.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = net(**batch)["loss"]
        loss.backward()
        optimizer.step()


def kernel(
    net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool, plugins: Sequence[Any] = ()
) -> None:
    """Logging: the loss of every step to a file, and the progress bar."""
    from kernel_core import TrainableModel, Trainer

    class Model(TrainableModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, batch: Any) -> Any:
            return self.net(**batch)

        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return outputs["loss"]

    log = ["progress_bar", ("file_logger", {"filename": str(folder / "metrics.jsonl")})]
    with Trainer(
        model=Model(),
        train_dataloader=loader,
        max_duration="1ep",
        optimizers=optimizer,
        plugins=[*plugins, *log] if logging else list(plugins),
        device="cpu",
        progress_bar=False,
    ) as trainer:
        trainer.fit()


def ignite(net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool) -> None:
    """Logging: its bar with the loss of every step. Ignite writes no file of itself."""
    from ignite.engine import Engine
    from ignite.handlers import ProgressBar

    def step(engine: Engine, batch: Any) -> float | None:
        net.train()
        optimizer.zero_grad()
        loss = net(**batch)["loss"]
        loss.backward()
        optimizer.step()
        return loss.item() if logging else None

    engine = Engine(step)
    if logging:
        ProgressBar().attach(engine, output_transform=lambda loss: {"loss": loss})
    engine.run(loader, max_epochs=1)


def fabric(net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool) -> None:
    """Fabric has no bar and no logger unless asked."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(net, optimizer)
    loader = fabric.setup_dataloaders(loader)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        fabric.backward(loss)
        optimizer.step()


def accelerate(net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool) -> None:
    """Accelerate has no bar and no logger unless asked."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    model.train()
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()


def lightning(net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool) -> None:
    """Logging: its default logger (every 50 steps) and its default bar (every step), with the loss."""
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.net(**batch)["loss"]
            if logging:
                self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=logging,
        enable_progress_bar=logging,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), loader)


def hf(net: nn.Module, optimizer: Any, loader: DataLoader, folder: Path, logging: bool) -> None:
    """Logging: its bar, and the mean loss every 500 steps, as its defaults are."""
    from transformers import Trainer, TrainingArguments

    class Prepared(Trainer):
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(loader)

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1,
        use_cpu=True,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="steps" if logging else "no",
        disable_tqdm=not logging,
    )
    Prepared(model=net, args=arguments, train_dataset=loader.dataset, optimizers=(optimizer, None)).train()


class System(NamedTuple):
    """A way to train; ``logs`` says whether it has a bar or a logger by default."""

    name: str
    package: str
    fit: Fit
    logs: bool = True

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.package.replace("-", "_").removeprefix("pytorch_")) is not None


RAW = System("raw", "torch", raw, logs=False)
SYSTEMS = (
    System("kernel", "kernel-core", kernel),
    System("ignite", "pytorch-ignite", ignite),
    System("fabric", "lightning", fabric, logs=False),
    System("accelerate", "accelerate", accelerate, logs=False),
    System("lightning", "lightning", lightning),
    System("hf", "transformers", hf),
)


def chosen(names: str | None) -> list[System]:
    """Return the systems that are named (comma-separated; None for all) and installed; a line for what is left out."""
    wanted = [system.name for system in SYSTEMS] if names is None else names.split(",")
    if unknown := set(wanted) - {system.name for system in SYSTEMS}:
        known = ",".join(system.name for system in SYSTEMS)
        sys.exit(f"--systems: {','.join(sorted(unknown))} is unknown. Expected some of {known}.")
    found = [system for system in SYSTEMS if system.name in wanted]
    if missing := [system.name for system in found if not system.installed]:
        print(
            f"left out, not installed: {', '.join(missing)}. Install them with `python3 bench/setup_peers.py` and run "
            "this with .venv-bench/bin/python.\n"
        )
    return [system for system in found if system.installed]


def versions(systems: Sequence[System]) -> str:
    packages = dict.fromkeys(system.package for system in (RAW, *systems))
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


# --- what is trained --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model and its optimizer, made anew and alike for each run, and the batches, keyword arguments of the model."""

    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]]
    batches: list[dict[str, Tensor]]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


def mlp_task(steps: int) -> Task:
    """An MLP 64-64-10 with batches of 32 and SGD."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = Mlp()
        return net, torch.optim.SGD(net.parameters(), lr=0.1)

    random = torch.Generator().manual_seed(1)
    batches = [
        {"x": torch.randn(32, 64, generator=random), "labels": torch.randint(10, (32,), generator=random)}
        for _ in range(steps)
    ]
    return Task(make, batches)


class TimedBatches(Dataset):
    """Ready batches. The clock starts when number ``first`` is asked for, so that no system's preparation is timed."""

    def __init__(self, batches: list[dict[str, Tensor]], first: int) -> None:
        self._batches, self._first = batches, first
        self.wall = self.cpu = 0.0

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == self._first:
            self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self._batches[index]


def _as_it_is(batch: Any) -> Any:
    return batch


def loader_of(data: Dataset) -> DataLoader:
    """One loader for all systems: batches in their order, as they are."""
    return DataLoader(data, batch_size=None, collate_fn=_as_it_is)


# --- timing -----------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Seconds for one step."""

    wall: float
    cpu: float


@contextlib.contextmanager
def output_to(terminal: bool) -> Iterator[None]:
    """Send what the block writes to standard output and error nowhere, or to a terminal that nobody sees."""
    kept = os.dup(1), os.dup(2)
    sys.stdout.flush()
    sys.stderr.flush()
    reader = None
    if terminal:
        master, target = os.openpty()
        termios.tcsetwinsize(target, (24, 100))
        reader = subprocess.Popen(["cat"], stdin=master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(master)
    else:
        target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(kept[0], 1)
        os.dup2(kept[1], 2)
        for descriptor in kept:
            os.close(descriptor)
        if reader is not None:
            reader.wait()  # the last writer is gone, so cat ends


def run(fit: Fit, task: Task, logging: bool = False, terminal: bool = False) -> tuple[Taken, list[Tensor]]:
    """Train once; return the time of a step after the warm-up, the end of the run included, and the final weights."""
    gc.collect()
    gc.freeze()  # what is alive by now stays: without this, collecting takes longer than training
    net, optimizer = task.make()
    warmup = min(WARMUP, len(task.batches) // 10)
    data = TimedBatches(task.batches, warmup)
    with tempfile.TemporaryDirectory() as folder, output_to(terminal):
        gc.disable()
        fit(net, optimizer, loader_of(data), Path(folder), logging)
        wall, cpu = time.perf_counter() - data.wall, time.process_time() - data.cpu
        gc.enable()
    steps = len(task.batches) - warmup
    return Taken(wall / steps, cpu / steps), [parameter.detach() for parameter in net.parameters()]


class Figure(NamedTuple):
    """Median, least and greatest."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Figure":
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        digits = 1 if abs(self.median) >= 10 else 3 if abs(self.median) < 2 else 2
        return f"{self.median:.{digits}f} [{self.least:.{digits}f}, {self.greatest:.{digits}f}]"


def added(pairs: Sequence[tuple[Taken, Taken]]) -> dict[str, Figure]:
    """What the first of each pair takes over the second: µs per step and ratio, in CPU and wall time."""
    return {
        "us_added_cpu": Figure.of([(one.cpu - raw.cpu) * 1e6 for one, raw in pairs]),
        "us_added_wall": Figure.of([(one.wall - raw.wall) * 1e6 for one, raw in pairs]),
        "ratio_cpu": Figure.of([one.cpu / raw.cpu for one, raw in pairs]),
        "ratio_wall": Figure.of([one.wall / raw.wall for one, raw in pairs]),
    }


def alternate(
    measures: dict[str, tuple[Callable[[], Taken], Callable[[], Taken]]], pairs: int
) -> dict[str, list[tuple[Taken, Taken]]]:
    """Run every (system, raw) of ``measures`` in turn, ``pairs`` times after one round to warm up.

    The two of a pair run one right after the other, in the other order each time, so that a machine that becomes slower
    or faster in between meets both.
    """
    taken: dict[str, list[tuple[Taken, Taken]]] = {name: [] for name in measures}
    for pair in range(pairs + 1):
        for name, (system, by_hand) in measures.items():
            if pair % 2:
                first, second = system(), by_hand()
            else:
                second, first = by_hand(), system()
            if pair:
                taken[name].append((first, second))
    return taken


def compare(
    task: Task, fits: dict[str, Fit], pairs: int, logging: bool = False, terminal: bool = False
) -> dict[str, dict[str, Any]]:
    """Compare each of ``fits`` with the hand-written loop on ``task``; ``bit_equal`` says whether all weights were."""
    expected = run(raw, task)[1]
    equal = dict.fromkeys(fits, True)

    def measure(name: str, fit: Fit) -> Taken:
        taken, weights = run(fit, task, logging, terminal)
        equal[name] &= all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
        return taken

    measures = {
        name: (lambda name=name, fit=fit: measure(name, fit), lambda: run(raw, task)[0]) for name, fit in fits.items()
    }
    taken = alternate(measures, pairs)
    return {
        name: {**added(runs), "us_raw_cpu": Figure.of([raw.cpu * 1e6 for _, raw in runs]), "bit_equal": equal[name]}
        for name, runs in taken.items()
    }


if __name__ == "__main__":
    (system,) = [system for system in (RAW, *SYSTEMS) if system.name == sys.argv[1]]
    task = mlp_task(1)
    with tempfile.TemporaryDirectory() as folder:
        system.fit(*task.make(), loader_of(TimedBatches(task.batches, 0)), Path(folder), False)
