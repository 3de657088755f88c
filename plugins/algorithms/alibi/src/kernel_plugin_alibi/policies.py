"""The contract between ALiBi and the packages that teach it a module class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from kernel_plugin_alibi.bias import DEFAULT_MAX_BIAS_BYTES, AlibiBias


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was changed. ``path`` is dotted; a policy gives it relative to its module, "" being the module."""

    path: str
    old: str
    new: str
    what: str


@dataclass(frozen=True, slots=True)
class AlibiRequest:
    """What a policy is asked to do.

    Attributes:
        root: The whole model, for what its modules share.
        max_sequence_length: The longest sequence to allow, in positions; None for no limit.
        max_bias_bytes: The most memory that one bias may take.
    """

    root: nn.Module
    max_sequence_length: int | None = None
    max_bias_bytes: int = DEFAULT_MAX_BIAS_BYTES

    def bias(self, num_heads: int) -> AlibiBias:
        """Return what builds the bias of a layer with ``num_heads`` heads in all, with the limits of this request."""
        return AlibiBias(num_heads, self.max_sequence_length, self.max_bias_bytes)


AttentionPolicy = Callable[[nn.Module, AlibiRequest], Sequence[Change]]
"""Turns a module into its ALiBi form, in place, and returns what it changed; nothing for one that has that form."""
