"""The transform."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from kernel_core.engine import ModelTransform
from kernel_core.errors import ConflictError, OptionError, ParallelismError
from pydantic import Field

from kernel_plugin_activation_checkpointing.recompute import Settings, operators, replace_forward
from kernel_plugin_activation_checkpointing.selection import select_modules

if TYPE_CHECKING:
    from kernel_core import State
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


def apply_activation_checkpointing(
    model: nn.Module,
    modules: Sequence[str] | None = None,
    *,
    offload: bool = False,
    reentrant: bool = False,
    every: int = 1,
    save: Sequence[str] = (),
    recompute: bool = True,
) -> list[str]:
    """Recompute blocks of ``model`` in the backward pass. Names, classes and values stay.

    Args:
        model: Changed in place.
        modules: See ``select_modules``.
        offload: Keep on the host what is kept.
        reentrant: Take torch's older way.
        every: Take each n-th block.
        save: Operators whose results are kept.
        recompute: False to recompute nothing and only offload.

    Returns:
        The paths of the changed modules.

    Raises:
        OptionError: options exclude each other, or name what there is not.
        ParallelismError: there is nothing to recompute, or it is recomputed already.
    """
    _check(offload, reentrant, every, save, recompute)
    settings = Settings(recompute, offload, reentrant, operators(save))
    found = select_modules(model, modules, every)
    for path, module in found.items():
        if getattr(module, "gradient_checkpointing", False):
            raise ParallelismError(
                f"activation_checkpointing: transformers recomputes {path} already. Expected one of the two. Call "
                "gradient_checkpointing_disable() on the model."
            )
    for module in found.values():
        replace_forward(module, settings)
    return list(found)


def _check(offload: bool, reentrant: bool, every: int, save: Sequence[str], recompute: bool) -> None:
    if every < 1:
        raise OptionError(f"activation_checkpointing.every: got {every}. Expected at least 1, which takes every block.")
    if reentrant and save:
        raise OptionError(
            f"activation_checkpointing.save: got {list(save)} together with reentrant=True, which keeps inputs only. Expected "
            "one of them. Leave reentrant out."
        )
    if not recompute and (reentrant or save or not offload):
        raise OptionError(
            "activation_checkpointing.recompute: got False, which leaves only offload=True to be done. Expected it, without "
            "reentrant and save. Or remove activation_checkpointing."
        )


class ActivationCheckpointing(ModelTransform):
    """Recompute blocks in the backward pass in place of keeping their activations, or keep those on the host.

    Args:
        modules: What to recompute: class names, or globs of paths (``*`` is one part, ``**`` any number). None for what the
            model says, else its blocks.
        offload: Keep on the host what is kept: the inputs of the blocks.
        reentrant: Take torch's older way: no nested, keyword or frozen inputs with gradient, no FSDP.
        every: Take each n-th block, the first included.
        save: Operators whose results are kept, ``mm`` or ``namespace.name``: less is recomputed, more is kept.
        recompute: False to recompute nothing: with ``offload`` all activations of the blocks go to the host.

    Raises:
        OptionError: options exclude each other, or name what there is not.

    Source: Chen, Xu, Zhang, Guestrin, Training Deep Nets with Sublinear Memory Cost, 2016, section 4.

    Example:
        >>> trainer = Trainer(model=model, parallelism={"activation_checkpointing": {"every": 2}})
    """

    name = "activation_checkpointing"
    stage = "recompute"

    def __init__(
        self,
        modules: list[str] | None = None,
        offload: bool = False,
        reentrant: bool = False,
        every: Annotated[int, Field(ge=1)] = 1,
        save: list[str] | None = None,
        recompute: bool = True,
    ) -> None:
        self.modules, self.every, self.save = modules, every, save or []
        self.offload, self.reentrant, self.recompute = offload, reentrant, recompute
        _check(offload, reentrant, every, self.save, recompute)
        operators(self.save)

    def check(self, state: State) -> None:
        """Refuse the older way under FSDP, whose parameters are gone when it recomputes."""
        if self.reentrant and state.engine.name == "fsdp":
            raise ConflictError(
                "activation_checkpointing.reentrant: got True with the engine 'fsdp'. Expected False there. Leave it out."
            )

    def apply(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Replace the forward pass of the blocks."""
        paths = apply_activation_checkpointing(
            model,
            self.modules,
            offload=self.offload,
            reentrant=self.reentrant,
            every=self.every,
            save=self.save,
            recompute=self.recompute,
        )
        log.info("activation_checkpointing: %d modules, %s to %s.", len(paths), paths[0], paths[-1])
