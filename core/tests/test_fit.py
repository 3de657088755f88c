"""What ``Trainer`` and ``fit`` take: durations, iterations, losses, compilation, determinism; and what they refuse."""

import logging
from typing import Any

import pytest
import torch
from kernel_core import (
    Algorithm,
    Callback,
    Classifier,
    DataSpec,
    Evaluator,
    LoggerDestination,
    TrainableModel,
    Trainer,
    hookimpl,
)
from kernel_core.errors import TrainerError
from kernel_core.optim import LinearScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Model(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0] if isinstance(batch, tuple | list) else batch["x"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1] if isinstance(batch, tuple | list) else batch["y"])


class Record(LoggerDestination):
    """Keeps what is logged, and what happens."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, Any]]] = []
        self.hyperparameters: dict[str, Any] = {}
        self.events: list[str] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def log_hyperparameters(self, hyperparameters: Any) -> None:
        self.hyperparameters |= hyperparameters

    @hookimpl
    def iteration_start(self, state: Any) -> None:
        self.events.append(f"start {state.progress.iteration}")

    @hookimpl
    def iteration_end(self, state: Any) -> None:
        self.events.append(f"end {state.progress.iteration}")

    @hookimpl
    def epoch_start(self, state: Any) -> None:
        self.events.append(f"epoch {state.progress.epoch}")

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self.events.append(f"batch {state.progress.batch}")


def rows(number: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, 4, generator=generator), torch.randint(3, (number,), generator=generator)


def make(model: TrainableModel | None = None, **arguments: Any) -> Trainer:
    model = Model() if model is None else model
    given: dict[str, Any] = {
        "train_dataloader": [rows(8, n) for n in range(4)],
        "max_duration": "1ep",
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "seed": 1,
    }
    return Trainer(model=model, device="cpu", progress_bar=False, **(given | arguments))


# --- time -----------------------------------------------------------------------------------------------------------


class Tokens(IterableDataset[Any]):
    """Without a length, batches of 8 rows that count 5 tokens each."""

    def __iter__(self) -> Any:
        for n in range(4):
            x, y = rows(8, n)
            yield {"x": x, "y": y}


def token_data() -> DataSpec:
    return DataSpec(DataLoader(Tokens(), batch_size=None), get_num_tokens_in_batch=lambda batch: 40)


def test_iterations_of_tokens_on_an_unsized_loader_neither_restart_the_epoch_nor_repeat_data() -> None:
    """80 tokens are two batches; an epoch has four, so the third iteration spans no restart of the loader."""
    record = Record()
    make(train_dataloader=token_data(), max_duration="3iter", iteration_length="80tok", loggers=record).fit()
    assert record.events == [
        *("start 0", "epoch 0", "batch 1", "batch 2", "end 1"),
        *("start 1", "batch 3", "batch 4", "end 2"),
        *("start 2", "epoch 1", "batch 5", "batch 6", "end 3"),
    ]


def test_an_iteration_may_span_epochs() -> None:
    record = Record()
    make(train_dataloader=token_data(), max_duration="6ba", iteration_length="200tok", loggers=record).fit()
    assert record.events == [
        *("start 0", "epoch 0", "batch 1", "batch 2", "batch 3", "batch 4", "epoch 1", "batch 5", "end 1"),
        *("start 1", "batch 6"),
    ]


def test_a_run_that_stops_where_an_iteration_ends_announces_the_next_one_once() -> None:
    record = Record()
    trainer = make(train_dataloader=token_data(), max_duration="2ba", iteration_length="80tok", loggers=record)
    trainer.fit()
    trainer.fit(duration="1ba")
    assert record.events == ["start 0", "epoch 0", "batch 1", "batch 2", "end 1", "start 1", "batch 3"]


@pytest.mark.parametrize("duration", ["5ba", "40sp", "200tok"])
def test_durations_add_in_any_unit(duration: str) -> None:
    trainer = make(train_dataloader=token_data(), max_duration="3ba")
    trainer.fit()
    trainer.fit(duration=duration)
    assert trainer.state.progress.batch == 8


def test_reset_time_counts_from_zero_and_keeps_what_was_learned() -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    trainer = make(model, optimizers=optimizer)
    trainer.fit()
    trainer.fit(reset_time=True)
    assert trainer.state.progress.batch == 4
    assert {int(state["step"]) for state in optimizer.state.values()} == {8}


def test_time_strings_of_seconds_stop_a_run() -> None:
    class Wait(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            state.progress.total_wct += 40  # as if the batch had taken so long

    trainer = make(max_duration="90s", callbacks=Wait())
    trainer.fit()
    assert trainer.state.progress.batch == 3


def test_the_run_and_its_schedule_are_scaled_together() -> None:
    rates: list[float] = []

    class Look(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            rates.append(state.optimizers[0].param_groups[0]["lr"])

    model = Model()
    trainer = make(
        model,
        max_duration="8ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
        schedulers=LinearScheduler(t_max="8ba"),
        scale_schedule_ratio=0.5,
        callbacks=Look(),
    )
    trainer.fit()
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_fit_takes_what_the_trainer_takes() -> None:
    record = Record()
    trainer = make(train_dataloader=None, max_duration=None, eval_interval=0, loggers=record)
    trainer.fit(
        [rows(4, n) for n in range(6)],
        train_dataloader_label="second",
        train_subset_num_batches=3,
        duration="2ep",
        schedulers=LinearScheduler(),
        eval_dataloader=[rows(4)],
        eval_interval="2ba",
        device_train_microbatch_size=2,
        precision="amp_bf16",
    )
    state = trainer.state
    assert (state.progress.batch, state.progress.epoch) == (6, 2)
    assert (state.precision, state.device_train_microbatch_size, state.dataloader_label) == ("amp_bf16", 2, "second")
    assert len(state.evaluators) == 1


def test_training_metrics_have_the_label_of_their_loader() -> None:
    from torchmetrics.classification import MulticlassAccuracy

    record = Record()
    model = Classifier(nn.Linear(4, 3), train_metrics={"acc": MulticlassAccuracy(3)}, val_metrics={})
    make(model, train_dataloader_label="digits", loggers=record).fit()
    logged = {name for _, metrics in record.metrics for name in metrics}
    assert "metrics/digits/acc" in logged


# --- loss -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatch", [None, 3])
@pytest.mark.parametrize("form", ["mapping", "total", "sequence"])
def test_several_losses_train_on_their_total_and_are_logged_each(form: str, microbatch: int | None) -> None:
    class Several(Model):
        def loss(self, outputs: Any, batch: Any) -> Any:
            first, second = super().loss(outputs, batch), outputs.square().mean()
            if form == "sequence":
                return first, second
            return {"ce": first, "norm": second, **({"total": first + 2 * second} if form == "total" else {})}

    class One(Model):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return super().loss(outputs, batch) + (2 if form == "total" else 1) * outputs.square().mean()

    record, several, one = Record(), Several().double(), One().double()
    data = [tuple(part.double() if part.is_floating_point() else part for part in rows(8, n)) for n in range(3)]
    make(several, train_dataloader=data, loggers=record, device_train_microbatch_size=microbatch).fit()
    make(one, train_dataloader=data).fit()
    for a, b in zip(several.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    names = ["0", "1"] if form == "sequence" else ["ce", "norm"]
    for _, metrics in record.metrics:
        parts = [float(metrics[f"loss/train/{name}"]) for name in names]
        factor = 2 if form == "total" else 1
        assert float(metrics["loss/train/total"]) == pytest.approx(parts[0] + factor * parts[1], rel=1e-9)


def test_rows_that_do_not_count_give_no_nan() -> None:
    """A microbatch and then a whole batch without any label that counts."""

    class Ragged(Model):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return nn.functional.cross_entropy(outputs, batch[1], ignore_index=-1)

        def loss_weight(self, batch: Any) -> Any:
            return (batch[1] != -1).sum()

    losses: list[Tensor] = []

    class Keep(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            losses.append(state.loss)

    x, y = rows(9)
    y = y.clone()
    y[:4] = -1
    nothing = torch.full_like(y, -1)
    model = Ragged()
    expected = float(model.loss(model((x, y)), (x, y)).detach())
    data = [(x, y), (x, nothing)]
    make(model, train_dataloader=data, device_train_microbatch_size=3, callbacks=Keep()).fit()
    assert float(losses[0]) == pytest.approx(expected, rel=1e-6)
    assert float(losses[1]) == 0.0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_each_batch_counts_once_in_metrics_however_often_it_is_evaluated() -> None:
    from torchmetrics import SumMetric

    class Twice(torch.optim.SGD):
        def step(self, closure: Any) -> Any:  # type: ignore[override]
            loss = closure()
            closure()
            super().step()
            return loss

    class Counting(Model):
        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {"rows": SumMetric()}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(float(len(outputs)))

    model = Counting()
    trainer = make(model, optimizers=Twice(model.parameters(), lr=0.1))
    trainer.fit()
    assert float(trainer.state.train_metric_values["rows"]) == 32


# --- evaluation -----------------------------------------------------------------------------------------------------


def test_an_interval_may_be_a_function_of_state_and_event() -> None:
    asked: set[str] = set()
    at: list[int] = []

    def due(state: Any, event: str) -> bool:
        asked.add(event)
        return event == "batch_end" and int(state.timestamp.batch) % 3 == 0

    class Look(Callback):
        @hookimpl
        def eval_start(self, state: Any) -> None:
            at.append(state.progress.batch)

    make(eval_dataloader=[rows()], eval_interval=due, max_duration="2ep", callbacks=Look()).fit()
    assert at == [3, 6, 8]  # and what was not evaluated since, at the end
    assert asked == {"batch_end", "epoch_end"}
    at.clear()
    evaluators = [Evaluator("a", [rows()], eval_interval=due), Evaluator("b", [rows()], eval_interval="5ba")]
    make(eval_dataloader=evaluators, max_duration="2ep", callbacks=Look()).fit()
    assert at == [3, 5, 6, 8, 8]


def test_modules_keep_their_own_mode_through_an_evaluation() -> None:
    model = Model()
    trainer = make(model)
    model.train()
    model.net[1].eval()  # frozen by the user
    trainer.eval([rows()])
    assert model.training
    assert not model.net[1].training


# --- how it runs ----------------------------------------------------------------------------------------------------


def test_hyperparameters_are_logged_when_asked_for() -> None:
    record = Record()
    make(loggers=record, auto_log_hparams=True, train_subset_num_batches=2)
    assert record.hyperparameters["train_subset_num_batches"] == 2
    assert record.hyperparameters["max_duration"] == "1ep"
    assert record.hyperparameters["precision"] == "fp32"
    assert record.hyperparameters["model"] == {"$object": f"{Model.__module__}.Model"}


def test_deterministic_mode_refuses_by_name_and_is_put_back() -> None:
    class Scatter(Model):
        def loss(self, outputs: Any, batch: Any) -> Any:
            torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
            assert torch.are_deterministic_algorithms_enabled()
            return super().loss(outputs, batch)

    before = torch.are_deterministic_algorithms_enabled()
    with make(Scatter(), deterministic_mode=True) as trainer:
        trainer.fit()
    assert torch.are_deterministic_algorithms_enabled() is before is False


def test_two_runs_of_one_seed_are_bit_equal() -> None:
    def weights() -> list[Tensor]:
        model = Model()
        loader = DataLoader(TensorDataset(*rows(30)), batch_size=8, shuffle=True)
        with make(model, train_dataloader=loader, max_duration="2ep", deterministic_mode=True) as trainer:
            trainer.fit()
        return list(model.parameters())

    assert all(torch.equal(one, other) for one, other in zip(weights(), weights(), strict=True))


@pytest.mark.parametrize("how", ["compile_config", "torch.compile"])
def test_a_compiled_model_trains_alike_and_keeps_its_names(how: str) -> None:
    plain, model = Model(), Model()
    make(plain).fit()
    backend = "eager"  # traced and run by torch.compile, without a C++ compiler's minute
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: Any = torch.compile(model) if how == "torch.compile" else model
    trainer = make(given, optimizers=optimizer, compile_config={"backend": backend})
    assert trainer.state.model is model
    trainer.fit()
    assert model._compiled_call_impl is not None
    assert list(model.state_dict()) == list(plain.state_dict())
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_run_name_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_NAME", "from-the-environment")
    assert make().state.run_name == "from-the-environment"
    assert make(run_name="given").state.run_name == "given"


def test_the_log_level_shows_what_was_done(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("kernel_core")
    level = logger.level
    try:
        make(python_log_level="info")
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(level)


def test_parts_of_the_loop_can_be_instrumented_and_cost_nothing_otherwise() -> None:
    seen: dict[str, int] = {}

    class Trace(Callback):
        @hookimpl
        def instrument(self, part: str, call: Any) -> Any:
            seen[part] = 0

            def traced(*args: Any, **options: Any) -> Any:
                seen[part] += 1
                return call(*args, **options)

            return traced

    class Work(Algorithm):
        @hookimpl
        def after_loss(self, state: Any) -> None:
            state.loss = state.loss * 2

    make(callbacks=Trace(), algorithms=Work(), eval_dataloader=[rows()], device_train_microbatch_size=4).fit()
    assert seen == {
        "work.after_loss": 8,
        "data": 5,  # with the call that finds the loader exhausted
        "forward": 8,
        "loss": 8,
        "backward": 8,
        "step": 4,
        "evaluation": 1,
    }


# --- wrong use ------------------------------------------------------------------------------------------------------


def _returns(value: Any) -> TrainableModel:
    class Wrong(Model):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return value(super().loss(outputs, batch))

    return Wrong()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"train_dataloader": DataLoader(Tokens(), batch_size=None), "max_duration": "2ep"},
            r"max_duration: 2ep counts epochs, and train_dataloader has no length.*train_subset_num_batches",
        ),
        (
            {
                "train_dataloader": DataLoader(TensorDataset(*rows(30)), batch_size=8),
                "device_train_microbatch_size": 9,
            },
            r"device_train_microbatch_size: got 9, and train_dataloader gives batches of 8\. Expected at most that",
        ),
        ({"device_train_microbatch_size": 0}, r"device_train_microbatch_size: got 0\. Expected a whole number"),
        (
            {"device_train_microbatch_size": "many"},
            r"device_train_microbatch_size: got 'many'\. Expected a whole number",
        ),
        (
            {"device_train_microbatch_size": 2, "grad_accum": 2},
            r"grad_accum: got 2 beside device_train_microbatch_size=2",
        ),
        ({"scale_schedule_ratio": 0.5}, r"scale_schedule_ratio: got 0\.5, and there is no scheduler"),
        ({"iteration_length": "3ba"}, r"iteration_length: got 3ba\. Expected at least one epoch or token"),
        (
            {"schedulers": LinearScheduler(), "scale_schedule_ratio": 0.01, "max_duration": "2ba"},
            r"scale_schedule_ratio: 0\.01 of max_duration=2ba is nothing",
        ),
        (
            {"model": _returns(lambda loss: loss.item())},
            r"loss: Wrong\.loss returned .* a float\. Expected a scalar tensor",
        ),
        ({"model": _returns(lambda loss: None)}, r"loss: Wrong\.loss returned None, a NoneType"),
        ({"model": _returns(lambda loss: {"a": loss, "b": 3.0})}, r"loss: Wrong\.loss returned .* a dict"),
        (
            {"model": _returns(lambda loss: loss / 0)},
            r"loss: the loss of the first batch is inf\. Expected a finite number",
        ),
        ({"train_dataloader": ["text"]}, r"batch: cannot tell how many samples.*get_num_samples_in_batch"),
    ],
)
def test_wrong_use_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    from kernel_core.errors import KernelError

    arguments = dict(arguments)
    model = arguments.pop("model", None) or Model()
    with pytest.raises(KernelError, match=message):
        make(model, **arguments).fit()


def test_an_unsized_loader_with_a_known_number_of_samples_has_epochs() -> None:
    data = DataSpec(DataLoader(Tokens(), batch_size=None), num_samples=32)
    shares: list[float] = []

    class Look(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            shares.append(float(state.get_elapsed_duration()))

    trainer = make(train_dataloader=data, max_duration="2ep", callbacks=Look())
    trainer.fit()
    assert trainer.state.progress.batch == 8
    assert shares == pytest.approx([0.125 * n for n in range(1, 9)])


def test_a_ratio_without_new_schedulers_is_refused_in_fit() -> None:
    trainer = make(schedulers=LinearScheduler())
    with pytest.raises(TrainerError, match=r"scale_schedule_ratio: got 2\.0 without schedulers"):
        trainer.fit(scale_schedule_ratio=2.0)


def test_a_data_spec_may_serve_two_runs_of_different_seeds() -> None:
    data = DataSpec(DataLoader(TensorDataset(*rows(30)), batch_size=8, shuffle=True))
    orders = []
    for seed in (1, 2):
        trainer = make(train_dataloader=data, seed=seed)
        orders.append([batch[0] for batch in trainer.state.dataloader])  # type: ignore[union-attr]
    assert not torch.equal(orders[0][0], orders[1][0])
