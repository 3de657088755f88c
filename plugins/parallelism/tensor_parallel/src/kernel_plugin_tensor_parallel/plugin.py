"""The transform."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from kernel_core.engine import ModelTransform
from kernel_core.errors import OptionError, ParallelismError
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from kernel_plugin_tensor_parallel.heads import attention_modules
from kernel_plugin_tensor_parallel.plans import Styles, resolve_plan
from kernel_plugin_tensor_parallel.styles import leaves_output_split, split_dim

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Any] | None = None) -> list[str]:
    """Split layers of ``model`` over the ranks of ``mesh``, in place. A collective; every rank must have the same model.

    Attention modules whose heads are split get ``head_indices``, the range of those held here among all.

    Args:
        model: Its names stay; a parameter that is split becomes a DTensor.
        mesh: Of one dimension.
        plan: See ``resolve_plan``.

    Returns:
        The paths of the modules that compute in parts.

    Raises:
        OptionError: a style is unknown, or a glob fits nothing.
        ParallelismError: the model has no plan, or cannot be split so. Nothing has been changed then.
    """
    degree, rank = mesh.size(), mesh.get_local_rank()
    styles = _unique(model, resolve_plan(model, plan))
    for path, style in styles.items():
        _check_module(model, path, style, degree)
    attention = attention_modules(model, styles, degree)
    shared = _shared_parameters(model, styles)
    for path, style in styles.items():
        parallelize_module(model.get_submodule(path), mesh, style)
    for first, *others in shared:
        owner, _, name = first.rpartition(".")
        parameter = model.get_submodule(owner)._parameters[name]
        for other in others:
            path, _, name = other.rpartition(".")
            model.get_submodule(path).register_parameter(name, parameter)
    for path, heads in attention.items():
        model.get_submodule(path).head_indices = range(rank * heads // degree, (rank + 1) * heads // degree)  # type: ignore[assignment]
    return list(styles)


def _unique(model: nn.Module, styles: Styles) -> Styles:
    """Return each module once, whichever paths lead to it."""
    paths = {id(model.get_submodule(path)): path for path in styles}
    return {path: styles[path] for path in paths.values()}


def _check_module(model: nn.Module, path: str, style: Any, degree: int) -> None:
    """Refuse what ``style`` cannot split, or not into equal parts."""
    module, parent = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ParallelismError(
            f"tensor_parallel: {path} is split already. Expected a model as it was built. Give each trainer its own."
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ParallelismError(
            f"tensor_parallel: {path} is on the meta device. Expected values: drawn part by part, every rank would draw the same "
            "ones. Materialise the model before it is split."
        )
    if not isinstance(style, ColwiseParallel | RowwiseParallel):
        return
    dim = split_dim(style, module)
    if dim is None or isinstance(parent, nn.MultiheadAttention):
        which = f"part of an {type(parent).__name__}" if dim is not None else f"a {type(module).__name__}"
        raise ParallelismError(
            f"tensor_parallel: {path} is {which}, which {type(style).__name__} cannot split. Expected an nn.Linear or "
            "nn.Embedding that is called itself. Leave it out of the plan, or give a ParallelStyle of your own."
        )
    size = module.weight.shape[dim]  # type: ignore[union-attr,index]
    if size % degree and not _may_be_uneven(style, module):
        raise ParallelismError(
            f"tensor_parallel.degree: got {degree}, and {path} has {size} {'out' if dim == 0 else 'in'}put features to split. "
            "Expected a degree that divides them. Choose another, or leave it out of the plan."
        )


def _may_be_uneven(style: Any, module: nn.Module) -> bool:
    """Say whether nobody but torch sees the parts: a vocabulary may have any size."""
    if isinstance(style, ColwiseParallel):
        return isinstance(module, nn.Linear) and not leaves_output_split(style)
    return isinstance(module, nn.Embedding)


def _shared_parameters(model: nn.Module, styles: Styles) -> list[list[str]]:
    """Return the names of each parameter that several modules share and that is split.

    Raises:
        ParallelismError: the modules that share it would hold different parts.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for group in names.values():
        owners = [name.rpartition(".")[0] for name in group]
        if len({id(model.get_submodule(owner)) for owner in owners}) == 1 or not styles.keys() & set(owners):
            continue
        dims = {split_dim(styles[owner], model.get_submodule(owner)) if owner in styles else None for owner in owners}
        if None in dims or len(dims) > 1:
            raise ParallelismError(
                f"tensor_parallel.plan: {' and '.join(group)} are one parameter, and the plan splits them differently. Expected "
                "the same part for both: for tied embeddings 'embedding_rowwise' and 'colwise_gather_output'. Name both so, "
                "or neither."
            )
        found.append(group)
    return found


class TensorParallel(ModelTransform):
    """Split layers over several ranks, each of which computes its part of every one of them.

    Args:
        degree: Over how many ranks; 1 splits nothing.
        plan: Globs of module paths to ``colwise``, ``rowwise`` and the like, or to a ``ParallelStyle`` of torch's. None for
            the model's own: ``tensor_parallel_plan()`` or transformers' ``tp_plan``.

    Raises:
        OptionError: the degree is below 1.

    Source: Shoeybi, Patwary, Puri, LeGresley, Casper, Catanzaro, Megatron-LM: Training Multi-Billion Parameter Language
        Models Using Model Parallelism, 2019, section 3.

    Example:
        >>> trainer = Trainer(model=model, parallelism={"fsdp": {}, "tensor_parallel": {"degree": 2}})
    """

    name = "tensor_parallel"
    stage = "split"
    axis = "tensor_parallel"

    def __init__(self, degree: Annotated[int, Field(ge=1)], plan: Mapping[str, Any] | None = None) -> None:
        if degree < 1:
            raise OptionError(f"tensor_parallel.degree: got {degree}. Expected at least 1, which splits nothing.")
        self.degree = degree
        self.plan = plan

    def apply(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Split the layers."""
        if self.degree == 1:
            log.info("tensor_parallel: degree 1 splits nothing.")
            return
        if mesh is None or mesh.size() != self.degree:
            raise ParallelismError(
                f"tensor_parallel.degree: got {self.degree} for {1 if mesh is None else mesh.size()} ranks along the axis. "
                "Expected as many."
            )
        paths = apply_tensor_parallel(model, mesh, self.plan)
        log.info("tensor_parallel: %d modules over %d ranks, %s to %s.", len(paths), self.degree, paths[0], paths[-1])
