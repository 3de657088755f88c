"""Comparing the plan of a checkpoint with that of the run that loads it, and taking up the plugins its model needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kernel_core.errors import CheckpointMismatchError, KernelError, PlanError
from kernel_core.registry.discovery import find, load_class
from kernel_core.registry.lock import Difference, comparable, plugins_of
from kernel_core.registry.plan import ActivePlugin

KIND = "algorithms"
Options = Mapping[str, Any]


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
    known = {comparable(name) for one in active for name in (one.id, one.plugin.name)}
    excluded = set(map(comparable, exclude))
    found = []
    for saved in _plugins(plan):
        names = {comparable(saved["id"]), comparable(saved["name"])}
        if saved.get("structural") is not True or saved["kind"] != KIND or names & known:
            continue
        if comparable(saved["name"]) not in excluded:
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
    """Return the plugins of a saved plan, checked."""
    try:
        return plugins_of(plan)
    except PlanError as error:
        raise CheckpointMismatchError(f"checkpoint: {error}") from None


def _holds_object(options: Any) -> bool:
    if isinstance(options, Mapping):
        return "$object" in options or any(map(_holds_object, options.values()))
    return isinstance(options, list) and any(map(_holds_object, options))
