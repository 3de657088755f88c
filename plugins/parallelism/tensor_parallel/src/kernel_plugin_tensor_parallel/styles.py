"""The words of plans, those of transformers among them, as torch's styles; and how each of them splits a parameter."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from kernel_core.errors import OptionError
from kernel_core.naming import did_you_mean
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel


class SumGradients(ParallelStyle):
    """Keeps a module whole that sees this rank's heads alone, and adds up what its parameters learn on all ranks.

    The norms of queries and keys are such. Only the gradient needs the other ranks.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            own = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
            self._parameters.update(
                {name: _summed_in_backward(parameter, device_mesh) for name, parameter in own.items()}
            )
            try:
                return type(self).forward(self, *args, **kwargs)
            finally:
                self._parameters.update(own)

        module.forward = MethodType(forward, module)
        return module


def _summed_in_backward(parameter: nn.Parameter, mesh: DeviceMesh) -> Any:
    return DTensor.from_local(parameter, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


STYLES: dict[str, Callable[[], ParallelStyle | None]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=Replicate()),
    "replicated_with_grad_allreduce": SumGradients,
    "replicate": lambda: None,
}


def make_style(style: Any, glob: str) -> ParallelStyle | None:
    """Return the style that a plan gives for ``glob``; None leaves the module as it is.

    Raises:
        OptionError: it is no known word and no ``ParallelStyle``.
    """
    if isinstance(style, ParallelStyle):
        return style
    if style in STYLES:
        return STYLES[style]()
    raise OptionError(
        f"tensor_parallel.plan: {glob!r} has the style {style!r}, which is not known here."
        f"{did_you_mean(style, list(STYLES)) if isinstance(style, str) else ''} Expected {', '.join(STYLES)}, or a "
        "torch.distributed.tensor.parallel.ParallelStyle. Give plan={path: style} without it."
    )


def split_dim(style: ParallelStyle, module: nn.Module) -> int | None:
    """Return the dim along which ``style`` splits the weight of ``module``; None if it does not or nobody can tell."""
    if isinstance(style, ColwiseParallel):
        return {nn.Linear: 0, nn.Embedding: 1}.get(_kind(module))
    if isinstance(style, RowwiseParallel):
        return {nn.Linear: 1, nn.Embedding: 0}.get(_kind(module))
    return None


def _kind(module: nn.Module) -> Any:
    return next((kind for kind in (nn.Linear, nn.Embedding) if isinstance(module, kind)), None)


def leaves_output_split(style: ParallelStyle) -> bool:
    """Say whether what follows a column-wise layer sees a part of its features only."""
    return isinstance(style, ColwiseParallel) and style.output_layouts == (Shard(-1),)
