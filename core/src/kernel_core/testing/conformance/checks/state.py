"""What a plugin keeps, and whether a run goes on with it."""

from __future__ import annotations

from kernel_core.testing.conformance.checks.training import followed
from kernel_core.testing.conformance.kit import Kit, RefutedError, Verdict, check

POINTS: tuple[int, ...] = (1, 4)  # batches, of six in two epochs
ALL_POINTS: tuple[int, ...] = (1, 2, 3, 4, 5)


@check("state", "a checkpoint holds its state, loading puts the same state back, and saving changes nothing")
def state(kit: Kit) -> tuple[Verdict, str] | None:
    """Save in the middle of an epoch, load in a new process, and compare what it keeps then."""
    saved = kit.train(save_at=list(POINTS), generators=False)
    if told := kit.differences(saved, kit.train(), followed(kit)):
        raise RefutedError(f"when the run is saved training differs: {told}")
    if refused := _refusal(kit, f"{saved['folder']}/4"):
        return refused
    loaded = kit.train(load=f"{saved['folder']}/4", init=1)["loaded"]
    if told := kit.differences({"state": loaded}, {"state": saved["kept"]["4"]}, ("state",)):
        raise RefutedError(f"after loading it keeps something else than was saved: {told}")
    return None


@check("resume", "a run that is resumed in mid-epoch, in a new process, is the run that went on, bit for bit")
def resume(kit: Kit) -> tuple[Verdict, str] | None:
    """Compare runs resumed at some batches with the one that was saved there."""
    saved = kit.train(save_at=list(POINTS), generators=False)
    points = POINTS
    if kit.full:
        saved, points = kit.train(save_at=list(ALL_POINTS), generators=False), ALL_POINTS
    for batch in points:
        if refused := _refusal(kit, f"{saved['folder']}/{batch}"):
            return refused
        found = kit.train(load=f"{saved['folder']}/{batch}", init=1)
        expected = {**saved, "losses": saved["losses"][batch:]}
        if told := kit.differences(found, expected, (*followed(kit), "generators")):
            raise RefutedError(f"resumed after batch {batch} of 6 training differs: {told}")
    return None


def _refusal(kit: Kit, path: str) -> tuple[Verdict, str] | None:
    return kit.refusal("resume", lambda: kit.train(load=path, init=1))
