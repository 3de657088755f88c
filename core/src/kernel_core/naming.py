"""Names as people type them: one normal form, and the nearest match for a misspelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def normalize(name: str) -> str:
    """Return ``name`` in the form names are compared in: PEP 503, with underscores.

    >>> normalize("Gradient--Clipping")
    'gradient_clipping'
    """
    return re.sub(r"[-_.]+", "_", name).lower()


def snake_case(class_name: str) -> str:
    """Turn a class name into a plugin name.

    >>> snake_case("LRMonitor"), snake_case("SpeedMonitor")
    ('lr_monitor', 'speed_monitor')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", class_name).lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the names of ``known`` close to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    if not matches:
        return ""
    return " Did you mean " + " or ".join(repr(match) for match in matches) + "?"
