"""The table adds up, and charges each part with its own time."""

from typing import Any

import kernel_plugin_timeline
import pytest
import torch
from kernel_core import Algorithm, TrainableModel, Trainer, hookimpl
from kernel_plugin_timeline import Clock, Timeline, timeline_table
from torch import nn


class FakeTime:
    """A clock that moves only where a test says so: real ones depend on what else the machine does."""

    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture(autouse=True)
def clockwork(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    monkeypatch.setattr(FakeTime, "seconds", 0.0)
    fake = FakeTime()
    monkeypatch.setattr(kernel_plugin_timeline, "time", fake)
    return fake


def wait(seconds: float) -> None:
    FakeTime.seconds += seconds


class Slow(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)

    def forward(self, batch: Any) -> Any:
        wait(0.004)
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        wait(0.002)
        return outputs.square().mean()


class Sluggish(Algorithm):
    @hookimpl
    def after_train_batch(self) -> None:
        wait(0.003)


def loader() -> Any:
    for _ in range(20):
        wait(0.001)
        yield torch.ones(4, 2)


class Loader:
    def __iter__(self) -> Any:
        return loader()

    def __len__(self) -> int:
        return 20


def fit(*plugins: Any) -> tuple[Any, float]:
    model = Slow()
    trainer = Trainer(
        model=model,
        train_dataloader=Loader(),
        eval_dataloader=[torch.ones(4, 2)] * 5,
        max_duration="1ep",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=plugins,
        device="cpu",
        progress_bar=False,
    )
    started = FakeTime.seconds
    trainer.fit()
    return trainer, FakeTime.seconds - started


def test_each_part_is_charged_with_its_own_time_and_the_whole_is_wall_time(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = Timeline()
    _, wall = fit(timeline, Sluggish())
    seconds = timeline.clock.seconds
    expected = {"data": 0.02, "forward": 0.08, "loss": 0.04, "sluggish.after_train_batch": 0.06, "evaluation": 0.02}
    for part, taken in seconds.items():  # step, too, is charged with nothing of what runs inside it
        assert taken == pytest.approx(expected.get(part, 0.0), abs=1e-9), part
    assert timeline.clock.calls["forward"] == 20
    rows = [line.split() for line in capsys.readouterr().err.splitlines() if line.strip()][1:]
    total = float(rows[-1][1])
    assert rows[-1][0] == "total"
    assert sum(float(row[1]) for row in rows[:-1]) == pytest.approx(total, abs=1e-9)
    assert total == pytest.approx(wall, rel=0.02)


def test_nested_parts_are_not_counted_twice() -> None:
    clock = Clock()
    inner = clock.around("inner", lambda: wait(0.01))

    def outer() -> None:
        inner()
        wait(0.005)
        inner()

    clock.around("outer", outer)()
    assert clock.seconds["inner"] == pytest.approx(0.02)
    assert clock.seconds["outer"] == pytest.approx(0.005)
    assert clock.calls == {"inner": 2, "outer": 1}


def test_results_arguments_and_exceptions_pass_unchanged() -> None:
    clock = Clock()
    assert clock.around("a", lambda x, *, y: (x, y))(1, y=2) == (1, 2)

    def broken() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        clock.around("b", broken)()
    assert clock.calls["b"] == 1


def test_training_is_bit_equal_with_and_without() -> None:
    torch.manual_seed(0)
    with_it, _ = fit(Timeline())
    torch.manual_seed(0)
    without, _ = fit()
    for one, other in zip(with_it.state.model.parameters(), without.state.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_table_has_a_row_for_what_is_left() -> None:
    rows = timeline_table({"forward": 3.0, "idle": 0.0}, {"forward": 2, "idle": 0}, 4.0)
    assert rows == [
        ("forward", "3.000", "75.0 %", "2", "1500000.0"),
        ("loop", "1.000", "25.0 %", "", ""),
        ("total", "4.000", "100.0 %", "", ""),
    ]
