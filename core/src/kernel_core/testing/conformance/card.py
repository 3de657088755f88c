"""What was proven of a plugin: for people, and as the document that a package keeps as ``conformance.json``."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernel_core.hooks import HOOK_API
from kernel_core.naming import normalize
from kernel_core.registry.discovery import installed_plugins
from kernel_core.registry.single_file import is_file
from kernel_core.testing.conformance.checks import CHECKS, ENGINE_CHECKS
from kernel_core.testing.conformance.kit import Result
from kernel_core.testing.conformance.subject import EngineSubject, Subject

FILE = "conformance.json"
MARKS = {"proven": "✓", "refused": "-", "declared": "~", "does not apply": " ", "refuted": "✗"}


def subject_of(name: str) -> Subject | EngineSubject:
    """Return the plugin that answers hooks, or the engine, of that name.

    Raises:
        KernelError: there is none, or it cannot be used.
    """
    kinds = {info.kind for info in installed_plugins() if info.name == normalize(name)}
    return EngineSubject.of(name) if kinds == {"parallelism"} or name.startswith("parallelism/") else Subject.of(name)


def card_of(subject: Subject | EngineSubject, results: Iterable[Result]) -> dict[str, Any]:
    """Return the card of a plugin: what it is, and what each check found."""
    return {
        "plugin": subject.name,
        "kind": subject.kind,
        "hook_api": HOOK_API,
        "hooks": list(subject.hooks),
        "options": {name: repr(value) for name, value in sorted(subject.options.items())},
        "checks": {one.check: str(one) for one in results},
    }


def render(card: Mapping[str, Any]) -> str:
    """Return a card as text."""
    lines = [f"{card['plugin']}  ({card['kind']}, level {card['hook_api']} of the hook interface)"]
    if card["options"]:
        lines.append("tried with " + ", ".join(f"{name}={value}" for name, value in card["options"].items()))
    known = {**CHECKS, **ENGINE_CHECKS}
    width = max(map(len, known))
    for name, found in card["checks"].items():
        verdict, _, detail = found.partition(": ")
        first, *more = detail.splitlines() or [""]
        claim = known[name].claim if name in known else ""
        text = (
            f"{claim} ({first})"
            if verdict == "proven" and first
            else claim
            if verdict == "proven"
            else found.splitlines()[0]
        )
        lines.append(f"  {MARKS[verdict]} {name:{width}}  {text}")
        lines += [f"    {'':{width}}  {line}" for line in more]
    return "\n".join(lines)


def card_path(subject: Subject | EngineSubject) -> Path | None:
    """Return where the package of a plugin keeps its cards; None for a plugin that is a single file."""
    if isinstance(subject, EngineSubject):
        return path_in_package(subject.cls)
    return None if is_file(subject.request) else path_in_package(type(subject.plugin))


def path_in_package(cls: type) -> Path | None:
    """Return where the package that defines a class keeps cards; None if it is no package."""
    package = cls.__module__.partition(".")[0]
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return Path(folders[0]) / FILE if folders else None


def kept_card(path: Path | None, name: str) -> dict[str, Any] | None:
    """Return the card of a plugin that its package keeps, None if it keeps none."""
    if path is None or not path.exists():
        return None
    card: dict[str, Any] | None = json.loads(path.read_text()).get(name)
    return card


def keep_card(path: Path, card: Mapping[str, Any]) -> None:
    """Write a card into the package of its plugin, beside those of the others there."""
    cards = json.loads(path.read_text()) if path.exists() else {}
    cards[card["plugin"]] = dict(card)
    path.write_text(json.dumps(dict(sorted(cards.items())), indent=1, ensure_ascii=False) + "\n")
