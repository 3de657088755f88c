"""Checkpoints against those of others: how long training stands still, when they are durable, how fast they load.

    .venv-bench/bin/python bench/checkpoint.py                     # 10 rotations; part of `make bench`
    .venv-bench/bin/python bench/checkpoint.py --rotations 3 --systems kernel,torch,dcp_async --layers 4

A stack of square linear layers with AdamW, 100.7 million parameters as it stands: 1.21 GB of weights and moments. In a
rotation every system in turn, each in a process of its own, trains some steps, saves twice (the first save warms up), trains
on while the second is written, and loads it into a fresh model and optimizer. Files go to --folder, which should be a real disk.

stall      from asking for the checkpoint until training goes on
durable    from asking until all of it is on the disk (fsync), or for those that do not ask for that, until written
load       from opening the file until model and optimizer have it; the kernel verifies checksums, the others do not
steps      time of a step while it is written, over that of a step before
bytes      size of the files
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

SYSTEMS = ("kernel", "torch", "torch_fsync", "dcp", "dcp_async", "lightning", "accelerate")
DURABLE = {"kernel", "torch_fsync", "dcp", "dcp_async"}  # those that fsync
FIELDS = ("stall", "durable", "load", "steps", "gigabytes")


def make(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    stack = [layer for _ in range(layers) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    net = nn.Sequential(*stack, nn.Linear(2048, 10))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-5)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    began = time.perf_counter()
    optimizer.zero_grad()
    net(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    return time.perf_counter() - began


@dataclass
class Save:
    """A checkpoint that was asked for: where it is, when training could go on, and whether it is written."""

    path: Path
    done: Callable[[], bool]
    finish: Callable[[], None]
    ended: list[float]  # when it was written, once that is so


def _at_once(path: Path) -> Save:
    return Save(path, lambda: True, lambda: None, [time.perf_counter()])


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


class Torch:
    """``torch.save`` of both state dicts; loaded with ``mmap=True``, or, where it was synced, by reading all of it.

    Mapped, the optimizer keeps tensors that are read from the disk when the next step touches them.
    """

    def __init__(self, layers: int, fsync: bool = False) -> None:
        self.net, self.optimizer = make(layers)
        self.fsync = fsync

    def step(self) -> float:
        return step(self.net, self.optimizer)

    def save(self, folder: Path) -> Save:
        path = folder / "checkpoint.pt"
        torch.save({"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}, path)
        if self.fsync:
            _fsync(path)
            _fsync(folder)
        return _at_once(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, mmap=not self.fsync, weights_only=True)
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        pass


class DCP(Torch):
    """``torch.distributed.checkpoint``, which fsyncs each file."""

    def __init__(self, layers: int, asynchronous: bool = False) -> None:
        super().__init__(layers)
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        self.dcp, self.asynchronous = dcp, asynchronous
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.stager: Any = None

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> Save:
        path = folder / "dcp"
        if not self.asynchronous:
            self.dcp.save(self._state(), checkpoint_id=path)
            return _at_once(path)
        future: Any = self.dcp.async_save(self._state(), checkpoint_id=path)
        ended: list[float] = []
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        return Save(path, future.done, future.result, ended)

    def load(self, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        self.dcp.load(state, checkpoint_id=path)
        set_state_dict(self.net, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def close(self) -> None:
        torch.distributed.destroy_process_group()


class Kernel:
    """A Trainer driven step by step; the checkpoint is asked for by a plugin, as checkpoint_saver does."""

    def __init__(self, layers: int) -> None:
        from kernel_core import Callback, TrainableModel, Trainer, hookimpl
        from kernel_core.checkpoint.request import SaveRequest

        class Model(TrainableModel):
            def __init__(self, net: nn.Module) -> None:
                super().__init__()
                self.net = net

            def forward(self, batch: Any) -> Any:
                return self.net(batch)

            def loss(self, outputs: Any, batch: Any) -> Any:
                return outputs.sum()

        class Policy(Callback):
            folder: Path | None = None

            @hookimpl
            def should_save(self) -> SaveRequest | None:
                folder, self.folder = self.folder, None
                return None if folder is None else SaveRequest(str(folder), "kernel", latest=None)

        self.policy, self.layers = Policy(), layers
        net, optimizer = make(layers)
        self.make: Callable[..., Trainer] = lambda net, optimizer, **more: Trainer(
            model=Model(net), optimizers=optimizer, progress_bar=False, seed=0, device="cpu", precision="fp32", **more
        )
        self.trainer = self.make(
            net,
            optimizer,
            train_dataloader=[torch.ones(1, 2048)] * 1000,
            max_duration="1000000ep",
            callbacks=[self.policy],
        )
        self.steps = self.trainer.steps()
        self.fresh: Any = None

    def step(self) -> float:
        began = time.perf_counter()
        next(self.steps)
        return time.perf_counter() - began

    def save(self, folder: Path) -> Save:
        saves = self.trainer._checkpoints.saves
        assert saves is not None
        self.policy.folder = folder
        saves.at("batch_checkpoint")  # what the loop does after a batch
        ended: list[float] = []
        thread = saves._writer._thread  # the loop may take its outcome in any step

        def wait() -> None:
            if thread is not None:
                thread.join()
            ended.append(time.perf_counter())

        watch = threading.Thread(target=wait)
        watch.start()

        def finish() -> None:
            watch.join()
            saves.settle()

        return Save(folder / "kernel", lambda: bool(ended), finish, ended)

    def load(self, path: Path) -> None:
        from kernel_core.checkpoint.loading import open_checkpoint
        from kernel_core.checkpoint.restore import load_state, load_weights

        state = self.trainer.state
        opened = open_checkpoint(state.engine, str(path))  # verifies every file
        load_weights(state, opened.reader)
        load_state(state, opened.reader, self.trainer._precision)
        opened.close()

    def close(self) -> None:
        self.trainer.close()


class Lightning(Torch):
    """Lightning's Trainer.save_checkpoint from a callback, its default plugin; loaded as a resumed fit loads it."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        import lightning

        self.fabric = None
        self.lightning = lightning
        net, optimizer = self.net, self.optimizer

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def configure_optimizers(self) -> Any:
                return optimizer

            def training_step(self, batch: Any, index: int) -> Any:
                return self.net(batch).sum()

        self.module = Module()
        self.trainer = lightning.Trainer(
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        self.trainer.fit(self.module, torch.utils.data.DataLoader(torch.ones(1, 2048), batch_size=None))

    def save(self, folder: Path) -> Save:
        path = folder / "lightning.ckpt"
        self.trainer.save_checkpoint(path)
        return _at_once(path)

    def load(self, path: Path) -> None:
        state = self.trainer.strategy.load_checkpoint(path, weights_only=False)
        self.trainer.strategy.load_model_state_dict(state)
        self.trainer.strategy.load_optimizer_state_dict(state)


class Accelerate(Torch):
    """``Accelerator.save_state`` and ``load_state``: safetensors for the model, a pickle for the optimizer."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        from accelerate import Accelerator

        self.accelerator = Accelerator(cpu=True)
        self.net, self.optimizer = self.accelerator.prepare(self.net, self.optimizer)

    def save(self, folder: Path) -> Save:
        self.accelerator.save_state(str(folder / "accelerate"))
        return _at_once(folder / "accelerate")

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))


MAKERS: dict[str, Callable[[int], Any]] = {
    "kernel": Kernel,
    "torch": Torch,
    "torch_fsync": lambda layers: Torch(layers, fsync=True),
    "dcp": DCP,
    "dcp_async": lambda layers: DCP(layers, asynchronous=True),
    "lightning": Lightning,
    "accelerate": Accelerate,
}


def measure(name: str, layers: int, folder: Path) -> dict[str, float]:
    """Return the figures of one system; in a process of its own."""
    logging.disable(logging.WARNING)
    system = MAKERS[name](layers)
    for _ in range(3):
        system.step()
    time.sleep(1.0)  # memory that is got in the background is there
    first = system.save(_emptied(folder / "first"))
    first.finish()
    shutil.rmtree(folder / "first")
    before = statistics.median(system.step() for _ in range(5))
    target = _emptied(folder / "second")
    began = time.perf_counter()
    save = system.save(target)
    stall = time.perf_counter() - began
    during = []
    while not save.done():
        during.append(system.step())
    save.finish()
    durable = save.ended[0] - began
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    fresh = MAKERS[name](layers) if name != "dcp" and name != "dcp_async" else system
    fresh.step()  # so that optimizer state exists, as in a run that goes on
    load = min(_timed(lambda: fresh.load(save.path)) for _ in range(3))
    system.close()
    return {
        "stall": stall,
        "durable": durable,
        "load": load,
        "steps": statistics.median(during) / before if during else float("nan"),
        "gigabytes": size / 1e9,
    }


def _timed(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rotations", type=int, default=10)
    parser.add_argument("--layers", type=int, default=24, help="24 for 100.7 million parameters")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--folder", type=Path, help="where files go; a temporary folder beside this one by default")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.layers, arguments.folder)))
        return
    names = arguments.systems.split(",")
    if unknown := [name for name in names if name not in MAKERS]:
        parser.error(f"--systems: there is no {unknown[0]!r}; they are {', '.join(SYSTEMS)}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=arguments.folder or Path(__file__).parent, prefix=".checkpoint-") as folder:
        for rotation in range(arguments.rotations):
            for name in names[rotation % len(names) :] + names[: rotation % len(names)]:
                os.sync()  # nobody pays for what another one left unwritten
                command = [
                    sys.executable,
                    __file__,
                    "--one",
                    name,
                    "--layers",
                    str(arguments.layers),
                    "--folder",
                    folder,
                ]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"rotation {rotation + 1}: {name} {done.stdout.splitlines()[-1]}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{arguments.rotations} rotations; seconds, median [least, greatest]; torch {torch.__version__}")
    print(f"{'':14}" + "".join(f"{field:24}" for field in FIELDS))
    for name, rows in found.items():
        cells = []
        for field in FIELDS:
            values = sorted(row[field] for row in rows)
            cells.append(f"{statistics.median(values):.3g} [{values[0]:.3g}, {values[-1]:.3g}]")
        note = "" if name in DURABLE else "  no fsync"
        print(f"{name:14}" + "".join(f"{cell:24}" for cell in cells) + note)


if __name__ == "__main__":
    main()
