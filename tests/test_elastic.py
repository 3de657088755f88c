"""A run that goes on on another number of ranks is the run that stayed on one number: same samples, same weights to rounding.

In float64, without dropout and batch norm; the noise of the data set belongs to the sample, so it may be there.
"""

import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from resume_runs import server

pytestmark = pytest.mark.ranks
slow = pytest.mark.slow
LAST = 14
CASE: dict[str, Any] = {
    "dtype": "float64",
    "dropout": 0.0,
    "batch": 12,
    "num_samples": 58,  # the last batch of an epoch has 10: ranks have different numbers, or as many
    "duration": f"{LAST}ba",
    "noise": True,
    "scheduler": "cosine",
    "optimizer": "two",
    "evaluate": "4ba",
}
Leg = tuple[int, str | None, int]  # ranks, engine, the batch after which the run moves on


def run_legs(legs: list[Leg], folder: Path, case: dict[str, Any]) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Return what was read in each batch by all ranks together, the last numbers, and the metrics of epochs and evaluations."""
    read: list[Any] = []
    told: list[Any] = []
    numbers: dict[str, Any] = {}
    load = None
    for world_size, engine, last in legs:
        one = {**case, "parallelism": engine, "stop_at": last if last < LAST else 0}
        name = f"batch_checkpoint-{last}"
        ranks = server().run(
            world_size,
            "run",
            case=one,
            folder=str(folder),
            load=load,
            keep=[name],
            numbers=True,
            init=world_size if load else 0,
        )
        logs = [rank["log"][: rank["marks"][name]] if last < LAST else rank["log"] for rank in ranks]
        reads = [[note[1] for note in log if note[0] == "read"] for log in logs]
        read += [list(chain(*parts)) for parts in zip(*reads, strict=True)]
        told += [note[1:] for note in logs[0] if note[0] in ("epoch_end", "eval_end", "iteration_end")]
        numbers, load = ranks[0]["numbers"], name
    return read, numbers, told


def check_elastic(legs: list[Leg], folder: Path, case: dict[str, Any], fixed: Leg = (1, None, LAST)) -> None:
    expected_read, expected, expected_told = run_legs([fixed], folder / "fixed", case)
    read, numbers, told = run_legs(legs, folder / "moved", case)
    assert len(read) == LAST
    assert read == expected_read
    assert sorted(chain(*read[:5])) == list(range(58))
    assert numbers.keys() == expected.keys()
    assert any(name.startswith("optimizer 1") for name in numbers)
    for name, values in numbers.items():
        found, wanted = torch.tensor(values, dtype=torch.float64), torch.tensor(expected[name], dtype=torch.float64)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
    assert told == expected_told  # counts of right answers, put together over the ranks


def test_a_run_goes_through_one_three_two_and_four_ranks(tmp_path: Path) -> None:
    check_elastic([(1, None, 3), (3, "ddp", 6), (2, "ddp", 11), (4, "ddp", LAST)], tmp_path, CASE)


CHAINS: dict[str, list[Leg]] = {
    "sharded": [(1, None, 3), (3, "fsdp", 6), (2, "fsdp", 11), (4, "fsdp", LAST)],
    "other engines each time": [(4, "fsdp", 2), (2, "ddp", 5), (3, "fsdp", 7), (1, None, 10), (4, "ddp", LAST)],
    "at the last batch of an epoch": [(2, "ddp", 5), (3, "ddp", 10), (1, None, LAST)],
    "more ranks than the last batch has samples": [(2, "ddp", 3), (12, "ddp", 6), (2, "ddp", LAST)],
}


@slow
@pytest.mark.parametrize("variant", ["", "workers and microbatches", "the worlds of one number"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_goes_through_many_numbers_of_ranks(name: str, variant: str, tmp_path: Path) -> None:
    case = {**CASE, "workers": 2, "micro": 1} if variant.startswith("workers") else CASE
    fixed: Leg = (4, "ddp", LAST) if variant.startswith("the") else (1, None, LAST)
    check_elastic(CHAINS[name], tmp_path, case, fixed)


@pytest.mark.parametrize("world_size", [5])
def test_a_number_of_ranks_that_does_not_divide_the_global_batch_is_refused_before_the_first_step(
    world_size: int, tmp_path: Path
) -> None:
    name = "batch_checkpoint-3"
    server().run(1, "run", case=CASE, folder=str(tmp_path), keep=[name])
    case = {**CASE, "parallelism": "ddp", "batch": 15}
    for one in server().start(world_size, "run", case=case, folder=str(tmp_path), load=name):
        assert one.code == 1
        assert f"a global batch of 12 samples cannot be shared by {world_size} ranks" in one.output


def test_a_stream_with_a_place_of_its_own_needs_as_many_ranks(tmp_path: Path) -> None:
    name = "batch_checkpoint-3"
    case = {**CASE, "order": "stream", "evaluate": None}
    server().run(2, "run", case={**case, "parallelism": "ddp"}, folder=str(tmp_path), keep=[name])
    (one,) = server().start(1, "run", case=case, folder=str(tmp_path), load=name)
    assert one.code == 1
    assert "2 ranks saved a place of their own in it, and the run has 1" in one.output
