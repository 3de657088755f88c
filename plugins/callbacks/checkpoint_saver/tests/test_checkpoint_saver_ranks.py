"""Saving on two ranks: both save, both hear of a failure at the same step, and the one that fails is written down."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
from kernel_core.checkpoint.locate import Found, checkpoints_in, read_pointer
from kernel_core.storage import LocalStorage
from kernel_core.testing.checkpoints import everything, named
from kernel_core.testing.ranks import RankFailed, run_on_ranks

RANKS = Path(__file__).with_name("checkpoint_saver_ranks.py")
pytestmark = pytest.mark.ranks


def test_a_write_that_fails_on_one_rank_ends_all_at_one_step_and_is_no_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    first, second = run_on_ranks(2, RANKS, "train", str(folder), "fill")
    assert first["error"] == second["error"] == "SaveFailedError"
    assert first["batch"] == second["batch"] <= 9  # it is known to all when the next save begins at the latest
    assert "rank 1: " in first["message"]
    assert "No space left on device" in first["message"]
    assert first["saved"] == second["saved"] == ["ep0-ba3"]
    storage = LocalStorage(folder)
    assert read_pointer(storage)[0] == "ep0-ba3"
    assert everything(folder) == named(storage, "latest", "failures.json")
    assert json.loads((folder / "failures.json").read_text())["count"] == 1

    first, second = run_on_ranks(2, RANKS, "train", str(folder), "nothing")
    names = [f"ep0-ba{batch}" for batch in (6, 9, 12, 15, 18)] + ["ep1-ba20"]
    assert first == second == {"error": None, "batch": 20, "saved": names}
    assert [one.name for one in checkpoints_in(storage) if isinstance(one, Found)] == ["ep1-ba20", "ep0-ba18"]


@pytest.mark.slow  # rank 0 is ended by the watchdog, which leaves it time to end by itself
def test_what_only_rank_1_meets_is_written_down_too(tmp_path: Path) -> None:
    with suppress(RankFailed):
        run_on_ranks(2, RANKS, "train", str(tmp_path / "c"), "raise")
    told = json.loads((tmp_path / "c" / "failures.json").read_text())
    assert (told["type"], told["batch"], told["count"]) == ("ZeroDivisionError", 6, 1)
