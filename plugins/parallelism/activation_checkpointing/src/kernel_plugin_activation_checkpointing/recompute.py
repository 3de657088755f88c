"""A module whose forward pass keeps its inputs only, and runs again when the backward pass needs the rest.

The module stays what it is: its class, its parameters and their names. Only ``forward`` of the instance is another one, a
bound method, which a copy of the module binds to the copy.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from kernel_core.errors import OptionError
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Settings:
    """How one module is recomputed.

    Attributes:
        recompute: Whether it is at all.
        offload: Whether what is kept lies on the host.
        reentrant: Which of torch's two ways.
        save: Operators whose results are kept.
    """

    recompute: bool = True
    offload: bool = False
    reentrant: bool = False
    save: tuple[Any, ...] = ()


def replace_forward(module: nn.Module, settings: Settings) -> None:
    """Make ``module`` keep less in its forward pass. A second call replaces the settings of the first."""
    before = vars(module).get("forward")
    if getattr(before, "__func__", None) is not _forward:
        module._forward_before = before  # type: ignore[assignment] # of this instance; None for that of its class
    module._checkpoint_settings = settings  # type: ignore[assignment]
    module.forward = MethodType(_forward, module)


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    settings: Settings = self._checkpoint_settings
    # the class is asked for each time: fully_shard changes it
    plain = self._forward_before or functools.partial(type(self).forward, self)  # dynamo knows no MethodType
    if not (self.training and torch.is_grad_enabled()):
        return plain(*args, **kwargs)
    if settings.recompute:
        args, kwargs = without_cache(args, kwargs)
        plain = _recomputed(plain, settings)
    if not settings.offload:
        return plain(*args, **kwargs)
    with _on_host():
        return plain(*args, **kwargs)


def _recomputed(function: Callable[..., Any], settings: Settings) -> Callable[..., Any]:
    if settings.reentrant:
        return functools.partial(_reentrant, function)
    if not settings.save:
        return functools.partial(checkpoint, function, use_reentrant=False)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(settings.save))
    return functools.partial(checkpoint, function, use_reentrant=False, context_fn=contexts)


def _reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Pass everything by position, which is all that this way of torch's knows."""

    def run(*flat: Any) -> Any:
        return function(*flat[: len(args)], **dict(zip(kwargs, flat[len(args) :], strict=True)))

    return checkpoint(run, *args, *kwargs.values(), use_reentrant=True)


def _on_host() -> AbstractContextManager[Any]:
    if not torch.accelerator.is_available():
        return contextlib.nullcontext()  # everything is there already
    device_type = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    return torch.autograd.graph.save_on_cpu(pin_memory=True, device_type=device_type)


def without_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Leave out the cache of keys and values that transformers passes: a second forward pass would append to it again."""
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return args, {**kwargs, "use_cache": False} if "use_cache" in kwargs else kwargs


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def operators(names: Sequence[str]) -> tuple[Any, ...]:
    """Return torch's operators of these names, all overloads: ``mm`` is ``aten.mm``, others are ``namespace.name``.

    Raises:
        OptionError: there is no such operator.
    """
    found: list[Any] = []
    for name in names:
        namespace, _, operator = name.replace("::", ".").rpartition(".")
        packet = getattr(getattr(torch.ops, namespace or "aten"), operator, None)
        if packet is None:
            raise OptionError(
                f"activation_checkpointing.save: torch has no operator {name!r}. Expected names such as 'mm', 'addmm' or "
                "'aten._scaled_dot_product_flash_attention'."
            )
        found += [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(found)
