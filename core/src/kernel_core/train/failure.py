"""What to say when a run fails, found from the traceback afterwards so that it costs nothing per step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from kernel_core.registry.plan import Plan, PlannedCall
from kernel_core.train.state import State


def annotate(error: BaseException, state: State) -> None:
    """Add a note to ``error``: the plugin and hook it came from, if any, the rank and how far the run was."""
    progress = state.progress
    where = f"rank {state.rank}, epoch {progress.epoch}, batch {progress.batch}"
    call = find_culprit(error, state.plan)
    if call is None:
        note = f"the run {state.run_name!r} failed at {where}"
    else:
        hook, planned = call
        active = state.plan.by_id(planned.plugin)
        origin = f"{active.distribution} {active.version}" if active.distribution else "of no distribution"
        note = f"in plugin {planned.plugin!r} ({origin}), hook {hook}, {where}"
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def find_culprit(error: BaseException, plan: Plan) -> tuple[str, PlannedCall] | None:
    """Return hook and call of the innermost frame of the traceback that is a plugin's answer to a hook."""
    calls: dict[Any, list[tuple[str, PlannedCall]]] = {}
    for hook, planned in plan.events.items():
        for call in planned:
            code = getattr(inspect.unwrap(call.function), "__code__", None)
            calls.setdefault(code, []).append((hook, call))
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        for hook, call in calls.get(frame.f_code, ()):
            if frame.f_locals.get("self") is getattr(call.function, "__self__", None):
                found = (hook, call)
        traceback = traceback.tb_next
    return found


def call_all(calls: Iterable[Callable[[], Any]]) -> list[Exception]:
    """Run every call whatever another raises; return what was raised."""
    errors: list[Exception] = []
    for call in calls:
        try:
            call()
        except Exception as error:
            errors.append(error)
    return errors


def raise_all(message: str, errors: list[Exception]) -> None:
    """Raise a single error as itself, several as one ``ExceptionGroup``; do nothing when there is none."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(message, errors)
