"""The loop against hand-written ones, and what fires when."""

import math
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, DataSpec, Evaluator, Time, TrainableModel, Trainer, hookimpl
from kernel_core.data.sampler import ResumableBatchSampler, ResumableSampler
from kernel_core.errors import DataError, TimeStringError, TrainerError
from kernel_core.optim import CosineAnnealingWithWarmupScheduler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mlp(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return nn.functional.cross_entropy(outputs, batch[1])


def dataset(rows: int = 30) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator))


def make(model: TrainableModel, loader: Any, **kwargs: Any) -> Trainer:
    options = {"optimizers": torch.optim.SGD(model.parameters(), lr=0.1), "max_duration": "2ep", "seed": 3}
    return Trainer(model=model, train_dataloader=loader, device="cpu", progress_bar=False, **(options | kwargs))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_training_is_bit_for_bit_that_of_a_hand_written_loop() -> None:
    """With shuffling, dropout and momentum: the same draws from the same global generator."""
    by_hand = Mlp()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=0.01)
    order = ResumableSampler(30, shuffle=True, seed=3)
    by_hand_loader = DataLoader(dataset(), batch_sampler=ResumableBatchSampler(order, 8))
    torch.manual_seed(3)
    losses = []
    for epoch in range(2):
        order.set_epoch(epoch)
        for batch in by_hand_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(by_hand.net(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    seen = []

    class Watch(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            seen.append(state.loss)

    model = Mlp()
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    make(model, loader, optimizers=torch.optim.AdamW(model.parameters(), lr=0.01), callbacks=Watch()).fit()
    assert same(model, by_hand)
    assert torch.equal(torch.stack(seen), torch.stack(losses))
    assert not seen[0].requires_grad


@pytest.mark.parametrize("size", [1, 3, 4, 7, 10, 50])
def test_the_gradient_does_not_depend_on_the_microbatch_size(size: int) -> None:
    """Odd splits and a short last window, in float64 against one big batch."""

    def gradients(microbatch: int | None) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []

        class Keep(Algorithm):
            @hookimpl
            def after_train_batch(self, state: Any) -> None:
                kept.extend(p.grad.clone() for p in state.model.parameters())
                kept.append(state.loss)

        model = Mlp().double()
        model.net[2].p = 0.0
        x, y = dataset(10).tensors
        trainer = make(
            model, [(x.double(), y)], device_train_microbatch_size=microbatch, algorithms=Keep(), max_duration="1ba"
        )
        trainer.fit()
        return kept

    for one, other in zip(gradients(size), gradients(None), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_microbatches_are_weighted_by_what_the_loss_averages() -> None:
    """Ragged labels: the gradient is that of the mean over all labels that count, not a mean of means."""

    class Ragged(Mlp):
        def loss(self, outputs: Any, batch: Any) -> Any:
            return nn.functional.cross_entropy(outputs, batch[1], ignore_index=-1)

        def loss_weight(self, batch: Any) -> Any:
            return (batch[1] != -1).sum()

    x, y = dataset(9).tensors
    y = y.clone()
    y[[0, 1, 2, 4, 8]] = -1  # the first microbatch of three has no label at all
    model = Ragged().double()
    model.net[2].p = 0.0
    expected = torch.autograd.grad(model.loss(model((x.double(), y)), (x.double(), y)), list(model.parameters()))
    kept = []

    class Keep(Algorithm):
        @hookimpl
        def after_train_batch(self, state: Any) -> None:
            kept.extend(p.grad.clone() for p in state.model.parameters())

    class Finite(Algorithm):
        @hookimpl
        def after_loss(self, state: Any) -> None:
            state.loss = torch.nan_to_num(state.loss)  # the mean over no label is 0/0

    make(
        model, [(x.double(), y)], device_train_microbatch_size=3, algorithms=[Keep(), Finite()], max_duration="1ba"
    ).fit()
    for one, other in zip(kept, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Recorder(Callback):
    def __init__(self) -> None:
        self.events: list[str] = []


def _record(name: str) -> Any:
    def record(self: Any, state: Any) -> None:
        self.events.append(name)

    record.__name__ = name
    return hookimpl(record)


TRAINING = """fit_start iteration_start epoch_start before_dataloader after_dataloader batch_start before_train_batch
    before_forward after_forward before_loss after_loss before_backward after_backward after_train_batch
    batch_end batch_checkpoint epoch_end epoch_checkpoint iteration_end iteration_checkpoint fit_end
    eval_before_all eval_start eval_end eval_after_all""".split()
for _name in TRAINING:
    setattr(Recorder, _name, _record(_name))


def test_events_fire_in_the_order_of_the_reference() -> None:
    recorder = Recorder()
    microbatch = ["before_forward", "after_forward", "before_loss", "after_loss", "before_backward", "after_backward"]
    step = [
        *["before_dataloader", "after_dataloader", "batch_start", "before_train_batch"],
        *microbatch * 2,
        *["after_train_batch", "batch_end", "batch_checkpoint"],
    ]
    evaluation = ["eval_before_all", "eval_start", "eval_end", "eval_after_all"]
    epoch = ["epoch_start", *step, *step, "before_dataloader", "epoch_end", *evaluation, "epoch_checkpoint"]
    x, y = dataset(4).tensors
    make(
        Mlp(),
        [(x, y)] * 2,
        callbacks=recorder,
        eval_dataloader=[(x, y)],
        device_train_microbatch_size=2,
        iteration_length=2,
    ).fit()
    assert recorder.events == [
        "fit_start",
        "iteration_start",
        *epoch,
        *epoch,
        "iteration_end",
        "iteration_checkpoint",
        "fit_end",
    ]


@pytest.mark.parametrize(
    ("duration", "batches"),
    [("2ep", 8), ("3ba", 3), ("4ba", 4), ("5ba", 5), ("17sp", 3), ("1iter", 4), ("8tok", 2), ("0sec", 0)],
)
def test_training_stops_at_max_duration_in_every_unit(duration: str, batches: int) -> None:
    x, y = dataset(8).tensors
    data = DataSpec([(x, y)] * 4, get_num_tokens_in_batch=lambda batch: 4)
    trainer = make(Mlp(), data, max_duration=duration, iteration_length=1)
    trainer.fit()
    assert trainer.state.timestamp.batch == batches


def test_wall_clock_stops_too() -> None:
    import time

    class Slow(Callback):
        @hookimpl
        def batch_start(self) -> None:
            time.sleep(0.4)

    trainer = make(Mlp(), [dataset(8).tensors] * 100, max_duration="1s", callbacks=Slow())
    trainer.fit()
    assert 1 <= trainer.state.timestamp.batch <= 3


def test_fit_can_be_called_again_and_duration_adds() -> None:
    x, y = dataset(8).tensors
    trainer = make(Mlp(), [(x, y)] * 4, max_duration="1ep")
    trainer.fit()
    trainer.fit()
    assert trainer.state.timestamp.batch == 4
    trainer.fit(duration="3ba")
    trainer.fit(duration="2ep")
    assert (trainer.state.timestamp.epoch, trainer.state.max_duration) == (3, Time(3, "ep"))


def test_an_epoch_cut_short_continues_where_it_was() -> None:
    seen = []

    class Watch(Callback):
        @hookimpl
        def batch_start(self, state: Any) -> None:
            seen.append(int(state.batch[0][0, 0]))

    data = [(torch.full((2, 4), float(n)), torch.zeros(2, dtype=torch.long)) for n in range(4)]
    trainer = make(Mlp(), data, max_duration="3ba", callbacks=Watch())
    trainer.fit()
    trainer.fit(duration="3ba")
    assert seen == [0, 1, 2, 3, 0, 1]


def test_stop_training_ends_after_the_batch() -> None:
    class Stop(Callback):
        @hookimpl
        def batch_end(self, state: Any) -> None:
            if state.progress.batch == 3:
                state.stop_training()

    trainer = make(Mlp(), [dataset(8).tensors] * 10, callbacks=Stop())
    trainer.fit()
    assert trainer.state.timestamp.batch == 3


def test_steps_can_be_driven_one_at_a_time() -> None:
    trainer = make(Mlp(), [dataset(8).tensors] * 3, max_duration="1ep")
    batches = [trainer.state.timestamp.batch for _ in trainer.steps()]
    assert batches == [1, 2, 3]
    assert trainer.state.timestamp.epoch == 1


def test_train_subset_cuts_every_epoch() -> None:
    trainer = make(Mlp(), [dataset(8).tensors] * 10, train_subset_num_batches=2)
    trainer.fit()
    assert (trainer.state.timestamp.batch, trainer.state.timestamp.epoch) == (4, 2)


# --- learning rates -------------------------------------------------------------------------------------------------


class Rates(Callback):
    def __init__(self) -> None:
        self.rates: list[float] = []

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        self.rates.append(state.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize("duration", ["10ba", "2ep", "80sp"])
def test_the_rate_for_batch_t_is_in_force_at_batch_t(duration: str) -> None:
    rates = Rates()
    schedule = CosineAnnealingWithWarmupScheduler(t_warmup="0.2dur", alpha_f=0.1)
    make(Mlp(), [dataset(8).tensors] * 5, max_duration=duration, schedulers=schedule, callbacks=rates).fit()
    expected = [0.1 * t / 2 for t in range(2)]
    expected += [0.1 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (t - 2) / 8))) for t in range(2, 10)]
    assert rates.rates == pytest.approx(expected, abs=1e-12)


def test_schedule_times_of_other_units_are_converted_or_refused() -> None:
    rates = Rates()
    schedule = CosineAnnealingWithWarmupScheduler(t_warmup="5ba")
    make(Mlp(), [dataset(8).tensors] * 5, max_duration="2ep", schedulers=schedule, callbacks=rates).fit()
    assert rates.rates[:6] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08, 0.1])
    schedule = CosineAnnealingWithWarmupScheduler(t_warmup="5tok")
    with pytest.raises(TimeStringError, match=r"schedule: 5tok cannot be compared with max_duration=2ep"):
        make(Mlp(), [dataset(8).tensors] * 5, schedulers=schedule).fit()


def test_torch_s_schedulers_are_stepped_by_epoch_or_by_batch() -> None:
    def run(by_batch: bool | None) -> list[float]:
        model, rates = Mlp(), Rates()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        make(
            model,
            [dataset(8).tensors] * 2,
            optimizers=optimizer,
            schedulers=scheduler,
            step_schedulers_every_batch=by_batch,
            callbacks=rates,
        ).fit()
        return rates.rates

    assert run(None) == run(False) == [1.0, 1.0, 0.5, 0.5]
    assert run(True) == [1.0, 0.5, 0.25, 0.125]


# --- optimizers that step otherwise ---------------------------------------------------------------------------------


def test_an_optimizer_that_evaluates_again_gets_fresh_gradients() -> None:
    """L-BFGS, against torch alone."""
    x, y = dataset(8).tensors
    by_hand = Mlp()
    by_hand.net[2].p = 0.0
    optimizer = torch.optim.LBFGS(by_hand.parameters(), lr=0.5, max_iter=4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = by_hand.loss(by_hand((x, y)), (x, y))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    model = Mlp()
    model.net[2].p = 0.0
    make(
        model, [(x, y)], optimizers=torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4), max_duration="3ba"
    ).fit()
    assert same(model, by_hand)


def test_several_optimizers_share_one_evaluation() -> None:
    x, y = dataset(8).tensors
    model, by_hand = Mlp(), Mlp()
    model.net[2].p = by_hand.net[2].p = 0.0
    optimizers = [torch.optim.SGD(model.net[0].parameters(), lr=0.1), torch.optim.Adam(model.net[3].parameters())]
    make(model, [(x, y)], optimizers=optimizers, max_duration="3ba").fit()
    ours = [torch.optim.SGD(by_hand.net[0].parameters(), lr=0.1), torch.optim.Adam(by_hand.net[3].parameters())]
    for _ in range(3):
        by_hand.zero_grad()
        by_hand.loss(by_hand((x, y)), (x, y)).backward()
        for optimizer in ours:
            optimizer.step()
    assert same(model, by_hand)


# --- evaluation -----------------------------------------------------------------------------------------------------


class Mean:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: torch.Tensor) -> None:
        self.total += float(value.sum())
        self.count += value.numel()

    def compute(self) -> float:
        return self.total / self.count


class Measured(Mlp):
    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {"first_input": Mean(), "other": Mean()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(batch[0][:, 0])


def test_evaluators_run_when_due_and_once_at_the_end() -> None:
    at: dict[str, list[int]] = {}

    class Watch(Callback):
        @hookimpl
        def eval_start(self, state: Any) -> None:
            assert not state.model.training
            assert not torch.is_grad_enabled()
            at.setdefault(state.dataloader_label, []).append(state.progress.batch)

    data = [dataset(8).tensors]
    evaluators = [
        Evaluator("batches", data, eval_interval="2ba"),
        Evaluator("samples", data, eval_interval="20sp"),
        Evaluator("epochs", data),
        Evaluator("share", data, eval_interval="0.5dur"),
        Evaluator("never", data, eval_interval=0),
    ]
    make(Measured(), [dataset(8).tensors] * 4, eval_dataloader=evaluators, max_duration="7ba", callbacks=Watch()).fit()
    assert at == {"batches": [2, 4, 6, 7], "samples": [3, 5, 7], "epochs": [4, 7], "share": [4, 7]}


def test_an_interval_in_iterations_fires_when_they_end() -> None:
    at = []

    class Watch(Callback):
        @hookimpl
        def eval_start(self, state: Any) -> None:
            at.append(state.progress.epoch)

    make(
        Measured(),
        [dataset(8).tensors],
        eval_dataloader=[dataset(8).tensors],
        eval_interval="1iter",
        iteration_length=2,
        max_duration="6ep",
        callbacks=Watch(),
    ).fit()
    assert at == [2, 4, 6]


def test_metrics_are_weighted_by_rows_and_chosen_by_name() -> None:
    x, y = dataset(10).tensors
    data = [(x[:7], y[:7]), (x[7:], y[7:])]
    trainer = make(Measured(), data, eval_dataloader=[Evaluator("test", data, metric_names=["FIRST"])])
    values = trainer.eval()
    assert values == {"test/first_input": pytest.approx(float(x[:, 0].mean()), abs=1e-6)}
    assert trainer.eval() == values  # nothing is left over from the first time
    assert trainer.state.model.training
    trainer.fit()
    assert trainer.state.train_metric_values["first_input"] == pytest.approx(float(x[:, 0].mean()), abs=1e-6)


def test_a_metric_name_that_fits_nothing_is_an_error() -> None:
    data = [dataset(8).tensors]
    with pytest.raises(
        TrainerError, match=r"evaluator test: no metric of the model matches 'accuracy'\. It has first_input"
    ):
        make(Measured(), data, eval_dataloader=Evaluator("test", data, metric_names=["accuracy"])).eval()


def test_predict_returns_outputs_of_every_batch() -> None:
    model = Mlp().eval()
    x, y = dataset(10).tensors
    outputs = make(model, None).predict(DataLoader(TensorDataset(x, y), batch_size=4))
    assert [len(part) for part in outputs] == [4, 4, 2]
    torch.testing.assert_close(torch.cat(outputs), model((x, y)).detach())
    assert not outputs[0].requires_grad
    assert make(model, None).predict([(x, y)], return_outputs=False) == []


# --- data -----------------------------------------------------------------------------------------------------------


def test_rows_may_change_after_they_were_counted() -> None:
    class Half(Algorithm):
        roles = {"selects-samples"}

        @hookimpl
        def after_dataloader(self, state: Any) -> None:
            state.batch = tuple(part[:3] for part in state.batch)

    x, y = dataset(8).tensors
    trainer = make(Mlp(), [(x, y)], algorithms=Half(), device_train_microbatch_size=2, max_duration="1ba")
    trainer.fit()
    assert trainer.state.timestamp.sample == 8
    assert len(trainer.state.batch[0]) == 3


def test_transforms_run_on_batch_and_microbatch() -> None:
    sizes = []

    class Watch(Callback):
        @hookimpl
        def before_forward(self, state: Any) -> None:
            sizes.append(len(state.batch[0]))

    x, y = dataset(8).tensors
    spec = DataSpec(
        [(x, y)],
        batch_transforms=lambda batch: tuple(part[:6] for part in batch),
        microbatch_transforms=lambda batch: tuple(part[:1] for part in batch),
    )
    trainer = make(Mlp(), spec, device_train_microbatch_size=3, max_duration="1ba", callbacks=Watch())
    trainer.fit()
    assert sizes == [1, 1]
    assert trainer.state.timestamp.sample == 6


def test_an_empty_loader_is_an_error_and_not_an_endless_loop() -> None:
    with pytest.raises(DataError, match="train_dataloader: it gave no batch in epoch 0"):
        make(Mlp(), [], max_duration="5ba").fit()
    once = iter([dataset(8).tensors])
    with pytest.raises(DataError, match="it gave no batch in epoch 1"):
        make(Mlp(), once, max_duration="5ba").fit()


def test_an_unsized_loader_trains_for_batches() -> None:
    class Endless:
        def __iter__(self) -> Any:
            while True:
                yield dataset(8).tensors

    trainer = make(Mlp(), Endless(), max_duration="5ba")
    trainer.fit()
    assert trainer.state.timestamp.batch == 5


def test_a_sampler_is_told_the_epoch() -> None:
    epochs = []

    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    data = dataset(8)
    make(Mlp(), DataLoader(data, batch_size=4, sampler=Sampler(data)), max_duration="3ep").fit()
    assert epochs == [0, 1, 2]
