"""The engine: where backward, gradient synchronisation, clipping and the optimizer step happen.

Everything that differs between one process, DDP, FSDP or DeepSpeed is behind ``Engine``; the loop has no branch for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

TrainBatch = Callable[[], Tensor]
EVALUATE_ONCE = frozenset(cls for cls in vars(torch.optim).values() if isinstance(cls, type)) - {torch.optim.LBFGS}


class Engine(ABC):
    """How a model is prepared and stepped.

    Attributes:
        name: The name in messages and in the plan.
        rank, world_size, local_rank: This process's place.
        can_reevaluate: Whether an optimizer may call ``train_batch`` more than once in a step.
    """

    name: str = "engine"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    can_reevaluate: bool = True

    @abstractmethod
    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model to train, after surgery: wrapped, sharded or as it is, on ``device``.

        Parameter names must not change; the kernel points the optimizers to the new parameters by name.
        """

    @abstractmethod
    def set_gradient_sync(self, enabled: bool) -> None:
        """Turn gradient synchronisation on or off; on for the last microbatch of a batch only."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss``, a scalar."""

    @abstractmethod
    def step(self, optimizers: Sequence[torch.optim.Optimizer], train_batch: TrainBatch) -> Tensor:
        """Run ``train_batch`` (zero gradients, all microbatches; returns the loss) and step every optimizer.

        Returns:
            The detached mean loss of the batch, a scalar; of the first evaluation where there are several.
        """

    @abstractmethod
    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        Returns:
            The norm before clipping, a scalar on the device.
        """

    def close(self) -> None:  # noqa: B027 (most engines have nothing to give back)
        """Give back what ``prepare`` took. May be called twice."""


class SingleEngine(Engine):
    """One process, one device."""

    name = "single"

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model itself."""
        return model

    def set_gradient_sync(self, enabled: bool) -> None:
        """There is nobody to synchronise with."""

    def backward(self, loss: Tensor) -> None:
        """Call ``loss.backward()``."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, optimizers: Sequence[torch.optim.Optimizer], train_batch: TrainBatch) -> Tensor:
        """Hand ``train_batch`` to one optimizer as its closure; several get one evaluation and then each its step.

        So do torch's own that would call a closure once, and first of all: the same without its context (4 µs).
        """
        if len(optimizers) == 1 and type(optimizers[0]) not in EVALUATE_ONCE:
            closure: Any = train_batch  # torch's stubs say that a closure returns a float
            return optimizers[0].step(closure)  # type: ignore[no-any-return]
        loss = train_batch()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Call ``torch.nn.utils.clip_grad_norm_``."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
