"""A run that is killed again and again, at random instants and at every operation of a save, ends as if nothing had happened.

As a script it is the process from which the runs are forked, so that each start costs no imports.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Callback, State, Trainer, hookimpl
from kernel_core.models import Classifier
from kernel_core.storage import LocalStorage, files
from kernel_core.testing.checkpoints import everything, named
from kernel_core.testing.crashes import Counted, Dying
from torch import nn
from torch.utils.data import DataLoader, Dataset

SEED = int(os.environ.get("KERNEL_TEST_SEED", "0"))
NUM_SAMPLES, BATCH_SIZE = 40, 8
DIED = 77


# --- in the runs -----------------------------------------------------------------------------------------------------


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Notes which samples are read."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(NUM_SAMPLES, 8, generator=generator)
        self.y = torch.randint(0, 4, (NUM_SAMPLES,), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read.append(int(index))
        return self.x[index], self.y[index]


class History(Callback):
    """Writes samples and loss of each batch to a file, in one write each.

    Args:
        path: The file.
        data: What is trained on.
    """

    affects_training = False

    def __init__(self, path: str, data: Any) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.data = data

    @hookimpl
    def batch_end(self, state: State) -> None:
        ids, self.data.read[:] = self.data.read[:BATCH_SIZE], self.data.read[BATCH_SIZE:]
        line = f"{state.progress.batch} {ids} {float(state.loss).hex()}\n"
        os.write(self.handle, line.encode())


def train(folder: str, epochs: int, die_at: int = -1, when: Any = "before", count_to: str = "", **options: Any) -> None:
    if die_at >= 0:
        files.system = Dying(die_at, when, lambda: os._exit(DIED))
    elif count_to:
        files.system = Counted()
    torch.manual_seed(1)
    model = Classifier(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 4)), num_classes=4)
    data = Samples()
    with Trainer(
        model=model,
        train_dataloader=DataLoader(data, BATCH_SIZE, shuffle=True),
        max_duration=f"{epochs}ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        callbacks=[History(f"{folder}/history", data)],
        save_folder=f"{folder}/checkpoints",
        save_interval="3ba",
        save_num_checkpoints_to_keep=2,
        autoresume=True,
        run_name="run",
        progress_bar=False,
        device="cpu",
        seed=3,
        **options,
    ) as trainer:
        trainer.fit()
    if isinstance(files.system, Counted) and count_to:
        Path(count_to).write_text(json.dumps(files.system.done))


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def serve() -> None:
    """Fork a run for each line of standard input, kill it if that is asked for, and tell its exit code."""
    torch.set_num_threads(1)  # so that there is no pool of threads, which a fork would not take along
    with tempfile.TemporaryDirectory() as folder:
        train(folder, epochs=1)  # imports what is imported late
    say(0)
    for line in sys.stdin:
        asked = json.loads(line)
        kill_after_s = asked.pop("kill_after_s")
        child = os.fork()
        if child == 0:
            try:
                train(**asked)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        ended = os.pidfd_open(child)
        select.select([ended], [], [], kill_after_s)
        if kill_after_s is not None:
            os.kill(child, signal.SIGKILL)  # it has not been waited for, so that its id is still its own
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os.close(ended)


if __name__ == "__main__":
    serve()
    sys.exit()


# --- in the tests ----------------------------------------------------------------------------------------------------


class Server:
    """Starts runs."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._read() == 0

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def run(self, folder: Path, kill_after_s: float | None = None, **options: Any) -> int:
        """Let a run go to its end, or kill it; return its exit code."""
        folder.mkdir(exist_ok=True)
        assert self.process.stdin is not None
        asked = {"folder": str(folder), "kill_after_s": kill_after_s, **options}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self._read()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.process.stdin is not None
    server.process.stdin.close()
    server.process.wait()


def history(folder: Path) -> dict[int, set[str]]:
    """Return what was noted of each batch, in all the starts of a run."""
    noted: dict[int, set[str]] = {}
    for line in (folder / "history").read_text().splitlines():
        batch, _, told = line.partition(" ")
        noted.setdefault(int(batch), set()).add(told)
    return noted


def tensors(folder: Path) -> dict[str, bytes]:
    """Return the files with tensors of the checkpoints that are there: weights and optimizer state."""
    root = folder / "checkpoints"
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*.safetensors")}


def check_same(folder: Path, reference: Path) -> None:
    """All that was ever trained, and what is there at last, is what it was in a run that nobody disturbed."""
    assert history(folder) == history(reference)
    assert tensors(folder) == tensors(reference)
    root = folder / "checkpoints"
    assert everything(root) == everything(reference / "checkpoints") == named(LocalStorage(root), "latest")
    told = [json.loads((one / "checkpoints" / "latest").read_text())["checkpoint"] for one in (folder, reference)]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "num_kills",
    [
        2,
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(100, marks=[pytest.mark.slow, pytest.mark.soak]),
    ],
)
def test_a_run_killed_at_random_instants_ends_as_if_nothing_had_happened(
    server: Server, tmp_path: Path, num_kills: int, record_property: Any
) -> None:
    epochs = 8
    began = time.monotonic()
    assert server.run(tmp_path / "reference", epochs=epochs) == 0
    longest_s = time.monotonic() - began
    assert history(tmp_path / "reference").keys() == set(range(1, epochs * NUM_SAMPLES // BATCH_SIZE + 1))
    chance, kills, runs = random.Random(SEED), 0, 0
    while kills < num_kills:
        runs += 1
        folder = tmp_path / str(runs)
        for _ in range(1000):
            code = server.run(folder, chance.uniform(0, longest_s) if kills < num_kills else None, epochs=epochs)
            if code == 0:
                break
            assert code == -signal.SIGKILL
            kills += 1
        assert server.run(folder, epochs=epochs) == 0  # finds that there is nothing left to do, and clears up
        check_same(folder, tmp_path / "reference")
    record_property("kills", f"{kills} of {runs} runs in {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("stride", [61, pytest.param(13, marks=pytest.mark.slow)])
def test_a_run_that_dies_at_any_operation_ends_as_if_nothing_had_happened(
    server: Server, tmp_path: Path, stride: int
) -> None:
    """Five saves, three of which delete one."""
    reference, counted = tmp_path / "reference", tmp_path / "counted"
    assert server.run(reference, epochs=3, count_to=str(counted)) == 0
    done = json.loads(counted.read_text())
    assert len(done) > 200
    for at in range(SEED % stride, len(done), stride):
        for when in ("before", "half", "after"):
            if when == "half" and not done[at].startswith("write"):
                continue
            folder = tmp_path / f"{at} {when}"
            assert server.run(folder, epochs=3, die_at=at, when=when) == DIED
            assert server.run(folder, epochs=3) == 0
            check_same(folder, reference)
