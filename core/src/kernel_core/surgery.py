"""Changes to the model, each checked and written down.

Surgery goes plugin by plugin in plan order: ``module_replacements``, then ``transform_model``, then
``model_materialized`` of one plugin before the next, each under a keyed fork of the global generators.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kernel_core.errors import SurgeryError
from kernel_core.registry.plan import Plan, invoke
from kernel_core.train.randomness import forked_randomness

if TYPE_CHECKING:
    from kernel_core.train.state import State

SURGERY_HOOKS = ("module_replacements", "transform_model", "model_materialized")
Replacement = Callable[[nn.Module, str], nn.Module | None]
Fingerprint = dict[str, tuple[Any, ...]]


class SurgeryWarning(UserWarning):
    """Surgery that had no effect, or structure that changed without a word."""


@dataclass(frozen=True)
class SurgeryChange:
    """One change: at ``path``, ``plugin`` turned ``old`` into ``new``; ``what`` says it in words."""

    path: str
    plugin: str
    old: str
    new: str
    what: str


@dataclass
class SurgeryReport:
    """Everything plugins changed in the model.

    Attributes:
        changes: In the order they were made.
        no_effect: Plugins that asked for surgery and changed nothing.
        remarks: What a reader should know: module types that two unrelated plugins both claimed.
    """

    changes: list[SurgeryChange] = field(default_factory=list)
    no_effect: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    current_plugin: str = "unknown"

    def record(self, path: str, old: str, new: str, what: str) -> None:
        """Write down a change that the plugin at work has made.

        Args:
            path: The module or parameter, as ``named_modules`` and ``named_parameters`` write it.
            old, new: What was there and what is there now, in a word or two.
            what: The change in words.
        """
        self.changes.append(SurgeryChange(path, self.current_plugin, str(old), str(new), str(what)))

    def to_json(self) -> list[dict[str, str]]:
        """Return the changes as plain data."""
        return [asdict(change) for change in self.changes]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return what tells whether a model's structure changed: for each module its type, parameters and buffers with shape,
    dtype and ``requires_grad``, and the attention implementation its configuration names.
    """
    return {path: _describe(module) for path, module in model.named_modules(remove_duplicate=False)}


def _describe(module: nn.Module) -> tuple[Any, ...]:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return (
        type(module),
        tuple(
            (name, None if is_lazy(t) else tuple(t.shape), t.dtype, t.requires_grad)
            for name, t in tensors
            if t is not None
        ),
        getattr(getattr(module, "config", None), "_attn_implementation", None),
    )


def changed_paths(before: Fingerprint, after: Fingerprint) -> list[str]:
    """Return the paths at which two fingerprints differ, sorted."""
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def perform_surgery(state: State, strict: bool = False) -> SurgeryReport:
    """Run the surgery of every plugin on ``state.model``.

    Args:
        state: With model, plan and seed.
        strict: Make surgery without effect an error.

    Raises:
        SurgeryError: a replacement does not fit, or, if ``strict``, a plugin changed nothing.
    """
    plan, model = state.plan, state.model
    report = state.surgery_report
    claims: dict[type[nn.Module], list[str]] = {}
    present = {base for module in model.modules() for base in type(module).__mro__}
    materialized = not any(tensor.is_meta for tensor in model.parameters())
    for active in plan.plugins:
        if not any(plan.calls_of(active.id, hook) for hook in SURGERY_HOOKS):
            continue
        report.current_plugin = active.id
        before, recorded, tied = fingerprint(model), len(report.changes), _ties(model)
        with forked_randomness(state.seed, "surgery", active.id):
            replacements = _replacements_of(plan, active.id, state)
            _replace_modules(model, replacements, active.id, report)
            for module_type in replacements.keys() & present:
                claims.setdefault(module_type, []).append(active.id)
            for call in plan.calls_of(active.id, "transform_model"):
                invoke(call, {"model": model, "report": report, "state": state})
            if materialized:
                for call in plan.calls_of(active.id, "model_materialized"):
                    invoke(call, {"model": model})
        _remark_on_ties(tied, _ties(model), active.id, report)
        asked = any(plan.calls_of(active.id, hook) for hook in SURGERY_HOOKS[:2])
        if asked and len(report.changes) == recorded and not changed_paths(before, fingerprint(model)):
            _no_effect(active.id, report, strict)
    _remark_on_claims(claims, plan, report)
    report.current_plugin = "unknown"
    return report


def _no_effect(plugin_id: str, report: SurgeryReport, strict: bool) -> None:
    report.no_effect.append(plugin_id)
    message = (
        f"{plugin_id}: its surgery had no effect on this model: nothing in it is of a kind that the plugin changes. "
        "Leave the plugin out, or check its options and the model."
    )
    if strict:
        raise SurgeryError(message)
    warnings.warn(message, SurgeryWarning, stacklevel=2)


def _remark_on_claims(claims: Mapping[type[nn.Module], list[str]], plan: Plan, report: SurgeryReport) -> None:
    for module_type, plugins in claims.items():
        for index, one in enumerate(plugins):
            for other in plugins[index + 1 :]:
                if not plan.ordering.related(one, other):
                    report.remarks.append(
                        f"{one} and {other} both replace {module_type.__name__} and declare no order between them; "
                        f"{one} went first because it was named first."
                    )


def _ties(model: nn.Module) -> set[frozenset[str]]:
    """Return the groups of names that share one parameter."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


def _remark_on_ties(
    before: set[frozenset[str]], after: set[frozenset[str]], plugin_id: str, report: SurgeryReport
) -> None:
    for group in before:
        if not any(group <= now for now in after):
            report.remarks.append(
                f"{plugin_id}: {' and '.join(sorted(group))} were one tied parameter before its surgery and no longer are."
            )


def _replacements_of(plan: Plan, plugin_id: str, state: State) -> dict[type[nn.Module], Replacement]:
    merged: dict[type[nn.Module], Replacement] = {}
    for call in plan.calls_of(plugin_id, "module_replacements"):
        answer = invoke(call, {"state": state})
        if not isinstance(answer, Mapping) or not all(
            isinstance(key, type) and callable(value) and not isinstance(value, type | nn.Module)
            for key, value in answer.items()
        ):
            raise SurgeryError(
                f"{plugin_id}.module_replacements: returned {answer!r}. "
                "Expected a dict of module type to function(module, path)."
            )
        merged.update(answer)
    return merged


def _replace_modules(
    model: nn.Module, replacements: Mapping[type[nn.Module], Replacement], plugin_id: str, report: SurgeryReport
) -> None:
    """Walk the children breadth first; a shared module is asked about once and replaced everywhere."""
    answers: dict[int, nn.Module | None] = {}
    keep: list[nn.Module] = []  # holds replaced modules, so that no id is reused while we look ids up
    queue: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())] if replacements else []
    seen: set[tuple[str, int]] = set()
    for path, parent, ancestors in queue:
        if (path, id(parent)) in seen or parent in ancestors:
            continue
        seen.add((path, id(parent)))
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            child_path = f"{path}.{name}" if path else name
            if id(child) not in answers:
                answers[id(child)] = _answer(child, child_path, parent, ancestors, replacements, plugin_id, report)
                keep.append(child)
            new = answers[id(child)]
            if new is None:
                queue.append((child_path, child, (*ancestors, parent)))
            else:
                parent._modules[name] = new


def _answer(
    module: nn.Module,
    path: str,
    parent: nn.Module,
    ancestors: tuple[nn.Module, ...],
    replacements: Mapping[type[nn.Module], Replacement],
    plugin_id: str,
    report: SurgeryReport,
) -> nn.Module | None:
    for base in type(module).__mro__:
        if base in replacements:
            break
    else:
        return None
    try:
        new = replacements[base](module, path)
    except Exception as error:
        error.add_note(f"in plugin {plugin_id!r}, module_replacements, at {path}")
        raise
    if new is None or new is module:
        return None
    _check_replacement(module, new, path, plugin_id)
    like = _reference_tensor((module, parent, *reversed(ancestors)))
    if like is not None:
        new.to(device=like.device, dtype=like.dtype if like.is_floating_point() else None)
    new.train(module.training)
    held = list(module.parameters())
    if held and not any(parameter.requires_grad for parameter in held):
        new.requires_grad_(False)
    lost = [
        what
        for what in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "parametrizations")
        if _loses(what, module, new)
    ]
    if lost:
        names = ", ".join(what.strip("_").replace("_", " ") for what in lost)
        report.remarks.append(f"{plugin_id}: the {names} of {path} are not on what replaced it.")
    old_name, new_name = type(module).__name__, type(new).__name__
    report.record(path, old_name, new_name, f"{old_name} replaced by {new_name}")
    return new


def _loses(attribute: str, old: nn.Module, new: nn.Module) -> bool:
    return bool(getattr(old, attribute, None)) and not getattr(new, attribute, None)


def _reference_tensor(modules: tuple[nn.Module, ...]) -> torch.Tensor | None:
    """Return the tensor whose device and dtype a replacement takes over: of the module, else of its nearest ancestor."""
    for module in modules:
        for tensor in _tensors(module):
            return tensor
    return None


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from (parameter for parameter in module.parameters() if parameter.is_floating_point())
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())


def _check_replacement(old: nn.Module, new: Any, path: str, plugin_id: str) -> None:
    where = f"{plugin_id}: at {path} ({type(old).__name__})"
    if not isinstance(new, nn.Module):
        raise SurgeryError(
            f"{where} the replacement function returned {new!r}. Expected an nn.Module, or None to keep the old one."
        )
    old_range, new_range = _positional_calls(old), _positional_calls(new)
    if old_range is None or new_range is None:
        return
    if new_range[0] > old_range[0] or new_range[1] < old_range[1]:
        raise SurgeryError(
            f"{where} {type(new).__name__}.forward takes {_count(new_range)} positional arguments and cannot be called as "
            f"{type(old).__name__}.forward, which takes {_count(old_range)}. Give the replacement the same arguments."
        )


def _positional_calls(module: nn.Module) -> tuple[int, float] | None:
    """Return the least and the largest number of positional arguments of ``forward``; None if it cannot be known."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    least, most = 0, 0.0
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            most += 1
            least += parameter.default is parameter.empty
        elif parameter.kind is parameter.VAR_POSITIONAL:
            most = float("inf")
        elif parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            return int(1e9), 0.0  # no positional call can satisfy it
    return least, most


def _count(calls: tuple[int, float]) -> str:
    least, most = calls
    if most == float("inf"):
        return f"{least} or more"
    return "none alone" if least > most else str(least) if least == most else f"{least} to {int(most)}"


class StructureWatch:
    """Notices structure that changes after surgery without being recorded in the report."""

    def __init__(self, model: nn.Module, report: SurgeryReport, strict: bool = False) -> None:
        self._model, self._report, self._strict = model, report, strict
        self._known, self._recorded = fingerprint(model), len(report.changes)

    def look(self, when: str) -> None:
        """Warn about paths that changed since the last look and that no ``report.record`` announced.

        Raises:
            SurgeryError: there are such paths and the run is strict.
        """
        now = fingerprint(self._model)
        changed = changed_paths(self._known, now)
        if changed:
            announced = [change.path for change in self._report.changes[self._recorded :]]
            silent = [path for path in changed if not any(_covers(known, path) for known in announced)]
            if silent:
                shown = ", ".join(path or "the model itself" for path in silent[:10])
                more = f" and {len(silent) - 10} more" if len(silent) > 10 else ""
                message = (
                    f"surgery: the model's structure changed after surgery, noticed at {when}: {shown}{more}. "
                    "Whoever does this on purpose records it: state.surgery_report.record(path, old, new, what)."
                )
                if self._strict:
                    raise SurgeryError(message)
                warnings.warn(message, SurgeryWarning, stacklevel=2)
        self._known, self._recorded = now, len(self._report.changes)


def _covers(announced: str, path: str) -> bool:
    """An announcement of a module covers what is below it; one of a parameter covers its module."""
    return (
        path == announced or path.startswith(f"{announced}.") or announced.rpartition(".")[0] == path or not announced
    )
