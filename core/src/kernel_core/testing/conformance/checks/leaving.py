"""What a plugin leaves behind, how it stands beside others, and what it costs."""

from __future__ import annotations

import statistics

from kernel_core.testing.conformance.kit import SPLIT, TOLERANCE, Kit, RefusedError, RefutedError, Verdict, check


@check("teardown", "closing, also twice, leaves no hook, wrapper, thread, open file or changed function behind")
def teardown(kit: Kit) -> None:
    """Train in a process that has trained before, close, and look what is other than before."""
    subject = kit.subject
    (ended,) = kit.call(
        "leave",
        request=subject.request,
        options=dict(subject.options),
        folder=f"{kit.train()['folder']}/leave",
        case=kit.case,
        does_surgery=subject.does_surgery,
    )
    if ended.value is None:
        raise RefutedError(f"closing it twice fails: {' '.join(ended.output.splitlines()[-1:])}")
    if left := ended.value["left"]:
        raise RefutedError(f"it leaves something behind: {'; '.join(left[:4])}")
    if left := ended.value["left_again"]:
        raise RefutedError(f"closing it a second time leaves something behind: {'; '.join(left[:4])}")


@check("logs", "it takes whatever may be logged: numbers, tensors, nan and inf, tables, images, settings")
def logs(kit: Kit) -> tuple[Verdict, str] | None:
    """Hand it one of each, and close it."""
    subject = kit.subject
    if subject.kind != "loggers":
        return "does not apply", "it is no logger"
    folder = f"{kit.train()['folder']}/logs"
    (ended,) = kit.call("log_everything", request=subject.request, options=dict(subject.options), folder=folder)
    if ended.value is None:
        raise RefutedError(f"closing it fails: {' '.join(ended.output.splitlines()[-1:])}")
    if "error" in ended.value:
        raise RefutedError(ended.value["error"])
    return None


@check("commutes", "with those it says it commutes with, either order gives the same weights")
def commutes(kit: Kit) -> tuple[Verdict, str] | None:
    """Train with both in both orders."""
    names = kit.subject.plugin.commutes
    names = [names] if isinstance(names, str) else sorted(names)
    if not names:
        return "does not apply", "it names none"
    for name in names:
        try:
            first, last = (kit.train(others=[name], others_first=before, **SPLIT) for before in (False, True))
        except RefusedError as error:
            raise RefutedError(
                f"it says that it commutes with {name}, and a run with both is refused: {error}"
            ) from None
        if (distance := kit.distance(first, last)) > TOLERANCE:
            raise RefutedError(
                f"it says that it commutes with {name}, and the order makes a difference of {distance:.3g}"
            )
    return "proven", ", ".join(names)


def cost(kit: Kit) -> dict[str, float]:
    """Return the microseconds that a call of each of its hooks takes, the median on this machine; not part of a card."""
    found = kit.train(generators=False)
    return {hook: 1e6 * statistics.median(times) for hook, times in sorted(found["seconds"].items())}
