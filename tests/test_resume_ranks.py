"""What holds for one process holds for several, under every engine; and a signal on any of them ends all in order."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from resume_runs import check_resumed, check_started_again, differences, differs, server

pytestmark = pytest.mark.ranks
slow = pytest.mark.slow
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"noise": True, "evaluate": "4ba", "duration": "14ba"},
    "resnet": {"model": "resnet", "scheduler": "cosine"},
    "gpt2": {"model": "gpt2", "dropout": 0.1},
}
TENSOR = {"tensor_parallel": {"degree": 2, "plan": {"module.up": "colwise", "module.down": "rowwise"}}}
QUICK = [
    ("mlp", "ddp", 1, 2),
    ("mlp", "fsdp", None, 0),
    ("resnet", "ddp", None, 0),
    ("resnet", "fsdp", 1, 2),
    ("gpt2", "ddp", None, 2),
    ("gpt2", "fsdp", 1, 0),
]


def check(model: str, engine: str, micro: int | None, workers: int, folder: Path, every: bool) -> None:
    case = {**MODELS[model], "parallelism": engine, "micro": micro, "workers": workers}
    check_resumed(case, folder, world_size=2, every=every)


@pytest.mark.parametrize(("model", "engine", "micro", "workers"), QUICK)
def test_two_ranks_that_are_resumed_are_those_that_were_not_interrupted(
    model: str, engine: str, micro: int | None, workers: int, tmp_path: Path
) -> None:
    check(model, engine, micro, workers, tmp_path, every=False)


@slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_in_every_combination_two_ranks_that_are_resumed_are_those_that_were_not_interrupted(
    model: str, engine: str, micro: int | None, workers: int, tmp_path: Path
) -> None:
    check(model, engine, micro, workers, tmp_path, every=model == "mlp" and not workers)


# Only more than two ranks show that the order in which gradients are added up is the same.
FOUR: dict[str, dict[str, Any]] = {
    "ddp": {"model": "resnet", "parallelism": "ddp"},
    "ddp, small buckets": {"model": "resnet", "parallelism": {"ddp": {"bucket_cap_mb": 0.0005}}},
    "ddp, a static graph": {"model": "resnet", "parallelism": {"ddp": {"static_graph": True}}},
    "ddp that looks for unused parameters": {
        "model": "resnet",
        "parallelism": {"ddp": {"find_unused_parameters": True}},
    },
    "ddp in one message": {"model": "resnet", "parallelism": {"ddp": {"sync_strategy": "forced_sync"}}},
    "ddp, language model": {"model": "gpt2", "dropout": 0.1, "parallelism": "ddp", "micro": 1},
    "fewer samples than ranks in the last batch": {
        "parallelism": "ddp",
        "batch": 4,
        "duration": "2ep",
    },
    "fsdp": {"parallelism": "fsdp", "scheduler": "one_cycle", "evaluate": "4ba"},
    "fsdp, batch norm": {"model": "resnet", "parallelism": "fsdp"},
    "fsdp, whole copies": {"parallelism": {"fsdp": {"sharding_strategy": "NO_SHARD"}}},
    "fsdp in pairs": {
        "parallelism": {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}}
    },
    "fsdp and tensor parallel": {"model": "wide", "parts": 2, "parallelism": {"fsdp": {}, **TENSOR}},
}


@pytest.mark.parametrize("name", [name if name == "ddp" else pytest.param(name, marks=slow) for name in FOUR])
def test_four_ranks_that_are_resumed_are_those_that_were_not_interrupted(name: str, tmp_path: Path) -> None:
    check_resumed({"batch": 8, "duration": "5ba", **FOUR[name]}, tmp_path, world_size=4, every=True)


OTHERS: dict[str, dict[str, Any]] = {
    "a split model": {"model": "wide", "parts": 2, "parallelism": TENSOR, "evaluate": "4ba"},
    "an order of a sampler's own": {"order": "own", "parallelism": "ddp", "noise": True},
    "a stream with a position": {"order": "stream", "parallelism": "ddp", "duration": "14ba"},
    "persistent workers": {"workers": 2, "persistent": True, "noise": True, "parallelism": "fsdp", "duration": "3ep"},
    "several optimizers": {"optimizer": "two", "parallelism": "fsdp", "scheduler": "step"},
    "bf16": {"precision": "amp_bf16", "parallelism": "fsdp"},
    "tokens": {"tokens": True, "iteration": "30tok", "duration": "100tok", "parallelism": "ddp"},
    "weights on the host": {"parallelism": {"fsdp": {"cpu_offload": True}}},
}


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_with(name: str, tmp_path: Path) -> None:
    check_resumed(OTHERS[name], tmp_path, world_size=2)


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=slow)])
def test_a_command_whose_first_rank_is_killed_ends_with_the_same_weights(engine: str, tmp_path: Path) -> None:
    case = {"parallelism": engine, "fits": [{"duration": "8ba"}, {"duration": "4ba"}], "evaluate": "3ba"}
    check_started_again(case, tmp_path, [5] if engine == "ddp" else range(2, 13, 3), world_size=2, interval="2ba")


# --- controls --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=slow)])
@pytest.mark.parametrize("part", ["model", "optimizers", "rng", "metrics", "timestamp"])
def test_a_part_that_is_not_restored_makes_a_difference_on_every_rank(part: str, engine: str, tmp_path: Path) -> None:
    case, name = {"parallelism": engine}, "batch_checkpoint-3"
    reference = server().run(2, "run", case=case, folder=str(tmp_path), keep=[name])
    calls = {"case": case, "folder": str(tmp_path), "load": name}
    assert not differs(reference, server().run(2, "run", **calls), name)
    found = differs(reference, server().run(2, "run", **calls, load_ignore_keys=[part]), name)
    assert {one.partition(",")[0] for one in found} == {"rank 0", "rank 1"}


def test_what_differs_between_ranks_is_each_ranks_own(tmp_path: Path) -> None:
    """Else the tests above could not tell a rank's own statistics and generators from rank 0's."""
    case = {"model": "resnet", "parallelism": {"ddp": {"broadcast_buffers": False}}}
    reference = server().run(2, "run", case=case, folder=str(tmp_path), keep=["batch_checkpoint-3"])
    first, second = (one["state"] for one in reference)
    assert first["rng"]["torch"] != second["rng"]["torch"]
    assert first["metrics"] == second["metrics"]  # of epochs that are done
    other = [name for name in first["model"] if first["model"][name] != second["model"][name]]
    assert other
    assert all("running" in name for name in other)
    resumed = server().run(2, "run", case=case, folder=str(tmp_path), load="batch_checkpoint-3")
    assert not differs(reference, resumed, "batch_checkpoint-3")


# --- another engine --------------------------------------------------------------------------------------------------


def check_chain(case: dict[str, Any], chain: list[tuple[int, Any, int]], folder: Path) -> None:
    """Train two steps with one engine after the other; what each loads is what the one before saved."""
    saved: Any = None
    for number, (world_size, parallelism, parts) in enumerate(chain):
        one = {**case, "batch": 4, "parallelism": parallelism, "parts": parts}
        names = {"load": str(number - 1) if number else None, "save": str(number), "steps": 2}
        result = server().run(world_size, "whole_state", case=one, folder=str(folder), **names)[0]
        if number:
            assert not differences(result["loaded"], saved), (number, parallelism)
        assert result["loaded"] != result["saved"]
        assert result["engine"][1] == 2 * (number + 1)
        saved = result["saved"]


def test_a_run_changes_its_engine_at_every_checkpoint(tmp_path: Path) -> None:
    chain = [(1, None, 1), (2, "ddp", 1), (2, "fsdp", 1), (2, TENSOR, 2), (1, None, 1)]
    check_chain({"model": "wide", "optimizer": "two"}, chain, tmp_path)


@slow
@pytest.mark.parametrize("model", ["mlp", "resnet", "gpt2"])
def test_shapes_that_no_number_of_ranks_divides_go_through_every_engine(model: str, tmp_path: Path) -> None:
    """Rows of 11, 5, 3 and 1: some ranks have none."""
    if model == "gpt2":
        server().start(1, "prepare", here=True, gpt2=True)
    pairs = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}
    chain: list[tuple[int, Any, int]] = [(4, "fsdp", 1), (1, None, 1), (2, "fsdp", 1), (4, {"fsdp": pairs}, 1)]
    chain += [(2, "ddp", 1), (4, {"fsdp": {"sharding_strategy": "NO_SHARD"}}, 1), (4, "fsdp", 1), (2, "fsdp", 1)]
    check_chain({"model": model}, chain, tmp_path)


# --- preemption ------------------------------------------------------------------------------------------------------

WITHIN_S = 20.0  # on a busy machine; as a rule it is one step and one write
INTERRUPTIONS: dict[str, tuple[str, int, str]] = {  # the hook, the finished batches, and how often the run is saved
    "in the first batch": ("before_forward", 0, "50ba"),
    "before the first batch": ("fit_start", 0, "50ba"),
    "in training": ("before_forward", 4, "50ba"),
    "at the end of a batch": ("batch_end", 5, "50ba"),
    "in an evaluation in mid-epoch": ("eval_batch_end", 4, "50ba"),
    "in an evaluation at the end of an epoch": ("eval_batch_end", 6, "50ba"),
    "in such an evaluation, just after a checkpoint": ("eval_batch_end", 6, "3ba"),
    "at the end of an epoch": ("epoch_end", 6, "50ba"),
    "while a checkpoint is written": ("write", 3, "3ba"),
    "in the last batch": ("before_forward", 8, "50ba"),
    "in the last evaluation": ("eval_batch_end", 9, "50ba"),
    "in the last evaluation, just after a checkpoint": ("eval_batch_end", 9, "3ba"),
}
QUICKLY = ["in the first batch", "in an evaluation in mid-epoch", "while a checkpoint is written"]


def check_interrupted(
    world_size: int, engine: str | None, rank: int, interruption: tuple[str, int, str], folder: Path
) -> None:
    hook, batch, interval = interruption
    case = {"parallelism": engine, "evaluate": "4ba", "duration": "9ba", "noise": True}
    calls: dict[str, Any] = {"case": case, "autoresume": {"save_interval": interval}}
    reference = server().run(world_size, "run", **calls, folder=str(folder / "reference"))
    began = time.monotonic()
    ends = {"hook": hook, "batch": batch, "rank": rank, "how": "term"}
    cut = server().start(world_size, "run", **calls, folder=str(folder / "cut"), ends=ends)
    took_s = time.monotonic() - began
    assert [one.code for one in cut] == [75] * world_size, cut[rank].output
    assert took_s < WITHIN_S
    first = cut[0].value
    assert Path(first["checkpoint"].removeprefix("file://")).joinpath("manifest.json").exists()
    assert len({repr(one.value["state"]["timestamp"]) for one in cut}) == 1
    assert first["state"]["timestamp"].get("batch", 0) < 9 or hook in ("before_forward", "eval_batch_end")
    resumed = server().run(world_size, "run", **calls, folder=str(folder / "cut"), init=7)
    for number, (one, before, after) in enumerate(zip(reference, cut, resumed, strict=True)):
        found = differences(before.value["log"] + after["log"], one["log"], f"rank {number}, log")
        found += differences(after["state"], one["state"], f"rank {number}, state")
        assert not found, "\n".join(found[:8])


@pytest.mark.parametrize("name", [one if one in QUICKLY else pytest.param(one, marks=slow) for one in INTERRUPTIONS])
def test_sigterm_on_one_rank_ends_all_at_one_step_from_which_the_run_goes_on_exactly(name: str, tmp_path: Path) -> None:
    check_interrupted(2, "ddp", 1, INTERRUPTIONS[name], tmp_path)


@slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_sigterm_on_any_rank_of_a_sharded_run_does(name: str, rank: int, tmp_path: Path) -> None:
    check_interrupted(2, "fsdp", rank, INTERRUPTIONS[name], tmp_path)


@pytest.mark.parametrize("name", [one if one in QUICKLY else pytest.param(one, marks=slow) for one in INTERRUPTIONS])
def test_sigterm_ends_one_process_so_that_the_run_goes_on_exactly(name: str, tmp_path: Path) -> None:
    check_interrupted(1, None, 0, INTERRUPTIONS[name], tmp_path)


# --- memory ----------------------------------------------------------------------------------------------------------


@slow
def test_saving_and_loading_a_sharded_run_takes_about_the_memory_of_a_ranks_part(tmp_path: Path) -> None:
    constant = 48 * 2**20
    for names in ({"load": None, "save": "large"}, {"load": "large", "save": None}):
        for found in server().run(2, "memory", folder=str(tmp_path), **names):
            told = {name: round(size / 2**20) for name, size in found.items()}
            assert found["part"] > 250 * 2**20
            if names["save"]:
                assert found["save with files"] < 1.3 * found["part"] + constant, told
            else:  # the optimizer's state is new; what is read is mapped
                assert found["load"] < 1.3 * found["part"] + constant, told
                assert found["load with files"] < 2.3 * found["part"] + constant, told
