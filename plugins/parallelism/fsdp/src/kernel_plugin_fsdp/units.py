"""Which modules are sharded in one piece: gathered together for a pass, and freed after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernel_core.blocks import marked_modules, repeated_blocks
from kernel_core.errors import OptionError, ParallelismError
from torch import nn

OPTIONS = ("reshard_after_forward", "mixed_precision")


def find_units(model: nn.Module) -> dict[str, tuple[nn.Module, Mapping[str, Any]]]:
    """Return the units below the model by path, inner ones first, with options of their own.

    What the model says wins: ``fsdp_wrap_fn(module) -> bool or dict`` of a module about those inside it, ``_fsdp_wrap`` of a
    module about itself. Otherwise each of its repeated blocks is one.

    Raises:
        OptionError: a model asks for an option that there is not.
        ParallelismError: two units share a parameter.
    """
    modules = dict(model.named_modules())
    said = marked_modules(model, "fsdp_wrap_fn", "_fsdp_wrap")
    options: dict[str, Mapping[str, Any]] = {
        path: dict(answer) if isinstance(answer, Mapping) else {} for path, answer in said.items()
    }
    for path, own in options.items():
        if unknown := [key for key in own if key not in OPTIONS]:
            raise OptionError(f"fsdp_wrap_fn: asks for {unknown[0]!r} for {path}. Expected {' or '.join(OPTIONS)}.")
    if not options:
        options = {path: {} for path in repeated_blocks(model)}
    inner_first = sorted(options, key=lambda path: path.count("."), reverse=True)
    _check_ties(model, inner_first)
    return {path: (modules[path], options[path]) for path in inner_first}


def check_shapes(model: nn.Module, ignored: Iterable[nn.Parameter] = ()) -> None:
    """Refuse parameters that have no dimension to be shared out along.

    Raises:
        ParallelismError: names one.
    """
    left_out = {id(parameter) for parameter in ignored}
    for name, parameter in model.named_parameters():
        if not parameter.ndim and id(parameter) not in left_out:
            raise ParallelismError(
                f"fsdp: {name} is a single number without a dimension, and torch shares parameters out along their first one. "
                "Expected at least one dimension. Give it the shape (1,), or use 'ddp'."
            )


def _check_ties(model: nn.Module, paths: list[str]) -> None:
    """Refuse a parameter that would be in two units: it could not be gathered for both."""
    homes: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        home = max((path for path in paths if name.startswith(f"{path}.")), key=len, default="")
        known = homes.setdefault(id(parameter), (home, name))
        if known[0] != home:
            raise ParallelismError(
                f"fsdp: {known[1]} and {name} are one parameter in two units, {known[0] or 'the root'} and {home or 'the root'}. "
                "Expected tied parameters in one unit. Let fsdp_wrap_fn leave both modules to the root."
            )
