"""Blend samples of a batch and their targets with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import torch
from kernel_core import Algorithm, State, hookimpl
from kernel_core.errors import DataError
from pydantic import Field
from torch import Tensor

from kernel_plugin_mixup.functional import (
    blend,
    check_tensor,
    dense_targets,
    mixup_batch,
    sample_indices,
    sample_mixing,
)

__all__ = ["MixUp", "blend", "dense_targets", "mixup_batch", "sample_indices", "sample_mixing"]

BatchKey = int | str | tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


class MixUp(Algorithm):
    """Train on blends of two samples: ``(1 - m) * x + m * x[permuted]``, with ``m`` drawn once per microbatch.

    The targets are blended too, in one-hot form, while the loss is computed; whoever comes after the loss, metrics among
    them, sees the original ones. ``m = min(λ, 1 - λ)``, λ ~ Beta(alpha, alpha).

    Args:
        alpha: Parameter of the Beta distribution. Larger blends more; 0 turns the method off.
        interpolate_loss: Blend two losses instead of two targets, for losses that need class numbers.
        input_key: Where the inputs are in the batch: an index, a key, or a pair of functions
            ``(getter(batch), setter(batch, value) -> batch)``. The setter returns a changed copy.
        target_key: The same for the targets.

    Source: Zhang, Cisse, Dauphin, Lopez-Paz, mixup: Beyond Empirical Risk Minimization, 2017, section 2.
    """

    name = "mixup"  # not mix_up, as the class name would read
    roles = {"mixes-batch"}
    neutral = {"alpha": 0.0}
    split_invariant = False  # rows are paired within a microbatch

    def __init__(
        self,
        alpha: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.2,
        interpolate_loss: bool = False,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        self.alpha = alpha
        self.interpolate_loss = interpolate_loss
        self.input_key = input_key
        self.target_key = target_key
        self._mixing = 0.0
        self._indices: Tensor | None = None
        self._target: Any = None
        if interpolate_loss:
            self.roles = {"mixes-batch", "interpolates-loss"}
            # the second loss is taken after a smoother has put the hard targets back, so it would miss the smoothing
            self.conflicts = {"role:interpolates-loss", "role:smooths-targets"}
            # after_loss runs backwards: the second loss comes before the others put their targets back
            self.after = {"role:mixes-batch"}

    def active_hooks(self) -> Iterable[str]:
        """Return no hook for ``alpha`` 0, and ``before_loss`` only where targets are blended."""
        if self.alpha == 0:
            return ()
        return (
            ("before_forward", "after_loss")
            if self.interpolate_loss
            else ("before_forward", "before_loss", "after_loss")
        )

    @hookimpl
    def before_forward(self, state: State) -> None:
        """Blend the inputs. The draws depend on batch and microbatch only, so a re-evaluation sees the same blend."""
        inputs = _get_item(state, "input", self.input_key)
        # the share is the same on every rank, so that it does not depend on how many there are; the partners are not
        seed = state.generator(self, "batch", key=f"mixing {state.microbatch}").initial_seed()
        self._mixing = sample_mixing(self.alpha, seed)
        self._indices = sample_indices(inputs, state.generator(self, "microbatch"))
        state.batch_set_item(self.input_key, blend(inputs, self._mixing, self._indices))

    @hookimpl
    def before_loss(self, state: State) -> None:
        """Blend the targets."""
        assert self._indices is not None
        self._target = _get_item(state, "target", self.target_key)
        dense = dense_targets(self._target, state.outputs)
        state.batch_set_item(self.target_key, blend(dense, self._mixing, self._indices))

    @hookimpl
    def after_loss(self, state: State) -> None:
        """Put the original targets back; or blend in the loss for the partners' targets."""
        if self.interpolate_loss:
            self._interpolate(state)
        else:
            state.batch_set_item(self.target_key, self._target)
        self._indices = self._target = None  # not kept alive through backward

    def _interpolate(self, state: State) -> None:
        assert self._indices is not None
        target = _get_item(state, "target", self.target_key)
        check_tensor("target", target)
        state.batch_set_item(self.target_key, target[self._indices])
        other = state.compute_loss(state.batch)
        state.batch_set_item(self.target_key, target)
        state.loss = torch.lerp(state.loss, other, self._mixing)


def _get_item(state: State, what: str, key: BatchKey) -> Any:
    try:
        return state.batch_get_item(key)
    except (KeyError, IndexError) as error:
        keys = f" with {', '.join(map(repr, state.batch))}" if isinstance(state.batch, Mapping) else ""
        raise DataError(
            f"mixup.{what}_key: got {key!r}, which the batch, a {type(state.batch).__name__}{keys}, does not have. "
            f"Expected where the {what} is. Set {what}_key."
        ) from error
