"""``kernel plugins check``: the conformance kit on one plugin, and its card."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kernel_core.errors import ConfigError
from kernel_core.naming import normalize
from kernel_core.registry.discovery import HOOK_KINDS, installed_plugins

from kernel_cli.output import Result

if TYPE_CHECKING:
    from kernel_core.testing.conformance.kit import Check, Kit


def check_plugin(target: str, full: bool, write: bool, as_json: bool) -> Result:
    """Run the kit on each plugin that ``target`` means, print their cards, and return them; exit code 1 if one is refuted."""
    if full and write:
        raise ConfigError(
            "plugins check: got --write with --full. Expected one: a card holds what the short form finds. Leave out --full."
        )
    cards = [_check(name, full, write, as_json) for name in plugins_meant(target)]
    return Result(cards[0] if len(cards) == 1 else cards, 1 if any(map(_is_refuted, cards)) else 0)


def _is_refuted(card: Mapping[str, Any]) -> bool:
    return any(found.startswith("refuted") for found in card["checks"].values())


def _check(name: str, full: bool, write: bool, as_json: bool) -> dict[str, Any]:
    from kernel_core.testing.conformance.card import card_of, card_path, keep_card, render, subject_of
    from kernel_core.testing.conformance.kit import Kit

    subject = subject_of(name)
    path = card_path(subject)
    if write and path is None:
        raise ConfigError(
            f"plugins check: {name} is a single file. Expected a package, which keeps its card. Leave out --write."
        )
    kit = Kit(subject, full)
    try:
        card = card_of(subject, [kit.perform(check) for check in _told(kit.checks.values(), subject.name)])
        if not as_json:
            click.echo(render(card))
            if times := _times(kit):
                click.echo(
                    "on this machine: " + ", ".join(f"{hook} {time_us:.1f} us" for hook, time_us in times.items())
                )
    finally:
        kit.close()
    if write and path is not None:
        if _is_refuted(card):
            click.echo("the card is not kept: mend what is refuted, or declare it", err=True)
        else:
            keep_card(path, card)
            click.echo(f"wrote {path}", err=True)
    return card


def _told(checks: Iterable[Check], name: str) -> Iterator[Check]:
    """Yield checks, and say on a terminal which is at work."""
    for check in checks:
        if sys.stderr.isatty():
            click.echo(f"\r{name}: {check.name:20}", nl=False, err=True)
        yield check
    if sys.stderr.isatty():
        click.echo("\r" + " " * (len(name) + 22) + "\r", nl=False, err=True)


def _times(kit: Kit) -> dict[str, float]:
    from kernel_core.testing.conformance.checks.leaving import cost
    from kernel_core.testing.conformance.kit import ENGINE_CHECKS, OutcomeError

    try:
        return {} if kit.checks is ENGINE_CHECKS else cost(kit)
    except OutcomeError:
        return {}  # the card says why


CHECKED_KINDS = (*HOOK_KINDS, "parallelism")


def plugins_meant(target: str) -> list[str]:
    """Return the plugins that a name, a file, or the folder of an installed package means.

    Raises:
        ConfigError: it is a folder without plugins that the kit has checks for, or they are not installed.
    """
    folder, project = Path(target), Path(target) / "pyproject.toml"
    if not folder.is_dir() or not (project.exists() or "/" in target):  # a plugin may be called like a folder here
        return [target]
    groups = tomllib.loads(project.read_text()).get("project", {}).get("entry-points", {}) if project.exists() else {}
    found = [(kind, normalize(name)) for kind in CHECKED_KINDS for name in groups.get(f"kernel.{kind}", {})]
    if not found:
        kinds = ", ".join(f"kernel.{kind}" for kind in CHECKED_KINDS)
        raise ConfigError(
            f"plugins check: {target} holds no plugin to check. Expected the name of a plugin, a file ending in .py, or the "
            f"folder of a package with an entry point in one of {kinds}."
        )
    installed = {(info.kind, info.name) for info in installed_plugins()}
    if missing := [name for kind, name in found if (kind, name) not in installed]:
        raise ConfigError(
            f"plugins check: {missing[0]} of {target} is not installed. Expected it to be, since it is found by its entry point. "
            f"Install it: pip install -e {shlex.quote(target)}"
        )
    return [f"{kind}/{name}" for kind, name in found]
