"""What pytest gets from the kernel: the conformance kit as a fixture, one test for each check.

@pytest.mark.conformance("my_plugin")
def test_it_conforms(conformance_check):
    conformance_check()
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

import pytest

CARD = "card"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", "conformance(plugin): run the conformance kit of the kernel on that plugin")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each check."""
    if "conformance_check" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("conformance")
    if marker is None or len(marker.args) != 1:
        raise pytest.UsageError(
            f"{metafunc.function.__name__}: mark it with @pytest.mark.conformance('<name of the plugin>')."
        )
    name = marker.args[0]
    cases = [(name, check) for check in (*_kit(name).checks, CARD)]
    metafunc.parametrize("conformance_check", cases, indirect=True, ids=[check for _, check in cases])


@pytest.fixture
def conformance_check(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Return a function that performs one check of the kit, and fails if it is refuted or the kept card says otherwise."""
    plugin, check = request.param
    return functools.partial(_perform, plugin, check)


def _perform(plugin: str, check: str) -> None:
    from kernel_core.testing.conformance.card import card_path, kept_card

    kit, subject = _kit(plugin), _subject(plugin)
    card = kept_card(card_path(subject), subject.name)
    renew = f"Run `kernel plugins check {plugin} --write`"
    if check == CARD:
        _check_card(plugin, card, renew)
        return
    result = kit.perform(kit.checks[check])
    assert result.verdict != "refuted", f"{check}: {result.detail}"
    if card is not None:
        kept = card["checks"].get(check)
        assert kept == str(result), (
            f"{check}: the card in the package says {kept!r}, and it is {str(result)!r}. {renew}."
        )


def _check_card(plugin: str, card: Any, renew: str) -> None:
    """The rest of the card must be that of the plugin as it is."""
    from kernel_core.testing.conformance.card import card_of

    assert card is not None, f"the package keeps no card. {renew}."
    fresh = card_of(_subject(plugin), [])
    assert {**card, "checks": {}} == fresh, f"the card in the package is of another state of the plugin. {renew}."
    assert list(card["checks"]) == list(_kit(plugin).checks), f"the card in the package has other checks. {renew}."


@functools.cache
def _subject(plugin: str) -> Any:
    from kernel_core.testing.conformance.card import subject_of

    return subject_of(plugin)


@functools.cache
def _kit(plugin: str) -> Any:
    from kernel_core.testing.conformance.kit import Kit

    kit = Kit(_subject(plugin))
    atexit.register(kit.close)
    return kit
