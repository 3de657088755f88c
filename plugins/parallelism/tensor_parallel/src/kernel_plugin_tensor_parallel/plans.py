"""From a plan, the user's or the model's own, to the style of each module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kernel_core.blocks import path_pattern
from kernel_core.errors import OptionError, ParallelismError
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from kernel_plugin_tensor_parallel.styles import make_style

Styles = dict[str, ParallelStyle]


def resolve_plan(model: nn.Module, plan: Mapping[str, Any] | None) -> Styles:
    """Return the style of each module to split, by its path in ``model``.

    Args:
        model: What is trained, wrappers included.
        plan: Globs of module paths to styles: ``*`` is one part of a path, ``**`` any number; of two that fit one module the
            later counts. None for the model's own plan.

    Raises:
        OptionError: a style is unknown, or a glob fits nothing.
        ParallelismError: the model has no plan.
    """
    paths = {path: module for path, module in model.named_modules(remove_duplicate=False) if path}
    if plan is not None:
        return _expand(plan, paths, _wrappers(model), strict=True)
    prefix, own, strict = _own_plan(model)
    found = _expand(own, paths, [prefix], strict)
    if not found:
        raise ParallelismError(
            f"tensor_parallel: the plan of {type(model).__name__} fits none of its modules: {', '.join(own)}. Expected paths "
            "below the module that gives it. Give plan={path: style}."
        )
    return found


def _expand(plan: Mapping[str, Any], paths: Mapping[str, nn.Module], prefixes: list[str], strict: bool) -> Styles:
    found: Styles = {}
    for glob, word in plan.items():
        style = make_style(word, glob)
        fits = next(filter(None, (_matches(prefix + glob, paths) for prefix in prefixes)), [])
        if not fits and strict:
            raise OptionError(
                f"tensor_parallel.plan: {glob!r} fits no module. Expected the path of a module from the root of the model, "
                f"where * stands for one part and ** for any number, for example {_example(paths)!r}."
            )
        for path in fits:
            found.pop(path, None)
            if style is not None:
                found[path] = style
    return found


def _matches(glob: str, paths: Mapping[str, nn.Module]) -> list[str]:
    pattern = path_pattern(glob)
    return [path for path in paths if pattern.fullmatch(path)]


def _example(paths: Mapping[str, nn.Module]) -> str:
    linear = [path for path, module in paths.items() if isinstance(module, nn.Linear)]
    return re.sub(r"(^|(?<=[.]))[0-9]+(?=[.]|$)", "*", linear[0] if linear else "layers.0.up")


def _wrappers(model: nn.Module) -> list[str]:
    """Return the prefixes under which a path may be meant: none, and those of modules that wrap a single other one."""
    prefixes = [""]
    while True:
        children = [
            (name, child) for name, child in model.named_children() if next(child.parameters(), None) is not None
        ]
        if len(children) != 1 or isinstance(children[0][1], nn.ModuleList | nn.ModuleDict):
            return prefixes
        prefixes.append(f"{prefixes[-1]}{children[0][0]}.")
        model = children[0][1]


def _own_plan(model: nn.Module) -> tuple[str, Mapping[str, Any], bool]:
    """Return the outermost plan in ``model``, the prefix of its paths, and whether each of them must fit a module."""
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        method = getattr(module, "tensor_parallel_plan", None)
        if callable(method):
            return prefix, method(), True
        # transformers writes one plan for a whole family, where some models lack some of the modules
        plan = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None)
        if isinstance(plan, Mapping) and plan:
            return prefix, plan, False
    raise ParallelismError(
        f"tensor_parallel: {type(model).__name__} has no plan. Expected a method tensor_parallel_plan() -> {{path: style}}, or "
        "a transformers model with a tp_plan. Give one: plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
    )
