"""The repeated blocks of a model: what is sharded, recomputed or compiled in one piece."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

Found = dict[str, nn.Module]


def path_pattern(glob: str) -> re.Pattern[str]:
    """Return what matches the paths that ``glob`` stands for: ``*`` is one part of a path, ``**`` any number."""
    parts = re.split(r"(\*\*|\*)", glob)
    return re.compile("".join({"**": ".*", "*": r"[^.]*"}.get(part, re.escape(part)) for part in parts))


def marked_modules(model: nn.Module, function: str, attribute: str) -> dict[str, Any]:
    """Return what the model's author said about modules, by path, in the two ways that Composer has for it.

    Args:
        model: The whole model, which is not asked about itself.
        function: The name of a method ``module -> bool or dict`` that a module may have, asked about every module inside it;
            inner ones have the last word.
        attribute: The name of an attribute of a module, which beats the functions.

    Returns:
        The answers that are neither None nor False.
    """
    answers: dict[int, Any] = {}
    for owner in model.modules():
        ask = getattr(owner, function, None)
        if callable(ask):
            answers |= {id(module): ask(module) for module in owner.modules() if module is not owner}
    for module in model.modules():
        mark = getattr(module, attribute, None)
        if mark is not None:
            answers[id(module)] = mark
    paths = {path: answers.get(id(module)) for path, module in model.named_modules() if path}
    return {path: answer for path, answer in paths.items() if answer is not None and answer is not False}


def repeated_blocks(model: nn.Module) -> Found:
    """Return the blocks by path: the classes that transformers keeps in one piece, else the largest list of one class."""
    return _unsplit(model) or _largest_list(model)


def _unsplit(model: nn.Module) -> Found:
    """Return the modules that transformers keeps in one piece; the repeated ones if there are any, not the embeddings."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    found = {path: module for path, module in model.named_modules() if path and type(module).__name__ in names}
    listed = {id(member) for module in model.modules() if isinstance(module, nn.ModuleList) for member in module}
    return {path: module for path, module in found.items() if id(module) in listed} or found


def _largest_list(model: nn.Module) -> Found:
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len({type(member) for member in module}) == 1
        # these hold modules and have no forward pass of their own
        and not isinstance(module[0], nn.ModuleList | nn.ModuleDict)
    ]
    if not lists:
        return {}
    path, largest = max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))
    return {f"{path}.{name}" if path else name: member for name, member in largest.named_children()}
