"""Through the trainer, with metrics whose values are written down here, against epochs counted by hand."""

import json
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core import Callback, Evaluator, Time, TrainableModel, Trainer, hookimpl
from kernel_core.errors import Interrupted, OptionError
from kernel_plugin_early_stopper import EarlyStopper, choose_comparison, is_better, split_monitor
from torch import nn

NAN = float("nan")
NUM_BATCHES = 3


class Script:
    """A metric that gives the values it was told, one for each time it is computed, then the last again."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)

    def reset(self) -> None: ...

    def update(self) -> None: ...

    def compute(self) -> Any:
        value = self.values.pop(0) if len(self.values) > 1 else self.values[0]
        return torch.tensor(value) if isinstance(value, float) else value


class Line(TrainableModel):
    def __init__(self, metrics: dict[str, Any]) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.metrics = metrics

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return self.metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update()


def make(stopper: EarlyStopper, *more: Any, metrics: dict[str, Any], **arguments: Any) -> Trainer:
    model = Line({name: Script(values) for name, values in metrics.items()})
    return Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)] * NUM_BATCHES,
        **{"max_duration": "8ep", **arguments},
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        callbacks=[stopper, *more],
        device="cpu",
        progress_bar=False,
    )


def epochs(values: Sequence[Any], monitor: str = "Accuracy", **options: Any) -> int:
    trainer = make(EarlyStopper(monitor, "train", **options), metrics={monitor: values})
    trainer.fit()
    return trainer.state.progress.epoch


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        # best at 2; more than one epoch has passed at 4
        ([1.0, 2.0, 2.0, 2.0, 9.0], {}, 4),
        ([1.0, 2.0, 2.0, 3.0, 3.0, 3.0], {}, 6),
        ([1.0, 2.0, 2.0, 9.0], {"patience": 0}, 3),
        ([1.0, 0.0, 0.0, 0.0, 9.0], {"patience": "2ep"}, 4),
        ([1.0, 0.0, 0.0, 0.0, 9.0], {"patience": Time(2, "ep")}, 4),
        # best at batch 3; the first epoch that ends more than 6 batches later is the fourth
        ([1.0, 0.0], {"patience": "6ba"}, 4),
        ([1.0, 0.0], {"patience": "5ba"}, 3),
        # 1.5 is better than 1.0 by 0.5, and not by more
        ([1.0, 1.4, 1.5, 9.0], {"min_delta": 0.5}, 3),
        ([1.0, 1.4, 1.5, 9.0], {"min_delta": -0.5}, 3),
        ([1.0, 1.4, 1.6, 1.0, 1.0, 1.0], {"min_delta": 0.5}, 5),
        # any number is better than nan, and nan is no better than nan
        ([NAN, NAN, NAN, 9.0], {}, 3),
        ([NAN, 1.0, NAN, NAN, 9.0], {}, 4),
        ([1, 2, np.float32(2), 2, 9], {}, 4),
    ],
)
def test_training_stops_at_the_epoch_counted_by_hand(
    values: Sequence[Any], options: dict[str, Any], expected: int
) -> None:
    assert epochs(values, **options) == expected


FALLING = [float(8 - epoch) for epoch in range(8)]


@pytest.mark.parametrize("monitor", ["CrossEntropy", "valLoss", "MeanSquaredError", "LanguagePerplexity"])
def test_what_should_fall_is_known_by_its_name(monitor: str) -> None:
    assert epochs(FALLING, monitor) == 8
    assert epochs(FALLING, monitor, comp="greater") == 3
    assert epochs(FALLING[::-1], monitor) == 3


def test_everything_else_should_rise() -> None:
    assert epochs(FALLING) == 3
    assert epochs(FALLING[::-1]) == 8
    assert epochs(FALLING, comp="less") == 8


@pytest.mark.parametrize("comp", [torch.less, operator.lt, lambda value, best: value < best])
def test_a_comparison_of_ones_own_may_be_that_of_any_library(comp: Any) -> None:
    assert epochs(FALLING, comp=comp) == 8
    assert epochs(FALLING[::-1], comp=comp) == 3


def test_label_and_name_may_come_in_one_text() -> None:
    trainer = make(EarlyStopper("metrics/train/CrossEntropy", patience="2ep"), metrics={"CrossEntropy": [1.0, 2.0]})
    trainer.fit()
    assert trainer.state.progress.epoch == 4
    assert split_monitor("metrics/eval/a/b") == ("a/b", "eval")
    assert split_monitor("metrics/eval/a", "eval") == ("a", "eval")


def test_an_evaluator_is_watched_at_each_of_its_evaluations_and_no_other() -> None:
    data = [torch.ones(1, 2)]
    evaluators = [Evaluator("other", data, eval_interval="1ba"), Evaluator("mine", data, eval_interval="2ba")]
    stopper = EarlyStopper("Accuracy", "mine", patience="3ba")
    trainer = make(stopper, metrics={"Accuracy": [1.0, 2.0, 2.0, 2.0, 9.0]}, eval_dataloader=evaluators)
    trainer.fit()
    # looked at after batches 2, 4, 6, 8; best at 4, and 8 is more than 3 later: in the middle of an epoch
    assert trainer.state.progress.batch == 8
    assert stopper.best == 2.0
    assert stopper.best_occurred is not None
    assert stopper.best_occurred.batch == "4ba"


def test_a_bare_eval_dataloader_is_called_eval() -> None:
    trainer = make(
        EarlyStopper("metrics/eval/Accuracy"), metrics={"Accuracy": [1.0, 0.0]}, eval_dataloader=[torch.ones(1, 2)]
    )
    trainer.fit()
    assert trainer.state.progress.epoch == 3


def test_it_says_why_it_stops_and_only_when_it_does(caplog: pytest.LogCaptureFixture) -> None:
    epochs([1.0, 0.5])
    assert caplog.messages == [
        "early_stopper: Accuracy of train has not become better than 1, reached at 1ep, for more than 1ep. Training stops."
    ]
    caplog.clear()
    make(EarlyStopper("Accuracy", "train", patience=0), metrics={"Accuracy": [1.0]}, max_duration="2ep").fit()
    assert caplog.messages == []  # it would end at this point anyway


def test_a_resumed_run_stops_where_an_unbroken_one_does() -> None:
    values = [1.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    whole = EarlyStopper("Accuracy", "train", patience=2)
    unbroken = make(whole, metrics={"Accuracy": values})
    unbroken.fit()
    assert unbroken.state.progress.epoch == 5
    first = EarlyStopper("Accuracy", "train", patience=2)
    begun = make(first, metrics={"Accuracy": values}, max_duration="3ep")
    begun.fit()
    second = EarlyStopper("Accuracy", "train", patience=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed = make(second, metrics={"Accuracy": values[3:]})
    resumed.state.progress.restore(begun.state.timestamp)
    resumed.fit()
    assert resumed.state.progress.epoch == 5
    assert second.state_dict() == whole.state_dict() == {"best": 3.0, "best_occurred": {"ep": 2, "ba": 6}}


def test_before_the_first_value_there_is_no_state() -> None:
    stopper = EarlyStopper("Accuracy", "train")
    assert stopper.state_dict() == {}
    stopper.load_state_dict({})
    assert stopper.best is None


def test_time_set_back_forgets_the_best() -> None:
    stopper = EarlyStopper("Accuracy", "train")
    trainer = make(stopper, metrics={"Accuracy": [9.0, 9.0, 9.0, 1.0, 2.0, 2.0, 2.0]})
    trainer.fit()
    assert trainer.state.progress.epoch == 3
    trainer.fit(reset_time=True)
    assert trainer.state.progress.epoch == 4  # 1, 2, 2, 2: best at 2
    assert stopper.best == 2.0


def test_an_evaluation_outside_fit_does_not_count() -> None:
    data = [torch.ones(1, 2)]
    stopper = EarlyStopper("Accuracy", "eval")
    trainer = make(stopper, metrics={"Accuracy": [9.0, 1.0, 2.0, 3.0, 4.0]}, eval_dataloader=data, max_duration="3ep")
    trainer.eval()
    assert stopper.best is None
    trainer.fit()
    assert stopper.best == 3.0


def test_an_evaluation_that_a_signal_cut_short_is_passed_over() -> None:
    class Signal(Callback):
        @hookimpl
        def eval_batch_start(self, state: Any) -> None:
            state.interrupt(15)

    stopper = EarlyStopper("Accuracy", "eval")
    trainer = make(stopper, Signal(), metrics={"Accuracy": [1.0]}, eval_dataloader=[torch.ones(1, 2)] * 2)
    with pytest.raises(Interrupted):
        trainer.fit()
    assert stopper.best is None


def test_a_value_is_read_once_an_epoch_and_never_in_a_batch() -> None:
    read = []

    class Number:
        def __float__(self) -> float:
            read.append(1)
            return 1.0

    trainer = make(EarlyStopper("Accuracy", "train", patience=9), metrics={"Accuracy": [Number()]}, max_duration="2ep")
    seen = []
    for _ in trainer.steps():
        seen.append(len(read))
    assert seen == [0, 0, 0, 1, 1, 1]
    assert len(read) == 2


def test_a_label_that_does_not_exist_is_refused_at_the_start() -> None:
    data = [Evaluator("digits5", [torch.ones(1, 2)])]
    trainer = make(EarlyStopper("Accuracy", "digit5"), metrics={"Accuracy": [1.0]}, eval_dataloader=data)
    message = (
        r"early_stopper\.dataloader_label: nothing has the label 'digit5'\. Did you mean 'digits5'\? "
        r"Expected one of train, digits5\. Name one"
    )
    with pytest.raises(OptionError, match=message):
        trainer.fit()
    assert trainer.state.progress.batch == 0


def test_a_model_without_metrics_is_refused_at_the_start() -> None:
    trainer = make(EarlyStopper("Accuracy", "train"), metrics={})
    with pytest.raises(
        OptionError, match=r"early_stopper\.monitor: there is no metric 'Accuracy' of 'train'\. There is none\."
    ):
        trainer.fit()
    assert trainer.state.progress.batch == 0


@pytest.mark.parametrize("label", ["train", "eval"])
def test_a_metric_that_does_not_exist_is_an_error_after_a_warning(label: str, caplog: pytest.LogCaptureFixture) -> None:
    metrics = {"MulticlassAccuracy": [1.0], "Other": [1.0]}
    trainer = make(EarlyStopper("Accuracy", label), metrics=metrics, eval_dataloader=[torch.ones(1, 2)])
    message = (
        rf"early_stopper\.monitor: there is no metric 'Accuracy' of '{label}'\. Did you mean 'MulticlassAccuracy'\? "
        r"There is MulticlassAccuracy, Other\. Name one of these"
    )
    with pytest.raises(OptionError, match=message):
        trainer.fit()
    assert trainer.state.progress.epoch == 1
    assert "It is looked for again when they are computed." in caplog.text


def test_one_value_of_a_metric_that_computes_several_can_be_watched() -> None:
    trainer = make(EarlyStopper("rougeL", "train"), metrics={"ROUGE": [{"rougeL": 2.0}, {"rougeL": 1.0}]})
    trainer.fit()
    assert trainer.state.progress.epoch == 3


def test_a_metric_that_is_no_number_is_refused() -> None:
    trainer = make(EarlyStopper("Matrix", "train"), metrics={"Matrix": [torch.zeros(2, 2)]})
    with pytest.raises(OptionError, match=r"early_stopper\.monitor: 'Matrix' of 'train' is tensor.*no single number"):
        trainer.fit()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"monitor": "a"}, r"early_stopper\.dataloader_label: missing, and monitor='a' holds none\. Expected 'train'"),
        (
            {"monitor": "metrics/train/a", "dataloader_label": "eval"},
            r"early_stopper\.dataloader_label: got 'eval', and monitor='metrics/train/a' says 'train'\. Expected one",
        ),
        ({"patience": "3tok"}, r"early_stopper\.patience: got '3tok'\. Expected epochs as a whole number"),
        ({"patience": -1}, r"early_stopper\.patience: got '-1'\. Expected epochs as a whole number"),
        ({"patience": "soon"}, r"early_stopper\.patience: got 'soon'\. time: cannot read 'soon'"),
        ({"comp": "lesser"}, r"early_stopper\.comp: got 'lesser', expected "),
        ({"patient": 1}, r"early_stopper\.patient: unknown option\. Did you mean 'patience'\?"),
    ],
)
def test_wrong_options(arguments: dict[str, Any], message: str) -> None:
    given = arguments if "monitor" in arguments else {"monitor": "a", "dataloader_label": "train", **arguments}
    with pytest.raises(OptionError, match=message):
        EarlyStopper(**given)


def test_better_is_strict_and_keeps_double_precision() -> None:
    less = choose_comparison("loss")
    assert is_better(1 - 1e-12, 1.0, less)
    assert not is_better(1.0, 1.0, less)
    assert is_better(0.0, float("inf"), less)
