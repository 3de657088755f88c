"""What holds of training with a plugin, in one process."""

from __future__ import annotations

from kernel_core.testing.conformance.kit import SPLIT, TOLERANCE, Kit, RefutedError, Verdict, check

TRAINED = ("losses", "weights", "optimizers")


def followed(kit: Kit) -> tuple[str, ...]:
    """Return what must be equal in equal runs; what one that watches only keeps may be times and sizes of files."""
    return TRAINED if kit.subject.watches_only else (*TRAINED, "plugin")


@check("models", "it trains, or says why it does not")
def models(kit: Kit) -> tuple[Verdict, str]:
    """Train each model with it; only those up to the first that works in the short form."""
    first, told = kit.case, []
    for name in kit.cases:
        works, how = kit.try_case(name)
        if how.startswith("fails"):
            raise RefutedError(f"{name} {how}. Expected it to train, or an error that says what it needs")
        told.append(f"{name}: {how if works or how == 'no effect' else 'refused'}")
        if name == first and not kit.full:
            break
    return "proven", ", ".join(told)


@check("neutral", "with neutral options, or as one that watches only, it leaves training as it is, bit for bit")
def neutral(kit: Kit) -> tuple[Verdict, str] | None:
    """Compare a run with one without it."""
    subject = kit.subject
    if subject.watches_only:
        found, what = kit.train(), "it says that it watches only"
    elif subject.plugin.neutral is not None:
        found, what = (
            kit.train(options={**subject.options, **subject.plugin.neutral}),
            f"{dict(subject.plugin.neutral)}",
        )
    else:
        return "does not apply", "it names no options with which it does nothing"
    without = kit.train(plugin=False, case=kit.case)
    if told := kit.differences(found, without, TRAINED):
        raise RefutedError(f"{what}, and training differs from that without it: {told}")
    return None


@check("deterministic", "two runs with one seed are equal, bit for bit")
def deterministic(kit: Kit) -> None:
    """Run twice."""
    if told := kit.differences(kit.train(again=1), kit.train(), followed(kit)):
        raise RefutedError(f"two runs with one seed differ: {told}")


@check("randomness", "it draws from its own keyed generators only")
def randomness(kit: Kit) -> None:
    """Look at the global generators before and after each of its hooks."""
    for hook, whose in kit.train()["drawn"].items():
        raise RefutedError(f"{hook} draws from {whose} global generator. Expected state.generator(self, scope)")


@check("evaluation", "whether the run is evaluated makes no difference to training")
def evaluation(kit: Kit) -> None:
    """Compare a run that is evaluated after each epoch with one that is not."""
    if told := kit.differences(kit.train(evaluate=False), kit.train(), TRAINED):
        raise RefutedError(f"without evaluations training differs: {told}")


@check("fits", "a run in two fits is the run in one")
def fits(kit: Kit) -> None:
    """Stop in mid-epoch and call ``fit`` again."""
    if told := kit.differences(kit.train(stop_at=2), kit.train(), (*followed(kit), "batches")):
        raise RefutedError(f"when fit is called twice training differs: {told}")


@check("retry", "a batch that is tried again, because memory ran out, leaves nothing behind")
def retry(kit: Kit) -> tuple[Verdict, str] | None:
    """Let memory run out in a batch, and compare with a run whose batches are split from there on by themselves."""
    if refused := kit.refusal("microbatching", lambda: kit.train(micro="auto")):
        return refused
    found = kit.train(micro="auto", out_of_memory_at=4)
    expected = kit.train(split_at=4, split_to=found["micro"])
    if told := kit.differences(found, expected, followed(kit)):
        raise RefutedError(f"after a batch was tried again training differs: {told}")
    return None


@check("microbatches", "splitting a batch into microbatches changes rounding only")
def microbatches(kit: Kit) -> tuple[Verdict, str] | None:
    """Compare a run whose batches are split into four with one whose are not, in float64."""
    if told := kit.refusal("microbatching", lambda: kit.train(micro=2, **SPLIT)):
        return told
    found = kit.train(micro=2, **SPLIT)
    if not kit.subject.plugin.split_invariant:
        return "declared", "it depends on how a batch is split"
    if (distance := kit.distance(found, kit.train(**SPLIT))) > TOLERANCE:
        raise RefutedError(
            f"with microbatches a weight differs by {distance:.3g}. Expected {TOLERANCE:g}, or split_invariant=False"
        )
    return None
