"""A run of one process that is resumed, in a new process, is to the bit the run that was not interrupted.

All that happens is compared, from the point of the checkpoint to the end: samples as the data set hands them out, with their
noise, learning rates, losses, counters, metrics and hooks; and at the end weights, optimizer state, schedules, loss scale,
plugins, metrics, and the global generators. Points are batches, ends of epochs and iterations, and the end of the run.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from resume_runs import check_resumed, check_started_again, differs, server

slow = pytest.mark.slow
MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"noise": True, "evaluate": "4ba", "duration": "14ba"},
    "resnet": {"model": "resnet", "scheduler": "cosine"},
    "gpt2": {"model": "gpt2", "dropout": 0.1},
}


QUICK = {  # the rest at a choice of points too is part of the slow test
    "mlp": [(None, 0, False), (None, 2, False), (1, 0, True), (1, 2, False)],
    "resnet": [(None, 2, False), (1, 0, False)],
    "gpt2": [(None, 2, False), (1, 0, False)],
}


@pytest.mark.parametrize(
    ("model", "micro", "workers", "every"), [(model, *more) for model, some in QUICK.items() for more in some]
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    model: str, micro: int | None, workers: int, every: bool, tmp_path: Path
) -> None:
    check_resumed({**MODELS[model], "micro": micro, "workers": workers}, tmp_path, every=every)


@slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro", [None, 1])
@pytest.mark.parametrize("model", MODELS)
def test_at_every_point_a_resumed_run_is_the_run_that_was_not_interrupted(
    model: str, micro: int | None, workers: int, tmp_path: Path
) -> None:
    check_resumed({**MODELS[model], "micro": micro, "workers": workers}, tmp_path, every=True)


STOPPER: list[Any] = [
    "early_stopper",
    {"monitor": "MulticlassAccuracy", "dataloader_label": "often", "patience": "5ba"},
]
OTHERS: dict[str, dict[str, Any]] = {
    "persistent workers": {"workers": 2, "persistent": True, "noise": True, "duration": "3ep"},
    "an order of a sampler's own": {"order": "own", "noise": True},
    "an order of a sampler's own, workers": {"order": "own", "workers": 2, "noise": True, "duration": "14ba"},
    "a stream with a position": {"order": "stream", "duration": "14ba", "noise": True},
    "a schedule of the kernel's": {"scheduler": "cosine", "evaluate": "1ep"},
    "one cycle": {"scheduler": "one_cycle", "optimizer": "sgd"},
    "a schedule by epoch": {"scheduler": "step", "every_batch": False, "duration": "3ep"},
    "several optimizers": {"optimizer": "two", "scheduler": "step", "micro": 3},
    "bf16": {"precision": "amp_bf16"},
    "fp16, with loss scaling": {"precision": "amp_fp16"},
    "tokens": {"tokens": True, "iteration": "30tok", "duration": "100tok", "evaluate": "25tok"},
    "iterations of epochs": {"iteration": "2ep", "duration": "4ep", "evaluate": "1iter"},
    "the loader given to fit": {"loader_to_fit": True, "duration": "14ba"},
    "epochs cut short": {"subset": 4, "duration": "11ba", "evaluate": "0.3dur"},
    "an early stopper": {"plugins": [["early_stopper", {**STOPPER[1], "patience": "20ba"}]], "evaluate": "2ba"},
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("name", OTHERS)
def test_so_it_is_with(name: str, every: bool, tmp_path: Path) -> None:
    check_resumed(OTHERS[name], tmp_path, every=every)


@slow
def test_at_every_step_of_a_long_epoch(tmp_path: Path) -> None:
    check_resumed({"num_samples": 83, "batch": 2, "duration": "1ep", "noise": True}, tmp_path, every=True)


def test_saved_by_hand_between_steps(tmp_path: Path) -> None:
    case = {"noise": True, "evaluate": "3ba", "iteration": "1ep", "scheduler": "cosine"}
    reference = server().run(1, "run", case=case, folder=str(tmp_path), keep="by hand")
    for name in reference[0]["marks"]:
        assert not differs(reference, server().run(1, "run", case=case, folder=str(tmp_path), load=name), name)


def test_a_finished_run_is_trained_longer_as_if_it_had_not_been_left(tmp_path: Path) -> None:
    case = {"fits": [{}, {"duration": "8ba"}], "evaluate": "3ba", "noise": True}
    reference = server().run(1, "run", case=case, folder=str(tmp_path), keep=["fit_end-12"])
    resumed = server().run(1, "run", case=case, folder=str(tmp_path), load="fit_end-12")
    assert not differs(reference, resumed, "fit_end-12")
    assert resumed[0]["state"]["timestamp"]["batch"] == 20


# --- the same command started again ----------------------------------------------------------------------------------

TWICE = {"fits": [{"duration": "8ba"}, {"duration": "7ba"}], "scheduler": "cosine", "evaluate": "3ba"}
COMMANDS: dict[str, tuple[dict[str, Any], str, range]] = {
    "fit called twice": (TWICE, "1ba", range(1, 16)),
    "fit called twice, stopped in the first": ({**TWICE, "stop_at": 5}, "2ba", range(1, 13)),
    "a run that a plugin stops": ({"stop_at": 8, "evaluate": "3ba"}, "1ba", range(1, 9)),
    "a run that the early stopper stops": (
        {"plugins": [["early_stopper", {**STOPPER[1], "patience": "3ba"}]], "evaluate": "2ba", "duration": "9ep"},
        "1ba",
        range(1, 6),
    ),
    "a run that ends in mid-epoch, with few checkpoints": ({"duration": "14ba", "noise": True}, "4ba", range(1, 15)),
    "epochs": ({"duration": "3ep", "scheduler": "step", "every_batch": False}, "1ep", range(1, 19)),
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_command_ends_at_the_same_step_with_the_same_weights(name: str, every: bool, tmp_path: Path) -> None:
    case, interval, kills = COMMANDS[name]
    check_started_again(case, tmp_path, kills if every else kills[1::5], interval=interval)


# --- controls: what is not restored is missed ------------------------------------------------------------------------

EMA: list[Any] = ["ema", {"half_life": "3ba"}]
CONTROLS: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({}, "batch_checkpoint-3"),
    "model/module.0.weight": ({}, "batch_checkpoint-3"),
    "optimizers": ({"optimizer": "sgd"}, "batch_checkpoint-3"),
    "schedulers": ({"scheduler": "step"}, "batch_checkpoint-4"),
    "scaler": ({"precision": "amp_fp16"}, "batch_checkpoint-3"),
    "timestamp": ({}, "batch_checkpoint-3"),
    "rng": ({}, "batch_checkpoint-3"),
    "position": ({"order": "own"}, "batch_checkpoint-3"),
    "metrics": ({}, "batch_checkpoint-3"),
    "values": ({"evaluate": "2ba"}, "batch_checkpoint-3"),
    "loop": ({"evaluate": "7ba", "duration": "14ba"}, "batch_checkpoint-14"),
    "plugins": ({"plugins": [EMA]}, "batch_checkpoint-3"),
    "plugins/ema": ({"plugins": [EMA]}, "batch_checkpoint-3"),
    "plugins/early_stopper": ({"plugins": [STOPPER], "evaluate": "2ba"}, "batch_checkpoint-8"),
}


@pytest.mark.parametrize("part", CONTROLS)
def test_a_part_that_is_not_restored_makes_a_difference(part: str, tmp_path: Path) -> None:
    case, name = CONTROLS[part]
    reference = server().run(1, "run", case=case, folder=str(tmp_path), keep=[name])
    calls = {"case": case, "folder": str(tmp_path), "load": name}
    assert not differs(reference, server().run(1, "run", **calls), name)
    assert differs(reference, server().run(1, "run", **calls, load_ignore_keys=[part]), name)


def test_a_position_in_a_stream_that_is_not_restored_makes_a_difference(tmp_path: Path) -> None:
    case, name = {"order": "stream", "duration": "14ba"}, "batch_checkpoint-8"
    reference = server().run(1, "run", case=case, folder=str(tmp_path), keep=[name])
    calls = {"case": case, "folder": str(tmp_path), "load": name}
    assert differs(reference, server().run(1, "run", **calls, load_ignore_keys=["position"]), name)
