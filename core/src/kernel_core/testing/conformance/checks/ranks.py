"""What holds on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernel_core.testing.conformance.checks.training import followed
from kernel_core.testing.conformance.kit import SPLIT, TOLERANCE, Kit, RefutedError, Verdict, check

WORLD_SIZE = 2


@check(
    "ddp",
    "two ranks with copies of the model train as one process does, issue the same collectives, and resume exactly",
)
def ddp(kit: Kit) -> tuple[Verdict, str] | None:
    """Train on two ranks."""
    return _on_ranks(kit, "ddp")


@check(
    "fsdp",
    "two ranks that share the model out train as one process does, issue the same collectives, and resume exactly",
)
def fsdp(kit: Kit) -> tuple[Verdict, str] | None:
    """Train on two ranks."""
    return _on_ranks(kit, "fsdp")


def _on_ranks(kit: Kit, engine: str) -> tuple[Verdict, str] | None:
    if refused := kit.refusal(engine, lambda: _train(kit, engine)):
        return refused
    found = _train(kit, engine)
    for rank, one in enumerate(found):
        for hook, whose in one["drawn"].items():
            raise RefutedError(f"on rank {rank} {hook} draws from {whose} global generator")
    if engine == "ddp" and (told := kit.differences(found[1], found[0], ("parts",))):
        raise RefutedError(f"the ranks end with different weights: rank 1 has {told}")
    _check_resume(kit, engine)
    if not kit.subject.plugin.split_invariant:
        return "declared", "it depends on which rows a rank has; the ranks agree with each other"
    if (distance := kit.distance(found[0], kit.train(**SPLIT))) > TOLERANCE:
        raise RefutedError(
            f"on two ranks a weight differs by {distance:.3g} from that of one process. Expected {TOLERANCE:g}, or "
            "split_invariant=False"
        )
    return None


def _check_resume(kit: Kit, engine: str) -> None:
    """Save in mid-epoch, go on in new processes, and compare what each rank has, shards and what the plugin keeps there too."""
    if "resume" in kit.subject.plugin.unsupported:
        return
    saved = kit.train_ranks(WORLD_SIZE, engine=engine, save_at=[4])
    resumed = kit.train_ranks(WORLD_SIZE, engine=engine, load=f"{saved[0]['folder']}/4", init=1)
    for rank, (found, one) in enumerate(zip(resumed, saved, strict=True)):
        expected = {**one, "losses": one["losses"][4:]}
        if told := kit.differences(found, expected, (*followed(kit), "parts", "generators")):
            raise RefutedError(f"resumed after batch 4 of 6 rank {rank} differs: {told}")


def _train(kit: Kit, engine: str) -> list[dict[str, Any]]:
    """Train; whether or not that ends, the collectives that the plugin issued must be the same on both ranks."""
    arguments: dict[str, Any] = {"engine": engine, **SPLIT}
    try:
        found = kit.train_ranks(WORLD_SIZE, **arguments)
    except RefutedError as error:
        if told := _collectives_differ(kit.last_folder):
            raise RefutedError(told) from error
        raise
    if told := _collectives_differ(found[0]["folder"]):
        raise RefutedError(told)
    return found


def _collectives_differ(folder: str) -> str:
    lines = []
    for rank in range(WORLD_SIZE):
        path = Path(folder) / f"collectives-{rank}"
        lines.append(path.read_text().splitlines() if path.exists() else [])
    for index in range(max(map(len, lines))):
        one, other = (each[index] if index < len(each) else "nothing" for each in lines)
        if one != other:
            return f"the ranks issue different collectives: rank 0 {one}, rank 1 {other}"
    return ""
