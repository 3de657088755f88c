"""Learning rates read off real training, against tables by torch or in closed form."""

import inspect
import logging
import math
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import kernel_core.optim as optim
import pytest
import torch
from kernel_core import Callback, DataSpec, Time, TrainableModel, Trainer, hookimpl
from kernel_core.errors import OptionError, TimeStringError, TrainerError
from kernel_core.optim import (
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    Scheduler,
    StepScheduler,
)
from kernel_core.optim.schedule_shapes import progress_in_cycle
from kernel_core.optim.scheduling import (
    SCHEDULES,
    apply_schedules,
    bind_ratio,
    check_schedulers,
    constant,
    scale_torch_scheduler,
    split_schedules,
)
from kernel_core.registry.options import bind_options
from torch import nn
from torch.optim import lr_scheduler

ROWS, LENGTH, NUM_BATCHES = 8, 5, 20
PER_BATCH = {"ba": 1, "sp": ROWS, "tok": ROWS * 4}  # of the batches below
BATCHES = [{"input_ids": torch.ones(ROWS, 4, dtype=torch.long)}] * LENGTH
ALL = [value for value in vars(optim).values() if inspect.isclass(value) and issubclass(value, Scheduler)]
CLASSES = [value for value in ALL if value is not Scheduler]


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch["input_ids"].float())

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Rates(Callback):
    """Reads the rate at every moment of a batch; it must be one and the same."""

    def __init__(self) -> None:
        self.seen: list[set[float]] = []

    @property
    def rates(self) -> list[float]:
        assert all(len(moments) == 1 for moments in self.seen)
        return [moments.pop() for moments in map(set, self.seen)]

    def _read(self, state: Any) -> None:
        self.seen[-1].add(state.optimizers[0].param_groups[0]["lr"])

    @hookimpl
    def before_train_batch(self, state: Any) -> None:
        self.seen.append(set())
        self._read(state)

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self._read(state)

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        self._read(state)

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self._read(state)


def make(schedulers: Any, max_duration: str = "20ba", loader: Any = BATCHES, **kwargs: Any) -> tuple[Trainer, Rates]:
    model, rates = Line(), Rates()
    options = {"optimizers": torch.optim.SGD(model.parameters(), lr=1.0), "seed": 1, "device": "cpu"} | kwargs
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        max_duration=max_duration,
        schedulers=schedulers,
        callbacks=rates,
        progress_bar=False,
        **options,  # type: ignore[arg-type]
    )
    return trainer, rates


def trained_rates(schedulers: Any, max_duration: str = "20ba", loader: Any = BATCHES, **kwargs: Any) -> list[float]:
    trainer, rates = make(schedulers, max_duration, loader, **kwargs)
    trainer.fit()
    return rates.rates


def asked_rates(schedule: Any, max_duration: str, num_batches: int, ssr: float = 1.0) -> list[float]:
    """What the schedule answers before each batch of a run that is only counted."""
    state = make(None, max_duration)[0].state
    rates = []
    for batch in range(num_batches):
        rates.append(schedule(state, ssr))
        state.progress.finish_batch(ROWS, ROWS * 4, 0.0)
        if (batch + 1) % LENGTH == 0:
            state.progress.finish_epoch()
    return rates


def at(batches: int, unit: str) -> str:
    """The time after so many batches, in a unit."""
    if unit == "ep":
        return f"{batches // LENGTH}ep" if batches % LENGTH == 0 else f"{batches}ba"
    return f"{batches * PER_BATCH[unit]}{unit}"


def torch_rates(make_scheduler: Callable[[torch.optim.Optimizer], Any], num_batches: int = NUM_BATCHES) -> list[float]:
    """The rates of one of torch's schedulers, stepped by hand after every batch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(num_batches):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def table(formula: Callable[[int], float]) -> list[float]:
    return [formula(t) for t in range(NUM_BATCHES)]


def half_cosine(share: float, alpha_f: float) -> float:
    return alpha_f + (1 - alpha_f) * (1 + math.cos(math.pi * share)) / 2


CASES: dict[str, tuple[Callable[[str], Any], Callable[[], list[float]]]] = {
    "step": (
        lambda unit: StepScheduler(at(6, unit), gamma=0.5),
        lambda: torch_rates(lambda o: lr_scheduler.StepLR(o, 6, 0.5)),
    ),
    "multi_step": (
        lambda unit: MultiStepScheduler([at(3, unit), at(10, unit)], gamma=0.5),
        lambda: torch_rates(lambda o: lr_scheduler.MultiStepLR(o, [3, 10], 0.5)),
    ),
    "constant": (
        lambda unit: ConstantScheduler(0.3, at(10, unit)),
        lambda: torch_rates(lambda o: lr_scheduler.ConstantLR(o, 0.3, 10)),
    ),
    "linear": (
        lambda unit: LinearScheduler(0.2, 0.9, at(15, unit)),
        lambda: torch_rates(lambda o: lr_scheduler.LinearLR(o, 0.2, 0.9, 15)),
    ),
    "exponential": (
        lambda unit: ExponentialScheduler(0.5, at(5, unit)),
        lambda: torch_rates(lambda o: lr_scheduler.ExponentialLR(o, 0.5 ** (1 / 5))),
    ),
    "cosine_annealing": (
        lambda unit: CosineAnnealingScheduler(alpha_f=0.1),
        lambda: torch_rates(lambda o: lr_scheduler.CosineAnnealingLR(o, 20, 0.1)),
    ),
    "cosine_annealing_warm_restarts": (
        lambda unit: CosineAnnealingWarmRestartsScheduler(at(5, unit), t_mult=2, alpha_f=0.1),
        lambda: torch_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, 2, 0.1)),
    ),
    "polynomial": (
        lambda unit: PolynomialScheduler(power=3, t_max=at(20, unit)),
        lambda: torch_rates(lambda o: lr_scheduler.PolynomialLR(o, 20, 3)),
    ),
    "multi_step_with_warmup": (
        lambda unit: MultiStepWithWarmupScheduler(at(4, unit), [at(10, unit), "0.75dur"], gamma=0.5),
        lambda: table(lambda t: t / 4 if t < 4 else 1.0 if t < 10 else 0.5 if t < 15 else 0.25),
    ),
    "constant_with_warmup": (
        lambda unit: ConstantWithWarmupScheduler(at(4, unit), alpha=0.5, t_max=at(15, unit)),
        lambda: table(lambda t: 0.5 * t / 4 if t < 4 else 0.5 if t < 15 else 1.0),
    ),
    "linear_with_warmup": (
        lambda unit: LinearWithWarmupScheduler(at(4, unit), alpha_i=0.8, alpha_f=0.2),
        lambda: table(lambda t: 0.8 * t / 4 if t < 4 else 0.8 - 0.6 * (t - 4) / 16),
    ),
    "cosine_annealing_with_warmup": (
        lambda unit: CosineAnnealingWithWarmupScheduler(at(5, unit), alpha_f=0.1),
        lambda: table(lambda t: t / 5 if t < 5 else half_cosine((t - 5) / 15, 0.1)),
    ),
    "polynomial_with_warmup": (
        lambda unit: PolynomialWithWarmupScheduler("0.2dur", alpha_f=0.1, t_max=at(20, unit)),
        lambda: table(lambda t: t / 4 if t < 4 else 0.1 + 0.9 * ((20 - t) / 16) ** 2),
    ),
}


@pytest.mark.parametrize("unit", ["ep", "ba", "sp", "tok"])
@pytest.mark.parametrize("name", CASES)
def test_training_uses_for_batch_t_the_rate_of_the_table_at_t(name: str, unit: str) -> None:
    schedule, expected = CASES[name]
    assert trained_rates(schedule(unit), at(20, unit)) == pytest.approx(expected(), abs=1e-12)


def test_every_class_has_a_table_and_a_snake_case_name_for_configurations() -> None:
    assert len(CLASSES) == 13
    for cls in CLASSES:
        name = re.sub("(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Scheduler")).lower()
        assert name in CASES
        assert SCHEDULES[name] is cls
    assert {**SCHEDULES}.keys() - CASES.keys() == {"cosine_with_warmup"}


def test_arguments_and_defaults_are_composer_s() -> None:
    """As in Composer's reference; without a default, an argument stands alone."""
    expected = {
        StepScheduler: "step_size gamma=0.1",
        MultiStepScheduler: "milestones gamma=0.1",
        ConstantScheduler: "alpha=1.0 t_max=1dur",
        LinearScheduler: "alpha_i=1.0 alpha_f=0.0 t_max=1dur",
        ExponentialScheduler: "gamma decay_period=1ep",
        CosineAnnealingScheduler: "t_max=1dur alpha_f=0.0",
        CosineAnnealingWarmRestartsScheduler: "t_0 t_mult=1.0 alpha_f=0.0",
        PolynomialScheduler: "power t_max=1dur alpha_f=0.0",
        MultiStepWithWarmupScheduler: "t_warmup milestones gamma=0.1 scale_warmup=False",
        ConstantWithWarmupScheduler: "t_warmup alpha=1.0 t_max=1dur scale_warmup=False",
        LinearWithWarmupScheduler: "t_warmup alpha_i=1.0 alpha_f=0.0 t_max=1dur scale_warmup=False",
        CosineAnnealingWithWarmupScheduler: "t_warmup t_max=1dur alpha_f=0.0 scale_warmup=False",
        PolynomialWithWarmupScheduler: "t_warmup power=2.0 t_max=1dur alpha_f=0.0 scale_warmup=False",
    }
    for cls, arguments in expected.items():
        parameters = inspect.signature(cls).parameters.values()
        shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
        assert " ".join(shown) == arguments
    assert set(expected) == set(CLASSES)


def test_a_configuration_s_options_make_the_schedule() -> None:
    bound = bind_options(SCHEDULES["multi_step"], "scheduler", (), {"milestones": ["1ep", "2ep"], "gamma": 0.5})
    schedule = SCHEDULES["multi_step"](*bound.args, **bound.kwargs)
    assert trained_rates(schedule, "3ep") == [1.0] * 5 + [0.5] * 5 + [0.25] * 5
    with pytest.raises(OptionError, match=r"scheduler\.t_warmup: got 5, expected str"):
        bind_options(SCHEDULES["linear_with_warmup"], "scheduler", (), {"t_warmup": 5})


def test_cosine_with_warmup_by_name_needs_no_warmup(caplog: pytest.LogCaptureFixture) -> None:
    expected = table(lambda t: half_cosine(t / 20, 0.0))
    assert trained_rates(SCHEDULES["cosine_with_warmup"]()) == pytest.approx(expected)
    assert not caplog.records
    warm = table(lambda t: t / 4 if t < 4 else half_cosine((t - 4) / 16, 0.0))
    assert trained_rates(SCHEDULES["cosine_with_warmup"]("0.2dur")) == pytest.approx(warm)


def test_samples_and_tokens_are_those_of_each_batch() -> None:
    loader = [{"input_ids": torch.ones(rows, 4, dtype=torch.long)} for rows in (8, 8, 4)]
    seen = [0, 8, 16, 20, 28, 36]
    assert trained_rates(LinearScheduler(), "40sp", loader) == pytest.approx([1 - n / 40 for n in seen])
    pairs = [(batch["input_ids"],) for batch in loader]
    data = DataSpec([{"input_ids": rows.float()} for (rows,) in pairs], get_num_tokens_in_batch=lambda b: 2)
    assert trained_rates(LinearScheduler(t_max="8tok"), "10tok", data) == [1.0, 0.75, 0.5, 0.25, 0.0]


def test_units_other_than_that_of_the_run_are_read_off_their_own_counters() -> None:
    milestones = ["1ep", "8ba", "88sp", "512tok", "0.85dur"]  # after 5, 8, 11, 16 and 17 batches
    expected = table(lambda t: 0.5 ** sum(t >= n for n in (5, 8, 11, 16, 17)))
    assert trained_rates(MultiStepScheduler(milestones, 0.5), "4ep") == expected


def test_iterations_count() -> None:
    rates = trained_rates(StepScheduler("1iter", 0.5), "4ep", BATCHES[:2], iteration_length=2)
    assert rates == [1.0] * 4 + [0.5] * 4


def test_without_a_length_epochs_stay_epochs() -> None:
    class Unsized:
        def __iter__(self) -> Iterator[Any]:
            return iter(BATCHES[:2])

    assert trained_rates(StepScheduler("1ep", 0.5), "4ba", Unsized()) == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(TimeStringError, match=r"t_warmup and t_max in one unit, and they are in ba and ep"):
        trained_rates(LinearWithWarmupScheduler("1ba", t_max="2ep"), "4ba", Unsized())


def test_a_share_rounds_down_to_whole_units_and_a_hair_less_is_not_less() -> None:
    assert asked_rates(MultiStepScheduler(["0.29dur"], 0.5), "100ba", 30)[28:] == [1.0, 0.5]  # 0.29 * 100 < 29
    assert asked_rates(MultiStepScheduler(["0.1dur"], 0.5), "25ba", 4) == [1.0, 1.0, 0.5, 0.5]


def test_a_share_of_a_run_by_the_clock_is_measured_by_the_clock() -> None:
    state = make(None, "1h")[0].state
    schedule = LinearWithWarmupScheduler("0.25dur")
    for seconds, expected in ((0.0, 0.0), (450.0, 0.5), (900.0, 1.0), (2250.0, 0.5), (4000.0, 0.0)):
        state.progress.total_wct = seconds
        assert schedule(state) == pytest.approx(expected)


def test_the_schedule_ends_with_the_run_though_an_earlier_fit_used_another_loader() -> None:
    trainer, rates = make(LinearScheduler(), "1ep", BATCHES * 2)
    trainer.fit()
    trainer.fit(BATCHES, duration="1ep")
    assert rates.rates == pytest.approx([1 - t / 10 for t in range(10)] + [0.5 - t / 10 for t in range(5)])


def test_a_warmup_in_batches_goes_by_the_same_clock_as_the_end_in_epochs() -> None:
    trainer, rates = make(LinearWithWarmupScheduler("7ba"), "1ep", BATCHES * 2)
    trainer.fit()
    trainer.fit(BATCHES, duration="1ep")  # two epochs are now 10 batches, of which half are done
    assert rates.rates[10:] == pytest.approx([5 / 7, 6 / 7, 1.0, 2 / 3, 1 / 3])


def test_a_longer_run_stretches_its_shares_from_then_on() -> None:
    trainer, rates = make(LinearScheduler(), "5ba")
    trainer.fit()
    trainer.fit(duration="5ba")
    assert rates.rates == pytest.approx([1 - t / 5 for t in range(5)] + [1 - t / 10 for t in range(5, 10)])


def test_a_resolved_schedule_builds_no_time_and_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    state = make(None, "20ba")[0].state
    for name, (schedule, _) in CASES.items():
        used = schedule("ba")
        first = used(state)
        again = pickle.loads(pickle.dumps(used))
        with monkeypatch.context() as patch:
            patch.setattr(Time, "__init__", None)  # calling it would raise
            assert used(state) == first, name
        assert again(state) == first


def test_schedules_multiply_and_every_group_keeps_its_own_rate() -> None:
    one, two = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [one], "lr": 0.5}, {"params": [two]}], lr=2.0)
    state = make(None)[0].state
    state.optimizers = (optimizer,)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    state.progress.batch = 10
    apply_schedules(state, [LinearScheduler(), constant(0.5)])
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5]


# --- restarts -------------------------------------------------------------------------------------------------------


def test_cycles_of_equal_length_repeat() -> None:
    expected = torch_rates(lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 6, 1, 0.2))
    assert trained_rates(CosineAnnealingWarmRestartsScheduler("6ba", alpha_f=0.2)) == pytest.approx(expected)


def test_cycles_round_down_to_whole_units() -> None:
    """5 batches, then 7 (of 7.5), then 10 (of 10.5)."""
    shares = [progress_in_cycle(t, 5, 1.5) for t in (0, 4, 5, 11, 12, 21, 22)]
    assert shares == pytest.approx([0, 4 / 5, 0, 6 / 7, 0, 9 / 10, 0])
    assert progress_in_cycle(5.0 + 7.0, 5, 1.5, whole=False) == pytest.approx(7 / 7.5)
    assert progress_in_cycle(10**9, 1, 1.0) == 0.0  # no loop over the cycles


def test_cycles_that_shrink_are_refused() -> None:
    with pytest.raises(
        OptionError, match=r"CosineAnnealingWarmRestartsScheduler\.t_mult: got 0\.5\. Expected at least 1"
    ):
        CosineAnnealingWarmRestartsScheduler("5ba", t_mult=0.5)


# --- times that cannot be used --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_schedule", "name"),
    [
        (lambda time: StepScheduler(time), "StepScheduler.step_size"),
        (lambda time: MultiStepScheduler(["1ep", time]), "MultiStepScheduler.milestones"),
        (lambda time: ExponentialScheduler(0.5, time), "ExponentialScheduler.decay_period"),
        (lambda time: CosineAnnealingWarmRestartsScheduler(time), "CosineAnnealingWarmRestartsScheduler.t_0"),
        (lambda time: LinearWithWarmupScheduler(time), "LinearWithWarmupScheduler.t_warmup"),
        (lambda time: PolynomialScheduler(2, time), "PolynomialScheduler.t_max"),
    ],
)
def test_seconds_and_times_below_zero_are_refused_when_the_schedule_is_made(make_schedule: Any, name: str) -> None:
    with pytest.raises(TimeStringError, match=f"^{re.escape(name)}: got 1h30m, a wall clock, which no two runs share"):
        make_schedule("1h30m")
    with pytest.raises(TimeStringError, match=f"^{re.escape(name)}: got -1ba. Expected a time of at least 0"):
        make_schedule("-1ba")


def test_a_period_of_nothing_is_refused_when_the_run_begins() -> None:
    with pytest.raises(
        TimeStringError, match=r"StepScheduler\.step_size: 0\.01dur is 0ba in this run, at a scale_sched"
    ):
        trained_rates(StepScheduler("0.01dur"))
    with pytest.raises(
        TimeStringError, match=r"ExponentialScheduler\.decay_period: 1ba is 0ba .* of 0\.5\. Expected more"
    ):
        trained_rates(bind_ratio(ExponentialScheduler(0.5, "1ba"), 0.5))


def test_a_share_without_a_duration_is_refused() -> None:
    state = make(None, None)[0].state  # type: ignore[arg-type]
    assert StepScheduler("5ba")(state) == 1.0
    with pytest.raises(TimeStringError, match=r"schedule: 1\.0dur is a share of the run, and no max_duration is set"):
        LinearScheduler()(state)


WARMUP_DECAYS = [LinearWithWarmupScheduler, CosineAnnealingWithWarmupScheduler, PolynomialWithWarmupScheduler]


@pytest.mark.parametrize("cls", WARMUP_DECAYS)
def test_warmup_and_end_must_be_in_one_unit(cls: Any) -> None:
    with pytest.raises(
        TimeStringError, match=rf"schedule: 8sp cannot be compared with t_max=4ep\. {cls.__name__} needs"
    ):
        trained_rates(cls("8sp", t_max="4ep"))
    with pytest.raises(TimeStringError, match=r"schedule: 8sp cannot be compared with max_duration=20ba"):
        trained_rates(cls("8sp"))


@pytest.mark.parametrize("cls", WARMUP_DECAYS)
@pytest.mark.parametrize(
    ("t_max", "max_duration"), [("19ba", "20ba"), ("19ba", "4ep"), ("3ep", "20ba"), ("0.9dur", "4ep")]
)
def test_after_a_warmup_the_decay_must_last_as_long_as_the_run(cls: Any, t_max: str, max_duration: str) -> None:
    with pytest.raises(
        TrainerError, match=rf"{cls.__name__}\.t_max: {t_max} ends before max_duration={max_duration}, at "
    ):
        trained_rates(cls("1ba", t_max=t_max), max_duration)


def test_a_decay_may_last_longer_than_the_run() -> None:
    assert trained_rates(LinearWithWarmupScheduler("2ba", t_max="12ba"), "4ba") == [0.0, 0.5, 1.0, 0.9]


def test_a_warmup_as_long_as_the_run_only_climbs() -> None:
    assert trained_rates(CosineAnnealingWithWarmupScheduler("1dur"), "4ba") == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize("cls", [*WARMUP_DECAYS, ConstantWithWarmupScheduler, MultiStepWithWarmupScheduler])
def test_a_warmup_of_nothing_warns_once_and_begins_at_full_rate(cls: Any, caplog: pytest.LogCaptureFixture) -> None:
    schedule = cls("0.01dur", ["1dur"]) if cls is MultiStepWithWarmupScheduler else cls("0.01dur")
    trainer, rates = make(schedule, "5ba")
    with caplog.at_level(logging.WARNING, "kernel_core"):
        trainer.fit()
        trainer.fit(duration="5ba")  # resolved anew
    assert rates.rates[0] == 1.0
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        f"{cls.__name__}: t_warmup=0.01dur is 0ba in this run, so there is no warm-up. Use a longer time, or the schedule "
        "without one."
    ]


# --- the scale schedule ratio ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_ratio_stretches_the_whole_schedule(name: str) -> None:
    """Doubled, it has at batch 2t the rate that it had at batch t, warm-up included if that is scaled."""
    schedule = CASES[name][0]("ba")
    if hasattr(schedule, "scale_warmup"):
        schedule.scale_warmup = True
        if schedule.t_warmup.unit == "dur":
            schedule.t_warmup = Time(4, "ba")
    plain, doubled = asked_rates(schedule, "20ba", 20), asked_rates(schedule, "40ba", 40, 2.0)
    assert doubled[::2] == pytest.approx(plain)


def test_a_ratio_leaves_shares_alone() -> None:
    schedule = MultiStepScheduler(["0.5dur", "8ba"], 0.5)
    assert asked_rates(schedule, "10ba", 10, 0.5) == [1.0] * 4 + [0.5] + [0.25] * 5


def test_a_ratio_stretches_epochs_by_the_batch_and_rounds_down() -> None:
    assert asked_rates(MultiStepScheduler(["1ep"], 0.5), "20ba", 4, 0.5) == [1.0, 1.0, 0.5, 0.5]  # 2 of 2.5 batches


@pytest.mark.parametrize(("scale_warmup", "warmup"), [(True, 2), (False, 4)])
def test_the_ramp_and_its_end_use_the_same_warmup(scale_warmup: bool, warmup: int) -> None:
    for cls, after in (
        (LinearWithWarmupScheduler, lambda share: 1 - share),
        (CosineAnnealingWithWarmupScheduler, lambda share: half_cosine(share, 0.0)),
        (PolynomialWithWarmupScheduler, lambda share: (1 - share) ** 2),
        (ConstantWithWarmupScheduler, lambda share: 1.0),
    ):
        schedule = cls("4ba", scale_warmup=scale_warmup)
        expected = [t / warmup if t < warmup else after((t - warmup) / (10 - warmup)) for t in range(10)]
        assert asked_rates(schedule, "10ba", 10, 0.5) == pytest.approx(expected)
    steps = MultiStepWithWarmupScheduler("4ba", ["12ba"], 0.5, scale_warmup)
    expected = [t / warmup if t < warmup else 1.0 if t < 6 else 0.5 for t in range(10)]
    assert asked_rates(steps, "10ba", 10, 0.5) == pytest.approx(expected)


def test_the_end_of_a_decay_is_compared_with_the_scaled_run() -> None:
    schedule = LinearWithWarmupScheduler("1ba", t_max="15ba")
    assert asked_rates(schedule, "7ba", 7, 0.5)[-1] == pytest.approx(1 / 6)  # both 15 and the run become 7
    with pytest.raises(TrainerError, match=r"t_max: 15ba ends before max_duration=15ba, at 7 of 15ba"):
        asked_rates(schedule, "15ba", 1, 0.5)


def test_training_runs_on_a_bound_ratio() -> None:
    schedule = bind_ratio(LinearWithWarmupScheduler("4ba", t_max="20ba", scale_warmup=True), 0.5)
    expected = [t / 2 if t < 2 else 1 - (t - 2) / 8 for t in range(10)]
    assert trained_rates(schedule, "10ba") == pytest.approx(expected)


def test_the_trainer_s_ratio_shortens_run_and_schedule_together() -> None:
    schedule = LinearWithWarmupScheduler("4ba", t_max="20ba", scale_warmup=True)
    expected = [t / 2 if t < 2 else 1 - (t - 2) / 8 for t in range(10)]
    assert trained_rates(schedule, "20ba", scale_schedule_ratio=0.5) == pytest.approx(expected)


def test_a_schedule_of_one_s_own_takes_the_state_or_the_ratio_too() -> None:
    def alone(state: Any) -> float:
        return 0.5

    def composer(state: Any, ssr: float = 1.0) -> float:
        return ssr

    def required(state: Any, ratio: float) -> float:
        return ratio

    def keyword(state: Any, *, ssr: float) -> float:
        return ssr

    def option(state: Any, floor: float = 0.25) -> float:
        return floor

    schedules = [alone, composer, required, keyword, option]
    state: Any = SimpleNamespace()
    assert [bind_ratio(schedule)(state) for schedule in schedules] == [0.5, 1.0, 1.0, 1.0, 0.25]
    assert [bind_ratio(schedule, 0.5)(state) for schedule in (composer, required, keyword)] == [0.5, 0.5, 0.5]
    for schedule in (alone, option):
        with pytest.raises(TrainerError, match=r"scale_schedule_ratio: got 0\.5, and the schedule .* takes no ratio"):
            bind_ratio(schedule, 0.5)
    assert trained_rates([alone, composer, required], "2ba") == [0.5, 0.5]
    torch_ones, bound = split_schedules([composer, alone_scheduler(), required], 0.5)
    assert len(torch_ones) == 1
    assert [schedule(state) for schedule in bound] == [0.5, 0.5]


def alone_scheduler() -> Any:
    return lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 2)


def test_what_is_no_schedule_is_refused_at_start() -> None:
    with pytest.raises(
        TrainerError, match=r"schedulers: got <class .*LinearScheduler'>\. .*an instance, not its class"
    ):
        make(LinearScheduler)
    with pytest.raises(TrainerError, match=r"schedulers: got 0\.5\. Expected one of torch's, or a function"):
        make(0.5)
    with pytest.raises(TrainerError, match=r"takes \(a, b, c\)\. Expected \(state\) or \(state, ssr\)"):
        make(lambda a, b, c: 1.0)
    with pytest.raises(TrainerError, match=r"takes no ratio"):
        check_schedulers([lambda state: 1.0], 0.5)


@pytest.mark.parametrize("ssr", [0, -1.0, math.inf, math.nan, True, "2"])
def test_a_ratio_must_be_above_zero(ssr: Any) -> None:
    for function in (bind_ratio, scale_torch_scheduler):
        with pytest.raises(TrainerError, match=r"scale_schedule_ratio: got .*\. Expected a number above 0"):
            function(alone_scheduler() if function is scale_torch_scheduler else constant(), ssr)


# --- torch's schedulers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make_scheduler", "stretched"),
    [
        (lambda o: lr_scheduler.StepLR(o, 5, 0.5), lambda o: lr_scheduler.StepLR(o, 7, 0.5)),
        (lambda o: lr_scheduler.MultiStepLR(o, [3, 7], 0.5), lambda o: lr_scheduler.MultiStepLR(o, [4, 10], 0.5)),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 13, 0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 19, 0.1)),
        (
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2, 0.1),
            lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2, 0.1),
        ),
        (lambda o: lr_scheduler.ExponentialLR(o, 0.8), lambda o: lr_scheduler.ExponentialLR(o, 0.8 ** (2 / 3))),
    ],
)
def test_torch_s_schedulers_are_stretched_to_what_they_would_have_been_made_with(
    make_scheduler: Any, stretched: Any
) -> None:
    def scaled(optimizer: torch.optim.Optimizer) -> Any:
        scheduler = make_scheduler(optimizer)
        scale_torch_scheduler(scheduler, 1.5)
        return scheduler

    assert torch_rates(scaled) == pytest.approx(torch_rates(stretched))


def test_milestones_that_fall_together_both_count() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [2, 3, 8], 0.1)
    scale_torch_scheduler(scheduler, 0.5)
    assert scheduler.milestones == Counter({1: 2, 4: 1})


def test_torch_s_schedulers_without_a_rule_or_left_with_nothing_are_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    other = lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    scale_torch_scheduler(other, 1.0)
    with pytest.raises(TrainerError, match=r"got 2\.0, and there is no rule for stretching LambdaLR\. Expected StepLR"):
        scale_torch_scheduler(other, 2.0)
    with pytest.raises(TrainerError, match=r"scale_schedule_ratio: 0\.1 makes StepLR\.step_size=2 nothing"):
        scale_torch_scheduler(alone_scheduler(), 0.1)


@pytest.mark.parametrize("by_batch", [False, True])
def test_torch_s_schedulers_step_by_epoch_or_by_batch(by_batch: bool) -> None:
    made: list[tuple[Callable[[Any], Any], Callable[[int], float]]] = [
        (lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 3), lambda n: 0.2 + 0.8 * min(n, 3) / 3),
        (lambda o: lr_scheduler.StepLR(o, 2, 0.5), lambda n: 0.5 ** (n // 2)),
    ]
    for make_scheduler, formula in made:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rates = Rates()
        Trainer(
            model=model,
            train_dataloader=BATCHES,
            max_duration="20ba",
            optimizers=optimizer,
            schedulers=make_scheduler(optimizer),
            step_schedulers_every_batch=by_batch,
            callbacks=rates,
            device="cpu",
            progress_bar=False,
        ).fit()
        expected = table(lambda t, formula=formula: formula(t if by_batch else t // LENGTH))  # type: ignore[misc]
        assert rates.rates == pytest.approx(expected, abs=1e-12)
