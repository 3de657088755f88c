"""Attention: whole heads on each rank, and which of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kernel_core.errors import ParallelismError
from torch import nn

from kernel_plugin_tensor_parallel.plans import Styles
from kernel_plugin_tensor_parallel.styles import leaves_output_split

COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
SIZES = ("head_dim", "attention_head_size", "head_size")


def attention_modules(model: nn.Module, styles: Styles, degree: int) -> dict[str, int]:
    """Return path and number of heads, all ranks together, of the attention modules that are split.

    Such a module has column-wise layers whose output stays split, and says how many heads it has (``num_heads`` or the
    like) or how large one is (``head_dim`` or the like).

    Raises:
        ParallelismError: a layer holds a number of heads that ``degree`` does not divide, or queries, keys and values in one.
    """
    projections: dict[str, dict[str, nn.Linear]] = {}
    for path, style in styles.items():
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear) and leaves_output_split(style):
            projections.setdefault(path.rpartition(".")[0], {})[path] = layer
    found = {}
    for path, layers in projections.items():
        attention = model.get_submodule(path)
        count, size = _heads_of(attention, layers)
        if count is not None and size is not None:
            _check(layers, count, size, degree, type(attention).__name__)
            found[path] = count
    return found


def _heads_of(attention: nn.Module, layers: Mapping[str, nn.Linear]) -> tuple[int | None, int | None]:
    """Return the number of heads and the features of one; None for a module that has nothing to do with heads."""
    count, size = _first(attention, COUNTS), _first(attention, SIZES)
    first = next(iter(layers.values()))
    if size is not None and count is None:
        # a feed-forward module may hold the config as well, but has no size of a head
        config = getattr(attention, "config", None)
        count = _first(config, COUNTS) or max(layer.out_features for layer in layers.values()) // size
    if count is not None and size is None:
        size = first.in_features // count
    return count, size


def _first(holder: Any, names: Iterable[str]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(holder, name, None), int)), None)


def _check(layers: Mapping[str, nn.Linear], count: int, size: int, degree: int, what: str) -> None:
    heads = {path: layer.out_features // size for path, layer in layers.items() if layer.out_features % size == 0}
    if count not in heads.values():
        path, held = max(heads.items(), key=lambda item: item[1], default=(next(iter(layers)), 0))
        raise ParallelismError(
            f"tensor_parallel: {path} has {layers[path].out_features} features, and {what} {count} heads of {size}. Expected "
            "the queries in a layer of their own: of queries, keys and values in one layer each rank would get another kind. "
            "Make it three layers, or leave it out of the plan."
        )
    for path, held in {"": count, **heads}.items():
        if held % degree:
            raise ParallelismError(
                f"tensor_parallel.degree: got {degree}, which does not divide the number of heads in {path or what}: {held}. "
                "Expected one that divides both num_attention_heads and num_key_value_heads. Choose another."
            )
