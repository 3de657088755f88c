"""Dropout whose masks come from a pool chosen in advance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from kernel_core import Algorithm, State, hookimpl
from kernel_core.errors import OptionError
from kernel_core.train.randomness import keyed_seed
from pydantic import Field
from torch import Tensor, nn

__all__ = ["GyroDropout", "GyroDropoutLayer", "active_masks", "apply_gyro_dropout", "mask_of_row"]


def active_masks(elapsed: float, sigma: int, tau: int) -> range:
    """Return the numbers of the masks that are in use when the share ``elapsed`` of training is done.

    The pool of ``sigma`` masks is gone through once, ``tau`` of them at a time, each group for as long as every other.

    >>> [active_masks(t, 8, 4) for t in (0.0, 0.49, 0.5, 1.0)]
    [range(0, 4), range(0, 4), range(4, 8), range(4, 8)]
    """
    groups = max(sigma // tau, 1)
    group = min(int(elapsed * groups), groups - 1)
    return range(group * tau, group * tau + tau)


def mask_of_row(num_rows: int, tau: int, device: torch.device | None = None) -> Tensor:
    """Return which of ``tau`` masks each of ``num_rows`` rows has (N,): neighbours share one, as evenly as that goes."""
    return torch.arange(num_rows, device=device) * tau // num_rows


class GyroDropoutLayer(nn.Module):
    """What takes the place of ``nn.Dropout``.

    Rows of a batch share masks; the values that are left are scaled by 1 / (1 - p), as ``nn.Dropout`` does. In evaluation it
    changes nothing. By itself, without a trainer, it is plain dropout.

    Args:
        p: The probability that a value is left out.
        tau: How many masks a batch has.

    Attributes:
        masks: The numbers of the masks in use.
        seed_of: Returns the seed that a mask is drawn with, by its number; None for plain dropout.
    """

    def __init__(self, p: float, tau: int) -> None:
        super().__init__()
        self.p, self.tau = p, tau
        self.masks = range(tau)
        self.seed_of: Callable[[int], int] | None = None
        self._drawn: tuple[Any, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, ...), of the shape of ``x``."""
        if not self.training or self.p == 0:
            return x
        if self.seed_of is None:
            return nn.functional.dropout(x, self.p)
        return x * self._factors(x)[mask_of_row(x.shape[0], self.tau, x.device)]

    def _factors(self, x: Tensor) -> Tensor:
        """Return the masks in use (tau, ...), scaled; they are drawn anew when others are in use, or rows have another shape."""
        key = (self.masks, tuple(x.shape[1:]), x.dtype, x.device)
        if self._drawn is None or self._drawn[0] != key:
            assert self.seed_of is not None
            seeds = [self.seed_of(number) for number in self.masks]
            # on the host, so that every device has the same masks
            draws = [torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
            factors = (torch.stack(draws) >= self.p).to(x.device, x.dtype) / (1 - self.p)
            self._drawn = key, factors
        return self._drawn[1]

    def extra_repr(self) -> str:
        """Return the options."""
        return f"p={self.p}, tau={self.tau}"


def apply_gyro_dropout(model: nn.Module, p: float | None = 0.5, tau: int = 16) -> list[str]:
    """Put a ``GyroDropoutLayer`` in the place of every ``nn.Dropout`` of ``model``; return where.

    One that is used in several places stays one layer.

    Args:
        model: Any model.
        p: The probability that a value is left out; None for that of each layer.
        tau: How many masks a batch has.
    """
    named = model.named_modules(remove_duplicate=False)
    found: dict[str, Any] = {path: module for path, module in named if type(module) is nn.Dropout}
    layers = {old: GyroDropoutLayer(old.p if p is None else p, tau) for old in found.values()}
    for path, old in found.items():
        model.set_submodule(path, layers[old])
    return list(found)


class GyroDropout(Algorithm):
    """Let dropout use masks from a pool: each chooses a subnetwork, and each subnetwork is trained for a while.

    The pool has ``sigma`` masks for each layer, gone through once in the run, ``tau`` at a time: each group is in use for the
    share ``tau / sigma`` of the run, whatever its length is measured in. The rows of a batch share the masks in use, as evenly
    as that goes; a row is what the first dimension counts. Where ``tau`` does not divide ``sigma``, the last masks are not used.
    Masks follow from the seed, the layer and their number, so that none has to be saved; they are the same on every rank. With
    a run that is measured in seconds the moment at which masks change depends on the machine.

    Args:
        p: The probability that a value is left out; None for that of each layer.
        sigma: The number of masks in the pool, of each layer.
        tau: How many of them are in use at a time.

    Source: Lee, Lee, Kim, Lee, Kim, Gyro Dropout: Maximizing Ensemble Effect in Neural Network Training, 2022, section 3.
    """

    roles = {"replaces-modules"}
    example = {"sigma": 8, "tau": 2}
    neutral = None  # p=0 takes away the dropout that the model has without the plugin
    split_invariant = False  # which mask a row has depends on its place in the microbatch

    def __init__(
        self,
        p: Annotated[float, Field(ge=0, lt=1)] | None = 0.5,
        sigma: Annotated[int, Field(ge=1)] = 256,
        tau: Annotated[int, Field(ge=1)] = 16,
    ) -> None:
        if tau > sigma:
            raise OptionError(
                f"gyro_dropout.tau: got {tau}, with sigma={sigma}. Expected at most as many masks at a time as there are in the "
                "pool. Make sigma larger, or tau smaller."
            )
        self.p = p
        self.sigma = sigma
        self.tau = tau
        self._layers: list[GyroDropoutLayer] = []

    @hookimpl
    def module_replacements(self) -> dict[type[nn.Module], Callable[[nn.Module, str], nn.Module | None]]:
        """Replace every ``nn.Dropout``, and what an earlier trainer has put in its place."""
        self._layers = []  # those of another trainer's model are not ours
        return {nn.Dropout: self._replace, GyroDropoutLayer: self._replace}

    def _replace(self, module: nn.Module, path: str) -> nn.Module | None:
        if type(module) not in (nn.Dropout, GyroDropoutLayer):  # a class derived from it may do something else
            return None
        rate: Any = module.p if self.p is None else self.p
        self._layers.append(GyroDropoutLayer(rate, self.tau))
        return self._layers[-1]

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Say what each layer draws its masks with."""
        for index, layer in enumerate(self._layers):
            layer.seed_of = partial(keyed_seed, state.seed, state.plan.id_of(self), index, "mask")

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """Take the masks of where the run is."""
        elapsed = state.get_elapsed_duration()
        masks = active_masks(0.0 if elapsed is None else float(elapsed.value), self.sigma, self.tau)
        for layer in self._layers:
            layer.masks = masks

    @hookimpl
    def close(self) -> None:
        """Leave plain dropout behind, and no masks."""
        for layer in self._layers:
            layer.seed_of = layer._drawn = None
