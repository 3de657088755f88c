"""All ranks of a run end together: the first error is the one that is told, and nothing that hangs keeps a rank alive."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_core import Callback, Classifier, Trainer, hookimpl
from kernel_core.distributed import hang
from kernel_core.testing.ranks import free_port
from torch.utils.data import DataLoader, TensorDataset

LIMIT_S, END_S, NEVER_S = 4.0, 30.0, 600.0
MARK = "trouble-began"


class Case:
    """What goes wrong on which rank."""

    def __init__(self, name: str, culprit: int) -> None:
        self.name, self.mine = name, int(os.environ["RANK"]) == culprit
        self.folder = Path(os.environ["KERNEL_REPORT_DIR"])

    def begins(self, *names: str) -> bool:
        if self.name not in names or not self.mine:
            return False
        (self.folder / MARK).write_text(str(time.time()))
        return True

    def fail(self, *names: str) -> None:
        if self.begins(*names):
            raise ValueError(f"rank {os.environ['RANK']} is unwell")

    def hang(self, *names: str) -> None:
        if self.begins(*names):
            time.sleep(NEVER_S)


class Trouble(Callback):
    def __init__(self, case: Case) -> None:
        self.case = case

    @hookimpl
    def init(self) -> None:
        self.case.fail("init")

    @hookimpl
    def fit_start(self) -> None:
        self.case.fail("fit_start")

    @hookimpl
    def before_forward(self) -> None:
        self.case.fail("before_forward")

    @hookimpl
    def batch_end(self, state: Any) -> None:
        if state.progress.batch == 3:
            self.case.fail("batch_end", "batch_end, then close hangs")
            if self.case.begins("collective"):
                dist.recv(torch.zeros(1), 0)  # nobody sends

    @hookimpl
    def eval_start(self) -> None:
        self.case.fail("eval_start")

    @hookimpl
    def eval_standalone_start(self) -> None:
        self.case.fail("eval_standalone_start")

    @hookimpl
    def predict_batch_end(self) -> None:
        self.case.fail("predict_batch_end")

    @hookimpl
    def close(self) -> None:
        self.case.fail("close raises")
        self.case.hang("close", "close, when the others are gone")
        if self.case.mine and self.case.name == "batch_end, then close hangs":
            time.sleep(NEVER_S)
        if self.case.name in ("close", "close raises"):
            dist.barrier()


class Net(torch.nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.line, self.case, self.passes = torch.nn.Linear(4, 3), case, 0

    def forward(self, x: torch.Tensor) -> Any:
        self.passes += self.training
        if self.training and self.passes == 4:
            self.case.hang("forward")
        if not self.training:
            self.case.hang("evaluation")
        return self.line(x)


class Stream:
    """Batches without a loader of torch's around them."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[Any]:
        for index in range(20):
            if index == 3:
                self.case.hang("data")
            yield torch.randn(2, 4), torch.zeros(2, dtype=torch.long)


def run(name: str, culprit: str, engine: str) -> None:
    case = Case(name, int(culprit))
    _meet(case.folder)
    model = Classifier(Net(case))
    rows = DataLoader(TensorDataset(torch.randn(16, 4), torch.arange(16) % 3), 2)
    trainer = Trainer(
        model=model,
        train_dataloader=Stream(case),
        eval_dataloader=rows,
        max_duration="5ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[Trouble(case)],
        parallelism=engine,
        dist_timeout=LIMIT_S if name in HANGS else 120.0,
        progress_bar=False,
        run_name="trouble",
        device="cpu",
    )
    if name == "eval_standalone_start":
        trainer.eval()
    elif name == "predict_batch_end":
        trainer.predict(DataLoader(torch.randn(16, 4), 2))  # type: ignore[arg-type]
    elif name == "the user's code":
        with trainer:
            trainer.fit()
            case.fail(name)
            trainer.fit(duration="3ba")
    elif name == "an evaluation between two steps":
        for step, _ in enumerate(trainer.steps()):
            if step == 1:
                case.name = "evaluation"
                trainer.eval()
    elif name == "the user's code between two steps":
        for step, _ in enumerate(trainer.steps()):
            if step == 1:
                case.hang(name)
    else:
        trainer.fit()
    trainer.close()


def _meet(folder: Path) -> None:
    """Wait until all ranks have imported torch: the limit is shorter than that may take on a busy machine."""
    (folder / f"ready{os.environ['RANK']}").touch()
    while len(list(folder.glob("ready*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)


def start(folder: Path, world_size: int, *arguments: str) -> list["subprocess.Popen[str]"]:
    place = {
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "OMP_NUM_THREADS": 1,
        "KERNEL_REPORT_DIR": folder,
    }
    shared = {**os.environ, **{key: str(value) for key, value in place.items()}}
    return [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=(folder / f"said{rank}").open("w"),
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]


def ends(folder: Path, world_size: int, *arguments: str) -> tuple[list[str], list[int], float]:
    """Return what each rank said, its exit code, and how long after the trouble began the last one had ended."""
    processes = start(folder, world_size, *arguments)
    try:
        for process in processes:
            process.wait(timeout=100)
        ended = time.time()
    finally:
        for process in processes:
            process.kill()
    said = [(folder / f"said{rank}").read_text() for rank in range(world_size)]
    took_s = ended - float((folder / MARK).read_text())
    print(f"{arguments}: ended {took_s:.1f} s after the trouble began")  # noqa: T201
    return said, [process.returncode for process in processes], took_s


slow = pytest.mark.slow
HANGS = (
    "data",
    "forward",
    "collective",
    "evaluation",
    "close",
    "close, when the others are gone",
    "an evaluation between two steps",
    "the user's code between two steps",
)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "phase", "event", "engine"),
    [
        ("data", "data", None, "ddp"),
        pytest.param("forward", "forward", None, "fsdp", marks=slow),
        pytest.param("collective", "batch_end", "batch_end", "ddp", marks=slow),
        pytest.param("evaluation", "evaluation", None, "ddp", marks=slow),
        pytest.param("close", "close", "close", "ddp", marks=slow),
        pytest.param("an evaluation between two steps", "evaluation", None, "ddp", marks=slow),
        pytest.param("the user's code between two steps", "outside", None, "ddp", marks=slow),
    ],
)
def test_ranks_that_stand_still_say_where_and_end(
    tmp_path: Path, name: str, phase: str, event: str | None, engine: str
) -> None:
    said, codes, took_s = ends(tmp_path, 4, name, "2", engine)
    assert codes == [1, 1, 1, 1], said
    assert LIMIT_S <= took_s < LIMIT_S + END_S
    records = [json.loads((tmp_path / f"hang-rank{rank}.json").read_text()) for rank in range(4)]
    culprit, others = records[2], [one for one in records if one["rank"] != 2]
    assert (culprit["phase"], culprit["event"]) == (phase, event)
    assert culprit["plugin"] == ("trouble" if event else None)
    assert culprit["waits"] == (name == "collective")
    stack = culprit["stacks"]["MainThread"]
    assert any("dist.recv(" in line if name == "collective" else "time.sleep(NEVER_S)" in line for line in stack)
    assert name == "forward" or all(one["waits"] for one in others)  # in DDP's backward pass nothing of Python waits
    if name != "collective":
        assert hang.combine(records).startswith(
            f"The ranks stood still: rank 2 {'outside of the trainer' if phase == 'outside' else f'in {phase}'}"
        )
    # one that loses its peers while it waits for them may come out with an error of its own before it says so
    assert any(f"rank {rank}: " in said[rank] and "this rank is " in said[rank] for rank in range(4))


@pytest.mark.ranks
@slow
def test_a_rank_that_hangs_when_the_others_are_gone_is_reported_too(tmp_path: Path) -> None:
    said, codes, _ = ends(tmp_path, 3, "close, when the others are gone", "2", "ddp")
    assert codes == [0, 0, 1], said
    record = json.loads((tmp_path / "hang-rank2.json").read_text())
    assert (record["phase"], record["plugin"]) == ("close", "trouble")
    assert "ranks 0, 1 left no record" in hang.combine([record])


@pytest.mark.ranks
@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("init", marks=slow),
        pytest.param("fit_start", marks=slow),
        pytest.param("before_forward", marks=slow),
        "batch_end",
        pytest.param("eval_start", marks=slow),
        pytest.param("eval_standalone_start", marks=slow),
        pytest.param("predict_batch_end", marks=slow),
        pytest.param("close raises", marks=slow),
        pytest.param("the user's code", marks=slow),
        pytest.param("batch_end, then close hangs", marks=slow),
    ],
)
def test_an_error_on_one_rank_ends_all_with_its_name(tmp_path: Path, name: str, culprit: int) -> None:
    said, codes, took_s = ends(tmp_path, 3, name, str(culprit), "ddp")
    assert all(codes), said
    assert took_s < END_S
    assert f"ValueError: rank {culprit} is unwell" in said[culprit]
    assert "Traceback (most recent call last)" in said[culprit]
    for rank in {0, 1, 2} - {culprit}:
        named = (
            f"rank {culprit} failed: ValueError: rank {culprit} is unwell",
            f"rank {culprit} failed first: ValueError",
        )
        assert any(one in said[rank] for one in named), said[rank]
    assert (tmp_path / "failed-first").read_text() == str(culprit)


if __name__ == "__main__":
    run(*sys.argv[1:])
