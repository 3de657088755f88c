"""Ranks that stand still are reported and ended; an error on one rank ends all."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.distributed import hang
from kernel_core.testing.ranks import free_port
from torch.utils.data import DataLoader, Dataset, TensorDataset

LIMIT_S = 3.0
CULPRIT = 2


class Slow(Dataset[Any]):
    """A data set of which one rank cannot read the samples of the third batch."""

    def __init__(self, stuck: bool) -> None:
        self.stuck, self.read = stuck, 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.stuck and self.read > 5:
            time.sleep(600)
        return torch.randn(4), index % 3


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 3)
        self.stuck = ""
        self.passes = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.passes += self.training
        if (self.stuck == "forward" and self.passes > 3) or (self.stuck == "evaluation" and not self.training):
            time.sleep(600)
        return self.line(x)


class Trouble(Callback):
    def __init__(self, trouble: str, event: str) -> None:
        self.trouble, self.event = trouble, event

    def act(self, event: str, state: Any) -> None:
        if event != self.event:
            return
        if self.trouble == "collective" and state.progress.batch == 3 and state.rank != CULPRIT:
            dist.all_reduce(torch.zeros(3))
        elif (self.trouble == "collective" and state.progress.batch == 3) or (
            self.trouble == "close" and state.rank == CULPRIT
        ):
            time.sleep(600)
        elif self.trouble == "error" and state.rank == CULPRIT:
            raise ValueError(f"rank {state.rank} is unwell in {event}")

    @hookimpl
    def init(self, state: Any) -> None:
        self.act("init", state)

    @hookimpl
    def fit_start(self, state: Any) -> None:
        self.act("fit_start", state)

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self.act("before_forward", state)

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.act("batch_end", state)

    @hookimpl
    def eval_start(self, state: Any) -> None:
        self.act("eval_start", state)

    @hookimpl
    def close(self, state: Any) -> None:
        self.act("close", state)
        if self.trouble == "close":
            dist.barrier()


def run(kind: str, event: str, engine: str) -> None:
    rank = int(os.environ["RANK"])
    here = kind if rank == CULPRIT else ""
    net = Net()
    net.stuck = here
    data: Any = Slow(here == "data") if kind == "data" else TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
    model = Classifier(net)
    evaluation = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, 2),
        eval_dataloader=DataLoader(evaluation, 2),
        max_duration="6ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Trouble(kind, event)],
        parallelism=engine,
        dist_timeout=LIMIT_S if kind != "error" else 60.0,
        progress_bar=False,
        run_name="stuck",
        device="cpu",
    ) as trainer:
        trainer.fit()


def start(folder: Path, world_size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    place = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
        "KERNEL_REPORT_DIR": folder,
    }
    shared = {**os.environ, **{key: str(value) for key, value in place.items()}}
    call = [sys.executable, __file__, *arguments]
    return [
        subprocess.Popen(
            call,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]


KINDS = [
    pytest.param("data", "", "data", None, id="data"),
    pytest.param("forward", "", "forward", None, id="forward", marks=pytest.mark.slow),
    pytest.param("collective", "batch_end", "data", "batch_end", id="collective", marks=pytest.mark.slow),
    pytest.param("evaluation", "", "evaluation", None, id="evaluation", marks=pytest.mark.slow),
    pytest.param("close", "close", "close", "close", id="close"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("kind", "event", "phase", "hook"), KINDS)
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_ranks_that_stand_still_are_reported_and_end(
    tmp_path: Path, kind: str, event: str, phase: str, hook: str | None, engine: str
) -> None:
    processes = start(tmp_path, 4, kind, event, engine)
    outputs = [process.communicate(timeout=90)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1, 1, 1], outputs
    records = [json.loads((tmp_path / f"hang-rank{rank}.json").read_text()) for rank in range(4)]
    culprit, *others = records[CULPRIT], *(one for one in records if one["rank"] != CULPRIT)
    assert (culprit["phase"], culprit["event"], culprit["waits"]) == (phase, hook, False)
    assert any("time.sleep(600)" in line for line in culprit["stacks"]["MainThread"])
    assert culprit["plugin"] == ("trouble" if hook else None)
    assert all(one["waits"] for one in others) or kind == "forward"  # in the backward pass nothing of Python waits
    report = hang.combine(records)
    assert report.splitlines()[2].startswith(f"rank {CULPRIT}: {phase}")
    assert "this rank is in" in outputs[0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "event",
    [
        pytest.param("init", marks=pytest.mark.slow),
        pytest.param("fit_start", marks=pytest.mark.slow),
        "before_forward",
        pytest.param("batch_end", marks=pytest.mark.slow),
        pytest.param("eval_start", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_all(tmp_path: Path, event: str) -> None:
    processes = start(tmp_path, 3, "error", event, "ddp")
    outputs = []
    began = None
    for process in processes:
        outputs.append(process.communicate(timeout=60)[1])
        began = began or time.monotonic()
    assert time.monotonic() - (began or 0) < 20
    assert all(process.returncode for process in processes)
    assert f"ValueError: rank {CULPRIT} is unwell in {event}" in outputs[CULPRIT]
    for rank in (0, 1):
        assert f"rank {CULPRIT} failed" in outputs[rank], outputs[rank]
        assert f"is unwell in {event}" in outputs[rank]
    assert (tmp_path / "failed-first").read_text() == str(CULPRIT)


def test_the_functions_that_phases_are_told_by_exist() -> None:
    for file, name in [*hang.AROUND, *hang.INSIDE]:
        text = (Path(hang.KERNEL) / file).read_text()
        parts = [part for part in name.split(".") if part != "<locals>"]
        assert all(f"def {part}(" in text or f"class {part}" in text for part in parts), name


if __name__ == "__main__":
    run(*sys.argv[1:])
