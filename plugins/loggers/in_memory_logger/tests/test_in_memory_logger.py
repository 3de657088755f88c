"""Against what a callback logged, and against another logger that saw the same run."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core import Callback, LoggerDestination, Timestamp, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptionError
from kernel_plugin_in_memory_logger import InMemoryLogger, as_timeseries, table_as_json
from torch import nn


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Read(LoggerDestination):
    """Reads everything at once, as a logger should not."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, float]] = []

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        if "loss/train/total" in metrics:
            self.losses.append((step, float(metrics["loss/train/total"])))


def fit(*plugins: Any) -> Trainer:
    model = Line()
    trainer = Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)] * 3,
        max_duration="2ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=list(plugins),
        device="cpu",
        progress_bar=False,
        run_name="test-run",
    )
    trainer.fit()
    return trainer


def test_a_series_holds_every_value_with_the_time_it_was_logged_at() -> None:
    logger, read = InMemoryLogger(), Read()
    trainer = fit(logger, read)
    series = logger.get_timeseries("loss/train/total")
    assert [(step, loss) for step, loss in zip(series["batch"], series["loss/train/total"], strict=True)] == read.losses
    assert series["epoch"].tolist() == [0, 0, 0, 1, 1, 1]  # an epoch counts when it is over
    assert series["batch_in_epoch"].tolist() == [1, 2, 3, 1, 2, 3]
    assert series["sample"].tolist() == [4, 8, 12, 16, 20, 24]
    assert series["total_wct"][-1] == pytest.approx(trainer.state.timestamp.total_wct.total_seconds(), abs=1e-5)
    assert {array.shape for array in series.values()} == {(6,)}
    assert series["batch"].dtype.kind == "i"
    assert series["loss/train/total"].dtype.kind == "f"


def test_there_is_an_array_for_each_field_of_a_timestamp() -> None:
    series = as_timeseries("a", [(Timestamp(epoch=2, batch=7, token=9, epoch_wct=1.5), 3)])
    stamp = Timestamp(epoch=2, batch=7, token=9, epoch_wct=1.5)
    for name, array in series.items():
        if name == "a":
            assert array.tolist() == [3]
        elif name.endswith("_wct"):
            assert array.tolist() == [getattr(stamp, name).total_seconds()]
        else:
            assert array.tolist() == [getattr(stamp, name).value]
    public = {
        name for name in dir(Timestamp) if isinstance(getattr(stamp, name), type(stamp.batch) | type(stamp.batch_wct))
    }
    assert set(series) == public | {"a"}


def test_tensors_are_detached_copied_and_read_only_by_get_timeseries(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = InMemoryLogger()
    running = torch.zeros((), requires_grad=True) * 1
    array = np.zeros(2)
    read = []
    for name in ("item", "tolist", "cpu", "__float__", "__bool__"):
        method = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *args, method=method: read.append(1) or method(*args))
    logger.log_metrics({"running": running, "array": array})
    logger.log_table(["x"], [[running]], "table")
    with torch.no_grad():
        running += 5
    array += 5
    logger.log_metrics({"running": running.detach()}, 3)
    assert read == []
    assert all(not value.requires_grad for _, value in logger.data["running"])
    assert logger.get_timeseries("running")["running"].tolist() == [0.0, 5.0]
    assert read
    assert logger.get_timeseries("array")["array"].tolist() == [[0.0, 0.0]]
    assert json.loads(logger.tables["table"]) == {"columns": ["x"], "data": [[0.0]]}


def test_the_latest_value_and_time_of_each_metric_are_at_hand() -> None:
    class Talk(Callback):
        @hookimpl
        def batch_end(self, state: Any, logger: Any) -> None:
            if state.progress.batch <= 4:
                logger.log_metrics({"mine": state.progress.batch * 10})

    logger = InMemoryLogger()
    fit(logger, Talk())
    assert [value for _, value in logger.data["mine"]] == [10, 20, 30, 40]
    assert logger.most_recent_values["mine"] == 40
    assert logger.most_recent_timestamps["mine"].batch == "4ba"
    assert logger.most_recent_timestamps["loss/train/total"].batch == "6ba"


def test_hyperparameters_and_the_latest_form_of_each_table_are_kept() -> None:
    class Talk(Callback):
        @hookimpl
        def epoch_end(self, state: Any, logger: Any) -> None:
            logger.log_table(["epoch", "text"], [[state.progress.epoch, "é"]], name="texts")

    logger = InMemoryLogger()
    fit(logger, Talk())
    assert logger.hyperparameters["run_name"] == "test-run"
    assert json.loads(logger.tables["texts"]) == {"columns": ["epoch", "text"], "data": [[2, "é"]]}


def test_a_table_is_json_whatever_is_in_it() -> None:
    text = table_as_json(["a", "b"], [[torch.tensor([1.0, float("inf")]), float("nan")], [Timestamp, None]])
    assert json.loads(text) == {"columns": ["a", "b"], "data": [[[1.0, None], None], [str(Timestamp), None]]}


def test_a_metric_that_was_not_logged_is_an_error_with_what_was() -> None:
    logger = InMemoryLogger()
    with pytest.raises(OptionError, match=r"get_timeseries: nothing was logged as 'loss'.*Expected one of none so far"):
        logger.get_timeseries("loss")
    logger.log_metrics({"losses": 1, "other": 2})
    with pytest.raises(
        OptionError,
        match=r"in_memory_logger\.get_timeseries: nothing was logged as 'loss'\. Did you mean 'losses'\? Expected one of losses",
    ):
        logger.get_timeseries("loss")
