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
from kernel_core.optim import ConstantScheduler, ConstantWithWarmupScheduler, LinearScheduler
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
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
        (
            {"model": _returns(lambda loss: loss.repeat(3))},
            r"loss: got a tensor of shape \(3,\)\. Expected a scalar, the mean over the batch",
        ),
        ({"model": _returns(lambda loss: loss.detach())}, r"loss: it is not attached to the graph"),
        ({"train_subset_num_batches": 0}, r"train_subset_num_batches: got 0\. Expected at least 1, or -1"),
        ({"python_log_level": "loud"}, r"python_log_level: got 'loud'\. Expected 'debug'"),
        ({"seed": 2**70}, r"seed: got 1180591620717411303424\. Expected a whole number from 0"),
        ({"seed": -1}, r"seed: got -1\. Expected a whole number from 0"),
        (
            {"eval_dataloader": Evaluator("train", [rows()])},
            r"an evaluator has the label 'train', which is that of the training",
        ),
        (
            {"schedulers": [ConstantScheduler(), StepLR(torch.optim.SGD([torch.ones(1)], lr=1.0), 1)]},
            r"schedulers: got torch's StepLR beside schedules on training time\. Expected one kind",
        ),
        (
            {"schedulers": ConstantWithWarmupScheduler("10tok"), "max_duration": "100tok"},
            r"or a schedule counts tokens",
        ),
        ({"eval_dataloader": [rows()], "eval_interval": "10tok"}, r"eval_interval or a schedule counts tokens"),
        (
            {"eval_dataloader": [rows()], "eval_interval": "1iter"},
            r"one of them counts iterations\. Give Trainer iteration_length",
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


def test_a_schedule_of_tokens_on_data_without_tokens_is_refused_in_epochs_too() -> None:
    from kernel_core.errors import KernelError

    with pytest.raises(KernelError, match="token"):
        make(schedulers=ConstantWithWarmupScheduler("10tok"), max_duration="3ep").fit()


def test_a_number_of_any_integer_type_is_a_seed() -> None:
    import numpy as np

    assert make(seed=np.int64(3)).state.seed == 3


def test_a_microbatch_larger_than_what_a_list_gives_is_said(caplog: pytest.LogCaptureFixture) -> None:
    make(device_train_microbatch_size=999, max_duration="1ba").fit()
    assert "device_train_microbatch_size: 999 is more than the first batch has rows, 8." in caplog.text


# --- one fit after another ------------------------------------------------------------------------------------------


def test_a_refused_fit_changes_nothing() -> None:
    trainer = make()
    trainer.fit(duration="2ba")
    held = vars(trainer.state).copy()
    for arguments in (
        {"reset_time": True, "precision": "bf16"},
        {"duration": "5ba", "device_train_microbatch_size": 0},
        {"eval_dataloader": [rows()], "eval_interval": "soon"},
        {"train_dataloader": [rows()], "scale_schedule_ratio": 2.0},
    ):
        with pytest.raises((TrainerError, ValueError)):
            trainer.fit(**arguments)
        assert {name: value for name, value in vars(trainer.state).items() if name != "timestamp"} == held
        assert trainer.state.progress.batch == 2


def test_a_run_that_is_finished_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    at: list[int] = []

    class Look(Callback):
        @hookimpl
        def eval_start(self, state: Any) -> None:
            at.append(state.progress.batch)

        @hookimpl
        def fit_start(self, state: Any) -> None:
            at.append(-1)

    trainer = make(max_duration="3ba", eval_dataloader=[rows()], callbacks=Look())
    trainer.fit()
    trainer.fit()
    assert at == [-1, 3]
    assert "max_duration=3ba is reached already; nothing is trained" in caplog.text


def test_a_ratio_scales_what_is_added_and_not_what_is_done() -> None:
    trainer = make(max_duration="4ep", schedulers=LinearScheduler())
    trainer.fit()
    trainer.fit(duration="4ep", schedulers=LinearScheduler(), scale_schedule_ratio=0.5)
    assert trainer.state.progress.epoch == 6


def test_seconds_are_added_whole() -> None:
    class Wait(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            state.progress.total_wct = round(state.progress.total_wct) + 0.95

    trainer = make(max_duration="1ba", callbacks=Wait())
    trainer.fit()
    trainer.fit(duration="2sec")
    assert trainer.state.progress.total_wct >= 2.95


def test_an_iterator_goes_on_where_it_is_and_a_loader_at_its_place_unless_told_otherwise() -> None:
    def fit_twice(loader: Any, **arguments: Any) -> list[float]:
        seen: list[float] = []

        class Look(Callback):
            @hookimpl
            def batch_start(self, state: Any) -> None:
                seen.append(float(state.batch[1][0]))

        trainer = make(train_dataloader=loader, max_duration="3ba", callbacks=Look(), **arguments)
        trainer.fit()
        trainer.fit(duration="3ba")
        return seen

    def batches() -> list[Any]:
        return [(torch.zeros(2, 4), torch.tensor([n % 3, n % 3])) for n in range(9)]

    assert fit_twice(iter(batches())) == [0, 1, 2, 0, 1, 2]
    assert fit_twice(batches()) == [0, 1, 2, 0, 1, 2]
    assert fit_twice(batches()[1:], spin_dataloaders=False) == [1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("workers", [0, 2])
def test_how_a_run_is_cut_into_fits_does_not_shift_its_randomness(workers: int) -> None:
    class Dropped(Model):
        def forward(self, batch: Any) -> Any:
            return nn.functional.dropout(super().forward(batch), 0.4, self.training)

    def weights(*durations: str) -> list[Tensor]:
        model = Dropped()
        loader = DataLoader(TensorDataset(*rows(48)), batch_size=8, shuffle=True, num_workers=workers)
        trainer = make(model, train_dataloader=loader, max_duration=durations[0])
        trainer.fit()
        for duration in durations[1:]:
            trainer.fit(duration=duration)
        return list(model.parameters())

    whole, cut = weights("9ba"), weights("3ba", "4ba", "2ba")
    assert all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))


def test_what_one_fit_was_given_does_not_stay_for_the_next() -> None:
    """Transforms of the first loader, and the rate that a schedule left."""
    trainer = make(
        train_dataloader=DataSpec([rows()] * 4, microbatch_transforms=lambda batch: (batch[0] * 2, batch[1])),
        schedulers=LinearScheduler(),
    )
    trainer.fit()
    group = trainer.state.optimizers[0].param_groups[0]
    assert group["lr"] == pytest.approx(0.025)
    trainer.fit([rows()] * 4, duration="1ep", schedulers=[])
    batch = rows()
    assert trainer.state.prepare_batch(batch)[0] is batch[0]
    assert group["lr"] == 0.1


def test_evaluators_take_the_trainers_limit_unless_they_have_one_and_serve_several_trainers() -> None:
    from torchmetrics import SumMetric

    class Counting(Model):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.metric_name = name

        def get_metrics(self, is_train: bool) -> dict[str, Any]:
            return {} if is_train else {self.metric_name: SumMetric()}

        def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
            metric.update(float(len(outputs)))

    evaluators = [Evaluator("a", [rows()] * 4), Evaluator("b", [rows()] * 4, subset_num_batches=3)]
    for name in ("one", "two"):
        trainer = make(Counting(name), eval_dataloader=evaluators, eval_subset_num_batches=1, max_duration="1ba")
        trainer.fit()
        assert {key: float(value) for key, value in trainer.state.eval_metric_values.items()} == {
            f"a/{name}": 8,
            f"b/{name}": 24,
        }
    assert float(trainer.eval(evaluators)["a/two"]) == 32


def test_a_closed_trainer_does_not_train_on() -> None:
    trainer = make()
    steps = trainer.steps()
    next(steps)
    trainer.close()
    with pytest.raises(TrainerError, match="this trainer is closed"):
        next(steps)


def test_neither_evaluation_nor_the_user_counts_as_training_time() -> None:
    import time

    class Slow(Callback):
        @hookimpl
        def eval_start(self) -> None:
            time.sleep(0.2)

    trainer = make(
        train_dataloader=token_data(),
        eval_dataloader=[rows()],
        eval_interval="1iter",
        iteration_length="40tok",
        max_duration="4ba",
        callbacks=Slow(),
    )
    for _ in trainer.steps():
        time.sleep(0.1)
    assert trainer.state.progress.total_wct < 0.2 < 4 * 0.2 + 4 * 0.1
