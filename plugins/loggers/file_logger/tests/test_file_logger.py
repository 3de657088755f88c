import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core import Callback, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptionError
from kernel_plugin_file_logger import FileLogger, json_line, jsonable, read_scalars
from torch import nn


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Measured(Line):
    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {} if is_train else {"mean": Mean()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None: ...


class Mean:
    def reset(self) -> None: ...
    def update(self) -> None: ...
    def compute(self) -> float:
        return 0.25


def make(*plugins: Any, run_name: str = "test-run", **kwargs: Any) -> Trainer:
    model = Measured()
    return Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)] * 3,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=list(plugins),
        device="cpu",
        run_name=run_name,
        progress_bar=False,
        **kwargs,
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_everything_that_is_logged_is_a_line(tmp_path: Path) -> None:
    class Talk(Callback):
        @hookimpl
        def epoch_end(self, logger: Any) -> None:
            logger.log_metrics({"a/tensor": torch.tensor(1.5), "a/nan": float("nan"), "a/numpy": np.float32(2)})
            logger.log_table(["x", "y"], [[1, "one"], [2, torch.tensor(2.0)]], name="pairs")

    with make(FileLogger(str(tmp_path / "{run_name}/rank{rank}.jsonl")), Talk()) as trainer:
        trainer.fit()
    lines = records(tmp_path / "test-run" / "rank0.jsonl")
    assert lines[0]["hyperparameters"]["run_name"] == "test-run"
    assert [line["step"] for line in lines if "loss/train/total" in line] == [1, 2, 3, 4, 5, 6]
    (first, _) = [line for line in lines if "a/tensor" in line]
    assert (first["a/tensor"], first["a/nan"], first["a/numpy"]) == (1.5, None, 2.0)
    (table, _) = [line for line in lines if "table" in line]
    assert (table["columns"], table["rows"]) == (["x", "y"], [[1, "one"], [2, 2.0]])


def test_what_was_logged_before_a_failure_is_there(tmp_path: Path) -> None:
    class Fails(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            if state.progress.batch == 2:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        make(FileLogger(str(tmp_path / "log")), Fails()).fit()
    assert [line["step"] for line in records(tmp_path / "log") if "loss/train/total" in line] == [1, 2]


def test_values_are_read_when_they_are_written_and_not_in_the_step(tmp_path: Path) -> None:
    read = []

    class Lazy:
        def numel(self) -> int:
            return 1

        def item(self) -> float:
            read.append(1)
            return 3.0

    logger = FileLogger(str(tmp_path / "log"), flush_interval=3)
    make(logger)._hooks.fit_start[0]()
    logger.flush()
    for step in range(2):
        logger.log_metrics({"value": Lazy()}, step)
    assert read == []
    logger.log_metrics({"value": Lazy()}, 2)
    assert read == [1, 1, 1]
    logger.close()


def test_a_second_run_appends_unless_told_to_overwrite(tmp_path: Path) -> None:
    def run(overwrite: bool) -> int:
        with make(FileLogger(str(tmp_path / "log"), overwrite=overwrite)) as trainer:
            trainer.fit()
        return len(records(tmp_path / "log"))

    one = run(False)
    assert run(False) == 2 * one
    assert run(True) == one


def test_a_run_that_never_begins_leaves_no_file(tmp_path: Path) -> None:
    make(FileLogger(str(tmp_path / "folder" / "log"))).close()
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_alone_is_written_too(tmp_path: Path) -> None:
    class Mean:
        def reset(self) -> None: ...
        def update(self) -> None: ...
        def compute(self) -> float:
            return 0.25

    trainer = make(FileLogger(str(tmp_path / "log")))
    trainer.state.model.get_metrics = lambda is_train: {"mean": Mean()}
    trainer.state.model.update_metric = lambda batch, outputs, metric: None
    trainer.eval([torch.ones(1, 2)])
    trainer.close()
    assert records(tmp_path / "log")[-1]["metrics/eval/mean"] == 0.25


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor(2), 2),
        (torch.tensor([1.0, float("inf")]), [1.0, None]),
        (np.int64(3), 3),
        (Path("a"), "a"),
        ({"a": (1, float("-inf"))}, {"a": [1, None]}),
        (None, None),
        (True, True),
    ],
)
def test_values_become_plain(value: Any, expected: Any) -> None:
    assert jsonable(value) == expected


def test_an_unknown_placeholder_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"file_logger\.filename: got '\{name\}\.txt', with an unknown placeholder 'name'"
    ):
        FileLogger("{name}.txt")


def test_a_line_is_what_json_would_write() -> None:
    generator = torch.Generator().manual_seed(0)
    floats = (
        torch.randn(200, generator=generator, dtype=torch.float64)
        * 10.0 ** torch.arange(-100, 100, dtype=torch.float64)
    ).tolist()
    record = {
        'quote " and ünï': 1,
        "none": None,
        "text": 'a"b\\',
        "true": True,
        "list": [1, 2.5],
        "big": 10**30,
        "neg": -0.0,
    }
    record |= {f"x{number}": value for number, value in enumerate(floats)}
    assert json_line(record, {}) == json.dumps(record) + "\n"
    assert json_line({"a": float("inf"), "b": [float("nan")]}, {}) == '{"a": null, "b": [null]}\n'


def test_scalars_of_all_kinds_are_read_together_and_others_are_left() -> None:
    values = [
        torch.tensor(1.5),
        torch.tensor(3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.ones(2),
        4.0,
        torch.tensor(-1.0),
    ]
    read = read_scalars(values)
    assert [read.get(id(value)) for value in values] == [1.5, 3, 2.5, None, None, -1.0]


def step_keys(path: Path) -> list[tuple[int, str]]:
    lines = [line for line in records(path) if "step" in line]
    return [(line["step"], key) for line in lines for key in line if key not in ("step", "time")]


@pytest.mark.parametrize(
    "damage", ["none", "a line is half written", "the file has lost its end", "the file was edited"]
)
def test_a_run_that_was_killed_after_its_checkpoint_has_every_step_once(tmp_path: Path, damage: str) -> None:
    def trainer(**arguments: Any) -> Trainer:
        evaluation = [torch.ones(1, 2)]
        return make(FileLogger(str(tmp_path / "log"), flush_interval=2), eval_dataloader=evaluation, **arguments)

    run = trainer()
    steps = run.steps()
    for _ in range(3):
        next(steps)  # the third batch is the last of its epoch: its evaluation comes after the checkpoint
    checkpoint = run.save_checkpoint(tmp_path / "checkpoints")
    for _ in range(2):
        next(steps)
    for logger in run.logger._destinations:
        logger.flush()  # type: ignore[attr-defined]
    path = tmp_path / "log"  # and here it is killed
    assert step_keys(path)[-1][0] == 5
    text = path.read_text()
    if damage == "a line is half written":
        path.write_text(text + '{"step": 6, "time"')
    elif damage == "the file has lost its end":
        path.write_text(text[: text.index('{"step": 2') + 9])
    elif damage == "the file was edited":
        path.write_text("{}\n" + text)
    with trainer(load_path=checkpoint) as resumed:
        resumed.fit()
    found = step_keys(path)
    losses = [step for step, key in found if key == "loss/train/total"]
    assert losses == ([1, 4, 5, 6] if damage == "the file has lost its end" else [1, 2, 3, 4, 5, 6])
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    if damage != "the file was edited":  # then nobody knows what of the checkpoint's own step came after it
        assert len(found) == len(set(found))
        assert [step for step, key in found if key == "metrics/eval/mean"] == [3, 6]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["checkpoints", "log"]


def test_a_run_that_begins_from_another_one_s_checkpoint_leaves_what_it_has_logged(tmp_path: Path) -> None:
    with make(FileLogger(str(tmp_path / "{run_name}"))) as first:
        first.fit()
        checkpoint = first.save_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "second").write_text('{"step": 99}\n')
    with make(FileLogger(str(tmp_path / "{run_name}")), run_name="second", load_path=checkpoint) as second:
        second.fit(duration="1ep")
    assert records(tmp_path / "second")[0] == {"step": 99}
    assert step_keys(tmp_path / "second")[-1][0] == 9


def test_a_run_that_is_resumed_keeps_its_file_even_if_it_was_to_be_replaced(tmp_path: Path) -> None:
    with make(FileLogger(str(tmp_path / "log"), overwrite=True)) as first:
        first.fit()
        checkpoint = first.save_checkpoint(tmp_path / "checkpoints")
    with make(FileLogger(str(tmp_path / "log"), overwrite=True), load_path=checkpoint) as second:
        second.fit(duration="1ba")
    assert [step for step, key in step_keys(tmp_path / "log") if key == "loss/train/total"] == [1, 2, 3, 4, 5, 6, 7]
