"""The full form of the conformance kit: every model, and every batch to resume from, for each plugin of the workspace."""

import pytest
from kernel_core.registry.discovery import installed_plugins
from kernel_core.testing.conformance.checks import CHECKS
from kernel_core.testing.conformance.kit import Kit
from kernel_core.testing.conformance.subject import Subject

NAMES = [
    info.name
    for info in installed_plugins()
    if info.kind in ("algorithms", "callbacks", "loggers") and info.distribution.startswith("kernel-plugin-")
]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_refuted(name: str) -> None:
    kit = Kit(Subject.of(name), full=True)
    try:
        results = [kit.perform(check) for check in CHECKS.values()]
    finally:
        kit.close()
    assert not [str(one) for one in results if one.verdict == "refuted"]
