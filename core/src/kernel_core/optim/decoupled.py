"""SGD and AdamW whose weight decay follows the schedule of the learning rate, not its size.

Each step multiplies the weights by ``1 - (lr / initial_lr) * weight_decay`` besides what the gradient does. torch's AdamW
multiplies by ``1 - lr * weight_decay``, so that changing the learning rate changes the decay as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

__all__ = ["DecoupledAdamW", "DecoupledSGDW", "decay_weights"]

log = logging.getLogger(__name__)

HIGH_WEIGHT_DECAY = 1e-3  # usual for torch's AdamW, which multiplies it by lr; here a slip of the pen


def decay_weights(parameters: Sequence[Tensor], rate: float | Tensor, foreach: bool | None = None) -> None:
    """Multiply ``parameters`` by ``1 - rate`` in place.

    Args:
        parameters: Leaves or plain tensors; may be DTensors.
        rate: The share of each weight that is taken away.
        foreach: One call for all tensors, or one for each; None chooses the former if all are plain tensors.
    """
    if foreach is None:
        foreach = all(type(parameter) in (Tensor, nn.Parameter) for parameter in parameters)
    with torch.no_grad():
        if foreach and parameters:
            torch._foreach_mul_(list(parameters), 1 - rate)  # type: ignore[arg-type]
        else:
            for parameter in parameters:
                parameter.mul_(1 - rate)


class _Decoupled(Optimizer):
    """What both have in common: the initial learning rate of each group, and a step with another ``weight_decay``."""

    def _warn_if_high(self) -> None:
        highest = max(float(group["weight_decay"]) for group in self.param_groups)
        if highest >= HIGH_WEIGHT_DECAY:
            log.warning(
                "%s: weight_decay=%g is high. Every step at the initial learning rate shrinks the weights by that share, "
                "however small the rate is. 1e-5 to 1e-4 is usual; coming from torch's AdamW, use its lr * weight_decay.",
                type(self).__name__,
                highest,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its learning rate now is the one that decay is measured against."""
        super().add_param_group(param_group)
        _remember_initial_lr(self.param_groups[-1:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _remember_initial_lr(self.param_groups)

    def _torch_weight_decay(self, group: dict[str, Any]) -> float:
        """Return the ``weight_decay`` that torch's step shall see for ``group``; called once the gradients are there."""
        raise NotImplementedError

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: Computes the gradients and returns the loss; weights decay after it.

        Returns:
            What ``closure`` returned, else None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        torch_step = _without_hooks(super().step)
        with _weight_decays(self.param_groups, [self._torch_weight_decay(group) for group in self.param_groups]):
            torch_step(self)
        return loss


class DecoupledSGDW(_Decoupled, SGD):
    """SGD with momentum, and weight decay that is relative to the initial learning rate.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate; at the same time the initial one of every group that has none of its own.
        momentum, dampening, nesterov: As in ``torch.optim.SGD``.
        weight_decay: The share of each weight taken away by a step at the initial learning rate. Parameters without a
            gradient do not decay, nor do groups whose initial learning rate is 0.
        maximize: Ascend instead of descend; decay shrinks the weights all the same.
        foreach, fused: Which of torch's implementations to use; None lets torch choose.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 1.

    Example:
        >>> optimizer = DecoupledSGDW(nn.Linear(2, 1).parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        # torch's fused step skips itself on the device when fp16 gradients overflow; the decay would not
        self._step_supports_amp_scaling = False
        self._warn_if_high()

    def _torch_weight_decay(self, group: dict[str, Any]) -> float:
        if group["weight_decay"] and group["initial_lr"]:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            decay_weights(parameters, group["lr"] / group["initial_lr"] * group["weight_decay"], group["foreach"])
        return 0.0


class DecoupledAdamW(_Decoupled, AdamW):
    """AdamW with weight decay that is relative to the initial learning rate.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate; at the same time the initial one of every group that has none of its own.
        betas, eps, amsgrad: As in ``torch.optim.AdamW``; the second beta is 0.95 here.
        weight_decay: The share of each weight taken away by a step at the initial learning rate. Parameters without a
            gradient do not decay, nor do groups whose initial learning rate is 0.
        maximize: Ascend instead of descend; decay shrinks the weights all the same.
        foreach, capturable, fused: Which of torch's implementations to use; None lets torch choose.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2.

    Example:
        >>> optimizer = DecoupledAdamW(nn.Linear(2, 1).parameters(), lr=1e-3, weight_decay=1e-5)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 1e-5,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )
        self._warn_if_high()

    def _torch_weight_decay(self, group: dict[str, Any]) -> float:
        # torch multiplies by 1 - lr * weight_decay inside its own kernels: dividing by the initial rate is all there is to do
        return group["weight_decay"] / group["initial_lr"] if group["initial_lr"] else 0.0


def _remember_initial_lr(groups: Sequence[dict[str, Any]]) -> None:
    for group in groups:
        group.setdefault("initial_lr", float(group["lr"]))  # a tensor would change with the schedule


@contextmanager
def _weight_decays(groups: Sequence[dict[str, Any]], values: Sequence[float]) -> Iterator[None]:
    """Show torch's step other decays than the user's, which monitors and state dicts keep seeing."""
    own = [group["weight_decay"] for group in groups]
    try:
        for group, value in zip(groups, values, strict=True):
            group["weight_decay"] = value
        yield
    finally:
        for group, value in zip(groups, own, strict=True):
            group["weight_decay"] = value


def _without_hooks(step: Any) -> Callable[[Optimizer], Any]:
    """Return torch's own step without the step hooks, which run around ours already.

    torch adds them to the class of the first optimizer made of it, so to ``SGD`` as soon as there is a plain one.
    """
    function = getattr(step, "__func__", step)
    return function.__wrapped__ if getattr(function, "hooked", False) else function  # type: ignore[no-any-return]
