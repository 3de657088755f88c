"""Levels of the hook interface: older plugins work, newer ones are refused, and what will go is said."""

import warnings
from types import ModuleType
from typing import Any

import pytest
from kernel_core import Callback, hookimpl
from kernel_core.errors import HookError
from kernel_core.hooks import HOOK_API, HookDeprecationWarning, HookSpec, hookspec
from kernel_core.registry import hookmanager
from kernel_core.registry.hookmanager import HOOK_NAMES, HookManager
from kernel_core.registry.plan import ActivePlugin, build_plan, invoke, resolve


class Parts(ModuleType):
    """Hooks of another package."""

    @staticmethod
    @hookspec()
    def part_begins(number: int, size: int) -> None:
        """Fires when a part begins; ``size`` was added later."""

    @staticmethod
    @hookspec(since=2, deprecated=3, replaced_by="part_begins")
    def part_is_there(number: int) -> None:
        """Fires when a part is there."""


def owner() -> Any:
    space = ModuleType("parts")
    for name in ("part_begins", "part_is_there"):
        setattr(space, name, getattr(Parts, name))

    class Owner(Callback):
        @hookimpl
        def kernel_addhooks(self, hooks: Any) -> None:
            hooks.add(space)

    return Owner()


def active(plugin: Any, distribution: str | None = None, version: str | None = None) -> ActivePlugin:
    return ActivePlugin(plugin.name, plugin, distribution, version)


def test_every_hook_of_the_kernel_has_a_level_that_this_kernel_has() -> None:
    specs = HookManager().specs
    assert set(specs) == HOOK_NAMES
    for name, spec in specs.items():
        assert 1 <= spec.since <= HOOK_API, name
        assert spec.deprecated is None or spec.since <= spec.deprecated <= HOOK_API, name
        assert spec.replaced_by is None or (spec.deprecated is not None and spec.replaced_by in specs), name


def test_an_argument_that_is_added_breaks_no_answer() -> None:
    class Old(Callback):
        @hookimpl
        def part_begins(self, number: int) -> None:
            self.number = number

    old = Old()
    plan = build_plan([active(owner()), active(old)])
    for call in plan.calls("part_begins"):
        invoke(call, {"number": 3, "size": 5})
    assert old.number == 3


def test_a_deprecated_hook_fires_and_the_warning_names_plugin_version_and_what_to_answer_instead() -> None:
    class Late(Callback):
        @hookimpl
        def part_is_there(self, number: int) -> None:
            self.number = number

    late = Late()
    with pytest.warns(HookDeprecationWarning) as told:
        plan = build_plan([active(owner()), active(late, "somebodys-late", "1.4")])
    assert [str(one.message) for one in told] == [
        "late (somebodys-late 1.4): answers the hook part_is_there, which is deprecated from level 3 of the hook interface on. "
        "Answer part_begins instead. It still works."
    ]
    plan.call("part_is_there", number=7)
    assert late.number == 7


def test_a_hook_that_is_not_active_is_no_reason_to_warn() -> None:
    class Late(Callback):
        @hookimpl
        def part_is_there(self, number: int) -> None:
            pass

        def active_hooks(self) -> list[str]:
            return []

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build_plan([active(owner()), active(Late())])


def test_a_plugin_that_answers_a_hook_newer_than_its_level_is_told_which_to_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Modern(Callback):
        @hookimpl
        def batch_end(self) -> None:
            pass

    before = hookmanager.HookManager.add_specs

    def newer(self: HookManager, namespace: Any, owner: str) -> None:
        before(self, namespace, owner)
        self.specs["batch_end"] = HookSpec(since=2)

    monkeypatch.setattr(hookmanager.HookManager, "add_specs", newer)
    message = (
        r"modern\.batch_end: is a hook of level 2, and the plugin says that it was written for level 1\. Set hook_api = 2 in the "
        r"class\."
    )
    with pytest.raises(HookError, match=message):
        build_plan(resolve([Modern()]))


def test_a_plugin_of_a_newer_level_is_refused() -> None:
    class Future(Callback):
        hook_api = HOOK_API + 1

    message = (
        rf"future: was written for level {HOOK_API + 1} of the hook interface; this kernel has {HOOK_API}\. Upgrade "
    )
    with pytest.raises(HookError, match=message):
        build_plan(resolve([Future()]))
