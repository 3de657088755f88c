"""What holds of an engine: how a model is trained by it, on two ranks if it is for several, beside how one process trains it."""

from __future__ import annotations

from typing import Any

from kernel_core.testing.conformance.checks.training import TRAINED
from kernel_core.testing.conformance.kit import (
    ENGINE_CHECKS,
    SPLIT,
    TOLERANCE,
    Kit,
    RefusedError,
    RefutedError,
    Verdict,
    check,
)

MODELS = ("mlp", "gpt2")


def _on_ranks(kit: Kit, case: str = "mlp", **arguments: Any) -> list[dict[str, Any]]:
    return kit.train_ranks(kit.engine.world_size, plugin=False, engine=kit.engine.name, case=case, **arguments)


def _alone(kit: Kit, case: str = "mlp", **arguments: Any) -> dict[str, Any]:
    return kit.train(plugin=False, case=case, **arguments)


def _rows(kit: Kit, rows: int) -> int:
    """Return the microbatch size of a rank for that of two ranks."""
    return rows * 2 // kit.engine.world_size


def _compare(kit: Kit, found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    if (distance := kit.distance(found, expected)) > TOLERANCE:
        raise RefutedError(
            f"{what} a weight differs by {distance:.3g} from that of one process. Expected {TOLERANCE:g} at most"
        )


@check("equal", "its ranks train as one process does on the same batches, up to rounding", ENGINE_CHECKS)
def equal(kit: Kit) -> tuple[Verdict, str]:
    """Train in float64."""
    cases = [case for case in MODELS if case in kit.cases]
    for case in cases:
        _compare(kit, _on_ranks(kit, case, **SPLIT)[0], _alone(kit, case, **SPLIT), f"on {case}")
    return "proven", ", ".join(cases)


@check("microbatches", "splitting a batch into microbatches changes rounding only", ENGINE_CHECKS)
def microbatches(kit: Kit) -> None:
    """Train in float64."""
    _compare(kit, _on_ranks(kit, micro=_rows(kit, 1), **SPLIT)[0], _alone(kit, **SPLIT), "with microbatches")


@check(
    "norms", "the norm of the gradients is that over all ranks, complete when after_train_batch fires", ENGINE_CHECKS
)
def norms(kit: Kit) -> None:
    """Compare the norms of each batch with those of one process."""
    expected = _alone(kit, norms=True, micro=2, **SPLIT)["norms"]
    for rank, one in enumerate(_on_ranks(kit, norms=True, micro=_rows(kit, 1), **SPLIT)):
        worst = max(abs(a - b) for a, b in zip(one["norms"], expected, strict=True))
        if worst > TOLERANCE:
            raise RefutedError(
                f"on rank {rank} the norm of the gradients differs by {worst:.3g} from that of one process"
            )


@check(
    "resume", "a run that is resumed in mid-epoch on the same ranks is the run that went on, bit for bit", ENGINE_CHECKS
)
def resume(kit: Kit) -> None:
    """Save, load in new processes, and compare every rank's part."""
    saved = _on_ranks(kit, save_at=[2, 4])
    for batch in (2, 4):
        resumed = _on_ranks(kit, load=f"{saved[0]['folder']}/{batch}", init=1)
        for rank, (found, one) in enumerate(zip(resumed, saved, strict=True)):
            expected = {**one, "losses": one["losses"][batch:]}
            if told := kit.differences(found, expected, (*TRAINED, "parts", "generators")):
                raise RefutedError(f"resumed after batch {batch} of 6 rank {rank} differs: {told}")


@check("elastic", "a run goes on from its ranks in one process, and from one process on its ranks", ENGINE_CHECKS)
def elastic(kit: Kit) -> None:
    """Save half-way in one way, go on in the other, and compare the end with that of one process."""
    whole = _alone(kit, save_at=[3], **SPLIT)
    ranks = _on_ranks(kit, save_at=[3], **SPLIT)[0]
    _compare(kit, _alone(kit, load=f"{ranks['folder']}/3", init=1, **SPLIT), whole, "gone on in one process")
    _compare(kit, _on_ranks(kit, load=f"{whole['folder']}/3", init=1, **SPLIT)[0], whole, "begun in one process")


@check("fits", "a run in two fits is the run in one", ENGINE_CHECKS)
def fits(kit: Kit) -> None:
    """Stop in mid-epoch and call ``fit`` again."""
    for rank, (found, expected) in enumerate(zip(_on_ranks(kit, stop_at=2), _on_ranks(kit), strict=True)):
        if told := kit.differences(found, expected, (*TRAINED, "batches")):
            raise RefutedError(f"when fit is called twice rank {rank} differs: {told}")


@check(
    "evaluations",
    "an optimizer that evaluates more than once trains as in one process, or is refused at start",
    ENGINE_CHECKS,
)
def evaluations(kit: Kit) -> tuple[Verdict, str] | None:
    """Train with L-BFGS."""
    case = {**SPLIT, "optimizer": "lbfgs"}
    try:
        found = _on_ranks(kit, **case)[0]
    except RefusedError as error:
        return "refused", str(error)
    _compare(kit, found, _alone(kit, **case), "with L-BFGS")
    return None


@check("memory", "microbatches of a size that is looked for train to the end, or are refused at start", ENGINE_CHECKS)
def memory(kit: Kit) -> tuple[Verdict, str] | None:
    """Train with ``device_train_microbatch_size="auto"``; a run that hangs is a run that did not end."""
    try:
        found = _on_ranks(kit, micro="auto", **SPLIT)[0]
    except RefusedError as error:
        return "refused", str(error)
    _compare(kit, found, _alone(kit, **SPLIT), "with microbatches of a size that is looked for")
    return None
