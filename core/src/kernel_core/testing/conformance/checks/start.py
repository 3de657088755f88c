"""What can be said of a plugin before it trains."""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import Any

import importlib_metadata

from kernel_core.errors import KernelError, OptionError, OrderError
from kernel_core.hooks import HOOK_API
from kernel_core.naming import normalize
from kernel_core.registry.discovery import HOOK_KINDS, installed_plugins, load_class
from kernel_core.registry.options import to_json
from kernel_core.registry.plan import ActivePlugin, build_plan, resolve
from kernel_core.registry.roles import ROLES
from kernel_core.registry.single_file import is_file
from kernel_core.testing.conformance.kit import Kit, RefutedError, Verdict, check

IMPORT_S = 0.5  # of processor time, beyond what the plugin depends on


@check("import", "importing it changes nothing in the process, asks nothing of an accelerator, and takes no time")
def imports(kit: Kit) -> None:
    """Import it in a process that has imported what it depends on, and look what is other than before."""
    subject = kit.subject
    module = subject.request if is_file(subject.request) else type(subject.plugin).__module__
    (ended,) = kit.call("import_plugin", module=module, budget=_dependencies(subject.active.distribution))
    if ended.value is None:
        raise RefutedError(f"importing it fails: {ended.output.splitlines()[-1] if ended.output else 'no word'}")
    told = [*ended.value["changed"], *(f"it calls {name}" for name in dict.fromkeys(ended.value["touched"]))]
    if told:
        raise RefutedError(f"importing it has side effects: {'; '.join(told[:5])}")
    if ended.value["seconds"] > IMPORT_S:
        raise RefutedError(
            f"importing it takes {ended.value['seconds']:.2g} s of processor time. Expected {IMPORT_S:g} s at most"
        )


def _dependencies(distribution: str | None) -> list[str]:
    """Return the modules of what a distribution requires, as far as their names tell, and the kernel's."""
    found = ["kernel_core.train.trainer", "pydantic"]
    for requirement in importlib_metadata.requires(distribution) or [] if distribution else []:
        name = re.split(r"[^A-Za-z0-9_-]", requirement)[0].replace("-", "_")
        if ";" not in requirement and importlib.util.find_spec(name) is not None:
            found.append(name)
    return found


@check("options", "wrong options are refused by name, and right ones survive the lock")
def options(kit: Kit) -> tuple[Verdict, str] | None:
    """Give it an option that it does not have, wrong values, and its own options as a lock keeps them."""
    subject, cls = kit.subject, type(kit.subject.plugin)
    parameters: list[inspect.Parameter] = []
    if cls.__init__ is not object.__init__:
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    documentation = inspect.getdoc(cls) or ""
    for one in parameters:
        if one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            raise RefutedError(f"its constructor takes {one}, so that no option can be checked. Name every option")
        if one.annotation is one.empty:
            raise RefutedError(f"its option {one.name} has no annotation, so that no value can be checked")
        if not re.search(rf"\b{re.escape(one.name)}\b[^\n]*:", documentation):
            raise RefutedError(f"its option {one.name} is not described in the docstring of {cls.__name__}")
        if not re.search(r"\b(Any|object|Callable)\b", str(one.annotation)):
            _must_refuse(kit, {one.name: object()}, f"an object() for {one.name}")
    _must_refuse(kit, {"no_such_option": 1}, "an option that it does not have")
    locked = to_json(subject.plugin.options)
    if "$object" in str(locked):
        return "declared", "an option is an object, which a lock cannot hold"
    (again,) = resolve([(subject.request, locked)])
    if to_json(again.plugin.options) != locked:
        raise RefutedError(
            f"made with its options as the lock keeps them it has others: {to_json(again.plugin.options)}"
        )
    return None


def _must_refuse(kit: Kit, wrong: dict[str, Any], what: str) -> None:
    try:
        resolve([(kit.subject.request, {**kit.subject.options, **wrong})])
    except OptionError:
        return
    except Exception as error:
        raise RefutedError(f"it answers {what} with {type(error).__name__}: {error}. Expected an OptionError") from None
    raise RefutedError(f"it accepts {what}")


@check("hooks", "every hook it answers exists, at a level of the hook interface that this kernel has")
def hooks(kit: Kit) -> None:
    """Make a plan of it alone."""
    plugin = kit.subject.plugin
    if plugin.hook_api > HOOK_API:
        raise RefutedError(
            f"it was written for level {plugin.hook_api} of the hook interface, and this kernel has {HOOK_API}"
        )
    try:
        build_plan([kit.subject.active])
    except KernelError as error:
        raise RefutedError(str(error)) from None
    engines = {info.name for info in installed_plugins() if info.kind == "parallelism"}
    if unknown := set(plugin.unsupported) - engines - {"microbatching", "resume"}:
        raise RefutedError(
            f"it says that it does not support {min(unknown)!r}. Expected microbatching, resume, or the name of an engine"
        )


@check("order", "its roles are documented, and its place among all that is installed can be found")
def order(kit: Kit) -> None:
    """Make plans of it with every other plugin that is installed, one at a time, in both orders."""
    active, plugin = kit.subject.active, kit.subject.plugin
    documentation = inspect.getdoc(type(plugin)) or ""
    words = {
        one.removeprefix("role:") for one in _words(plugin, "before", "after", "conflicts") if one.startswith("role:")
    }
    for role in sorted(words | _words(plugin, "roles")):
        if role not in ROLES and f"``{role}``" not in documentation:
            raise RefutedError(
                f"its role {role!r} is not documented. Use one of docs/order.md, or explain ``{role}`` in the class docstring"
            )
    for other in _others(active):
        for pair in ([active, other], [other, active]):
            try:
                build_plan(pair)
            except OrderError as error:
                raise RefutedError(f"beside {other.id}: {error}") from None
            except KernelError:
                continue  # they exclude each other, or the other one is broken


def _words(plugin: Any, *attributes: str) -> set[str]:
    found: set[str] = set()
    for attribute in attributes:
        value = getattr(plugin, attribute)
        found |= {value} if isinstance(value, str) else set(value)
    return found


def _others(active: ActivePlugin) -> list[ActivePlugin]:
    """Return the other installed plugins of its kind, as far as they can be made."""
    found = []
    for info in installed_plugins():
        if info.kind not in HOOK_KINDS or info.name == normalize(active.id):
            continue
        try:
            found += resolve([(f"{info.kind}/{info.name}", dict(getattr(load_class(info), "example", {})))])
        except Exception:
            continue  # it has its own check
    return found
