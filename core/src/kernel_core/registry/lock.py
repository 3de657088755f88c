"""Plans that were written down: the lock of a run, and how two plans differ.

A plan as plain data is what ``Plan.to_json`` returns; checkpoints keep it, ``plan.json`` of a run, and ``kernel.lock``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importlib_metadata import version
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

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


def comparable(name: str) -> str:
    """Return a name in the form in which names that were written down are compared: the one place that decides it."""
    return normalize(name)


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two entries of plans are the same plugin of the same distribution."""
    return _origin(one) == _origin(other)


def _origin(one: Mapping[str, Any]) -> tuple[str, str, str | None]:
    distribution = one["distribution"]
    return one["kind"], comparable(one["name"]), None if distribution is None else comparable(str(distribution))


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], may_change: Mapping[str, Iterable[str]]
) -> list[Difference]:
    """Return how the plan of this run differs from that of a checkpoint.

    Args:
        saved, now: What ``Plan.to_json`` returned.
        may_change: By plugin id, the options that may differ.
    """
    before, after = _by_id(saved), _by_id(now)
    found = _changed_plugins(before, after, may_change, "was in the run that was saved, and is not in this one")
    matter = {plugin_id for plugin_id, one in (before | after).items() if _matters(one)}
    for event in _events(saved, now):
        order, order_now = _order(saved, event), _order(now, event)
        both = set(order) & set(order_now) & matter
        if [one for one in order if one in both] != [one for one in order_now if one in both]:
            found.append(Difference(f"order.{event}", _reordered(f"at {event}", order, order_now), True))
    return found


def _by_id(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in plugins_of(plan)}


def _events(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys([*saved["events"], *now["events"]]))


def _order(plan: Mapping[str, Any], event: str) -> list[str]:
    return [call["plugin"] for call in plan["events"].get(event, ())]


def _reordered(where: str, was: Iterable[str], now: Iterable[str]) -> str:
    return f"the order {where} was {', '.join(was) or 'nobody'}, and is {', '.join(now) or 'nobody'}"


def _changed_plugins(
    before: Mapping[str, Mapping[str, Any]],
    after: Mapping[str, Mapping[str, Any]],
    may_change: Mapping[str, Iterable[str]],
    missing: str,
) -> list[Difference]:
    """Return how two sets of plugins differ, their order aside; ``missing`` is what is said of one that is gone."""
    found = []
    for plugin_id, old in before.items():
        if plugin_id in after:
            found += _changes(plugin_id, old, after[plugin_id], set(may_change.get(plugin_id, ())))
        else:
            found.append(Difference(plugin_id, f"{plugin_id} ({old['kind']}) {missing}", _matters(old)))
    for plugin_id, new in after.items():
        if plugin_id not in before:
            found.append(Difference(plugin_id, f"{plugin_id} ({new['kind']}) is new", _matters(new)))
    return found


def _changes(plugin_id: str, old: Mapping[str, Any], new: Mapping[str, Any], may_change: set[str]) -> list[Difference]:
    matters = _matters(new)
    found = []
    if not is_same(old, new):
        text = f"{plugin_id} was {old['name']} of {old['distribution']}, and is {new['name']} of {new['distribution']}"
        found.append(Difference(plugin_id, text, matters))
    for option in dict.fromkeys([*old["options"], *new["options"]]):
        was, now = old["options"].get(option), new["options"].get(option)
        if was != now and repr(was) != repr(now):  # nan is not equal to itself
            text = f"{plugin_id}.{option} was {was!r}, and is {now!r}"
            found.append(Difference(f"{plugin_id}.{option}", text, matters and option not in may_change))
    for what in ("version", "hash"):
        if old[what] != new[what]:
            was, now = (str(one[what])[: None if what == "version" else 12] for one in (old, new))
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
    """Write a lock file, readable and the same for the same plan.

    Raises:
        PlanError: it cannot be written there.
    """
    try:
        path.write_text(json.dumps(lock, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise PlanError(f"{path}: the lock cannot be written there: {error.strerror}. Name another file.") from None


def read_plan(path: Path) -> dict[str, Any]:
    """Return the plan that a lock file, or the ``plan.json`` of a run, holds.

    Raises:
        PlanError: it is not there, or no such file.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{path}: there is no such file. Expected a lock. Write one: kernel plugins lock.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path}: is no lock: {error}. Write one: kernel plugins lock.") from None
    if not isinstance(document, dict) or document.get("format", FORMAT) != FORMAT:
        raise PlanError(f"{path}: is no lock of format {FORMAT}. Write one: kernel plugins lock.")
    try:
        plugins_of(document)
    except PlanError as error:
        raise PlanError(f"{path}: {error} Write another: kernel plugins lock.") from None
    return document


def lock_differences(lock: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return in words every way in which a plan differs from one that was written down: those of loggers and code too.

    Args:
        lock, now: What ``lock_of``, ``read_plan`` or ``Plan.to_json`` returned.
    """
    before, after = _by_id(lock), _by_id(now)
    found = [one.text for one in _changed_plugins(before, after, {}, "is missing")]
    both = [plugin_id for plugin_id in before if plugin_id in after]
    for what in ("structural", "affects_training"):  # of a class that no file tells of
        found += [
            f"{one}.{what} was {before[one].get(what)}, and is {after[one].get(what)}"
            for one in both
            if before[one].get(what) != after[one].get(what)
        ]
    orders = {f"at {event}": (_order(lock, event), _order(now, event)) for event in _events(lock, now)}
    orders["of the plugins"] = (list(before), list(after))
    for where, (was, is_now) in orders.items():
        was, is_now = ([one for one in order if one in both] for order in (was, is_now))
        if was != is_now:
            found.append(_reordered(where, was, is_now))
    return [*found, *_changed_code(lock, now)]


def _changed_code(lock: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return how what is not a plugin differs, as far as both plans tell: those of runs and checkpoints do not tell all."""
    levels = lock.get("hook_api"), now.get("hook_api")
    found = []
    if None not in levels and levels[0] != levels[1]:
        found.append(f"the level of the hook interface was {levels[0]}, and is {levels[1]}")
    code, code_now = _code(lock), _code(now)
    return found + [
        f"{name} was {code[name]}, and is {code_now[name]}"
        for name in code
        if name in code_now and code[name] != code_now[name]
    ]


def _code(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    code = plan.get("code")
    return code if isinstance(code, Mapping) else {}


def check_lock(path: Path, plan: Plan) -> None:
    """Refuse a plan that differs in any way from the lock at ``path``.

    Raises:
        PlanError: it does, or there is no lock.
    """
    lock, now = read_plan(path), lock_of(plan)
    told = lock_differences(lock, now)
    if told:
        lines = "\n".join(f"  {_printable(line)}" for line in told)
        install = " ".join(_other_versions(lock, now))
        raise PlanError(
            f"{path}: the plugins of this run are not those of the lock.\n{lines}\n"
            f"Use the same plugins, versions and options{f' (pip install {install})' if install else ''}, or write the lock anew "
            "with the same arguments: kernel plugins lock."
        )


def _other_versions(lock: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the requirements for the versions that the lock has and that are not installed."""
    wanted, installed = _versions(lock), _versions(now)
    names = [name for name in wanted if name in installed and wanted[name] != installed[name]]
    return sorted(text for name in names if (text := requirement(name, wanted[name])) is not None)


def _versions(plan: Mapping[str, Any]) -> dict[str, str]:
    found = {str(one["distribution"]): one["version"] for one in plugins_of(plan) if one["distribution"] is not None}
    return {comparable(name): public_version(version) for name, version in {**found, **_code(plan)}.items()}


def public_version(version: Any) -> str:
    """Return a version without what its builder added, ``2.13.0`` for ``2.13.0+cpu``: what an index has. Empty for no version."""
    try:
        return Version(str(version)).public
    except InvalidVersion:
        return ""


def requirement(name: Any, version: Any) -> str | None:
    """Return ``name==version`` as pip reads it, the version as ``public_version`` has it; None if it is no such thing.

    What goes in may come from a stranger's file: what comes out is one line of letters, digits and ``-.!=``.
    """
    public = public_version(version)
    project = canonicalize_name(name) if isinstance(name, str) else ""
    return f"{project}=={public}" if public and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", project) else None


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
