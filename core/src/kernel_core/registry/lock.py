"""Plans that were written down: the lock of a run, and how two plans differ.

A plan as plain data is what ``Plan.to_json`` returns; checkpoints keep it, ``plan.json`` of a run, and ``kernel.lock``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importlib_metadata import version

from kernel_core.errors import PlanError
from kernel_core.hooks import HOOK_API
from kernel_core.naming import normalize
from kernel_core.registry.plan import Plan

FILE = "kernel.lock"
FORMAT = 1
CODE = ("kernel-core", "torch")  # whose versions a lock holds besides those of plugins


@dataclass(frozen=True)
class Difference:
    """One way in which two plans differ.

    Attributes:
        name: What allows it: a plugin's id, or ``id.option``.
        text: For people.
        refused: Whether it has to be allowed; else it is only reported.
    """

    name: str
    text: str
    refused: bool

    @property
    def is_of_code(self) -> bool:
        """Whether the code is another, which nobody can judge from here."""
        return self.name.endswith((".version", ".hash"))


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two entries of plans are the same plugin: the one place where names that were written down are compared."""
    return _origin(one) == _origin(other)


def _origin(one: Mapping[str, Any]) -> tuple[str, str, str | None]:
    distribution = one["distribution"]
    return one["kind"], normalize(one["name"]), None if distribution is None else normalize(str(distribution))


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], may_change: Mapping[str, Iterable[str]]
) -> list[Difference]:
    """Return how the plan of this run differs from that of a checkpoint.

    Args:
        saved, now: What ``Plan.to_json`` returned.
        may_change: By plugin id, the options that may differ.
    """
    before, after = ({one["id"]: one for one in plugins_of(plan)} for plan in (saved, now))
    found = []
    for plugin_id in [*before, *(one for one in after if one not in before)]:
        old, new = before.get(plugin_id), after.get(plugin_id)
        if old is None or new is None:
            one = old or new
            assert one is not None
            what = "was in the run that was saved, and is not in this one" if new is None else "is new"
            found.append(Difference(plugin_id, f"{plugin_id} ({one['kind']}) {what}", _matters(one)))
        else:
            found += _changes(plugin_id, old, new, set(may_change.get(plugin_id, ())))
    matter = {plugin_id for plugin_id, one in (before | after).items() if _matters(one)}
    for event in dict.fromkeys([*saved["events"], *now["events"]]):
        order, order_now = ([one["plugin"] for one in plan["events"].get(event, ())] for plan in (saved, now))
        both = set(order) & set(order_now) & matter
        if [one for one in order if one in both] != [one for one in order_now if one in both]:
            text = f"the order at {event} was {', '.join(order)}, and is {', '.join(order_now)}"
            found.append(Difference(f"order.{event}", text, True))
    return found


def _changes(plugin_id: str, old: Mapping[str, Any], new: Mapping[str, Any], may_change: set[str]) -> list[Difference]:
    matters = _matters(new)
    found = []
    if not is_same(old, new):
        text = f"{plugin_id} was {old['name']} of {old['distribution']}, and is {new['name']} of {new['distribution']}"
        found.append(Difference(plugin_id, text, matters))
    for option in dict.fromkeys([*old["options"], *new["options"]]):
        was, now = old["options"].get(option), new["options"].get(option)
        if was != now:
            text = f"{plugin_id}.{option} was {was!r}, and is {now!r}"
            found.append(Difference(f"{plugin_id}.{option}", text, matters and option not in may_change))
    for what in ("version", "hash"):
        if old[what] != new[what]:
            was, now = (str(one[what])[:12] for one in (old, new))
            found.append(Difference(f"{plugin_id}.{what}", f"the {what} of {plugin_id} was {was}, and is {now}", False))
            break  # another version has other files
    return found


def plugins_of(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plugins of a saved plan, checked.

    Raises:
        PlanError: it is no plan.
    """
    try:
        plugins: list[dict[str, Any]] = list(plan["plugins"])
        for one in plugins:
            texts = (one["id"], one["name"], one["kind"])
            if not all(isinstance(text, str) for text in texts) or not isinstance(one["options"], dict):
                raise TypeError(one)
            one.setdefault("distribution", None), one.setdefault("version", None), one.setdefault("hash", None)
        for calls in plan["events"].values():
            if not all(isinstance(call["plugin"], str) for call in calls):
                raise TypeError("events")
    except (KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"its plan is not one: {error!r:.120}.") from None
    return plugins


def _matters(plugin: Mapping[str, Any]) -> bool:
    return bool(plugin.get("affects_training", plugin["kind"] != "loggers"))


# --- the file -----------------------------------------------------------------------------------------------------------


def lock_of(plan: Plan) -> dict[str, Any]:
    """Return what a lock file holds: the plan, without its reasons, and the versions of what is not a plugin."""
    document = plan.to_json()
    events = {hook: [{"plugin": call["plugin"]} for call in calls] for hook, calls in document["events"].items()}
    return {
        "format": FORMAT,
        "hook_api": HOOK_API,
        "code": {name: version(name) for name in CODE},
        "digest": document["digest"],
        "plugins": document["plugins"],
        "events": events,
    }


def write_lock(path: Path, lock: Mapping[str, Any]) -> None:
    """Write a lock file, readable and the same for the same plan."""
    path.write_text(json.dumps(lock, indent=1, sort_keys=True) + "\n")


def read_plan(path: Path) -> dict[str, Any]:
    """Return the plan that a lock file, or the ``plan.json`` of a run, holds.

    Raises:
        PlanError: it is not there, or no such file.
    """
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        raise PlanError(f"{path}: there is no such file. Expected a lock. Write one: kernel plugins lock.") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path}: is no lock: {error}. Write one: kernel plugins lock.") from None
    if not isinstance(document, dict) or document.get("format", FORMAT) != FORMAT:
        raise PlanError(f"{path}: is no lock of format {FORMAT}. Write one: kernel plugins lock.")
    try:
        plugins_of(document)
    except PlanError as error:
        raise PlanError(f"{path}: {error} Write another: kernel plugins lock.") from None
    return document


def lock_differences(lock: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words how a plan differs from a lock; both as ``lock_of`` returns them."""
    found = [one.text for one in differences(lock, now, {})]
    if not found:
        found = [
            f"the order at {event} was {', '.join(was)}, and is {', '.join(is_now)}"
            for event in dict.fromkeys([*lock["events"], *now["events"]])
            if (was := _order(lock, event)) != (is_now := _order(now, event))
        ]
    if lock.get("hook_api", HOOK_API) != now.get("hook_api", HOOK_API):
        found.append(f"the level of the hook interface was {lock['hook_api']}, and is {now['hook_api']}")
    code, code_now = lock.get("code"), now.get("code")
    if isinstance(code, Mapping) and isinstance(code_now, Mapping):  # a plan.json has none
        found += [
            f"{name} was {code[name]}, and is {code_now.get(name)}" for name in code if code[name] != code_now.get(name)
        ]
    return found


def _order(plan: Mapping[str, Any], event: str) -> list[str]:
    return [call["plugin"] for call in plan["events"].get(event, ())]


def check_lock(path: Path, plan: Plan) -> None:
    """Refuse a plan that differs in any way from the lock at ``path``.

    Raises:
        PlanError: it does, or there is no lock.
    """
    told = lock_differences(read_plan(path), lock_of(plan))
    if told:
        lines = "\n".join(f"  {line}" for line in told)
        raise PlanError(
            f"{path}: the plugins of this run are not those of the lock.\n{lines}\n"
            "Use the same plugins, versions and options, or write the lock anew with the same arguments: kernel plugins lock."
        )
