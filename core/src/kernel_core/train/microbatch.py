"""One batch as forward and backward passes over its microbatches."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernel_core.data.spec import DataSpec, to_device
from kernel_core.engine import TrainBatch
from kernel_core.errors import DataError
from kernel_core.models import TrainableModel
from kernel_core.train.state import State


def make_train_batch(state: State, hooks: SimpleNamespace, data: DataSpec) -> TrainBatch:
    """Return ``train_batch()``: zero the gradients, run every microbatch of ``state.batch``, return the detached loss.

    The gradient is that of the mean over the whole batch, each microbatch weighted by ``loss_weight``, whatever the
    split. An optimizer that evaluates more than once in a step calls it again.
    """
    run, weigh = _make_run(state, hooks, data), _make_weigh(state.model, data)
    zero_grads = [optimizer.zero_grad for optimizer in state.optimizers]
    size = state.device_train_microbatch_size
    set_gradient_sync = state.engine.set_gradient_sync

    def train_batch() -> Tensor:
        for call in hooks.before_train_batch:
            call()
        for zero_grad in zero_grads:
            zero_grad()
        batch = state.batch
        microbatches = [batch] if size is None else data.split_batch(batch, size)
        if not microbatches:
            raise DataError("batch: no row is left to train on. A plugin that selects rows must leave at least one.")
        if len(microbatches) == 1:
            state.microbatch = 0
            loss = run(microbatches[0], None)
        else:
            weights = [weigh(microbatch) for microbatch in microbatches]
            total = sum(weights[1:], start=weights[0])
            loss = None
            for index, (microbatch, weight) in enumerate(zip(microbatches, weights, strict=True)):
                state.microbatch = index
                set_gradient_sync(index == len(microbatches) - 1)
                part = run(microbatch, weight / total)
                loss = part if loss is None else loss + part
        state.batch = batch
        state.loss = loss
        for call in hooks.after_train_batch:
            call()
        return loss  # type: ignore[no-any-return]

    return train_batch


def _make_run(state: State, hooks: SimpleNamespace, data: DataSpec) -> Callable[[Any, Any], Any]:
    """Return the function that runs one microbatch and returns its share of the batch's loss, detached."""
    device, transforms, model, backward = state.device, data.microbatch_transforms, state.model, state.engine.backward
    on_cpu = device.type == "cpu"
    metrics = state.train_metrics

    def run(batch: Any, share: Any) -> Any:
        if not on_cpu:
            batch = to_device(batch, device)
        state.batch = batch if transforms is None else transforms(batch)
        for call in hooks.before_forward:
            call()
        state.outputs = model(state.batch)
        for call in hooks.after_forward:
            call()
        for call in hooks.before_loss:
            call()
        state.loss = state.compute_loss(state.batch)
        for call in hooks.after_loss:
            call()
        for call in hooks.before_backward:
            call()
        loss = state.loss if share is None else state.loss * share
        backward(loss)
        for call in hooks.after_backward:
            call()
        if metrics:
            with torch.no_grad():
                for metric in metrics.values():
                    model.update_metric(state.batch, state.outputs, metric)
        return loss.detach()

    return run


def _make_weigh(model: Any, data: DataSpec) -> Callable[[Any], Any]:
    """Return the function that says how much a microbatch counts: the model's answer, else its number of samples."""
    if type(model).loss_weight is TrainableModel.loss_weight:
        return data.get_num_samples_in_batch

    def weigh(batch: Any) -> Any:
        weight = model.loss_weight(batch)
        return data.get_num_samples_in_batch(batch) if weight is None else weight

    return weigh
