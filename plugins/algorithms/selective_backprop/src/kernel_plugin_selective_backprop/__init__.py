"""Train on the samples of a batch whose loss is highest."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Annotated, Any

import torch
from kernel_core import Algorithm, State, hookimpl
from kernel_core.data.spec import get_item, set_item, to_device
from kernel_core.errors import ConflictError, DataError, OptionError
from pydantic import Field
from torch import Tensor

from kernel_plugin_selective_backprop.functional import (
    EvalMode,
    loss_per_row,
    select_indices,
    select_using_loss,
    should_selective_backprop,
    shrink,
    take_rows,
)

__all__ = [
    "EvalMode",
    "SelectiveBackprop",
    "loss_per_row",
    "select_indices",
    "select_using_loss",
    "should_selective_backprop",
    "shrink",
    "take_rows",
]

BatchKey = int | str | tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


class SelectiveBackprop(Algorithm):
    """Rank the rows of a batch by their loss in an extra forward pass, and train on a draw that prefers high losses.

    Runs before whatever else changes the batch. The extra pass leaves no trace: no gradients, every module in eval mode
    and back, torch's global random numbers where they were. The model's ``loss`` must take ``reduction="none"``. Of several
    ranks each selects from its own batch.

    Args:
        start: The share of training from which rows are selected.
        end: The share of training from which they are not any more.
        keep: The share of rows to keep, at least one row.
        scale_factor: Images are resized by this factor for the extra pass.
        interrupt: Every so many batches one is trained on whole; 0 for none.
        input_key: Where the inputs are in the batch: an index, a key, or a pair of functions
            ``(getter(batch), setter(batch, value) -> batch)``. The setter returns a changed copy.
        target_key: The same for the targets. Other parts of a tuple, list or mapping that have as many rows are cut too.

    Source: Jiang et al., Accelerating Deep Learning by Focusing on the Biggest Losers, 2019, section 3; the power of the
        percentile, 1 / keep - 1, is the one that gives an expected share of ``keep``.
    """

    roles = {"selects-samples"}
    before = {"role:augments-batch", "role:reshapes-sequences"}
    conflicts = {"role:selects-samples"}
    example = {"start": 0.2, "end": 1.0, "interrupt": 3}
    neutral = {"keep": 1.0}
    split_invariant = False  # each rank selects among its own rows

    def __init__(
        self,
        start: Annotated[float, Field(ge=0, le=1)] = 0.5,
        end: Annotated[float, Field(ge=0, le=1)] = 0.9,
        keep: Annotated[float, Field(gt=0, le=1)] = 0.5,
        scale_factor: Annotated[float, Field(gt=0, le=1)] = 1.0,
        interrupt: Annotated[int, Field(ge=0)] = 2,
        input_key: BatchKey = 0,
        target_key: BatchKey = 1,
    ) -> None:
        if start >= end:
            raise OptionError(
                f"selective_backprop.end: got {end} with start={start}. Expected an end after the start. Give a larger end."
            )
        self.start = start
        self.end = end
        self.keep = keep
        self.scale_factor = scale_factor
        self.interrupt = interrupt
        self.input_key = input_key
        self.target_key = target_key

    def active_hooks(self) -> Iterable[str] | None:
        """Return no hook where every row is kept."""
        return () if self.keep == 1 else None

    def check(self, state: State) -> None:
        """Refuse a model whose loss cannot be had row by row."""
        parameters = inspect.signature(state.model.loss).parameters.values()
        if not any(p.name == "reduction" or p.kind is p.VAR_KEYWORD for p in parameters):
            raise ConflictError(
                f"selective_backprop: {type(state.model).__name__}.loss takes no 'reduction', so it cannot tell the loss of "
                "each row. Write def loss(self, outputs, batch, reduction='mean') and pass reduction on to torch's loss "
                "function, or leave selective_backprop out."
            )

    @hookimpl
    def after_dataloader(self, state: State) -> None:
        """Cut the batch down when it is time to; it is then on the device."""
        elapsed = state.get_elapsed_duration()
        assert elapsed is not None  # fit has a duration
        if should_selective_backprop(
            float(elapsed.value), state.progress.batch_in_epoch, self.start, self.end, self.interrupt
        ):
            state.batch = to_device(state.batch, state.device)
            losses = self._losses(state)
            self._cut(state, select_indices(losses, self.keep, state.generator(self, "rank")), len(losses))

    def _losses(self, state: State) -> Tensor:
        """Return the loss of each row (N,), computed in passes of as many rows as training uses."""
        num_rows = self._num_rows(state)
        known = isinstance(state.batch, Mapping | tuple | list)  # any other kind cannot be cut into passes
        size = (state.device_train_microbatch_size if known else None) or num_rows
        starts = range(0, num_rows, size)
        rounds = _most_of_any_rank(state, len(starts)) if known else 1
        # passes that average hand buffers around too, and ranks may have different numbers of these
        state.engine.set_gradient_sync(False)
        losses = []
        with torch.no_grad(), EvalMode(list(state.model.modules())), _kept_randomness(state.device):
            for index in range(rounds):
                start = starts[min(index, len(starts) - 1)]  # again the last where other ranks have more
                count = min(size, num_rows - start)
                part = (
                    state.batch if count == num_rows else take_rows(state.batch, slice(start, start + count), num_rows)
                )
                losses.append(self._pass(state, part, count))
        state.engine.finish_passes()
        return torch.cat(losses[: len(starts)])

    def _pass(self, state: State, batch: Any, num_rows: int) -> Tensor:
        batch = state.prepare_batch(batch)
        if self.scale_factor != 1:
            batch = set_item(batch, self.input_key, shrink(get_item(batch, self.input_key), self.scale_factor))
        outputs = state.compute_outputs(batch)
        if isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16):
            outputs = outputs.float()  # losses in half precision would tie, and the ranks with them
        state.outputs = outputs
        losses = loss_per_row(state.compute_loss(batch, reduction="none"), num_rows)
        state.outputs = None
        return losses

    def _cut(self, state: State, indices: Tensor, num_rows: int) -> None:
        state.batch = take_rows(state.batch, indices, num_rows)
        for key in (self.input_key, self.target_key):
            part = state.batch_get_item(key)
            if len(part) == num_rows:  # it lies in an object that take_rows does not look into
                state.batch_set_item(key, part[indices])

    def _num_rows(self, state: State) -> int:
        inputs, targets = _part(state, "input", self.input_key), _part(state, "target", self.target_key)
        if len(inputs) != len(targets):
            raise DataError(
                f"selective_backprop.target_key: the target has {len(targets)} rows and the input {len(inputs)}. Expected as "
                "many. Point target_key to the targets of the inputs."
            )
        return len(inputs)


def _part(state: State, what: str, key: BatchKey) -> Tensor:
    try:
        part = state.batch_get_item(key)
    except (KeyError, IndexError) as error:
        keys = f" with {', '.join(map(repr, state.batch))}" if isinstance(state.batch, Mapping) else ""
        raise DataError(
            f"selective_backprop.{what}_key: got {key!r}, which the batch, a {type(state.batch).__name__}{keys}, does not "
            f"have. Expected where the {what} is. Set {what}_key."
        ) from error
    if not isinstance(part, Tensor) or not part.ndim:
        raise DataError(
            f"selective_backprop: the {what} is a {type(part).__name__}. Expected one tensor with samples in dimension 0. "
            f"Point {what}_key to it."
        )
    return part


def _most_of_any_rank(state: State, passes: int) -> int:
    """Return how many passes this rank has to make: as many as any other where they wait for one another.

    Asked only where there are microbatches; hosts wait for one another then.
    """
    if state.world_size == 1 or not state.engine.needs_all_ranks or state.device_train_microbatch_size is None:
        return passes
    of_each = torch.zeros(state.world_size)
    of_each[state.rank] = passes
    state.engine.all_reduce(of_each)
    return int(of_each.max())


def _kept_randomness(device: torch.device) -> AbstractContextManager[None]:
    """Return a block after which torch's global generators are where they were, should the model draw in eval mode."""
    devices = [] if device.type in ("cpu", "mps") else [device]  # mps has no generator for each device
    kept: AbstractContextManager[None] = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    return kept
