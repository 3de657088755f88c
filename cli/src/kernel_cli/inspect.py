"""``kernel plan``, ``kernel plugins list`` and ``kernel plugins show``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from kernel_core.registry.discovery import HOOK_KINDS, KINDS, PluginInfo, find, installed_plugins, load_class
from kernel_core.registry.single_file import is_file, load_file, name_of

from kernel_cli.output import columns


def list_plugins(as_json: bool) -> list[dict[str, str]]:
    """Return every installed plugin; print them for people unless ``as_json``."""
    found = installed_plugins()
    if not as_json:
        rows = [(info.name, info.kind, f"{info.distribution} {info.version}", info.summary) for info in found]
        click.echo(columns([("name", "kind", "distribution", "summary"), *rows]))
    return [_basics(info) for info in found]


def _basics(info: PluginInfo) -> dict[str, str]:
    return {
        "name": info.name,
        "kind": info.kind,
        "distribution": info.distribution,
        "version": info.version,
        "summary": info.summary,
    }


def show_plugin(name: str, as_json: bool) -> dict[str, Any]:
    """Return what can be known of one plugin from its class."""
    if is_file(name):
        cls = load_file(name)
        details = {"name": name_of(name), "kind": cls.kind, "distribution": None, "version": None, "summary": ""}  # type: ignore[attr-defined]
        details |= _describe_class(cls)
        if not as_json:
            _print_plugin(details)
        return details
    info = find(name, KINDS)
    details = _basics(info)
    if info.kind in HOOK_KINDS:
        cls = load_class(info)
        details |= _describe_class(cls) | {"card": _card(info, cls)}
    else:
        loaded = info.load()
        details |= {"documentation": getattr(loaded, "summary", None) or (loaded.__doc__ or "").strip()}
    if not as_json:
        _print_plugin(details)
    return details


def _card(info: PluginInfo, cls: type) -> dict[str, Any] | None:
    """Return what the conformance kit found, as the package keeps it."""
    from kernel_core.testing.conformance.card import kept_card, path_in_package

    return kept_card(path_in_package(cls), info.name)


def _describe_class(cls: Any) -> dict[str, Any]:
    import inspect

    from kernel_core.registry.hookmanager import hooks_of
    from kernel_core.registry.options import describe_options

    def words(attribute: str) -> list[str]:
        value = getattr(cls, attribute)
        return sorted({value} if isinstance(value, str) else value)

    return {
        "documentation": inspect.getdoc(cls) or "",
        "options": describe_options(cls),
        "hooks": hooks_of(cls),
        **{attribute: words(attribute) for attribute in ("roles", "before", "after", "conflicts")},
    }


def _print_plugin(details: dict[str, Any]) -> None:
    owner = f"{details['distribution']} {details['version']}" if details["distribution"] else "a file"
    click.echo(f"{details['name']}  ({details['kind']}, {owner})\n")
    click.echo(details["documentation"] + "\n")
    if options := details.get("options"):
        click.echo("options")
        click.echo(columns([(item["name"], item["type"], item["default"]) for item in options], "  "))
    for attribute in ("hooks", "roles", "before", "after", "conflicts"):
        if details.get(attribute):
            click.echo(f"{attribute}: {', '.join(details[attribute])}")
    if details.get("card"):
        from kernel_core.testing.conformance.card import render

        click.echo("\nwhat the conformance kit found\n" + render(details["card"]))


def show_plan(
    source: str | None, plugins: str, options: Iterable[str], settings: Iterable[str], as_json: bool
) -> dict[str, Any]:
    """Resolve and order the plugins of a run without building its model."""
    from kernel_cli.lock import plan_of_arguments

    plan = plan_of_arguments(source, plugins, options, settings)
    if not as_json:
        click.echo(plan.explain())
        click.echo(f"\nplan digest {plan.digest}")
    return plan.to_json()
