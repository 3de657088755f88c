"""Ctrl-C and SIGTERM: in order at the next step, at once the second time, and handlers only while the trainer works."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_core import Callback, Evaluator, TrainableModel, Trainer, hookimpl
from kernel_core.errors import Interrupted
from torch import nn


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"count": Count()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.total += len(batch)


class Count:
    total = 0

    def reset(self) -> None:
        self.total = 0

    def compute(self) -> int:
        return self.total


class Interrupts(Callback):
    """Sends a signal to its own process at one place, so that the handler runs inside the loop."""

    def __init__(self, hook: str, number: int, times: int = 1) -> None:
        self.hook, self.number, self.times = hook, number, times
        self.events: list[str] = []


def _at(hook: str) -> Any:
    def answer(self: Any, state: Any) -> None:
        self.events.append(hook)
        if hook == self.hook and (state.progress.batch == 2 or hook.startswith("predict")):
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    answer.__name__ = hook
    return hookimpl(answer)


HOOKS = """before_forward after_train_batch batch_end batch_checkpoint epoch_end eval_start eval_batch_end eval_end eval_after_all
    predict_batch_end predict_end fit_end fit_failed close""".split()
for _hook in HOOKS:
    setattr(Interrupts, _hook, _at(_hook))


def make(plugin: Any, **arguments: Any) -> Trainer:
    model = Line()
    given: dict[str, Any] = {
        "train_dataloader": [torch.ones(4, 2)] * 6,
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "max_duration": "2ep",
        "callbacks": plugin,
    }
    return Trainer(model=model, device="cpu", progress_bar=False, **(given | arguments))


@pytest.fixture(autouse=True)
def handlers() -> Any:
    """Begin with Python's own handlers, whoever started the tests with a signal ignored; a test leaves what it found."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    held = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    left = {number: signal.signal(number, handler) for number, handler in held.items()}
    assert left == defaults


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("hook", ["before_forward", "after_train_batch"])
def test_the_step_is_finished_and_the_run_ends_in_order(number: int, code: int, hook: str) -> None:
    plugin = Interrupts(hook, number)
    trainer = make(plugin)
    with pytest.raises(Interrupted) as caught:
        trainer.fit()
    assert caught.value.code == code
    assert trainer.state.progress.batch == 3
    assert plugin.events[-3:] == ["batch_end", "batch_checkpoint", "close"]
    assert not {"fit_end", "fit_failed", "epoch_end"} & set(plugin.events)


def test_an_evaluation_ends_early_gives_no_metrics_and_closes_its_hooks() -> None:
    plugin = Interrupts("eval_batch_end", signal.SIGTERM)
    evaluators = [Evaluator("first", [torch.ones(3, 2)] * 5), Evaluator("second", [torch.ones(3, 2)] * 5)]
    trainer = make(plugin, eval_dataloader=evaluators, eval_interval="2ba")
    with pytest.raises(Interrupted):
        trainer.fit()
    assert trainer.state.progress.batch == 2
    assert plugin.events.count("eval_batch_end") == 1
    assert plugin.events[-4:] == ["eval_end", "eval_after_all", "batch_checkpoint", "close"]
    assert trainer.state.eval_metric_values == {}
    assert trainer.state.model.training


def test_evaluation_and_prediction_on_their_own_end_in_order_too() -> None:
    plugin = Interrupts("predict_batch_end", signal.SIGTERM)
    trainer = make(plugin)
    with pytest.raises(Interrupted):
        trainer.predict([torch.ones(3, 2)] * 5)
    assert plugin.events == ["predict_batch_end", "predict_end", "close"]

    class InEval(Callback):
        @hookimpl
        def eval_batch_start(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    trainer = make(InEval())
    with pytest.raises(Interrupted) as caught:
        trainer.eval([torch.ones(3, 2)] * 5)
    assert caught.value.code == 130


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Interrupted)])
def test_a_second_signal_stops_at_once(number: int, error: type[BaseException]) -> None:
    plugin = Interrupts("before_forward", number, times=2)
    trainer = make(plugin)
    with pytest.raises(error):
        trainer.fit()
    assert trainer.state.progress.batch == 2
    assert plugin.events[-3:] == ["before_forward", "fit_failed", "close"]


def test_a_signal_ends_training_that_is_driven_step_by_step() -> None:
    trainer = make([])
    steps = trainer.steps()
    for _ in range(3):
        next(steps)
    os.kill(os.getpid(), signal.SIGTERM)  # between two steps: there is nothing to finish
    with pytest.raises(Interrupted):
        next(steps)
    assert trainer.state.progress.batch == 3


def test_no_handler_outside_of_work() -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside = []

    class Look(Callback):
        @hookimpl
        def batch_start(self) -> None:
            inside.append(signal.getsignal(signal.SIGTERM))

    trainer = make(Look())
    assert signal.getsignal(signal.SIGTERM) is before
    trainer.fit()
    assert all(handler is not before for handler in inside)
    assert signal.getsignal(signal.SIGTERM) is before
    steps = make([]).steps()
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_child_process_that_is_forked_meanwhile_can_be_terminated() -> None:
    import multiprocessing
    import time

    ended: list[int | None] = []
    context = multiprocessing.get_context("fork")
    begun = context.Event()

    def work() -> None:
        begun.set()
        time.sleep(60)

    class Forks(Callback):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            child = context.Process(target=work, daemon=True)
            child.start()
            assert begun.wait(30)
            child.terminate()
            child.join(30)
            ended.append(child.exitcode)

    make(Forks(), max_duration="1ba").fit()
    assert ended == [-signal.SIGTERM]


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    held = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as nohup does
    try:
        plugin = Interrupts("before_forward", signal.SIGINT)
        trainer = make(plugin, max_duration="4ba")
        trainer.fit()
        assert trainer.state.progress.batch == 4
    finally:
        signal.signal(signal.SIGINT, held)


def test_two_trainers_driven_in_turns_leave_no_handler() -> None:
    before = signal.getsignal(signal.SIGTERM)
    first, second = make([]).steps(), make([]).steps()
    next(first)
    next(second)
    first.close()  # type: ignore[attr-defined]
    second.close()  # type: ignore[attr-defined]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_the_user_leaves_the_loop_is_delivered_again() -> None:
    heard: list[int] = []
    held = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        steps = make([]).steps()
        next(steps)
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == []
        steps.close()  # type: ignore[attr-defined]
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, held)


def test_an_interrupted_evaluation_leaves_no_old_values() -> None:
    class Second(Callback):
        def __init__(self) -> None:
            self.evaluations = 0

        @hookimpl
        def eval_batch_start(self) -> None:
            self.evaluations += 1
            if self.evaluations == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = make(Second(), eval_dataloader=[torch.ones(3, 2)] * 2)
    assert trainer.eval() == {"eval/count": 6}
    with pytest.raises(Interrupted):
        trainer.eval()
    assert trainer.state.eval_metric_values == {}


SCRIPT = """
import os, signal, sys, torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl

class Line(TrainableModel):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 2)
    def forward(self, batch):
        return self.line(batch)
    def loss(self, outputs, batch):
        return outputs.square().mean()

class Stop(Callback):
    @hookimpl
    def batch_start(self, state):
        if state.progress.batch == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    @hookimpl
    def close(self):
        print("closed")

model = Line()
with Trainer(model=model, train_dataloader=[torch.ones(2, 2)] * 9, max_duration="1ep", callbacks=Stop(), device="cpu",
             optimizers=torch.optim.SGD(model.parameters(), lr=0.1), progress_bar=False) as trainer:
    trainer.fit()
print("not reached")
"""


def test_a_script_ends_with_the_code_of_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 143
    assert done.stdout == "closed\n"
    assert "SIGTERM: the run ends after the step it is in" in done.stderr
    assert "ended after batch 2" in done.stderr


WORKERS = """
import os, signal, time, torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl

class Line(TrainableModel):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 2)
    def forward(self, batch):
        return self.line(batch)
    def loss(self, outputs, batch):
        return outputs.square().mean()

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.ones(2)

class Stop(Callback):
    @hookimpl
    def before_dataloader(self, state):
        if state.progress.batch == 3:  # the next batch is not ready: the workers are in the middle of it
            os.killpg(os.getpgrp(), signal.SIGINT)

model = Line()
trainer = Trainer(model=model, train_dataloader=torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2),
                  max_duration="1ep", callbacks=Stop(), device="cpu", progress_bar=False,
                  optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
try:
    trainer.fit()
except SystemExit as end:
    print(end.code, trainer.state.progress.batch)
"""


def test_ctrl_c_at_a_terminal_reaches_the_workers_too_and_they_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True, start_new_session=True)
    assert done.stdout == "130 4\n", done.stderr
    assert done.stderr.count("the run ends after the step it is in") == 1
    assert "Traceback" not in done.stderr
