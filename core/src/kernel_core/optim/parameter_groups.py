"""Optimizers: built by name, and kept pointing at the model's parameters when surgery or an engine replaces them."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from kernel_core.engine import Engine
from kernel_core.errors import OptimizerError, SurgeryError
from kernel_core.optim.decoupled import DecoupledAdamW, DecoupledSGDW

if TYPE_CHECKING:
    from kernel_core.train.precision import Precision

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
OptimizerRequest = Optimizer | OptimizerFactory


def _optimizer_classes() -> dict[str, type[Optimizer]]:
    """Return torch's optimizers and the kernel's, by class name in lower case."""
    classes = [*vars(torch.optim).values(), DecoupledAdamW, DecoupledSGDW]
    return {
        cls.__name__.lower(): cls
        for cls in classes
        if isinstance(cls, type) and issubclass(cls, Optimizer) and cls is not Optimizer
    }


def optimizer_names() -> list[str]:
    """Return the names that ``optimizer_by_name`` knows."""
    return sorted(_optimizer_classes())


def optimizer_by_name(name: str) -> Callable[..., Optimizer] | None:
    """Return the optimizer of that name in any case, such as ``adamw``, ``SGD`` or ``decoupled_adamw``; None if there is none."""
    return _optimizer_classes().get(name.lower().replace("_", ""))


class ParameterGroups:
    """Remembers by name what each group of ready optimizers held, to point it at the parameters of those names later.

    Args:
        model: The model before surgery.
        optimizers: The ready optimizers among those of the run.

    Raises:
        OptimizerError: an optimizer holds parameters that are not the model's, or two groups share one.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        names = _names(model)
        self._old = dict(model.named_parameters(remove_duplicate=False))
        self._group_of: dict[str, tuple[int, int]] = {}
        for index, optimizer in enumerate(self._optimizers):
            foreign = sum(id(p) not in names for group in optimizer.param_groups for p in group["params"])
            if foreign:
                raise OptimizerError(
                    f"optimizer {type(optimizer).__name__}: {foreign} of its parameters are not the model's. "
                    "Build it from model.parameters() of the model given to the trainer."
                )
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    for name in names[id(parameter)]:
                        if self._group_of.setdefault(name, (index, number)) != (index, number):
                            raise OptimizerError(
                                f"optimizers: the parameter {name} is in 2 groups. Every parameter belongs to exactly one."
                            )

    def repoint(self, model: nn.Module, replaced: Iterable[str]) -> None:
        """Point every group at ``model``'s parameters of the remembered names.

        A parameter with a new name joins the group that held the parameters of the module it replaced.

        Args:
            model: The final model.
            replaced: Paths of modules that surgery replaced or changed.

        Raises:
            OptimizerError: it is not clear which group a new parameter belongs to.
            SurgeryError: an optimizer that already holds state would have to give up parameters.
        """
        if not self._optimizers:
            return
        new = dict(model.named_parameters(remove_duplicate=False))
        paths = sorted(set(replaced), key=len, reverse=True)
        members: dict[tuple[int, int], dict[int, nn.Parameter]] = {}
        adopted: dict[int, tuple[int, int]] = {}
        names = _names(model)
        for name, parameter in new.items():
            group = self._group_of.get(name) or adopted.get(id(parameter))
            if group is None and name not in self._old:
                group = self._adopting_group(name, paths)
            if group is not None:
                adopted[id(parameter)] = group  # the same tensor under another name stays where it is
                members.setdefault(group, {}).setdefault(id(parameter), parameter)
        for index, optimizer in enumerate(self._optimizers):
            self._assign(index, optimizer, members, names)

    def _assign(
        self,
        index: int,
        optimizer: Optimizer,
        members: Mapping[tuple[int, int], Mapping[int, nn.Parameter]],
        names: Mapping[int, Sequence[str]],
    ) -> None:
        wanted = [list(members.get((index, number), {}).values()) for number in range(len(optimizer.param_groups))]
        for group, parameters in zip(optimizer.param_groups, wanted, strict=True):
            if {id(p) for p in group["params"]} == {id(p) for p in parameters}:
                continue
            if optimizer.state:
                raise SurgeryError(
                    f"surgery: the optimizer {type(optimizer).__name__} already holds state, and surgery replaces parameters "
                    "it has state for. Do surgery before the first step, or give the trainer a function of the parameters "
                    "that makes the optimizer (some, such as Adagrad, hold state from the start)."
                )
            group["params"][:] = parameters  # in place: L-BFGS keeps the list itself
            if "param_names" in group:
                group["param_names"] = [names[id(parameter)][0] for parameter in parameters]

    def _adopting_group(self, name: str, paths: Sequence[str]) -> tuple[int, int]:
        for path in paths:
            if name == path or name.startswith(f"{path}.") or not path:
                candidates = {
                    group for old, group in self._group_of.items() if old == path or old.startswith(f"{path}.")
                }
                if len(candidates) == 1:
                    return candidates.pop()
                if candidates:
                    raise OptimizerError(
                        f"optimizers: the new parameter {name} replaces parameters of {path} that are in {len(candidates)} "
                        "different groups, so its group is not clear. Put the parameters of that module in one group, or "
                        "give the trainer a function of the parameters that makes the optimizer."
                    )
        groups = set(self._group_of.values())
        if len(groups) == 1:
            return groups.pop()
        raise OptimizerError(
            f"optimizers: the new parameter {name} belongs to a module that had none before, and there are {len(groups)} "
            "groups it could join. Give the trainer a function of the parameters that makes the optimizer."
        )


def _names(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def build_optimizers(model: nn.Module, requests: Sequence[OptimizerRequest]) -> tuple[Optimizer, ...]:
    """Return the ready optimizers as they are, and those that functions make from the trainable parameters.

    Raises:
        OptimizerError: a function returns something else than an optimizer.
    """
    optimizers = []
    for request in requests:
        if isinstance(request, Optimizer):
            optimizers.append(request)
            continue
        if not callable(request):
            raise OptimizerError(
                f"optimizers: got {request!r}. Expected a torch.optim.Optimizer, or a function of the parameters that makes one."
            )
        made: Any = request([parameter for parameter in model.parameters() if parameter.requires_grad])
        if not is_optimizer(made):
            raise OptimizerError(f"optimizers: {request!r} returned {made!r}. Expected a torch.optim.Optimizer.")
        optimizers.append(made)
    return tuple(optimizers)


def is_optimizer(value: Any) -> bool:
    """Say whether ``value`` can be used as an optimizer: torch's, or whatever has the same parts."""
    return isinstance(value, Optimizer) or all(hasattr(value, part) for part in ("param_groups", "step", "zero_grad"))


def check_reevaluation(optimizers: Sequence[Optimizer], engine: Engine, precision: Precision) -> None:
    """Refuse an optimizer that evaluates the model itself where it cannot.

    Raises:
        OptimizerError: it is one of several, or the engine or the precision evaluates once only.
    """
    for optimizer in optimizers:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is None or closure.default is not closure.empty:
            continue
        name = type(optimizer).__name__
        if len(optimizers) > 1:
            raise OptimizerError(f"optimizers: {name} evaluates the model in its step and must be the only optimizer.")
        if not engine.can_reevaluate:
            raise OptimizerError(
                f"optimizers: {name} evaluates the model in its step, and the engine {engine.name} evaluates once. "
                "Use another optimizer or engine."
            )
        if not precision.can_reevaluate:
            raise OptimizerError(
                f"optimizers: {name} evaluates the model in its step, and the loss scaling of precision={precision.name!r} "
                "allows one evaluation. Use precision='amp_bf16' or 'fp32', or another optimizer."
            )


def check_coverage(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Make sure that every trainable parameter is in exactly one group.

    Raises:
        OptimizerError: names the first parameter that is in none, or in several.
    """
    counts = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    missing = [name for name, p in model.named_parameters() if p.requires_grad and not counts[id(p)]]
    if missing:
        raise OptimizerError(
            f"optimizers: {len(missing)} trainable parameters are in no optimizer, the first is {missing[0]}. "
            "Give them to an optimizer, or set requires_grad=False on what shall not be trained."
        )
    for name, parameter in model.named_parameters():
        if counts[id(parameter)] > 1:
            raise OptimizerError(
                f"optimizers: the parameter {name} is in {counts[id(parameter)]} groups. "
                "Every parameter belongs to exactly one."
            )
