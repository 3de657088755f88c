import os
import pty
import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_core import Evaluator, TrainableModel, Trainer
from kernel_plugin_progress_bar import ProgressBar, progress_line, seconds_as_clock
from torch import nn

SCRIPT = """
import time, torch
from kernel_core import Trainer, Callback, hookimpl
from progress_bar_model import Line, evaluator

class Slow(Callback):
    @hookimpl
    def batch_end(self): time.sleep(0.1)

model = Line()
with Trainer(model=model, train_dataloader=[torch.ones(4, 2)] * 5, max_duration="2ep", callbacks=Slow(),
             optimizers=torch.optim.SGD(model.parameters(), lr=0.1), device="cpu", eval_dataloader=evaluator()) as trainer:
    trainer.fit()
"""


class Mean:
    def reset(self) -> None: ...
    def update(self) -> None: ...
    def compute(self) -> torch.Tensor:
        return torch.tensor(0.125)


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"mean": Mean(), "matrix": Matrix()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update()


class Matrix(Mean):
    def compute(self) -> torch.Tensor:
        return torch.zeros(2, 2)


def evaluator() -> Evaluator:
    return Evaluator("test", [torch.ones(1, 2)])


def fit(**kwargs: Any) -> None:
    model = Line()
    with Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)] * 3,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        eval_dataloader=evaluator(),
        device="cpu",
        **kwargs,
    ) as trainer:
        trainer.fit()


def test_without_a_terminal_there_are_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    fit()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0].startswith("train   17%  epoch 0, batch 1  0:00")
    assert "train/total" in lines[0]
    assert next(line for line in lines if line.startswith("eval")).endswith("test/mean 0.125")
    assert lines[-1].startswith("train  100%  epoch 2, batch 6")
    assert "\x1b" not in err


def test_it_is_used_when_installed_and_left_out_when_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    fit(progress_bar=False)
    assert capsys.readouterr().err == ""
    fit(loggers=ProgressBar(interval_s=1000.0))
    assert len(capsys.readouterr().err.splitlines()) == 4  # first batch, two evaluations, the end


def test_in_a_terminal_there_is_a_bar(tmp_path: Any) -> None:
    with open(__file__) as source:
        (tmp_path / "progress_bar_model.py").write_text(source.read())
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=follower, stdout=follower, env=environment)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait() == 0, shown.decode()
    text = shown.decode()
    assert "\x1b[" in text
    assert "━" in text
    assert "epoch 2, batch 10" in text
    assert "test/mean 0.125" in text


def test_times_and_lines_are_written_as_people_read_them() -> None:
    assert [seconds_as_clock(s) for s in (0, 59.9, 60, 3599, 3661)] == ["0:00", "0:59", "1:00", "59:59", "1:01:01"]
    assert progress_line("train", 0.25, "batch 5", 10, {"loss/train/total": 2.34567}) == (
        "train   25%  batch 5  0:10 (about 0:30 left)  train/total 2.346"
    )
    assert progress_line("train", None, "batch 5", 10, {}) == "train  batch 5  0:10"
