"""Prediction: the outputs of a model for every batch of a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernel_core.data.spec import DataSpec, to_device
from kernel_core.timing import Progress
from kernel_core.train.forward import Microbatch, Pass, batches_within, run_pass
from kernel_core.train.precision import Precision
from kernel_core.train.randomness import forked_randomness
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State


def predict(
    state: State,
    hooks: SimpleNamespace,
    precision: Precision,
    data: DataSpec,
    subset_num_batches: int,
    return_outputs: bool,
    microbatch: Microbatch,
    ranks: Ranks | None = None,
) -> list[Any]:
    """Return the outputs of each batch on the CPU, those of its microbatches put together."""
    held = (state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs)
    modes = [(module, module.training) for module in state.model.modules()]
    state.dataloader, state.dataloader_label = data.dataloader, "predict"
    state.dataloader_len = batches_within(data, subset_num_batches)
    progress = state.predict_progress = Progress()
    state.model.eval()
    outputs: list[Any] = []
    parts: list[Any] = []
    rows: list[int] = []
    cpu = torch.device("cpu")

    def take(part: Any) -> None:
        if return_outputs:
            parts.append(to_device(part, cpu))
            rows.append(data.get_num_samples_in_batch(state.batch))

    def finish_batch() -> None:
        if parts:
            outputs.append(concatenate(parts, rows))
            clear()

    def clear() -> None:
        parts.clear()
        rows.clear()

    def hold() -> Callable[[], None]:
        return clear

    try:
        with forked_randomness(state.seed, "predict"), torch.no_grad():
            for call in hooks.predict_start:
                call()
            forward = precision.cast(state.model, training=False)
            job = Pass(data, subset_num_batches, progress, "predict", forward, microbatch, take, hold, finish_batch)
            run_pass(state, hooks, job, ranks)
            for call in hooks.predict_end:
                call()
    finally:
        for module, training in modes:
            module.training = training
        state.dataloader, state.dataloader_label, state.dataloader_len, state.batch, state.outputs = held
    return outputs


def concatenate(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the outputs of several microbatches as those of one batch.

    Tensors are joined along their first dimension, lists with an entry for each row one after the other, mappings and other
    sequences column by column. What has no rows comes as a list of what each microbatch gave, None as None.

    Args:
        parts: Of one structure.
        rows: The number of rows of each microbatch.
    """
    first = parts[0]
    if len(parts) == 1 or all(part is None for part in parts):
        return first
    if isinstance(first, Tensor) and first.ndim:
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        joined = {key: concatenate([part[key] for part in parts], rows) for key in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    columns_of_tensors = (
        any(isinstance(item, Tensor) and item.ndim for item in first) if isinstance(first, list) else True
    )
    if not columns_of_tensors and [len(part) for part in parts] == list(rows):
        return [item for part in parts for item in part]
    if isinstance(first, list | tuple) and all(len(part) == len(first) for part in parts):
        columns = [concatenate(column, rows) for column in zip(*parts, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    return list(parts)
