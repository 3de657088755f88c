"""In which number format forward and loss are computed, and what small gradients in fp16 need.

The model's own parameters stay in the dtype the user gave them; ``amp_*`` computes matrix products and the like in
the smaller one, as torch's autocast decides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kernel_core.errors import TrainerError
from kernel_core.naming import did_you_mean

DTYPES: dict[str, torch.dtype | None] = {
    "fp32": None,
    "amp_bf16": torch.bfloat16,
    "amp_fp16": torch.float16,
    "amp_fp8": torch.bfloat16,  # what the fp8 context does not cover
}
PRECISIONS = tuple(DTYPES)
F = TypeVar("F", bound=Callable[..., Any])


def default_precision(device: torch.device) -> str:
    """Return ``fp32`` on a CPU and other devices; on a CUDA GPU ``amp_bf16`` where it has it, else ``amp_fp16``."""
    return mixed_precision(device) if device.type == "cuda" else "fp32"


def mixed_precision(device: torch.device) -> str:
    """Return the mixed precision that suits ``device``: ``amp_bf16``, or ``amp_fp16`` on GPUs without bf16."""
    if device.type != "cuda":
        return "amp_bf16"
    return "amp_bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "amp_fp16"


def check_precision(precision: str, device: torch.device) -> str:
    """Return ``precision`` if ``device`` can compute in it.

    Raises:
        TrainerError: there is no such precision, or the device lacks it.
    """
    name = str(precision)
    if name not in DTYPES:
        raise TrainerError(
            f"precision: unknown precision {name!r}.{did_you_mean(name, PRECISIONS)} Expected one of {', '.join(PRECISIONS)}."
        )
    if name == "amp_fp8" and (device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9)):
        raise TrainerError(
            f"precision: 'amp_fp8' was asked for, and {device} has no fp8. Expected a CUDA GPU of compute capability 8.9 or "
            f"newer. Use {mixed_precision(device)!r}."
        )
    if name != "fp32" and not torch.amp.is_autocast_available(device.type):
        raise TrainerError(
            f"precision: {name!r} was asked for, and torch has no autocast on {device.type}. Use 'fp32'."
        )
    return name


class Precision:
    """The number format of a run.

    Args:
        name: One of ``PRECISIONS``, checked.
        device: Where the run computes.
        contexts: More contexts around forward and loss, entered inside autocast.

    Attributes:
        can_reevaluate: Whether an optimizer may evaluate more than once in a step. Not with loss scaling: only after the
            step is it known whether a gradient overflowed.
    """

    def __init__(
        self, name: str, device: torch.device, contexts: Sequence[Callable[[], AbstractContextManager[Any]]] = ()
    ) -> None:
        self.name = name
        self._device = device
        self._dtype = DTYPES[name]
        self._contexts = tuple(contexts)
        self._scaler = torch.amp.GradScaler(device.type) if name == "amp_fp16" else None

    @property
    def can_reevaluate(self) -> bool:
        """Whether an optimizer may evaluate more than once in a step."""
        return self._scaler is None

    def cast(self, function: F, training: bool = True) -> F:
        """Return ``function`` computing in this precision; the function itself where there is nothing to do.

        Args:
            training: Whether the further contexts are entered too.
        """
        if self._dtype is None:
            return function
        autocast, contexts = torch.autocast(self._device.type, self._dtype), self._contexts

        def run(*args: Any, **options: Any) -> Any:
            with autocast:  # about 2 µs
                return function(*args, **options)

        def run_within(*args: Any, **options: Any) -> Any:
            with ExitStack() as stack:
                stack.enter_context(autocast)
                for context in contexts:
                    stack.enter_context(context())
                return function(*args, **options)

        return run_within if contexts and training else run  # type: ignore[return-value]

    def scaled(self, backward: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Return ``backward`` for the loss times the loss scale, ``backward`` itself where there is none."""
        if self._scaler is None:
            return backward
        return lambda loss: backward(self._scaler.scale(loss))  # type: ignore[union-attr]

    def unscalers(self, optimizers: Sequence[Optimizer]) -> list[Callable[[], None]]:
        """Return the calls that take the loss scale out of the gradients, none where there is no scale."""
        if self._scaler is None:
            return []

        def unscale(optimizer: Optimizer) -> None:
            if _has_gradients(optimizer):
                self._scaler.unscale_(optimizer)  # type: ignore[union-attr]

        return [partial(unscale, optimizer) for optimizer in optimizers]

    def steppers(self, optimizers: Sequence[Optimizer]) -> Sequence[Any]:
        """Return stand-ins of ``optimizers`` that pass over a step whose gradients overflowed; themselves without scaling."""
        if self._scaler is None:
            return optimizers
        last = len(optimizers) - 1
        return [_ScaledStep(self, optimizer, index == last) for index, optimizer in enumerate(optimizers)]

    def forget_gradients(self) -> None:
        """Forget which gradients were unscaled, because they were thrown away."""
        if self._scaler is not None:
            fresh = torch.amp.GradScaler(self._device.type)
            fresh.load_state_dict(self._scaler.state_dict())
            self._scaler = fresh

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and its history, empty without loss scaling."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what ``state_dict`` returned."""
        if self._scaler is not None and state:
            self._scaler.load_state_dict(state)


class _ScaledStep:
    """An optimizer whose step goes through the loss scaler (one device sync a step)."""

    def __init__(self, precision: Precision, optimizer: Optimizer, updates: bool) -> None:
        self._precision, self._optimizer, self._updates = precision, optimizer, updates

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate if asked to, step unless a gradient overflowed; the last of several sets the scale for the next batch."""
        loss = None if closure is None else closure()
        scaler = self._precision._scaler
        assert scaler is not None
        if _has_gradients(self._optimizer):
            scaler.step(self._optimizer)
        if self._updates:
            scaler.update()
        return loss


def _has_gradients(optimizer: Optimizer) -> bool:
    """Say whether there is anything to step; the scaler takes an optimizer without gradients for a mistake."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def live_dtypes(model: nn.Module, optimizers: Iterable[Optimizer]) -> list[tuple[str, str, int, int]]:
    """Read back in which dtypes a run really keeps its numbers.

    Returns:
        Rows (what, dtype, tensors, entries) for parameters, gradients, buffers and optimizer state, as they are now.
    """
    state = [
        value
        for optimizer in optimizers
        for values in getattr(optimizer, "state", {}).values()
        for value in values.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    parameters = list(model.parameters())
    groups: dict[str, list[Tensor]] = {
        "parameters": list(parameters),
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "buffers": list(model.buffers()),
        "optimizer state": state,
    }
    rows: list[tuple[str, str, int, int]] = []
    for what, tensors in groups.items():
        by_dtype: dict[str, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[str(tensor.dtype).removeprefix("torch.")].append(tensor)
        rows += [(what, dtype, len(some), sum(t.numel() for t in some)) for dtype, some in sorted(by_dtype.items())]
    return rows
