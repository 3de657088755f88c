"""The hook that this plugin adds to the kernel's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kernel_core.hooks import hookspec

if TYPE_CHECKING:
    from torch import nn

    from kernel_plugin_alibi.policies import AttentionPolicy


@hookspec()
def alibi_attention_policies() -> Mapping[type[nn.Module], AttentionPolicy]:  # type: ignore[empty-body]
    """Return ``{module class: policy}`` for model classes that ALiBi should know.

    Fires once, when ``alibi`` changes the model. An answer for a class that the plugin knows itself replaces the
    built-in policy; of two answers for one class the later one in plan order is used, and the surgery report names the
    class. Mark the answer ``@hookimpl(optional=True)`` so that the package also works without ``alibi``.
    """
