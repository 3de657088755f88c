"""Which modules to recompute: those named, those the model names, or its repeated blocks."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kernel_core.blocks import marked_modules, path_pattern, repeated_blocks
from kernel_core.errors import OptionError, ParallelismError
from torch import nn

Found = dict[str, nn.Module]


def select_modules(model: nn.Module, modules: Sequence[str] | None = None, every: int = 1) -> Found:
    """Return the modules to recompute by path, in the order of the model.

    A module inside another one that is recomputed is left out: it would be computed three times.

    Args:
        model: What is trained; it is never recomputed as a whole.
        modules: Class names, or globs of paths in which ``*`` stands for one part and ``**`` for any number. None for what
            the model says (``activation_checkpointing_fn(module)``, ``_activation_checkpointing``), else the classes in
            ``_no_split_modules`` of a transformers model, else the largest ``nn.ModuleList`` of one class.
        every: Take each n-th of them, the first included.

    Raises:
        OptionError: an entry of ``modules`` fits nothing.
        ParallelismError: there is nothing to recompute.
    """
    found = _blocks(model) if modules is None else _named(model, modules)
    if not found:
        raise ParallelismError(
            f"activation_checkpointing: found nothing to recompute in {type(model).__name__}. Looked for "
            "activation_checkpointing_fn(module) and _activation_checkpointing = True in the model, for the classes in "
            "_no_split_modules, and for an nn.ModuleList of modules of one class. Name classes or paths, for example "
            "modules=['Block', 'encoder.layers.*']."
        )
    outer = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    return {path: found[path] for path in outer[::every]}


def _below(model: nn.Module) -> Found:
    return {path: module for path, module in model.named_modules() if path}


def _named(model: nn.Module, modules: Sequence[str]) -> Found:
    below, chosen = _below(model), set()
    for entry in modules:
        pattern = path_pattern(entry)
        fits = {
            path
            for path, module in below.items()
            if pattern.fullmatch(path) or entry in {base.__name__ for base in type(module).__mro__[:-2]}
        }
        if not fits:
            raise OptionError(
                f"activation_checkpointing.modules: {entry!r} is no class and no path of a module in "
                f"{type(model).__name__}. Expected for example {_examples(below)}."
            )
        chosen |= fits
    return {path: module for path, module in below.items() if path in chosen}


def _examples(below: Found) -> str:
    path, module = max(below.items(), key=lambda item: item[0].count("."), default=("layers.0", nn.Linear(1, 1)))
    return f"{type(module).__name__!r} or {re.sub(r'[.][0-9]+(?=[.]|$)', '.*', path)!r}"


def _blocks(model: nn.Module) -> Found:
    said = marked_modules(model, "activation_checkpointing_fn", "_activation_checkpointing")
    return {path: module for path, module in _below(model).items() if path in said} or repeated_blocks(model)
