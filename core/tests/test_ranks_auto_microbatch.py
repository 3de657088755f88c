"""``device_train_microbatch_size="auto"`` on several ranks: memory that runs out on any of them makes all take less."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, TrainableModel, Trainer, hookimpl
from kernel_core.errors import EXIT_START_AGAIN, KernelError, StartAgain
from kernel_core.testing.ranks import RankFailed, run_on_ranks
from torch import Tensor, nn

ROWS, FITS = 8, 3
ALL, ONE = (0, 1, 2, 3), (1,)
RETRIED = ("forward", "loss", "backward", "before_train_batch", "before_forward", "before_backward", "after_backward")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a test.")


class Net(TrainableModel):
    """Runs out of memory in one phase where there are too many rows; counts the rows it saw in a buffer."""

    def __init__(self, where: str, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.where, self.fits = where, fits

    def _fail(self, where: str, rows: int) -> None:
        if self.where == where and rows > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a test.")

    def forward(self, batch: Any) -> Tensor:
        rows = len(batch[0])
        self.seen += rows
        hidden = self.blocks[0](batch[0]).tanh()
        self._fail("forward", rows)
        if self.where == "backward" and rows > self.fits:
            hidden = FailsInBackward.apply(hidden)
        return self.blocks[1](hidden)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        self._fail("loss", len(outputs))
        return nn.functional.mse_loss(outputs, batch[0].flip(1))


class Fails(Algorithm):
    """Runs out of memory in a hook, and counts the tries of each batch."""

    def __init__(self) -> None:  # without options, which all ranks must have alike
        self.where, self.fits = "", 0
        self.tries: list[int] = []

    def _fail(self, hook: str, state: Any, rows: int) -> None:
        if self.where == hook and rows > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a test.")

    @hookimpl
    def batch_start(self, state: Any) -> None:
        self.tries.append(0)

    @hookimpl
    def before_train_batch(self, state: Any) -> None:
        self.tries[-1] += 1
        self._fail("before_train_batch", state, state.device_train_microbatch_size or ROWS)

    @hookimpl
    def before_forward(self, state: Any) -> None:
        self._fail("before_forward", state, len(state.batch[0]))

    @hookimpl
    def before_backward(self, state: Any) -> None:
        self._fail("before_backward", state, len(state.batch[0]))

    @hookimpl
    def after_backward(self, state: Any) -> None:
        self._fail("after_backward", state, len(state.batch[0]))

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        self._fail("after_train_batch", state, state.device_train_microbatch_size or ROWS)


def batches(sizes: list[int]) -> list[Any]:
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return [(torch.randn(rows, 4, generator=generator, dtype=torch.float64),) for rows in sizes]


def run(
    engine: str,
    size: Any,
    where: str = "",
    on: Any = ALL,
    fits: int = FITS,
    sizes: tuple[int, ...] = (ROWS, ROWS, 5, ROWS),
) -> dict[str, Any]:
    """Train; memory runs out in ``where`` on the ranks ``on``."""
    where = where if int(os.environ["RANK"]) in on else ""
    model, fails = Net(where, fits), Fails()
    fails.where, fails.fits = where, fits
    with Trainer(
        model=model,
        train_dataloader=batches(list(sizes)),
        max_duration="2ep",
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05),
        algorithms=fails,
        device_train_microbatch_size=size,
        parallelism=engine,
        seed=0,
        device="cpu",
        progress_bar=False,
        dist_timeout=60,
    ) as trainer:
        state, outcome, code = trainer.state, "done", 0
        begun = state.device_train_microbatch_size
        try:
            trainer.fit()
        except KernelError as error:
            outcome, code = f"{type(error).__name__}: {error}", error.exit_code
        weights = {} if code else state.engine.model_state(state.model, full=True)
    return {
        "outcome": outcome,
        "code": code,
        "begun": begun,
        "size": state.device_train_microbatch_size,
        "tries": fails.tries,
        "weights": {name: value.tolist() for name, value in weights.items()},
    }


def tries(fully: bool) -> dict[str, Any]:
    """Try again in place, where passes wait for nobody."""
    forced = {"ddp": {"sync_strategy": "forced_sync"}}
    wheres = RETRIED if fully else ("forward", "backward", "before_train_batch")
    found: dict[str, Any] = {"plain": run("ddp", None)}  # type: ignore[dict-item]
    for where in wheres:
        found[f"{where} on all"] = run("ddp", "auto", where)
        found[f"{where} on one"] = run("ddp", "auto", where, ONE)
    found["forced"] = run(forced, "auto", "backward", ONE)  # type: ignore[arg-type]
    growing = (2, 4, ROWS, 5)
    found["plain, growing"] = run("ddp", None, sizes=growing)
    found["growing"] = run("ddp", "auto", "forward", ONE, sizes=growing)
    found["nothing fits"] = run("ddp", "auto", "forward", ONE, fits=0)
    return found


def starts_again(folder: str) -> dict[str, Any]:
    """Run out of memory on all ranks where none can try again, then start again with what was written down."""
    found: dict[str, Any] = {}
    cases = {"fsdp": ("fsdp", "forward"), "ddp_multi": ({"ddp": {"sync_strategy": "multi_auto_sync"}}, "backward")}
    cases["ddp outside"] = ("ddp", "after_train_batch")
    for name, (engine, where) in cases.items():
        plain = run(engine, None)  # type: ignore[arg-type]
        starts = []
        os.environ["KERNEL_REPORT_DIR"] = f"{folder}/{name}"
        while len(starts) < 5:
            starts.append(run(engine, "auto", where))  # type: ignore[arg-type]
            if not starts[-1]["code"]:
                break
            os.environ["KERNEL_MICROBATCH_SIZE"] = (Path(folder) / name / "microbatch_size").read_text()
        for variable in ("KERNEL_REPORT_DIR", "KERNEL_MICROBATCH_SIZE"):
            os.environ.pop(variable, None)
        found[name] = {"plain": plain, "starts": starts}
    return found


def on_ranks(folder: str, fully: bool) -> dict[str, Any]:
    return {**tries(fully), "starts again": starts_again(folder)}


def one_fails(folder: str, engine: str, where: str) -> None:
    """Run out of memory on rank 1 alone; what comes of it is left in a file, since nobody can wait for rank 0."""
    os.environ["KERNEL_REPORT_DIR"] = folder
    found = run(engine, "auto", where, ONE)
    (Path(folder) / f"outcome.{os.environ['RANK']}").write_text(json.dumps(found))


def check_weights(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, value in expected.items():
        left, right = torch.tensor(found[name]), torch.tensor(value)
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12, msg=f"{what}: {name}")


def check(world_size: int, folder: Path, fully: bool) -> None:
    results = run_on_ranks(world_size, __file__, "on_ranks", str(folder), fully, timeout_s=240)
    for name, first in results[0].items():
        if name in ("plain", "plain, growing", "nothing fits", "starts again"):
            continue
        for found in (result[name] for result in results):
            assert (found["outcome"], found["size"]) == ("done", 2), name
            assert found["tries"] == results[0][name]["tries"], name
            assert max(found["tries"]) <= math.log2(ROWS) + 1, name
            failed = 1 if name == "growing" else 2  # 4; 8 and 4
            assert sum(found["tries"]) == len(found["tries"]) + failed, name
        plain = results[0]["plain, growing" if name == "growing" else "plain"]
        check_weights(first["weights"], plain["weights"], name)
    assert results[0]["growing"]["tries"][:3] == [1, 2, 1]  # 2 fit, 4 do not, and then 8 in microbatches of 2 do

    for result in results:
        assert "runs out of memory with a single row" in result["nothing fits"]["outcome"]
        for name, found in result["starts again"].items():
            *failed, last = found["starts"]
            assert [one["code"] for one in failed] == [EXIT_START_AGAIN] * 2, name
            assert [one["begun"] for one in found["starts"]] == [None, 4, 2], name
            assert "kernel launch starts again with 4" in failed[0]["outcome"], name
            assert (last["outcome"], last["size"]) == ("done", 2), name
    for name, found in results[0]["starts again"].items():
        check_weights(found["starts"][-1]["weights"], found["plain"]["weights"], name)


@pytest.mark.ranks
def test_two_ranks_find_one_size_and_train_as_without_it(tmp_path: Path) -> None:
    check(2, tmp_path, fully=False)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_find_one_size_wherever_memory_runs_out(world_size: int, tmp_path: Path) -> None:
    check(world_size, tmp_path, fully=True)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "where"), [("fsdp", "forward"), ("fsdp", "backward"), ("ddp", "after_train_batch")])
def test_a_rank_that_cannot_try_again_leaves_the_size_for_the_next_start(
    engine: str, where: str, tmp_path: Path
) -> None:
    with pytest.raises(RankFailed):  # rank 0 waits for rank 1, which has gone
        run_on_ranks(2, __file__, "one_fails", str(tmp_path), engine, where)
    found = json.loads((tmp_path / "outcome.1").read_text())
    assert found["code"] == EXIT_START_AGAIN == StartAgain.exit_code
    assert (tmp_path / "microbatch_size").read_text() == "4"
