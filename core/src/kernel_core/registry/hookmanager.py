"""pluggy, made strict: whatever pluggy would pass over in silence is an error when a plugin registers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import pluggy

from kernel_core import hooks
from kernel_core.errors import HookError
from kernel_core.hooks import HookConstraints, HookDeprecationWarning, HookSpec
from kernel_core.naming import did_you_mean
from kernel_core.registry.base import Plugin

_IMPL = f"{hooks.PROJECT}_impl"
KERNEL = "kernel"  # who owns the hooks of hooks.py
HOOK_NAMES = frozenset(name for name, function in vars(hooks).items() if hasattr(function, "kernel_hook"))


class HookAdder:
    """What ``kernel_addhooks`` gets: ``add`` takes a module or class of functions marked with ``hookspec``."""

    def __init__(self, manager: HookManager, plugin_id: str) -> None:
        self._manager = manager
        self._plugin_id = plugin_id

    def add(self, namespace: Any) -> None:
        """Define the hooks of ``namespace``.

        Raises:
            HookError: it holds no hookspec, or one whose name is taken.
        """
        self._manager.add_specs(namespace, self._plugin_id)


class HookManager(pluggy.PluginManager):
    """A ``pluggy.PluginManager`` with the kernel's hookspecs."""

    def __init__(self) -> None:
        super().__init__(hooks.PROJECT)
        self.specs: dict[str, HookSpec] = {}
        self.spec_owners: dict[str, str] = {}
        self._added: set[int] = set()
        self._active: dict[int, set[str] | None] = {}
        self.add_specs(hooks, KERNEL)

    def add_specs(self, namespace: Any, owner: str) -> None:
        """Add the functions of ``namespace`` that carry ``hookspec``."""
        found = {
            name: function.kernel_hook for name, function in vars(namespace).items() if hasattr(function, "kernel_hook")
        }
        if not found:
            raise HookError(
                f"{owner}: {namespace!r} defines no hook. Mark its functions with kernel_core.hooks.hookspec."
            )
        if id(namespace) in self._added:
            return  # a plugin that is used twice defines its hooks once
        self._added.add(id(namespace))
        for name in found:
            if name in self.specs:
                raise HookError(
                    f"{owner}: the hook {name!r} is already defined by {self.spec_owners[name]}. Rename it."
                )
        self.specs |= found
        self.spec_owners |= dict.fromkeys(found, owner)
        self.add_hookspecs(namespace)

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        """Read the marker from the class, so that no property of the plugin runs, and leave out inactive hooks."""
        function = inspect.getattr_static(type(plugin), name, None)
        if getattr(function, _IMPL, None) is None:
            return None
        active = self._active_hooks(plugin)
        if active is not None and name not in active:
            return None
        return super().parse_hookimpl_opts(plugin, name)

    def _active_hooks(self, plugin: Plugin) -> set[str] | None:
        if id(plugin) not in self._active:
            active = plugin.active_hooks()
            self._active[id(plugin)] = None if active is None else set(active)
        return self._active[id(plugin)]

    def check_plugin(self, plugin: Plugin) -> None:
        """Refuse everything about the hooks of ``plugin`` that would be silent later.

        Raises:
            HookError: see the messages below.
        """
        for name, function in _public_functions(plugin):
            marker = getattr(function, _IMPL, None)
            where = f"{plugin.name}.{name}"
            if marker is None:
                if name in self.specs and not hasattr(Plugin, name):
                    raise HookError(
                        f"{where}: is named like a hook but not marked, so it would never be called. Put @hookimpl above it."
                    )
                continue
            _check_marker(where, marker, function)
            if name in self.specs:
                self._check_arguments(where, name, function)
            elif not marker["optionalhook"]:
                raise HookError(
                    f"{where}: there is no hook of that name.{did_you_mean(name, self.specs)} `kernel events` lists them; "
                    "if another package defines it, install that, or mark the method @hookimpl(optional=True)."
                )
        for name in sorted(set(vars(plugin)) & set(self.specs)):
            raise HookError(
                f"{plugin.name}.{name}: is set on the instance, where no hook is looked for. Make it a method."
            )
        active = self._active_hooks(plugin)
        if active is not None:
            answered = {name for name, function in _public_functions(plugin) if hasattr(function, _IMPL)}
            for name in sorted(active - answered):
                raise HookError(
                    f"{plugin.name}.active_hooks: names {name!r}, which the plugin does not answer."
                    f"{did_you_mean(name, answered)} It answers {', '.join(sorted(answered))}."
                )

    def check_levels(self, plugin: Plugin, owner: str) -> None:
        """Refuse hooks that are newer than what ``plugin`` says it was written for, and warn of those that will go.

        Args:
            plugin: The plugin.
            owner: Its name, with distribution and version.

        Raises:
            HookError: it answers a hook of the kernel of a later level, and not as one that may be unknown.
        """
        active = self._active_hooks(plugin)
        for name, function in _public_functions(plugin):
            spec, marker = self.specs.get(name), getattr(function, _IMPL, None)
            if spec is None or marker is None or (active is not None and name not in active):
                continue
            ours = self.spec_owners[name] == KERNEL  # levels of other packages are not those of hook_api
            if ours and spec.since > plugin.hook_api and not marker["optionalhook"]:
                raise HookError(
                    f"{plugin.name}.{name}: is a hook of level {spec.since}, and the plugin says that it was written for level "
                    f"{plugin.hook_api}. Set hook_api = {spec.since} in the class."
                )
            if spec.deprecated is not None:
                instead = f" Answer {spec.replaced_by} instead." if spec.replaced_by else ""
                warnings.warn(
                    f"{owner}: answers the hook {name}, which is deprecated from level {spec.deprecated} of the hook interface "
                    f"on.{instead} It still works.",
                    HookDeprecationWarning,
                )

    def _check_arguments(self, where: str, name: str, function: Any) -> None:
        offered = self.hook.__dict__[name].spec.argnames
        for parameter in list(inspect.signature(inspect.unwrap(function)).parameters.values())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.KEYWORD_ONLY):
                raise HookError(f"{where}: takes {parameter}. Name the arguments you want among {', '.join(offered)}.")
            if parameter.name not in offered:
                raise HookError(
                    f"{where}: takes {parameter.name!r}, which this hook does not pass."
                    f"{did_you_mean(parameter.name, offered)} It passes {', '.join(offered) or 'nothing'}."
                )
            if parameter.default is not parameter.empty:
                raise HookError(
                    f"{where}: the argument {parameter.name!r} has a default value, which would hide that it is passed. "
                    "Remove the default."
                )

    def add_plugin_hooks(self, plugin: Plugin, plugin_id: str) -> None:
        """Let ``plugin`` define hooks of its own."""
        addhooks = getattr(type(plugin), "kernel_addhooks", None)
        if addhooks is not None and hasattr(addhooks, _IMPL):
            addhooks(plugin, HookAdder(self, plugin_id))


def hooks_of(cls: type) -> list[str]:
    """Return the names of the hooks that a plugin class answers, sorted."""
    return sorted(name for name in dir(cls) if hasattr(inspect.getattr_static(cls, name), _IMPL))


def constraints_of(plugin: Plugin, hook: str) -> HookConstraints:
    """Return the order that ``plugin`` asks for on ``hook`` alone."""
    function = inspect.getattr_static(type(plugin), hook, None)
    return getattr(function, "kernel_constraints", None) or HookConstraints()


def _public_functions(plugin: Plugin) -> Iterator[tuple[str, Any]]:
    for name in dir(type(plugin)):
        function = inspect.getattr_static(type(plugin), name)
        if isinstance(function, staticmethod | classmethod):
            if name in HOOK_NAMES or hasattr(function.__func__, _IMPL):
                raise HookError(
                    f"{plugin.name}.{name}: a hook must be a plain method, not a {type(function).__name__}."
                )
        elif not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def _check_marker(where: str, marker: Any, function: Any) -> None:
    plain = inspect.unwrap(function)
    if inspect.isgeneratorfunction(plain) or inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise HookError(f"{where}: is a generator or coroutine, whose body would never run. Make it a plain method.")
    refused: Iterable[str] = [name for name in ("tryfirst", "trylast", "wrapper", "hookwrapper") if marker.get(name)]
    for name in refused:
        raise HookError(
            f"{where}: is marked {name}. The kernel has neither first, last nor wrappers. "
            "Declare before={...} or after={...} with plugin names or roles."
        )
