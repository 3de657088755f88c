"""The plan: which plugin runs at which hook, in what order, and why. Data to print, hash, compare and store.

``resolve`` turns what the user asked for into instances; ``build_plan`` checks, orders and registers them and compiles
the calls. The loop runs the compiled calls; a hook that nobody answers costs nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from types import SimpleNamespace
from typing import Any

from importlib_metadata import version

from kernel_core.errors import ConflictError, HookError, OptionError, PluginLoadError, PluginNotFoundError
from kernel_core.hooks import BANDS, HOOK_API, HookSpec
from kernel_core.naming import normalize
from kernel_core.registry.base import Plugin
from kernel_core.registry.discovery import (
    HOOK_KINDS,
    PluginInfo,
    find,
    info_of_class,
    load_class,
    package_digest,
)
from kernel_core.registry.hookmanager import HookAdder, HookManager, constraints_of
from kernel_core.registry.options import to_json
from kernel_core.registry.ordering import Edge, Node, Ordering, order_hook, order_plugins, path
from kernel_core.registry.single_file import digest_of_class, is_file, load_file, name_of

__all__ = ["ActivePlugin", "HookAdder", "Plan", "PlannedCall", "PluginRequest", "build_plan", "resolve"]

Guard = Callable[["PlannedCall", str, Callable[[], Any]], Callable[[], Any] | None]
PluginRequest = str | tuple[str, Mapping[str, Any]] | Plugin


@dataclass(frozen=True)
class ActivePlugin:
    """A plugin in use. Without a distribution (a class of the user's own script) version and digest are None."""

    id: str
    plugin: Plugin = field(repr=False)
    distribution: str | None = None
    version: str | None = None

    @property
    def kind(self) -> str:
        """The word of the entry-point group: ``algorithms``, ``callbacks`` or ``loggers``."""
        return self.plugin.kind

    def to_json(self) -> dict[str, Any]:
        """Return what the lock keeps of the plugin."""
        return {
            "id": self.id,
            "name": self.plugin.name,
            "kind": self.kind,
            "distribution": self.distribution,
            "version": self.version,
            "hash": _digest_of(self.distribution) if self.distribution else digest_of_class(type(self.plugin)),
            "options": to_json(self.plugin.options),
            "structural": self.plugin.structural,
            "affects_training": self.plugin.affects_training,
        }


@dataclass(frozen=True)
class PlannedCall:
    """One answer to one hook, and the reasons for its place."""

    plugin: str
    kind: str
    function: Callable[..., Any] = field(repr=False)
    arguments: tuple[str, ...]
    why: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The resolved plan of a run.

    Attributes:
        plugins: In the order algorithms, callbacks, loggers, each band in its forward order.
        events: Hook name to its calls in order, for every hook that somebody answers.
        specs: Every known hook, with its direction.
        ordering: The constraints behind it.
        unmatched: Constraints that name a plugin or role nobody provides.
    """

    plugins: tuple[ActivePlugin, ...]
    events: Mapping[str, tuple[PlannedCall, ...]]
    specs: Mapping[str, HookSpec]
    ordering: Ordering
    unmatched: tuple[str, ...]

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Call every answer to ``hook`` in plan order and return the results that are not None.

        Raises:
            HookError: no plugin in the plan defines such a hook.
        """
        results = [invoke(call, arguments) for call in self.calls(hook)]
        return [result for result in results if result is not None]

    def calls(self, hook: str) -> tuple[PlannedCall, ...]:
        """Return the planned calls of ``hook``, empty if nobody answers it."""
        if hook not in self.specs:
            raise HookError(f"plan: there is no hook {hook!r}. The plugin that defines it is not active.")
        return self.events.get(hook, ())

    def calls_of(self, plugin_id: str, hook: str) -> tuple[PlannedCall, ...]:
        """Return the calls of one plugin at ``hook``."""
        return tuple(call for call in self.calls(hook) if call.plugin == plugin_id)

    def bind(self, guard: Guard, **arguments: Any) -> SimpleNamespace:
        """Compile: an attribute for each hook, a tuple of calls without arguments.

        A hook whose answers need arguments that are not given here is left out.

        Args:
            guard: May put something around a call; None leaves it out.
            arguments: What hooks pass, by name.
        """
        bound = SimpleNamespace()
        for hook in self.specs:
            calls = self.events.get(hook, ())
            if all(set(call.arguments) <= set(arguments) for call in calls):
                compiled = (
                    guard(call, hook, partial(call.function, *[arguments[name] for name in call.arguments]))
                    for call in calls
                )
                setattr(bound, hook, tuple(call for call in compiled if call is not None))
        return bound

    def by_id(self, plugin_id: str) -> ActivePlugin:
        """Return the plugin with that id."""
        return next(active for active in self.plugins if active.id == plugin_id)

    def id_of(self, plugin: Plugin) -> str:
        """Return the id under which ``plugin`` is active.

        Raises:
            PluginNotFoundError: it is not part of this run.
        """
        for active in self.plugins:
            if active.plugin is plugin:
                return active.id
        raise PluginNotFoundError(
            f"{plugin.name}: is not one of this run's plugins. Pass one that the trainer was given."
        )

    def check_supported(self, word: str, what: str) -> None:
        """Refuse ``what``, which plugins call by ``word``, if one of them cannot work with it.

        Raises:
            ConflictError: it says so in ``unsupported``.
        """
        for active in self.plugins:
            if (reason := active.plugin.unsupported.get(word)) is not None:
                raise ConflictError(f"{active.id}: does not work with {what}: {reason}. Leave one of them out.")

    @cached_property
    def digest(self) -> str:
        """A SHA-256 over order, versions, file hashes and options: equal plans train alike."""
        content = {"plugins": [active.to_json() for active in self.plugins], "events": self._order()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def contents(self) -> dict[str, Any]:
        """Return what must be the same on every rank of a run, entry by entry."""
        versions = {name: version(name) for name in ("torch", "kernel-core")}
        plugins = {f"plugin {active.id}": active.to_json() for active in self.plugins}
        return {**versions, "plugins": [active.id for active in self.plugins], **plugins, "order": self._order()}

    def _order(self) -> dict[str, list[str]]:
        return {hook: [call.plugin for call in calls] for hook, calls in self.events.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "digest": self.digest,
            "events": {
                hook: [{"plugin": call.plugin, "kind": call.kind, "why": list(call.why)} for call in calls]
                for hook, calls in self.events.items()
            },
            "plugins": [active.to_json() for active in self.plugins],
            "unmatched": list(self.unmatched),
        }

    def explain(self) -> str:
        """Return the plan as text: each hook, its plugins in order, the reasons beneath."""
        lines: list[str] = []
        for hook, calls in self.events.items():
            lines.append(f"{hook}  [{self.specs[hook].order}]")
            for number, call in enumerate(calls, 1):
                lines.append(f"  {number}. {call.plugin}  ({call.kind})")
                lines += [f"       {reason}" for reason in call.why]
        if self.unmatched:
            lines += ["constraints that nobody matches", *(f"  {text}" for text in self.unmatched)]
        return "\n".join(lines) if lines else "no plugin answers any hook"


@cache
def _digest_of(distribution: str) -> str | None:
    return package_digest(distribution)


def invoke(call: PlannedCall, arguments: Mapping[str, Any]) -> Any:
    """Call one answer with those of ``arguments`` that it takes."""
    return call.function(*[arguments[name] for name in call.arguments])


def resolve(
    requests: Iterable[PluginRequest], kinds: Sequence[str] = HOOK_KINDS, active: Sequence[ActivePlugin] = ()
) -> list[ActivePlugin]:
    """Turn names, ``(name, options)`` and instances into plugins with ids.

    Args:
        requests: What was asked for.
        kinds: Where names are looked up.
        active: Plugins that are resolved already; the new ones follow them.

    Raises:
        PluginNotFoundError: a name is not installed, or several distributions provide it.
        PluginLoadError: an import failed, or something is neither a name nor a plugin.
        OptionError: an option does not fit, or two plugins have one id.
    """
    active = list(active)
    for request in requests:
        plugin, info = _instance(request, kinds)
        plugin_id = plugin.id or plugin.name
        if any(other.id == plugin_id for other in active):
            raise OptionError(
                f"{plugin_id}: is asked for twice under one id. Give one of them another: "
                f"{type(plugin).__name__}(..., id='{plugin_id}_2'), or on the command line "
                f"--plugins {plugin_id},{plugin_id}_2={plugin.name}."
            )
        active.append(
            ActivePlugin(plugin_id, plugin, info.distribution if info else None, info.version if info else None)
        )
    return active


def _instance(request: PluginRequest, kinds: Sequence[str]) -> tuple[Plugin, PluginInfo | None]:
    if isinstance(request, Plugin):
        info = info_of_class(type(request))
        if info is not None:
            request.name = info.name
        return request, info
    name, options = (request, {}) if isinstance(request, str) else _pair(request)
    if is_file(name):
        return load_file(name).make(name_of(name), **options), None
    info = find(name, kinds)
    plugin: Plugin = load_class(info).make(info.name, **options)
    return plugin, info


def _pair(request: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(request, tuple | list) and len(request) == 2 and isinstance(request[0], str):
        name, options = request
        if options is not None and not isinstance(options, Mapping):
            raise OptionError(f"{name}: got {options!r}. Expected its options as a mapping of name to value.")
        return name, dict(options or {})
    hint = f" Make an instance: {request.__name__}(...)." if isinstance(request, type) else ""
    raise PluginLoadError(
        f"plugins: got {request!r}. Expected a name, (name, options), or an instance of Algorithm, Callback or "
        f"LoggerDestination.{hint}"
    )


def build_plan(active: Sequence[ActivePlugin]) -> Plan:
    """Check, order and register the plugins and compile their calls.

    Raises:
        HookError: a hook does not fit its hookspec, or a plugin wants another level of the hook interface.
        OrderError, ConflictError: the declared constraints cannot be met.
    """
    manager = HookManager()
    for one in active:
        if one.plugin.hook_api > HOOK_API:
            raise HookError(
                f"{one.id}: was written for level {one.plugin.hook_api} of the hook interface; this kernel has {HOOK_API}. "
                "Upgrade kernel-core."
            )
        manager.add_plugin_hooks(one.plugin, one.id)
    for one in active:
        manager.check_plugin(one.plugin)
        owner = f" ({one.distribution} {one.version})" if one.distribution else ""
        manager.check_levels(one.plugin, f"{one.id}{owner}")
    ordering = order_plugins([_node(one, position) for position, one in enumerate(active)])
    for one in active:
        manager.register(one.plugin, name=one.id)
    plugins = tuple(
        one for band in BANDS for plugin_id in ordering.order.get(band, ()) for one in active if one.id == plugin_id
    )
    events: dict[str, tuple[PlannedCall, ...]] = {}
    unmatched = list(ordering.unmatched)
    for hook, spec in manager.specs.items():
        calls = _compile_hook(manager, ordering, hook, spec, {one.id: one for one in active}, unmatched)
        if calls:
            events[hook] = tuple(calls)
    return Plan(plugins, events, dict(manager.specs), ordering, tuple(unmatched))


def _node(one: ActivePlugin, position: int) -> Node:
    plugin = one.plugin

    def words(value: Iterable[str]) -> frozenset[str]:
        return frozenset({value} if isinstance(value, str) else value)

    def roles(value: Iterable[str]) -> frozenset[str]:
        return frozenset(normalize(role) for role in words(value))

    return Node(
        one.id,
        normalize(plugin.name),
        plugin.kind,
        position,
        roles(plugin.roles),
        words(plugin.before),
        words(plugin.after),
        words(plugin.conflicts),
    )


def _compile_hook(
    manager: HookManager,
    ordering: Ordering,
    hook: str,
    spec: HookSpec,
    active: Mapping[str, ActivePlugin],
    unmatched: list[str],
) -> list[PlannedCall]:
    caller = manager.hook.__dict__[hook]
    implementations = {impl.plugin_name: impl for impl in caller.get_hookimpls()}
    calls: list[PlannedCall] = []
    for band in spec.bands:
        ids = [plugin_id for plugin_id in implementations if active[plugin_id].kind == band]
        if not ids:
            continue
        constraints = {plugin_id: constraints_of(active[plugin_id].plugin, hook) for plugin_id in ids}
        ordered = order_hook(ordering, ids, spec.order == "reverse", constraints, hook)
        unmatched += ordered.unmatched
        for index, plugin_id in enumerate(ordered.ids):
            impl = implementations[plugin_id]
            why = _reasons(ordered.ids[:index], plugin_id, ordered.edges, spec)
            if index == 0 and calls:
                why = (f"after {calls[-1].plugin}: {band} run after {calls[-1].kind} on this hook", *why)
            calls.append(PlannedCall(plugin_id, band, impl.function, tuple(impl.argnames), why))
    return calls


def _reasons(earlier: Sequence[str], plugin_id: str, edges: Sequence[Edge], spec: HookSpec) -> tuple[str, ...]:
    reasons = [
        f"after {edge.first}: {edge.asserted_by} declares {edge.declaration}"
        for edge in edges
        if edge.second == plugin_id and edge.first in earlier
    ]
    if not reasons and earlier and (chain := path(edges, earlier[-1], plugin_id)):
        reasons = [f"after {earlier[-1]}: " + "; ".join(map(str, chain))]
    elif not reasons and earlier:
        direction = ", read backwards" if spec.order == "reverse" else ""
        reasons = [f"after {earlier[-1]}: nothing declared relates them; the order they were named in{direction}"]
    return tuple(dict.fromkeys(reasons))
