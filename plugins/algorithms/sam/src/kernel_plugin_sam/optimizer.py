"""The climb, and the optimizer that evaluates at its end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from kernel_core.errors import OptimizerError
from kernel_core.shards import local
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

TotalNorm = Callable[[list[Tensor]], Tensor]
STEPS = "sam_steps"  # the one entry that SAMOptimizer adds to the state of its base optimizer


@torch.no_grad()
def climb(
    parameters: Iterable[nn.Parameter],
    rho: float = 0.05,
    epsilon: float = 1e-12,
    total_norm: TotalNorm = get_total_norm,
) -> tuple[list[nn.Parameter], list[Tensor]]:
    """Move ``parameters`` in place by ``rho`` along their gradient: ``w + rho * g / (||g|| + epsilon)``.

    No host-device sync. The gradients are only read.

    Args:
        parameters: Those without gradient stay where they are; the norm is over all the others together.
        rho: The length of the move.
        epsilon: Keeps a zero gradient from dividing by zero.
        total_norm: Returns the norm of all gradients together as a plain scalar. Give one that knows shards where
            parameters are sharded (``DTensor``); every rank climbs then.

    Returns:
        The parameters that moved, and their values before, to be put back with ``copy_``.

    Raises:
        OptimizerError: a gradient is sparse; nothing has moved.

    Source: Foret, Kleiner, Mobahi, Neyshabur, Sharpness-Aware Minimization for Efficiently Improving Generalization,
        2021, equation 2.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    gradients: list[Any] = [parameter.grad for parameter in moved]
    if not moved:
        return [], []
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise OptimizerError(
            "sam: got a sparse gradient. Expected dense gradients. Build the embedding without sparse=True."
        )
    before = _copies(moved)
    norm = total_norm(gradients)
    # at least fp32: in fp16 epsilon would be zero
    scale = rho / (norm.to(torch.promote_types(norm.dtype, torch.float32)) + epsilon)
    steps: Any = torch._foreach_mul([local(gradient) for gradient in gradients], scale)
    torch._foreach_add_([local(parameter) for parameter in moved], steps)
    return moved, before


def _copies(tensors: list[Any]) -> list[Tensor]:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    _put_back(copies, tensors)
    return copies


def _put_back(tensors: list[Any], values: list[Any]) -> None:
    """Copy ``values`` into ``tensors``, bit for bit: one kernel for all that share dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, value in zip(tensors, values, strict=True):
        ours, theirs = kinds.setdefault((tensor.dtype, tensor.device), ([], []))
        ours.append(local(tensor))
        theirs.append(local(value))
    for ours, theirs in kinds.values():
        torch._foreach_copy_(ours, theirs)


class SAMOptimizer(Optimizer):
    """An optimizer that hands ``base_optimizer`` the gradient at the climbed point instead of that at the weights.

    Groups, defaults and state are those of ``base_optimizer`` itself, so that schedules reach it. ``state_dict`` is the
    base optimizer's with one entry more, and ``load_state_dict`` takes it with and without that entry.

    Args:
        base_optimizer: Does the update.
        rho: How far to climb.
        epsilon: Is added to the norm of the gradient.
        interval: Climb on every so many-th step; the others are plain steps of ``base_optimizer``.
        model: Its buffers keep the values that the first evaluation gave them, so that running statistics count a batch
            once. None leaves buffers alone.
        total_norm: As for ``climb``.

    Raises:
        OptimizerError: ``base_optimizer`` evaluates the model itself, as L-BFGS does.
    """

    def __init__(
        self,
        base_optimizer: Optimizer,
        rho: float = 0.05,
        epsilon: float = 1e-12,
        interval: int = 1,
        model: nn.Module | None = None,
        total_norm: TotalNorm = get_total_norm,
    ) -> None:
        closure = inspect.signature(base_optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            raise OptimizerError(
                f"sam: got {type(base_optimizer).__name__}, which evaluates the model in its step. "
                "Expected an optimizer that takes gradients as they are. Use SGD or AdamW, say."
            )
        self.base_optimizer = base_optimizer
        self.rho, self.epsilon, self.interval, self.model = rho, epsilon, interval, model
        self.total_norm = total_norm
        self.num_steps = 0
        # what torch's optimizer has besides groups and state; its __init__ would make its own of both
        self.__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The list of the base optimizer itself, which makes a new one when it loads its state."""
        return self.base_optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The base optimizer's."""
        return self.base_optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The base optimizer's."""
        return self.base_optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base optimizer."""
        self.base_optimizer.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as the base optimizer does."""
        self.base_optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the base optimizer's state and the number of steps, which decides when ``interval`` climbs."""
        return {**self.base_optimizer.state_dict(), STEPS: self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned, or the state of a bare base optimizer: then steps count from zero."""
        base = dict(state_dict)
        num_steps = base.pop(STEPS, 0)
        self.base_optimizer.load_state_dict(base)
        self.num_steps = int(num_steps)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Evaluate, climb, evaluate again there, put the weights back bit for bit, and step the base optimizer.

        Args:
            closure: Clears the gradients, computes new ones and returns the loss.

        Returns:
            The loss of the first evaluation: that of the weights, not of the climbed point.

        Raises:
            OptimizerError: there is no closure.
        """
        if not callable(closure):
            raise OptimizerError(
                f"sam: step got {closure!r} for its closure. Expected a function that clears the gradients, computes new "
                "ones and returns the loss. Call optimizer.step(closure)."
            )
        evaluate = torch.enable_grad()(closure)
        loss = evaluate()
        if (self.num_steps + 1) % self.interval == 0:
            self._evaluate_uphill(evaluate)
        self.base_optimizer.step()
        self.num_steps += 1
        return loss

    def _evaluate_uphill(self, evaluate: Callable[[], Any]) -> None:
        buffers = {} if self.model is None else dict(self.model.named_buffers())
        counted = dict(zip(buffers, _copies(list(buffers.values())), strict=True))
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        moved, weights = climb(parameters, self.rho, self.epsilon, self.total_norm)
        if not moved:
            return
        try:
            evaluate()
        finally:  # also after an error: the batch can be tried again
            _put_back(moved, weights)
            # asked again, since a module may have put a new tensor in the place of a buffer
            now = {} if self.model is None else dict(self.model.named_buffers())
            common = [name for name in counted if name in now]
            _put_back([now[name] for name in common], [counted[name] for name in common])
