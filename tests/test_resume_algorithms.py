"""Every algorithm goes on where it was: alone and together, on one rank and on several."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))
from resume_runs import check_resumed, check_started_again, differs, server

slow = pytest.mark.slow
SAM = ["sam", {"interval": 2}]
EMA: list[Any] = ["ema", {"half_life": "3ba", "ema_start": "0.2dur"}]
SELECT: list[Any] = ["selective_backprop", {"start": 0.2, "end": 0.9, "interrupt": 3}]
CLIP: list[Any] = ["gradient_clipping", {"clipping_threshold": 0.1}]
CASES: dict[str, dict[str, Any]] = {
    "sam": {"plugins": [SAM]},
    "ema": {"plugins": [EMA]},
    "ema by epochs": {"plugins": [["ema", {"half_life": "1ep"}]], "duration": "3ep"},
    "selective_backprop": {"plugins": [SELECT]},
    "mixup": {"plugins": ["mixup"]},
    "gradient_clipping": {"plugins": [CLIP]},
    "together": {"plugins": [SAM, EMA, SELECT, "mixup", CLIP], "noise": True, "scheduler": "cosine"},
    "blurpool and sam": {"model": "resnet", "plugins": ["blurpool", ["sam", {"interval": 3}]]},
    "alibi and ema": {"model": "gpt2", "dropout": 0.1, "plugins": ["alibi", EMA, CLIP]},
}
ONE_RANK = ["sam", "ema", "selective_backprop", "mixup", "together", "alibi and ema"]


def case_of(name: str, engine: str | None = None) -> dict[str, Any]:
    return {"evaluate": "4ba", **CASES[name], "parallelism": engine}


@pytest.mark.parametrize("name", ONE_RANK)
def test_an_algorithm_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    check_resumed(case_of(name), tmp_path)


@slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("name", CASES)
def test_an_algorithm_goes_on_where_it_was_at_every_point(
    name: str, micro: int | None, workers: int, tmp_path: Path
) -> None:
    check_resumed({**case_of(name), "micro": micro, "workers": workers}, tmp_path, every=True)


@pytest.mark.ranks
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_algorithms_go_on_where_they_were_on_two_ranks(engine: str, tmp_path: Path) -> None:
    check_resumed(case_of("together", engine), tmp_path, world_size=2)


@slow
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", CASES)
def test_an_algorithm_goes_on_where_it_was_on_every_rank(
    name: str, engine: str, world_size: int, tmp_path: Path
) -> None:
    case = {**case_of(name, engine), "batch": 8}  # of the short last batch each of four ranks has some
    check_resumed(case, tmp_path, world_size=world_size)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=slow)])
def test_a_command_with_algorithms_that_is_killed_ends_with_the_same_weights(world_size: int, tmp_path: Path) -> None:
    case = case_of("together", "fsdp" if world_size == 2 else None)
    check_started_again(case, tmp_path, [3, 8], world_size=world_size, interval="2ba")


@pytest.mark.parametrize("name", ["ema", "together"])
def test_an_average_that_is_not_restored_makes_a_difference(name: str, tmp_path: Path) -> None:
    point = "batch_checkpoint-7"
    reference = server().run(1, "run", case=case_of(name), folder=str(tmp_path), keep=[point])
    calls = {"case": case_of(name), "folder": str(tmp_path), "load": point}
    found = differs(reference, server().run(1, "run", **calls, load_ignore_keys=["plugins/ema"]), point)
    assert any("plugins/ema" in one for one in found)


def test_the_step_of_sam_that_is_not_restored_makes_a_difference(tmp_path: Path) -> None:
    """It climbs on every second step: which, it has to know."""
    point = "batch_checkpoint-3"
    reference = server().run(1, "run", case=case_of("sam"), folder=str(tmp_path), keep=[point])
    calls = {"case": case_of("sam"), "folder": str(tmp_path), "load": point}

    found = differs(reference, server().run(1, "run", **calls, load_ignore_keys=["optimizers"]), point)
    assert any("/model/" in one for one in found)
