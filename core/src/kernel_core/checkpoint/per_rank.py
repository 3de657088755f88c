"""State that differs from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kernel_core.errors import CheckpointMismatchError

Elastic = Literal["first", "sum", "drop", "refuse"]


@dataclass(frozen=True)
class PerRank:
    """A value in a plugin's ``state_dict`` that each rank has one of; anything else there is taken from rank 0.

    A run resumed on as many ranks gives each its own value back. On another number of ranks there is a rule.

    Args:
        value: Plain data and tensors.
        elastic: On another number of ranks, ``first``: all get rank 0's. ``sum``: rank 0 gets the sum over the ranks that
            saved, of numbers, tensors and containers of those, and the others zeros. ``drop``: the entry is left out of its
            dict. ``refuse``: such a run is refused.
    """

    value: Any
    elastic: Elastic = "refuse"

    def __post_init__(self) -> None:
        if self.elastic not in get_args(Elastic):
            raise ValueError(f"PerRank.elastic: got {self.elastic!r}. Expected one of {', '.join(get_args(Elastic))}.")


class Dropped:
    """Stands for an entry that its rule leaves out, until ``without_dropped``."""


def without_dropped(value: Any) -> Any:
    """Return ``value`` without the entries of dicts that are left out."""
    if isinstance(value, Mapping):
        return type(value)({key: without_dropped(item) for key, item in value.items() if item is not Dropped})  # type: ignore[call-arg]
    return type(value)(map(without_dropped, value)) if type(value) in (list, tuple) else value


def value_for(rank: int, world_size: int, saved: list[Any], elastic: str, where: str) -> Any:
    """Return the value of ``rank`` of ``world_size``, given those of all ranks that saved.

    Raises:
        CheckpointMismatchError: the rule refuses another number of ranks.
    """
    if len(saved) == world_size:
        return saved[rank]
    if elastic == "first":
        return saved[0]
    if elastic == "drop":
        return Dropped
    if elastic == "sum":
        total = saved[0]
        for one in saved[1:]:
            total = _combine(total, one)
        return total if rank == 0 else _zeros(total)
    raise CheckpointMismatchError(
        f"{where}: each of {len(saved)} ranks has a value of its own, and the run has {world_size} ranks now. Expected as many "
        "as saved it: the plugin says that its values cannot be shared out anew. Resume on as many ranks, or leave the plugin "
        "out."
    )


def _combine(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {key: _combine(value, b[key]) for key, value in a.items()}
    if isinstance(a, list | tuple):
        return type(a)(_combine(one, other) for one, other in zip(a, b, strict=True))
    return a + b


def _zeros(a: Any) -> Any:
    if isinstance(a, Mapping):
        return {key: _zeros(value) for key, value in a.items()}
    return type(a)(map(_zeros, a)) if isinstance(a, list | tuple) else a * 0
