"""``kernel plugins check``: the conformance kit on one plugin, and its card."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Any

import click
from kernel_core.errors import ConfigError
from kernel_core.registry.discovery import HOOK_KINDS

from kernel_cli.output import Result


def check_plugin(target: str, full: bool, write: bool, as_json: bool) -> Result:
    """Run the kit on each plugin that ``target`` means, print their cards, and return them; exit code 1 if one is refuted."""
    cards = [_check(name, full, write, as_json) for name in _names(target)]
    refuted = any(found.startswith("refuted") for card in cards for found in card["checks"].values())
    return Result(cards[0] if len(cards) == 1 else cards, 1 if refuted else 0)


def _check(name: str, full: bool, write: bool, as_json: bool) -> dict[str, Any]:
    from kernel_core.testing.conformance.card import card_of, card_path, keep_card, render, subject_of
    from kernel_core.testing.conformance.checks.leaving import cost
    from kernel_core.testing.conformance.kit import Kit, RefutedError
    from kernel_core.testing.conformance.subject import Subject

    subject = subject_of(name)
    kit, results = Kit(subject, full), []
    path = card_path(subject)
    if write and path is None:
        raise ConfigError(
            f"plugins check: {name} is a single file. Expected a package, which keeps its card. Leave out --write."
        )
    try:
        for check in kit.checks.values():
            if sys.stderr.isatty():
                click.echo(f"\r{subject.name}: {check.name:20}\r", nl=False, err=True)
            results.append(kit.perform(check))
        card = card_of(subject, results)
        if not as_json:
            click.echo(render(card))
            try:
                times = cost(kit) if isinstance(subject, Subject) else {}
            except RefutedError:
                times = {}
            if times:
                click.echo(
                    "on this machine: " + ", ".join(f"{hook} {time_us:.1f} us" for hook, time_us in times.items())
                )
    finally:
        kit.close()
    if write and path is not None:
        if full:
            raise ConfigError(
                "plugins check: got --write with --full. Expected one: a card holds what the short form finds."
            )
        keep_card(path, card)
        click.echo(f"wrote {path}", err=True)
    return card


def _names(target: str) -> list[str]:
    """Return the plugins that a name, a file, or the folder of an installed package means.

    Raises:
        ConfigError: it is a folder without plugins that answer hooks.
    """
    folder = Path(target)
    if not folder.is_dir():
        return [target]
    project = folder / "pyproject.toml"
    groups = tomllib.loads(project.read_text()).get("project", {}).get("entry-points", {}) if project.exists() else {}
    names = [f"{kind}/{name}" for kind in HOOK_KINDS for name in groups.get(f"kernel.{kind}", {})]
    if not names:
        raise ConfigError(
            f"plugins check: {target} holds no plugin that answers hooks. Expected the name of a plugin, a file ending in .py, "
            f"or the folder of a package with an entry point in one of {', '.join(f'kernel.{kind}' for kind in HOOK_KINDS)}."
        )
    return names
