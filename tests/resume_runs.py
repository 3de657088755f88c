"""Runs of many kinds that write down all that happens in them. As a script it is the process from which they are forked.

A *case* is a dict: what differs from ``DEFAULTS``. Each note is one line; all numbers in it are exact.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_core import Algorithm, Callback, Evaluator, State, Trainer, hookimpl
from kernel_core.checkpoint.metric_state import metric_state
from kernel_core.checkpoint.request import SaveRequest
from kernel_core.data.spec import DataSpec
from kernel_core.errors import Interrupted
from kernel_core.models import Classifier
from kernel_core.optim import CosineAnnealingWithWarmupScheduler
from kernel_core.storage import files
from kernel_core.testing.exact import exact
from kernel_core.testing.forked import serve, server_of
from kernel_core.train.randomness import randomness_state, seed_all
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

FEATURES, HIDDEN, CLASSES, WORDS = 7, 11, 5, 64  # neither is divided by a number of ranks

DEFAULTS: dict[str, Any] = {
    "model": "mlp",
    "dtype": "float32",
    "dropout": 0.3,
    "num_samples": 22,  # the last batch of an epoch is short
    "batch": 4,  # over all ranks
    "duration": "2ep",
    "workers": 0,
    "persistent": False,
    "micro": None,
    "noise": False,  # whether reading a sample draws
    "order": "shuffled",  # or "own": of a sampler that the kernel does not know; or "stream"
    "optimizer": "adamw",
    "lr": 0.02,
    "scheduler": None,
    "every_batch": True,  # whether torch's schedulers are stepped after each
    "evaluate": None,  # when, of the first evaluator
    "iteration": None,
    "tokens": False,
    "precision": "fp32",
    "parallelism": None,
    "parts": 1,  # ranks that share one model and read the same
    "plugins": [],
    "stop_at": 0,  # the batch after which a plugin ends training
    "fits": [{}],  # arguments of fit, which is called once for each
    "loader_to_fit": False,
    "subset": -1,
}


# --- models and data -------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """One row: of two ranks the second has none of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Block(nn.Module):
    """What a ResNet is made of: batch norm, a stride, and a short cut that is projected."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(self.norm1(self.first(x)).relu()))
        return (y + self.shortcut(x)).relu()


def make_model(case: Mapping[str, Any]) -> Any:
    p = case["dropout"]
    if case["model"] == "mlp":
        net = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), Scale(HIDDEN), nn.Dropout(p), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
    elif case["model"] == "wide":  # parts of even size, for tensor parallelism
        net = nn.Sequential()
        net.up, net.act, net.down = nn.Linear(FEATURES, 12), nn.ReLU(), nn.Linear(12, CLASSES)
    elif case["model"] == "resnet":
        net = nn.Sequential(Block(1, 3, 1), Block(3, 5, 2), nn.Flatten(), nn.Linear(5 * 9, CLASSES))
    else:
        from kernel_plugin_huggingface import HuggingFaceModel
        from kernel_plugin_huggingface.metrics import CrossEntropy
        from transformers import GPT2Config, GPT2LMHeadModel

        rates = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
        sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}
        config = GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0)
        return HuggingFaceModel(GPT2LMHeadModel(config), metrics={"loss": CrossEntropy()})
    return Classifier(net, num_classes=CLASSES).to(getattr(torch, case["dtype"]))


class Samples(Dataset[Any]):
    """Samples that carry their id.

    Args:
        case: Which.
        salt: Makes them others.
    """

    def __init__(self, case: Mapping[str, Any], salt: int = 0) -> None:
        generator = torch.Generator().manual_seed(1 + salt)
        self.num, self.noise, self.words = case["num_samples"], case["noise"], case["model"] == "gpt2"
        if self.words:
            self.x = torch.randint(0, WORDS, (self.num, 8), generator=generator)
            self.x[:, 0] = torch.arange(self.num)
            return
        shape = (1, 6, 6) if case["model"] == "resnet" else (FEATURES,)
        self.x = torch.randn(self.num, *shape, generator=generator).to(getattr(torch, case["dtype"]))
        self.y = torch.randint(0, CLASSES, (self.num,), generator=generator)

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if self.words:
            labels = x.clone()
            labels[8 - index % 4 :] = -100  # ranks have different numbers of labels
            return {"input_ids": x, "labels": labels}
        if self.noise:  # a crop, so to speak, and two more draws
            x = x.roll(random.randrange(3), -1) * (1 + 0.1 * np.random.random()) + 0.1 * torch.randn(x.shape)
        return x, self.y[index], index


class Stream(IterableDataset[Any]):
    """Samples in an order that nobody but it knows, with a position."""

    def __init__(self, samples: Samples, rank: int, world_size: int) -> None:
        self.samples, self.rank, self.world_size = samples, rank, world_size
        self.passes = self.done = 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.RandomState(self.passes).permutation(len(self.samples))[self.rank :: self.world_size]
        while self.done < len(order):
            self.done += 1
            yield self.samples[int(order[self.done - 1])]
        self.passes, self.done = self.passes + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.done = state["passes"], state["done"]


class OwnOrder(Sampler[int]):
    """Draws its order from the global generator, with replacement: the kernel leaves it alone."""

    def __init__(self, num: int, rank: int, world_size: int) -> None:
        self.num, self.rank, self.world_size = num, rank, world_size

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(self.num, (self.num,)).tolist()[self.rank :: self.world_size])

    def __len__(self) -> int:
        return len(range(self.rank, self.num, self.world_size))


def make_loader(case: Mapping[str, Any], rank: int, world_size: int) -> Any:
    data, workers = Samples(case), case["workers"]
    options: dict[str, Any] = {"batch_size": case["batch"] // world_size, "num_workers": workers}
    if workers:
        options |= {"persistent_workers": case["persistent"], "multiprocessing_context": "fork"}
    if case["order"] == "stream":
        return DataLoader(Stream(data, rank, world_size), **options)
    if case["order"] == "own":
        return DataLoader(data, sampler=OwnOrder(len(data), rank, world_size), **options)
    return DataLoader(data, shuffle=True, **options)


# --- what is noted ---------------------------------------------------------------------------------------------------


def ids_of(batch: Any) -> list[int]:
    return (batch["input_ids"][:, 0] if isinstance(batch, Mapping) else batch[2]).tolist()  # type: ignore[no-any-return]


def counters(timestamp: Any) -> dict[str, Any]:
    return {name: count for name, count in timestamp.to_json().items() if not name.endswith("_wct")}


class Reads(Algorithm):
    """Notes what the loader gave, before anybody changes it.

    A rank that has no batch left computes along with one that counts nothing: which one, and its loss, is not noted.
    """

    before = {"role:selects-samples", "role:augments-batch"}
    affects_training = False

    def __init__(self, log: Any) -> None:
        self.log = log

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        self.log.append(["read"] + ([[], None] if self.is_absent() else [ids_of(state.batch), exact(state.batch)]))


class Notes(Callback):
    """Notes the rest."""

    affects_training = False

    def __init__(self, log: Any) -> None:
        self.log = log

    @hookimpl
    def iteration_start(self, state: State) -> None:
        self.log.append(["iteration_start", counters(state.timestamp)])

    @hookimpl
    def epoch_start(self, state: State) -> None:
        self.log.append(["epoch_start", counters(state.timestamp)])

    @hookimpl
    def batch_start(self, state: State) -> None:
        rates = [group["lr"] for optimizer in state.optimizers for group in optimizer.param_groups]
        self.log.append(["batch_start", exact(rates)])

    @hookimpl
    def batch_end(self, state: State) -> None:
        values = exact([state.train_metric_values, state.eval_metric_values])
        loss = None if self.is_absent() else exact(state.loss)
        self.log.append(["batch_end", counters(state.timestamp), loss, values])

    @hookimpl
    def eval_end(self, state: State) -> None:
        if state.interrupted is None:
            self.log.append(["eval_end", state.dataloader_label, exact(state.eval_metric_values)])

    @hookimpl
    def epoch_end(self, state: State) -> None:
        self.log.append(["epoch_end", counters(state.timestamp), exact(state.train_metric_values)])

    @hookimpl
    def iteration_end(self, state: State) -> None:
        self.log.append(["iteration_end", counters(state.timestamp)])

    @hookimpl
    def fit_end(self, state: State) -> None:
        self.log.append(
            ["fit_end", counters(state.timestamp), exact([state.train_metric_values, state.eval_metric_values])]
        )


class Keeps(Callback):
    """Saves at every point where a run can be saved, and notes how long the log was.

    Args:
        log: What is noted.
        folder: Where to.
        names: Which points: such as ``batch_checkpoint-3``, or ``all``.
    """

    affects_training = False

    def __init__(self, log: Any, folder: str, names: Any) -> None:
        self.log, self.folder, self.names = log, folder, names
        self.marks: dict[str, int] = {}

    @hookimpl
    def should_save(self, state: State, event: str) -> SaveRequest | None:
        name = f"{event}-{state.progress.batch}"
        if event == "finished" or not ("all" in self.names or name in self.names):
            return None
        self.marks[name] = len(self.log)
        return SaveRequest(self.folder, name, latest=None)


class Stops(Callback):
    """Ends training after a batch."""

    affects_training = False

    def __init__(self, batch: int) -> None:
        self.batch = batch

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.progress.batch == self.batch:
            state.stop_training()


class Ends(Callback):
    """Ends the process, or lets a signal end the run, at a hook.

    Args:
        hook: The hook, or ``write``: while a checkpoint is written.
        batch: The number of finished batches at which.
        rank: The only rank on which.
        how: ``kill``, ``term``, or ``int``.
    """

    affects_training = False

    def __init__(self, hook: str, batch: int, rank: int = 0, how: str = "kill") -> None:
        self.hook, self.batch, self.rank, self.how = hook, batch, rank, how

    @hookimpl
    def init(self, state: State) -> None:
        if self.hook == "write" and state.rank == self.rank:
            files.system = Signalling(state, self.batch, self.end)

    def end(self) -> None:
        numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
        os.kill(os.getpid(), numbers[self.how])

    def _look(self, state: State, hook: str) -> None:
        if (hook, state.progress.batch, state.rank) == (self.hook, self.batch, self.rank):
            self.hook = ""
            self.end()

    @hookimpl
    def fit_start(self, state: State) -> None:
        self._look(state, "fit_start")

    @hookimpl
    def before_forward(self, state: State) -> None:
        self._look(state, "before_forward")

    @hookimpl
    def batch_end(self, state: State) -> None:
        self._look(state, "batch_end")

    @hookimpl
    def eval_batch_end(self, state: State) -> None:
        self._look(state, "eval_batch_end")

    @hookimpl
    def epoch_end(self, state: State) -> None:
        self._look(state, "epoch_end")


class Signalling(files.FileSystem):
    """Ends the process, or asks it to end, in the middle of writing a checkpoint."""

    def __init__(self, state: State, batch: int, end: Any) -> None:
        self.state, self.batch, self.end = state, batch, end

    def write(self, handle: int, data: memoryview) -> int:
        if self.batch and self.state.progress.batch >= self.batch:
            self.batch = 0
            self.end()
        return super().write(handle, data)


# --- a run -----------------------------------------------------------------------------------------------------------


def make_optimizers(case: Mapping[str, Any], model: nn.Module) -> Any:
    parameters, lr = list(model.parameters()), case["lr"]
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    if case["optimizer"] == "two":
        half = len(parameters) // 2
        groups = [{"params": parameters[half : half + 1], "lr": lr / 2}, {"params": parameters[half + 1 :]}]
        return [torch.optim.SGD(parameters[:half], lr=lr, momentum=0.9), torch.optim.AdamW(groups, lr=lr)]
    return torch.optim.AdamW(parameters, lr=lr)


def make_schedulers(case: Mapping[str, Any], optimizers: Any) -> Any:
    optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
    if case["scheduler"] == "cosine":
        return CosineAnnealingWithWarmupScheduler(t_warmup="0.2dur")
    if case["scheduler"] == "one_cycle":
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    if case["scheduler"] == "step":
        return torch.optim.lr_scheduler.StepLR(optimizer, 3 if case["every_batch"] else 1, gamma=0.7)
    return None


def make_evaluators(case: Mapping[str, Any], world_size: int) -> Any:
    if case["evaluate"] is None:
        return None
    loaders = [DataLoader(Samples({**case, "num_samples": 9}, salt), 4 // min(world_size, 4)) for salt in (5, 6)]
    return [Evaluator("often", loaders[0], eval_interval=case["evaluate"]), Evaluator("late", loaders[1])]


def run(
    case: dict[str, Any],
    folder: str,
    keep: Any = (),
    load: str | None = None,
    ends: dict[str, Any] | None = None,
    autoresume: dict[str, Any] | None = None,
    init: int = 0,
    numbers: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train a case and return what was noted.

    Args:
        case: What differs from ``DEFAULTS``.
        folder: Where checkpoints are.
        keep: The points at which the run is saved: names, or ``all``; or ``by hand`` after each step, by ``save_checkpoint``.
        load: The checkpoint there to begin from.
        ends: Options of ``Ends``.
        autoresume: Save to ``run`` there too, by these arguments of Trainer, and go on from what is there.
        init: Decides the weights to begin with, and the state of the global generators.
        numbers: Return whole weights and optimizer state too, as numbers, on rank 0.
        options: Arguments of Trainer.
    """
    case = {**DEFAULTS, **case}
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    rank, world_size = rank // case["parts"], world_size // case["parts"]
    seed_all(init + (load is not None))
    model = make_model(case)
    log: list[Any] = []
    keeper = Keeps(log, folder, keep)
    optimizers = make_optimizers(case, model)
    loader: Any = make_loader(case, rank, world_size)
    if case["tokens"]:
        loader = DataSpec(loader, get_num_tokens_in_batch=lambda batch: 3 * len(ids_of(batch)))
    noting = [Reads(log), Notes(log)]
    plugins: list[Any] = [*noting, keeper, *map(as_plugin, case["plugins"])]
    plugins += [Stops(case["stop_at"])] if case["stop_at"] else []
    plugins += [Ends(**ends)] if ends else []
    if autoresume is not None:
        options |= {"save_folder": f"{folder}/run", "run_name": "run", "autoresume": True, **autoresume}
    with_loader = {} if case["loader_to_fit"] else {"train_dataloader": loader}
    result: dict[str, Any] = {"code": 0}
    if load is None:
        options.setdefault("seed", 5)  # else it comes from the checkpoint
    trainer = Trainer(
        model=model,
        max_duration=case["duration"],
        optimizers=optimizers,
        schedulers=make_schedulers(case, optimizers),
        step_schedulers_every_batch=case["every_batch"],
        eval_dataloader=make_evaluators(case, world_size),
        iteration_length=case["iteration"],
        train_subset_num_batches=case["subset"],
        plugins=plugins,
        parallelism=case["parallelism"] if world_size * case["parts"] > 1 else None,
        device_train_microbatch_size=case["micro"],
        precision=case["precision"],
        load_path=None if load is None else f"{folder}/{load}",
        progress_bar=False,
        device="cpu",
        **with_loader,
        **options,
    )
    for one in noting:
        one.is_absent = lambda: trainer._ranks is not None and trainer._ranks.absent  # type: ignore[attr-defined]
    with trainer:
        if load or autoresume:
            result["loaded"] = state_of(trainer)
        try:
            for arguments in case["fits"]:
                steps = trainer.steps(**({"train_dataloader": loader} if case["loader_to_fit"] else {}), **arguments)
                for _ in steps:
                    if keep == "by hand":
                        keeper.marks[name := f"step-{trainer.state.progress.batch}"] = len(log)
                        trainer.save_checkpoint(folder, name)
        except Interrupted as error:
            result |= {"code": error.code, "checkpoint": error.checkpoint}
        result["state"] = state_of(trainer)
        if numbers:
            result["numbers"] = whole_numbers(trainer)
    return result | {"log": log, "marks": keeper.marks, "loaded_from": trainer.loaded_from}


def as_plugin(asked: Any) -> Any:
    return asked if isinstance(asked, str) else tuple(asked)


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Return all that decides how the run goes on, of this rank: its shards where the model is sharded."""
    state = trainer.state
    engine, model = state.engine, state.model
    mine = {"reads", "notes", "keeps", "ends", "stops", "checkpoint_saver"}
    return {
        "model": exact(engine.model_state(model, full=False)),
        "optimizers": exact([engine.optimizer_state(model, one, full=False) for one in state.optimizers]),
        "schedulers": exact([one.state_dict() if hasattr(one, "state_dict") else None for one in state.schedulers]),
        "scaler": exact(trainer._precision.state_dict()),
        "plugins": {one.id: exact(one.plugin.state_dict()) for one in state.plan.plugins if one.id not in mine},
        "timestamp": counters(state.timestamp),
        "metrics": {name: exact(metric_state(metric)) for name, metric in state.train_metrics.items()},
        "values": exact([state.train_metric_values, state.eval_metric_values]),
        "rng": exact(randomness_state()),
    }


def whole_state(case: dict[str, Any], folder: str, load: str | None, save: str | None = None, steps: int = 0) -> Any:
    """Load, train on for so many steps, save, and return whole weights and optimizer state: on rank 0."""
    case = {**DEFAULTS, **case}
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    model = make_model(case)
    data_ranks = world_size // case["parts"]
    with Trainer(
        model=model,
        train_dataloader=make_loader(case, rank // case["parts"], data_ranks),
        max_duration="100ba",
        optimizers=make_optimizers(case, model),
        parallelism=case["parallelism"],
        load_path=None if load is None else f"{folder}/{load}",
        seed=5 if load is None else None,
        progress_bar=False,
        device="cpu",
    ) as trainer:
        engine, state = trainer.state.engine, trainer.state
        before = exact(_whole(trainer))
        for done, _ in enumerate(trainer.steps() if steps else (), 1):
            if done == steps:
                break
        if save is not None:
            trainer.save_checkpoint(folder, save)
        return {"loaded": before, "saved": exact(_whole(trainer)), "engine": [engine.name, state.progress.batch]}


def _whole(trainer: Trainer) -> dict[str, Any]:
    state, engine = trainer.state, trainer.state.engine
    return {
        "model": engine.model_state(state.model, full=True),
        "optimizers": [engine.optimizer_state(state.model, one, full=True) for one in state.optimizers],
    }


def whole_numbers(trainer: Trainer) -> dict[str, list[float]]:
    """Return whole weights and optimizer state by name; nothing but on rank 0."""
    whole = _whole(trainer)
    found = dict(whole["model"])
    for index, optimizer in enumerate(whole["optimizers"]):
        for name, entries in optimizer.get("state", {}).items():
            found |= {f"optimizer {index}: {name} {key}": value for key, value in entries.items()}
    return {name: value.double().flatten().tolist() for name, value in found.items()}


class Wide(Classifier):
    """Weights of some 200 MB."""

    def __init__(self) -> None:
        width = 2240
        super().__init__(nn.Sequential(nn.Linear(FEATURES, width), *(nn.Linear(width, width) for _ in range(10))))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(super().forward(batch))  # type: ignore[no-any-return]


class Weighs(Callback):
    """Looks at the memory of this process around loading."""

    affects_training = False

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    @hookimpl
    def before_load(self) -> None:
        self.growth = Growth()

    @hookimpl
    def after_load(self) -> None:
        self.found |= {"load": self.growth.own(), "load with files": self.growth.all()}


class Growth:
    """By how much the memory of this process has grown at most, in bytes.

    With the pages of mapped files, which the system takes back when it needs them, that is exact; without, it is looked at
    every few milliseconds.
    """

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # forget the greatest so far
        self._all, self._own = _status("VmRSS"), _status("RssAnon")
        self._most, self._ended = self._own, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.002):
            self._most = max(self._most, _status("RssAnon"))

    def own(self) -> int:
        """Return that without mapped files."""
        self._ended.set()
        self._thread.join()
        return max(self._most, _status("RssAnon")) - self._own

    def all(self) -> int:
        """Return that with them."""
        return _status("VmHWM") - self._all


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def memory(folder: str, load: str | None, save: str | None) -> dict[str, Any]:
    """Return by how much saving, or loading, makes the memory of this rank grow, and how large its part is."""
    model, weighs = Wide(), Weighs()
    found: dict[str, int] = {}
    with Trainer(
        model=model,
        train_dataloader=make_loader({**DEFAULTS, "batch": 8}, 0, 2),
        max_duration="2ba",
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        parallelism="fsdp",
        load_path=None if load is None else f"{folder}/{load}",
        callbacks=[weighs],
        progress_bar=False,
        device="cpu",
    ) as trainer:
        state, engine = trainer.state, trainer.state.engine
        if save is not None:
            trainer.fit()
            growth = Growth()
            trainer.save_checkpoint(folder, save)
            found |= {"save": growth.own(), "save with files": growth.all()}
        parts = [engine.model_state(state.model, full=False)]
        parts += engine.optimizer_state(state.model, state.optimizers[0], full=False)["state"].values()
        found["part"] = sum(
            (one.to_local() if hasattr(one, "to_local") else one).nbytes for part in parts for one in part.values()
        )
    return found | weighs.found


def prepare(gpt2: bool = False) -> dict[str, Any]:
    """Import what is imported late."""
    for name in ("ddp", "fsdp", "tensor_parallel"):
        importlib.import_module(f"kernel_plugin_{name}")

    if gpt2:
        make_model({**DEFAULTS, "model": "gpt2"})
    return {}


def warm_up(folder: str) -> None:
    run({"evaluate": "1ba", "duration": "1ep"}, folder, keep=["fit_end-6"])
    prepare()


# --- what is compared ------------------------------------------------------------------------------------------------


def server() -> Any:
    return server_of(__file__)


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    """Return where two notes, or two states, differ."""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [*expected, *(key for key in found if key not in expected)]
        return [one for key in keys for one in differences(found.get(key), expected.get(key), f"{path}/{key}")]
    if isinstance(found, list) and isinstance(expected, list):
        common = min(len(found), len(expected))
        inside = [
            one for index in range(common) for one in differences(found[index], expected[index], f"{path}/{index}")
        ]
        if len(found) == len(expected):
            return inside
        more = f"{found[common:]!r:.200} instead of {expected[common:]!r:.200}"
        return [*inside[:1], f"{path}: {len(found)} entries instead of {len(expected)}; from {common} on {more}"]
    return [] if found == expected else [f"{path}: {found!r:.200} instead of {expected!r:.200}"]


def differs(reference: list[Any], resumed: list[Any], name: str) -> list[str]:
    """Return in what runs resumed at the point ``name`` differ from those that went on, on any rank.

    That a run which is to be resumed at a point was saved there is checked too: all it noted up to there, with what the
    resumed one noted, is what the other one noted.

    Where nothing is left to train, a resumed run leaves the generators for a later fit, and does not end once more.
    """
    found = []
    for rank, (one, other) in enumerate(zip(reference, resumed, strict=True)):
        tail, states = one["log"][one["marks"][name] :], (other["state"], one["state"])
        if not other["log"] and (not tail or (len(tail) == 1 and tail[0][0] == "fit_end")):
            tail, states = [], tuple({**state, "rng": None} for state in states)  # type: ignore[assignment]
        found += differences(other["log"], tail, f"rank {rank}, log")
        found += differences(*states, f"rank {rank}, state")
    return found


def check_resumed(case: dict[str, Any], folder: Path, world_size: int = 1, every: bool = False, **options: Any) -> None:
    """Run a case to its end; resume it, each time in new processes, at every point or at a choice of them, and compare."""
    if case.get("model") == "gpt2":
        server().start(1, "prepare", here=True, gpt2=True)
    plain = server().run(world_size, "run", case=case, folder=str(folder))
    reference = server().run(world_size, "run", case=case, folder=str(folder), keep="all", **options)
    undisturbed = [
        differences([one["log"], one["state"]], [two["log"], two["state"]])
        for one, two in zip(reference, plain, strict=True)
    ]
    assert not any(undisturbed), ("saving changed the run", undisturbed)
    for name in reference[0]["marks"] if every else choice(list(reference[0]["marks"])):
        resumed = server().run(world_size, "run", case=case, folder=str(folder), load=name, **options)
        found = differs(reference, resumed, name)
        assert not found, "\n".join([f"{case} resumed at {name}:", *found[:8]])
    assert len({repr(one["log"]) for one in plain}) == world_size // case.get("parts", 1)  # the ranks do different work


def choice(names: list[str]) -> list[str]:
    """Return the first point, one in the middle, those around the end of the first epoch, and the last two."""
    edge = [name for name in names if name.endswith("-6") and not name.startswith("iteration")]
    return list(dict.fromkeys([names[0], names[len(names) * 2 // 3], *edge, *names[-2:]]))


def saved_in(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    return any(folder.glob("run/*/manifest.json"))


def check_started_again(
    case: dict[str, Any], folder: Path, kills: Any, world_size: int = 1, interval: str = "1ba"
) -> None:
    """Kill rank 0 after a batch, start the same command until it is done and once more: it ends as if nothing had happened."""

    def start(where: Path, init: int = 0) -> list[Any]:
        return server().run(  # type: ignore[no-any-return]
            world_size, "run", case=case, folder=str(where), autoresume={"save_interval": interval}, init=init
        )

    reference = start(folder / "reference")
    for batch in kills:
        where, ends = folder / str(batch), {"hook": "batch_end", "batch": batch, "how": "kill"}
        cut = {"case": case, "folder": str(where), "autoresume": {"save_interval": interval}, "ends": ends}
        assert server().start(world_size, "run", **cut)[0].code == -9
        again = start(where, init=7 if saved_in(where) else 0)
        more = start(where, init=8)
        for one, two, three in zip(reference, again, more, strict=True):
            tail = one["log"][len(one["log"]) - len(two["log"]) :]
            found = differences(two["log"], tail, "log") + differences(two["state"], one["state"], "state")
            found += differences({**three["state"], "rng": 0}, {**one["state"], "rng": 0}, "once more, state")
            found += [f"once more: {note}" for note in three["log"] if note[0] in ("read", "batch_end", "epoch_start")]
            assert not found, "\n".join([f"{case} killed after batch {batch}:", *found[:8]])


if __name__ == "__main__":
    import tempfile

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        warm_up(place)
    files.system = files.FileSystem()
    serve({"run": run, "prepare": prepare, "whole_state": whole_state, "memory": memory})
    sys.exit()
