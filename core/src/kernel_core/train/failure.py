"""What to say when a run fails, found from the traceback afterwards so that it costs nothing per step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kernel_core.registry.plan import ActivePlugin, Plan
from kernel_core.train.state import State


def annotate(error: BaseException, state: State) -> None:
    """Add a note to ``error``: the plugin and hook it came from, if any, the rank and how far the run was."""
    progress = state.progress
    where = f"rank {state.rank}, epoch {progress.epoch}, batch {progress.batch}"
    culprit = find_culprit(error, state.plan)
    if culprit is None:
        note = f"the run {state.run_name!r} failed at {where}"
    else:
        active, method = culprit
        origin = f"{active.distribution} {active.version}" if active.distribution else "of no distribution"
        what = "hook" if method in state.plan.specs else "method"
        note = f"in plugin {active.id!r} ({origin}), {what} {method}, {where}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def find_culprit(error: BaseException, plan: Plan) -> tuple[ActivePlugin, str] | None:
    """Return plugin and method of the innermost frame that is a plugin's hook, else of its innermost other method."""
    plugins = {id(active.plugin): active for active in plan.plugins}
    hook = method = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        active = plugins.get(id(frame.f_locals.get("self")))
        if active is not None:
            method = (active, frame.f_code.co_name)
            hook = method if frame.f_code.co_name in plan.specs else hook
        traceback = traceback.tb_next
    return hook or method


def call_all(calls: Iterable[Callable[[], Any]]) -> list[BaseException]:
    """Run every call whatever another raises; return what was raised."""
    errors: list[BaseException] = []
    for call in calls:
        try:
            call()
        except BaseException as error:  # not even an interrupt keeps the others from closing
            errors.append(error)
    return errors


def raise_all(message: str, errors: list[BaseException]) -> None:
    """Raise a single error as itself, several as one group; do nothing when there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(message, errors)
