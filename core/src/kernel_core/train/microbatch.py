"""One batch as forward and backward passes over its microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kernel_core.data.spec import DataSpec, to_device
from kernel_core.engine import TrainBatch
from kernel_core.errors import DataError
from kernel_core.models import TrainableModel
from kernel_core.train.first_step import check_loss
from kernel_core.train.precision import Precision
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State

Instrument = Callable[[str, Callable[..., Any]], Callable[..., Any]]


def make_train_batch(
    state: State,
    hooks: SimpleNamespace,
    data: DataSpec,
    precision: Precision,
    instrument: Instrument,
    ranks: Ranks | None = None,
    settle: Callable[[], None] | None = None,
) -> TrainBatch:
    """Return ``train_batch()``: zero the gradients, run every microbatch of ``state.batch``, return the detached loss.

    The gradient is that of the mean over the whole batch of all ranks, each microbatch weighted by ``loss_weight``, whatever
    the split; the loss is that of this rank's batch. An optimizer that evaluates more than once in a step calls it again.

    Args:
        ranks: The other ranks, if there are any.
        settle: Called when all microbatches are through, before anybody looks at the gradients, to average over the ranks
            what no backward pass has; None for the engine's ``reduce_gradients``.
    """
    run, weigh = _make_run(state, hooks, data, precision, instrument, ranks), make_weigh(state.model, data)
    zero_grads = [optimizer.zero_grad for optimizer in state.optimizers]
    unscalers = precision.unscalers(state.optimizers)
    set_gradient_sync, settle = state.engine.set_gradient_sync, settle or state.engine.reduce_gradients
    in_step = ranks if state.engine.needs_all_ranks else None
    before, after = hooks.before_train_batch, hooks.after_train_batch
    grad_accum, count = state.grad_accum, data.get_num_samples_in_batch

    def train_batch() -> Tensor:
        for call in before:
            call()
        for zero_grad in zero_grads:
            zero_grad()
        batch = state.batch
        if state.loss_parts and not state.evaluation:
            state.loss_parts = {}
        size = state.device_train_microbatch_size if not grad_accum else -(-count(batch) // grad_accum)
        microbatches = [batch] if size is None else data.split_batch(batch, size)
        if not microbatches:
            raise DataError("batch: no row is left to train on. A plugin that selects rows must leave at least one.")
        rounds = len(microbatches) if in_step is None or size is None else in_step.most(len(microbatches))
        if rounds == 1:
            state.microbatch = 0
            set_gradient_sync(not state.trying)
            loss = run(microbatches[0], None)
        else:
            loss = None
            for index, share in enumerate(_shares([weigh(microbatch) for microbatch in microbatches])):
                state.microbatch = index
                set_gradient_sync(index == rounds - 1 and not state.trying)
                part = run(microbatches[index], share)
                loss = part if loss is None else loss + part
            for index in range(len(microbatches), rounds):  # other ranks have more, and a pass needs all ranks
                assert ranks is not None
                set_gradient_sync(index == rounds - 1)
                held, ranks.absent = ranks.absent, True
                run(microbatches[-1], 0.0)
                ranks.absent = held
        settle()
        state.batch = batch
        state.loss = loss
        for call in unscalers:
            call()
        for call in after:
            call()
        state.evaluation += 1
        return loss  # type: ignore[no-any-return]

    return train_batch


def make_prepare(state: State, data: DataSpec) -> Callable[[Any], Any] | None:
    """Return the function that makes of a microbatch what the model gets; None where there is nothing to do."""
    device, transforms = state.device, data.microbatch_transforms
    if device.type == "cpu":
        return transforms
    if transforms is None:
        return lambda batch: to_device(batch, device)
    return lambda batch: transforms(to_device(batch, device))


def _make_run(
    state: State,
    hooks: SimpleNamespace,
    data: DataSpec,
    precision: Precision,
    instrument: Instrument,
    ranks: Ranks | None,
) -> Callable[[Any, Any], Any]:
    """Return the function that runs one microbatch and returns its share of the batch's loss, detached."""
    model, prepare = state.model, make_prepare(state, data)
    state.prepare_batch = prepare or (lambda batch: batch)
    unchecked = True
    forward, compute_loss = instrument("forward", state.compute_outputs), instrument("loss", state.compute_loss)
    backward = instrument("backward", precision.scaled(state.engine.backward))
    metrics = state.train_metrics
    before_forward, after_forward = hooks.before_forward, hooks.after_forward
    before_loss, after_loss = hooks.before_loss, hooks.after_loss
    before_backward, after_backward = hooks.before_backward, hooks.after_backward

    def run(batch: Any, share: Any) -> Any:
        nonlocal unchecked
        state.batch = batch if prepare is None else prepare(batch)

        # forward
        for call in before_forward:
            call()
        state.outputs = forward(state.batch)
        for call in after_forward:
            call()

        # loss
        for call in before_loss:
            call()
        state.loss = compute_loss(state.batch)
        if state.latest_parts:
            _keep_parts(state, share)
        for call in after_loss:
            call()

        # backward
        for call in before_backward:
            call()
        loss = state.loss if share is None else _weighted(state.loss, share)
        if unchecked:
            check_loss(state, loss)
            unchecked = False
        backward(loss if ranks is None or ranks.counts_evenly else _weighted(loss, ranks.factor))
        for call in after_backward:
            call()
        if metrics and not state.evaluation and (ranks is None or not ranks.absent):  # each batch counts once
            _update_metrics(model, state, metrics)
        return loss.detach()

    return run


def _update_metrics(model: TrainableModel, state: State, metrics: Mapping[str, Any]) -> None:
    with torch.no_grad():
        outputs = model.eval_forward(state.batch, state.outputs)
        for metric in metrics.values():
            model.update_metric(state.batch, outputs, metric)


def _keep_parts(state: State, share: Any) -> None:
    """Add the parts of a loss that has several to those of the batch, to be logged; a re-evaluation adds nothing."""
    for name, part in state.latest_parts.items() if not state.evaluation else ():
        value = part.detach() if share is None else _weighted(part.detach(), share)
        state.loss_parts[name] = value if name not in state.loss_parts else state.loss_parts[name] + value
    state.latest_parts = {}


def make_weigh(model: Any, data: DataSpec) -> Callable[[Any], Any]:
    """Return the function that says how much a microbatch counts: the model's answer, else its number of samples."""
    if type(model).loss_weight is TrainableModel.loss_weight:
        return data.get_num_samples_in_batch

    def weigh(batch: Any) -> Any:
        weight = model.loss_weight(batch)
        if weight is None:
            return data.get_num_samples_in_batch(batch)
        # a number that lies on the host is read without waiting for a device
        return weight.tolist() if isinstance(weight, Tensor) and weight.device.type == "cpu" else weight

    return weigh


def _shares(weights: Sequence[Any]) -> list[Any]:
    """Return each weight as a share of their sum; all zero where nothing counts."""
    total = sum(weights[1:], start=weights[0])
    if isinstance(total, Tensor):
        return [torch.where(total > 0, weight / total, 0.0) for weight in weights]
    return [weight / total if total else 0.0 for weight in weights]


def _weighted(loss: Tensor, share: Any) -> Tensor:
    """Return ``loss`` times ``share``; zero where nothing counts, even if the mean over nothing is not a number."""
    if isinstance(share, Tensor):
        return torch.where(share > 0, loss * share, torch.zeros_like(loss))
    return loss * share if share else torch.where(torch.zeros_like(loss, dtype=torch.bool), loss, 0.0)
