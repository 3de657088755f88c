"""Comparing the plan of a checkpoint with that of the run that loads it, and taking up the plugins its model needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_core.errors import CheckpointMismatchError, KernelError
from kernel_core.naming import normalize
from kernel_core.registry.discovery import find, load_class
from kernel_core.registry.plan import ActivePlugin

KIND = "algorithms"
Options = Mapping[str, Any]


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


def structural_plugins(
    plan: Mapping[str, Any], active: Sequence[ActivePlugin], exclude: Collection[str]
) -> list[ActivePlugin]:
    """Return the algorithms that changed the structure of the saved model and are not among ``active``, ready to be used.

    They are found by the name of their entry point and must come from the same distribution; nothing is imported by a name
    that stands in the file.

    Args:
        plan: That of the checkpoint.
        active: The plugins that were asked for.
        exclude: Names of plugins to leave out.

    Raises:
        CheckpointMismatchError: one is not installed, comes from somewhere else, is not structural, or has options that a
            file cannot hold.
    """
    excluded = {normalize(name) for name in exclude}
    present = {one.id for one in active} | {one.plugin.name for one in active}
    found = []
    for saved in _plugins(plan):
        if saved.get("structural") is not True or saved["kind"] != KIND or {saved["id"], saved["name"]} & present:
            continue
        if normalize(saved["name"]) not in excluded:
            found.append(_again(saved))
    return found


def in_saved_order(active: Sequence[ActivePlugin], plan: Mapping[str, Any]) -> list[ActivePlugin]:
    """Return ``active`` with the plugins that the saved plan has in its order, before those that are new."""
    ids = [one["id"] for one in _plugins(plan)]
    return sorted(active, key=lambda one: ids.index(one.id) if one.id in ids else len(ids))


def _again(saved: Mapping[str, Any]) -> ActivePlugin:
    name, distribution = saved["name"], saved["distribution"]
    remedy = f"Install it, name it yourself, or leave it out: load_exclude_algorithms=[{name!r}]."
    if not isinstance(distribution, str):
        raise CheckpointMismatchError(
            f"checkpoint: its model was changed by {name!r}, which belongs to no distribution. Expected an instance of it among "
            f"the algorithms of this run. {remedy}"
        )
    try:
        info = find(f"{distribution}:{name}", (KIND,))
        cls = load_class(info)
        if not getattr(cls, "structural", False):
            raise CheckpointMismatchError(f"{name} of {distribution} is not one that changes the structure of models.")
        if _holds_object(saved["options"]):
            raise CheckpointMismatchError(f"an option of {name} is an object, which a file cannot hold.")
        plugin = cls.make(
            info.name, **saved["options"], **({"id": saved["id"]} if saved["id"] != saved["name"] else {})
        )
    except (KernelError, TypeError) as error:  # TypeError: options that no plugin can have, such as a second name
        raise CheckpointMismatchError(
            f"checkpoint: its model was changed by {name!r} of {distribution}, which cannot be applied again: {error} {remedy}"
        ) from error
    return ActivePlugin(plugin.id or plugin.name, plugin, info.distribution, info.version)


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], may_change: Mapping[str, Iterable[str]]
) -> list[Difference]:
    """Return how the plan of this run differs from that of a checkpoint.

    Args:
        saved, now: What ``Plan.to_json`` returned.
        may_change: By plugin id, the options that may differ.
    """
    before, after = ({one["id"]: one for one in _plugins(plan)} for plan in (saved, now))
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
    if (old["name"], old["distribution"]) != (new["name"], new["distribution"]):
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


def check_plan(found: Sequence[Difference], allow: Collection[str], locked: bool, where: str) -> list[Difference]:
    """Return the differences that may be; refuse the others.

    Args:
        found: What ``differences`` returned.
        allow: Names of differences that may be; a plugin's id allows all that concerns it.
        locked: Refuse every difference.
        where: The checkpoint.

    Raises:
        CheckpointMismatchError: lists what is refused, and how to allow it.
    """

    def allowed(one: Difference) -> bool:
        return one.name in allow or one.name.partition(".")[0] in allow

    refused = [one for one in found if (one.refused or locked) and not allowed(one)]
    if refused:
        ids = ",".join(one.name for one in refused)
        lines = "\n".join(f"  {one.text}" for one in refused)
        names = ", ".join(repr(one.name) for one in refused)
        how = "locked=True refuses any difference" if locked else "what changes training must be as it was"
        raise CheckpointMismatchError(
            f"checkpoint {where}: the plugins of this run differ from those that saved it; {how}.\n{lines}\n"
            f"Use the same plugins and options, or allow it: load_allow_changes=[{names}]; on the command line "
            f"--set checkpoint.load_allow_changes=[{ids}]."
        )
    return list(found)


def _plugins(plan: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the plugins of a saved plan, checked.

    Raises:
        CheckpointMismatchError: it is no plan.
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
        raise CheckpointMismatchError(f"checkpoint: its plan is not one: {error!r:.120}.") from None
    return plugins


def _matters(plugin: Mapping[str, Any]) -> bool:
    return bool(plugin.get("affects_training", plugin["kind"] != "loggers"))


def _holds_object(options: Any) -> bool:
    if isinstance(options, Mapping):
        return "$object" in options or any(map(_holds_object, options.values()))
    return isinstance(options, list) and any(map(_holds_object, options))
