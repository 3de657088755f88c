"""Epochs and runs end on all ranks with the same batch, whichever rank has no data left or wants to stop."""

import logging
import math
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_core import Callback, DataSpec, TrainableModel, Trainer, hookimpl
from kernel_core.errors import DataError, Interrupted
from kernel_core.testing.ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, RATE, ENGINES = 3, 0.1, ("ddp", "fsdp")
SIZES = [2, 1, 3, 2, 1, 2]  # rows of the batches of a rank


class Net(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])
        self.double()

    def forward(self, batch: Any) -> Tensor:
        return self.blocks[1](self.blocks[0](batch[0]).tanh())  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.mse_loss(outputs, batch[0].flip(1))


def batches_of(rank: int, number: int) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64),) for rows in SIZES[:number]]


class Stream:
    """Has no length, and can be read anew."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Events(Callback):
    """Does something on one rank at one hook of one batch, and counts what happens."""

    def __init__(self, rank: int = -1, hook: str = "", batch: int = 0, action: str = "", sleep_s: float = 0.0) -> None:
        self.mine = rank == int(os.environ["RANK"])
        self.hook, self.batch, self.action, self.sleep_s = hook, batch, action, sleep_s if self.mine else 0.0
        self.epochs = self.fit_ended = 0

    def _act(self, hook: str, state: Any) -> None:
        if not (self.mine and hook == self.hook and state.progress.batch == self.batch):
            return
        self.mine = False  # once: a second signal would not wait for the end of the batch
        if self.action == "stop":
            state.stop_training()
        else:
            os.kill(os.getpid(), signal.Signals[self.action])

    @hookimpl
    def batch_start(self, state: Any) -> None:
        self._act("batch_start", state)
        time.sleep(self.sleep_s)

    @hookimpl
    def batch_end(self, state: Any) -> None:
        self._act("batch_end", state)

    @hookimpl
    def epoch_end(self, state: Any) -> None:
        self.epochs += 1
        self._act("epoch_end", state)

    @hookimpl
    def eval_batch_end(self, state: Any) -> None:
        self._act("eval_batch_end", state)

    @hookimpl
    def fit_end(self, state: Any) -> None:
        self.fit_ended += 1


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit(engine: str, loader: Any, events: Events, duration: str = "2ep", **more: Any) -> dict[str, Any]:
    """Train, and return where it ended and with which weights."""
    model, messages, outcome = Net(), Messages(), "done"
    logging.getLogger("kernel_core").addHandler(messages)
    with Trainer(
        model=model,
        train_dataloader=loader,
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=RATE),
        callbacks=events,
        parallelism=engine,
        seed=0,
        device="cpu",
        progress_bar=False,
        dist_timeout=60,
        **more,
    ) as trainer:
        try:
            trainer.fit()
        except Interrupted as end:
            outcome = f"interrupted {end.signal}"
        except DataError as error:
            outcome = str(error)
        state = trainer.state
        weights = state.engine.model_state(state.model, full=True)
    logging.getLogger("kernel_core").removeHandler(messages)
    return {
        "outcome": outcome,
        "batch": state.progress.batch,
        "sample": state.progress.sample,
        "epochs": events.epochs,
        "fit_end": events.fit_ended,
        "weights": {name: value.tolist() for name, value in weights.items()},
        "said": messages.lines,
    }


def uneven(lengths: list[int], known: bool) -> Any:
    rank = int(os.environ["RANK"])
    batches = batches_of(rank, lengths[rank])
    return batches if known else DataSpec(Stream(batches), num_samples=100)


def one_sample() -> Any:
    return DataLoader(TensorDataset(batches_of(0, 1)[0][0][:1]), 2)


def stops(engine: str) -> dict[str, Any]:
    def run(duration: str = "2ep", **what: Any) -> dict[str, Any]:
        evaluates = {"eval_dataloader": batches_of(0, 4), "eval_interval": "1ba"} if "eval" in what["hook"] else {}
        return fit(engine, batches_of(int(os.environ["RANK"]), 4), Events(1, **what), duration, **evaluates)

    return {
        "stop": run(hook="batch_end", batch=2, action="stop"),
        "stop before the step": run(hook="batch_start", batch=1, action="stop"),
        "stop at the end of an epoch": run(hook="epoch_end", batch=4, action="stop"),
        "SIGTERM": run(hook="batch_end", batch=2, action="SIGTERM"),
        "SIGINT": run(hook="batch_start", batch=1, action="SIGINT"),
        "SIGTERM in evaluation": run(hook="eval_batch_end", batch=2, action="SIGTERM"),
        "seconds": run("1s", hook="none", sleep_s=0.05),
    }


def on_ranks(lengths: list[list[int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for engine in ENGINES:
        loaders = {
            f"{engine} {'known' if known else 'unknown'} {some}": fit(engine, uneven(some, known), Events())
            for some in lengths
            for known in (True, False)
        }
        found |= {
            **loaders,
            f"{engine} stops": stops(engine),
            f"{engine} one sample": fit(engine, one_sample(), Events()),
        }
    return found


def weights_after(lengths: list[int], epochs: int) -> dict[str, Any]:
    """Train by hand: each step on what all ranks that have a batch hold together."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    steps = min(min(lengths) + 1, max(lengths))
    ranks = [batches_of(rank, length) for rank, length in enumerate(lengths)]
    for _ in range(epochs):
        for index in range(steps):
            rows = (torch.cat([batches[index][0] for batches in ranks if index < len(batches)]),)
            optimizer.zero_grad()
            model.loss(model(rows), rows).backward()
            optimizer.step()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def check_weights(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-12, atol=1e-14, msg=what)


def check_loaders(results: list[dict[str, Any]], lengths: list[list[int]]) -> None:
    for engine in ENGINES:
        for some in lengths:
            for known in (True, False):
                what = f"{engine} {'known' if known else 'unknown'} {some}"
                found = [result[what] for result in results]
                if min(some) == 0:
                    assert all(
                        "1 of " in one["outcome"] and "got no batch at all" in one["outcome"] for one in found
                    ), what
                    assert all(one["batch"] == 0 for one in found), what
                    continue
                steps = min(min(some) + 1, max(some))
                samples = sum(sum(SIZES[: min(length, steps)]) for length in some)
                for one in found:
                    assert one["outcome"] == "done", what
                    assert (one["batch"], one["sample"], one["epochs"]) == (2 * steps, 2 * samples, 2), what
                check_weights(found[0]["weights"], weights_after(some, 2), what)
                left = sum(max(0, length - steps) for length in some)
                said = [line for line in found[0]["said"] if "left out" in line]
                if min(some) == max(some):
                    assert not said, what
                elif known:
                    assert f"{left} batches of the others are left out" in said[0], what
                else:
                    assert f"1 of {len(some)} ranks had no batch left after {min(some)}" in said[0], what
        rows = batches_of(0, 1)[0][0][:1]
        model = Net()
        for _ in range(2):
            model.zero_grad()
            model.loss(model((rows,)), (rows,)).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= RATE * parameter.grad
        found_of_one = results[0][f"{engine} one sample"]
        check_weights(found_of_one["weights"], {name: v.tolist() for name, v in model.state_dict().items()}, engine)
        assert found_of_one["sample"] == 2


def check_stops(results: list[dict[str, Any]]) -> None:
    for engine in ENGINES:
        ends = {
            "stop": ("done", 3, 1),  # told with the facts of batch 3
            "stop before the step": ("done", 2, 1),
            "stop at the end of an epoch": ("done", 4, 1),
            "SIGTERM": (f"interrupted {int(signal.SIGTERM)}", 3, 0),
            "SIGINT": (f"interrupted {int(signal.SIGINT)}", 2, 0),
            "SIGTERM in evaluation": (f"interrupted {int(signal.SIGTERM)}", 2, 0),
        }
        for result in results:
            for name, end in ends.items():
                found = result[f"{engine} stops"][name]
                assert (found["outcome"], found["batch"], found["fit_end"]) == end, f"{engine}: {name}"
        by_time = [result[f"{engine} stops"]["seconds"] for result in results]
        assert len({one["batch"] for one in by_time}) == 1, engine
        assert 2 <= by_time[0]["batch"] <= math.ceil(len(results) / 0.05) + 1  # the mean over the ranks


LENGTHS = [[3, 6], [4, 2], [3, 3], [0, 2]]


@pytest.mark.ranks
def test_two_ranks_end_epochs_and_runs_together() -> None:
    results = run_on_ranks(2, __file__, "on_ranks", LENGTHS)
    check_loaders(results, LENGTHS)
    check_stops(results)


@pytest.mark.ranks
@pytest.mark.slow
def test_four_ranks_end_epochs_and_runs_together() -> None:
    lengths = [[3, 5, 4, 6], [2, 2, 2, 2], [5, 0, 2, 3]]
    results = run_on_ranks(4, __file__, "on_ranks", lengths, timeout_s=300)
    check_loaders(results, lengths)
    check_stops(results)
