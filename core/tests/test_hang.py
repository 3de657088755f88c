"""Where a rank stands is found from its stacks, and the records of all ranks make one report."""

import ast
import json
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_core import Callback, DataSpec, TrainableModel, Trainer, hookimpl
from kernel_core.distributed import hang
from kernel_core.distributed.connection import Connection
from kernel_core.train.place import Place
from kernel_core.train.ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Looks:
    """Takes the record of a run from another thread, as the watchdog does, the first time ``at`` is called with ``place``."""

    def __init__(self, place: str) -> None:
        self.place, self.state, self.found = place, None, None

    def at(self, place: str) -> None:
        if place == self.place and self.state is not None and self.found is None:
            thread = threading.Thread(target=self._take)
            thread.start()
            thread.join()

    def _take(self) -> None:
        self.found = hang.record(self.state, 1.25)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, looks: Looks) -> Tensor:
        context.looks = looks
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        context.looks.at("backward")
        return gradient, None


class Net(TrainableModel):
    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self.line, self.looks = nn.Linear(2, 1), looks

    def forward(self, batch: Any) -> Tensor:
        self.looks.at("forward" if self.training else "in a pass")
        return InBackward.apply(self.line(batch), self.looks)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self.looks.at("loss")
        return outputs.square().mean()


class Descent(torch.optim.SGD):
    looks: Any = None

    def step(self, closure: Any = None) -> Any:
        self.looks.at("step")
        return super().step(closure)


class Onlooker(Callback):
    def __init__(self, looks: Looks) -> None:
        self.looks = looks

    def helps(self, place: str) -> None:
        self.looks.at(place)

    @hookimpl
    def init(self, state: Any) -> None:
        self.looks.state = state
        self.helps("init")

    @hookimpl
    def batch_end(self) -> None:
        self.helps("batch_end")

    @hookimpl
    def batch_checkpoint(self) -> None:
        self.helps("batch_checkpoint")

    @hookimpl
    def eval_start(self) -> None:
        self.helps("eval_start")

    @hookimpl
    def close(self) -> None:
        self.helps("close")


class Stream:
    def __init__(self, looks: Looks) -> None:
        self.looks = looks

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(2):
            self.looks.at("data")
            yield torch.randn(3, 2)


def make(looks: Looks) -> Trainer:
    model = Net(looks)

    def optimizer(parameters: Any) -> Descent:
        looks.at("optimizer")
        made = Descent(parameters, lr=0.1)
        made.looks = looks
        return made

    return Trainer(
        model=model,
        train_dataloader=DataSpec(Stream(looks), get_num_samples_in_batch=len),
        eval_dataloader=DataLoader(torch.randn(3, 2)),  # type: ignore[arg-type]
        max_duration="1ep",
        optimizers=optimizer,
        callbacks=Onlooker(looks),
        device="cpu",
        progress_bar=False,
    )


def stand(place: str, work: Callable[[Trainer], Any]) -> dict[str, Any]:
    looks = Looks(place)
    with make(looks) as trainer:
        work(trainer)
    assert looks.found is not None
    return looks.found


def fit(trainer: Trainer) -> None:
    trainer.fit()


@pytest.mark.parametrize(
    ("place", "work", "phase", "event"),
    [
        ("data", fit, "data", None),
        ("forward", fit, "forward", None),
        ("loss", fit, "loss", None),
        ("backward", fit, "backward", None),
        ("step", fit, "step", None),
        ("optimizer", fit, "start", None),
        ("in a pass", lambda trainer: trainer.eval(), "evaluation", None),
        ("in a pass", lambda trainer: trainer.predict(DataLoader(torch.randn(3, 2))), "prediction", None),  # type: ignore[arg-type]
        ("init", fit, "init", "init"),
        ("batch_end", fit, "batch_end", "batch_end"),
        ("batch_checkpoint", fit, "checkpoint", "batch_checkpoint"),
        ("eval_start", fit, "eval_start", "eval_start"),
        ("close", fit, "close", "close"),
    ],
)
def test_the_phase_is_found_from_the_stack(place: str, work: Any, phase: str, event: str | None) -> None:
    found = stand(place, work)
    assert (found["phase"], found["event"], found["waits"]) == (phase, event, False)
    assert found["plugin"] == ("onlooker" if event else None)
    stack = found["stacks"][found["main"]]
    assert any(line.startswith(f"{Path(__file__)}:") and "looks.at(" in line for line in stack)
    assert (found["rank"], found["world_size"], found["still_s"]) == (0, 1, 1.2)
    assert json.loads(json.dumps(found)) == found


def test_a_trainer_that_is_not_at_work_stands_outside() -> None:
    looks = Looks("")
    with make(looks) as trainer:
        found = hang_from_another_thread(trainer.state)
        steps = trainer.steps()
        next(steps)
        between = hang_from_another_thread(trainer.state)
        steps.close()  # type: ignore[attr-defined]
    assert (found["phase"], found["event"], found["plugin"]) == ("outside", None, None)
    assert (between["phase"], between["batch"]) == ("outside", 1)


def hang_from_another_thread(state: Any) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(hang.record(state)))
    thread.start()
    thread.join()
    return found[0]


def test_a_run_in_a_thread_of_its_own_is_found() -> None:
    looks = Looks("forward")
    with make(looks) as trainer:
        thread = threading.Thread(target=trainer.fit, name="trains")
        thread.start()
        thread.join()
    assert looks.found is not None
    assert (looks.found["main"], looks.found["phase"]) == ("trains", "forward")


def stack_of(call: Callable[[], Any], release: Callable[[], Any]) -> list[Any]:
    """Return the frames of ``call`` once it blocks, and let it go on."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive()
    frames = hang._stack(sys._current_frames()[thread.ident or 0])
    release()
    thread.join(5)
    assert not thread.is_alive()
    return frames


def test_a_rank_waits_in_the_store_and_in_collectives_and_not_in_its_loader() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=20))
    waiting = Connection(Place(1, 2, 1, 2), store)
    waits = stack_of(lambda: waiting.agree("seed", ""), lambda: store.set("agree/1/seed", "3"))
    assert hang.waits(waits)

    go = threading.Event()

    def batches() -> Iterator[Tensor]:
        go.wait()
        yield torch.zeros(2, 2)

    with make(Looks("")) as trainer:
        in_step = Ranks(trainer.state).in_step(batches(), DataSpec(Stream(Looks(""))), 1, "train_dataloader")
        frames = stack_of(lambda: list(in_step), go.set)
        assert not hang.waits(frames)
        assert hang.locate(frames, trainer.state)[0] == "data"
        assert hang.locate(waits, trainer.state)[0] == "collective"


def a_record(rank: int, phase: str = "data", waits: bool = False, line: str = "a.py:1 f: g()", **more: Any) -> Any:
    stacks = {"MainThread": ["script.py:9 main: fit()", line], "other": ["x.py:1 h: k()"]}
    base = {"rank": rank, "world_size": 4, "host": "h", "pid": 1, "time": "2026-01-01 00:00:00", "epoch": 0, "batch": 3}
    return {
        **base,
        "phase": phase,
        "event": None,
        "plugin": None,
        "waits": waits,
        "main": "MainThread",
        "stacks": stacks,
        **more,
    }


def test_the_report_names_the_ranks_that_differ_first() -> None:
    others = [a_record(rank, "step", True, "c10d.py:5 all_reduce: wait()") for rank in (3, 0, 1)]
    report = hang.combine([*others, a_record(2, event="batch_end", plugin="mine", phase="batch_end")])
    lines = report.splitlines()
    assert lines[0] == (
        "The ranks stood still: rank 2 in batch_end, in the hook batch_end of the plugin mine; the others in step, waiting for "
        "other ranks."
    )
    assert lines[2].startswith("rank 2: batch_end, in the hook batch_end of the plugin mine (epoch 0, batch 3")
    assert any(line.startswith("ranks 0, 1, 3: step, waiting for other ranks") for line in lines)
    assert report.count("all_reduce") == 1


def test_of_two_ranks_the_one_that_waits_is_the_other_one() -> None:
    report = hang.combine([a_record(0, "step", True, world_size=2), a_record(1, world_size=2)])
    assert report.startswith("The ranks stood still: rank 1 in data; the others in step, waiting for other ranks.")


def test_the_report_names_ranks_without_a_record() -> None:
    report = hang.combine([a_record(0), a_record(3)])
    assert report.startswith("The ranks stood still, all in data.\nranks 1, 2 left no record")
    assert hang.combine([]) == "No rank has left a record of where it stood."


def test_a_record_is_written_whole(tmp_path: Path) -> None:
    with make(Looks("")) as trainer:
        path = hang.write(trainer.state, tmp_path / "new")
    assert path == tmp_path / "new" / "hang-rank0.json"
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    assert json.loads(path.read_text())["rank"] == 0


def functions_of(file: Path) -> set[str]:
    """Return the qualified names of all functions in ``file``, as Python's own compiler gives them."""
    found: set[str] = set()
    code = [compile(ast.parse(file.read_text()), str(file), "exec")]
    for one in code:
        found.add(one.co_qualname)
        code += [inner for inner in one.co_consts if hasattr(inner, "co_qualname")]
    return found


def test_the_functions_that_phases_are_told_by_exist() -> None:
    for file, name in [*hang.AROUND, *hang.INSIDE, *hang.WAITS]:
        assert name in functions_of(Path(hang.KERNEL) / file), f"{file}: {name}"
