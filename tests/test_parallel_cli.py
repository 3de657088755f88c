"""The recipes on several processes, by the command; and nothing left behind, however a run ends."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks
# whoever runs the tests in the background has SIGINT ignored, which children inherit
RESTORE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
KERNEL = [sys.executable, "-c", RESTORE + "from kernel_cli.main import main; main()"]
QUICK = ["--set", "data.num_test_strips=32", "--set", "data.test_digits=[5]", "--set", "data.num_train_strips=512"]
ENGINES = ["ddp", "fsdp", "fsdp,activation_checkpointing"]


def command(folder: Path, *arguments: str) -> list[str]:
    return [*KERNEL, "train", "-n", "2", "--log-dir", str(folder / "logs"), *arguments]


def left_over(folder: Path) -> list[str]:
    """Return the processes that a launch with logs in ``folder`` has started and that still live."""
    mark, found = str(folder).encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (path / "environ").read_bytes() and b" Z " not in (path / "stat").read_bytes():
                found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def check_nothing_is_left(folder: Path) -> None:
    end = time.monotonic() + 15
    while left_over(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_over(folder) == []


def train(folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        command(folder, "--json", *arguments), capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert done.returncode == 0, done.stderr
    check_nothing_is_left(folder)
    document: dict[str, Any] = json.loads(done.stdout)
    run = folder / str(document["run_dir"])
    assert {path.name for path in run.iterdir()} == {"config.yaml", "plan.json", "metrics.jsonl", "checkpoints"}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "loss/train/total" in record]
    assert steps == sorted(set(steps)), "only one rank writes"
    return document


def test_numbers_trains_on_two_processes(tmp_path: Path) -> None:
    document = train(tmp_path, "--plugins", "alibi,blurpool", "--max-duration", "4ba", "--seed", "3", *QUICK)
    assert 0 <= document["metrics"]["metrics/digits5/exact_match"] <= 1
    assert {change["plugin"] for change in document["surgery"]} == {"alibi", "blurpool"}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("recipe", ["numbers", "stdlib"])
def test_the_recipes_train_twenty_steps_under_every_engine(tmp_path: Path, recipe: str, engine: str) -> None:
    quick = QUICK if recipe == "numbers" else ["--set", "eval.interval=0ba"]
    document = train(tmp_path, recipe, "--parallelism", engine, "--max-duration", "20ba", "--plugins", "alibi", *quick)
    assert document["run_name"]


def start(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start an endless run; return it and the ranks' process ids once they train."""
    log = (folder / "err.txt").open("w")
    call = command(folder, "--max-duration", "10000ba", *QUICK, *arguments)
    process = subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=log, text=True, cwd=folder)
    end = time.monotonic() + 120
    while "batch 1" not in (folder / "err.txt").read_text():
        assert time.monotonic() < end, (folder / "err.txt").read_text()
        assert process.poll() is None, (folder / "err.txt").read_text()
        time.sleep(0.1)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return process, [
        int(child) for child in children if b"torchrun.rank" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


@pytest.mark.parametrize(
    ("number", "flags", "code"),
    [
        (signal.SIGTERM, [], 75),
        pytest.param(signal.SIGTERM, ["--no-checkpoints"], 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, ["--no-checkpoints"], 130, marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_the_launcher_ends_the_run_in_order(
    tmp_path: Path, number: int, flags: list[str], code: int
) -> None:
    process, ranks = start(tmp_path, "--run-name", "cut", *flags)
    assert len(ranks) == 2
    process.send_signal(number)
    assert process.wait(timeout=60) == code
    check_nothing_is_left(tmp_path)
    told = (tmp_path / "err.txt").read_text()
    assert re.search(r"the run 'cut' ended after batch \d+", told)
    if code == 75:
        last = told.rstrip().splitlines()[-1].strip()
        assert last == f"kernel train -n 2 --log-dir {tmp_path}/logs --resume runs/cut"
        call = [*KERNEL, *shlex.split(last)[1:], "--max-duration", f"{batches(tmp_path) + 2}ba", "--json"]
        done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert document["resumed_from"].startswith("runs/cut/checkpoints/")
        records = [json.loads(line) for line in (tmp_path / "runs" / "cut" / "metrics.jsonl").read_text().splitlines()]
        steps = [record["step"] for record in records if "loss/train/total" in record]
        assert steps == list(range(1, len(steps) + 1))


def batches(folder: Path) -> int:
    """Return how many batches the run that was cut has trained."""
    names = [path.name for path in (folder / "runs" / "cut" / "checkpoints").iterdir() if path.is_dir()]
    return max(int(name.rpartition("ba")[2]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_a_killed_rank_ends_the_others(tmp_path: Path, engine: str) -> None:
    process, ranks = start(tmp_path, "--parallelism", engine)
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    assert process.wait(timeout=60) in (1, 128 + signal.SIGKILL)
    assert time.monotonic() - began < 40
    check_nothing_is_left(tmp_path)


@pytest.mark.slow
def test_a_killed_rank_is_started_again_with_the_others(tmp_path: Path) -> None:
    process, ranks = start(tmp_path, "--max-restarts", "1", "--run-name", "again")
    os.kill(ranks[1], signal.SIGKILL)
    told = tmp_path / "err.txt"
    end = time.monotonic() + 120
    while "batch 1 " not in told.read_text().partition("all start again")[2]:
        assert time.monotonic() < end, told.read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    check_nothing_is_left(tmp_path)


OUT_OF_MEMORY = """
import os
import torch
import torch.distributed as dist
from kernel_core import Callback, Classifier, Trainer, hookimpl
from torch.utils.data import DataLoader, TensorDataset

FITS, PLACE = 4, "PLACE"
rows = 0

def fill(place):
    if place == PLACE and rows > FITS and os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("more rows than fit")

class Count(Callback):
    @hookimpl
    def before_forward(self, state):
        global rows
        rows = len(state.batch[0])

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        fill("backward")
        return gradient

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 3)

    def forward(self, x):
        fill("forward")
        return Backward.apply(self.line(x))

# fully_shard gathers with one or the other, as torch's release has it
for name in ("all_gather_into_tensor", "all_gather_single"):
    if gather := getattr(dist, name, None):
        def full_gather(*arguments, gather=gather, **options):
            fill("gather")
            return gather(*arguments, **options)

        setattr(dist, name, full_gather)
model = Classifier(Net())
data = TensorDataset(torch.randn(64, 4), torch.arange(64) % 3)
trainer = Trainer(
    model=model, train_dataloader=DataLoader(data, 16), max_duration="3ba", device="cpu", progress_bar=False,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1), device_train_microbatch_size="auto", parallelism="ENGINE",
    callbacks=[Count()],
)
trainer.fit()
if os.environ["RANK"] == "0":
    print("size", trainer.state.device_train_microbatch_size, "batches", trainer.state.progress.batch)
"""


def out_of_memory(engine: str, place: str) -> str:
    return OUT_OF_MEMORY.replace('"PLACE"', f'"{place}"').replace("ENGINE", engine)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "gather"])
@pytest.mark.parametrize(("engine", "starts"), [("fsdp", ["8", "4"]), ("ddp", [])])
def test_memory_that_runs_out_on_one_rank_ends_in_a_smaller_size(
    tmp_path: Path, engine: str, starts: list[str], place: str
) -> None:
    if (engine, place) == ("ddp", "gather"):
        pytest.skip("ddp gathers nothing")
    (tmp_path / "script.py").write_text(out_of_memory(engine, place))
    call = [*KERNEL, "launch", "-n", "2", "--log-dir", str(tmp_path / "logs"), "script.py"]
    began = time.monotonic()
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 120
    assert done.stdout == "size 4 batches 3\n"
    assert re.findall(r"microbatches of (\d+) rows\.\n", done.stderr) == starts
    check_nothing_is_left(tmp_path)


def test_an_error_of_one_rank_comes_last_and_names_the_rank(tmp_path: Path) -> None:
    broken = out_of_memory("ddp", "forward").replace('torch.OutOfMemoryError("more', 'ValueError("more')
    (tmp_path / "script.py").write_text(broken)
    call = [*KERNEL, "launch", "-n", "2", "--log-dir", str(tmp_path / "logs"), "script.py"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert done.returncode == 1
    tail = done.stderr[done.stderr.rindex("failed first, at") :]
    assert "ValueError: more rows than fit" in tail
    assert "rank 1 failed first, at" in done.stderr
    check_nothing_is_left(tmp_path)
