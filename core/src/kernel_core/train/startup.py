"""From a model and a plan to a run that can be trained, in the order of the design."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kernel_core.errors import OptimizerError, SurgeryError, TrainerError
from kernel_core.logger import Logger
from kernel_core.materialize import Materializer, is_meta
from kernel_core.optim.parameter_groups import (
    OptimizerRequest,
    ParameterGroups,
    build_optimizers,
    check_coverage,
    check_reevaluation,
    is_optimizer,
)
from kernel_core.optim.scheduling import check_schedulers
from kernel_core.registry.plan import PlannedCall, invoke
from kernel_core.surgery import changed_paths, fingerprint, perform_surgery
from kernel_core.train.precision import Precision
from kernel_core.train.randomness import forked_randomness
from kernel_core.train.state import State


def init_plugins(state: State, logger: Logger, begin: Callable[[str], None]) -> None:
    """Check every plugin against the run, then fire ``init``.

    Args:
        begin: Told the id of each plugin before its turn.

    Raises:
        ConflictError: a plugin cannot work in this run.
        SurgeryError: a plugin changed the model, which is what the surgery hooks are for.
    """
    state.plan.check_supported(state.engine.name, f"the engine {state.engine.name}")
    for active in state.plan.plugins:
        active.plugin.check(state)
    state.engine.check(state)
    for transform in state.transforms:
        transform.check(state)
    before = fingerprint(state.model)
    for call in (call for call in state.plan.calls("init") if call.plugin not in state.silent):
        begin(call.plugin)
        invoke(call, {"state": state, "logger": logger})
        if changed := changed_paths(before, fingerprint(state.model)):
            raise SurgeryError(
                f"{call.plugin}: changed the model in init, at {changed[0] or 'its root'}. Surgery belongs in the hooks "
                "module_replacements or transform_model, where it is ordered, checked and reported."
            )
    for active in (active for active in state.plan.plugins if active.id not in state.silent):
        begin(active.id)


def prepare_model(
    state: State, optimizers: list[OptimizerRequest], compile_config: Mapping[str, Any] | None, strict: bool
) -> Precision:
    """Surgery, compilation, the engine; then the optimizers for the parameters there are in the end.

    Returns:
        The precision that ``state.compute_outputs`` and ``state.compute_loss`` use from now on.

    Raises:
        SurgeryError, OptimizerError: something in the model or the optimizers does not fit.
    """
    ready = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]
    groups = ParameterGroups(state.model, ready)
    perform_surgery(state, strict)
    for call in state.plan.calls("model_transformed"):
        invoke(call, {"model": state.model, "report": state.surgery_report})
    _apply_transforms(state, compile_config)
    groups.repoint(state.model, [change.path for change in state.surgery_report.changes])
    made = build_optimizers(state.model, optimizers)
    for optimizer in made:
        state.engine.adapt_optimizer(optimizer)
    state.optimizers = tuple(_wrap(optimizer, state) for optimizer in made)
    if made:
        check_coverage(state.model, state.optimizers)
    check_schedulers(state.schedulers)
    return bind_precision(state)


def _apply_transforms(state: State, compile_config: Mapping[str, Any] | None) -> None:
    """Let every rank begin with the same model, then transforms, compilation and the engine change how it computes."""
    engine, model = state.engine, state.model
    shapes = {name: f"{list(tensor.shape)} {tensor.dtype}" for name, tensor in model.named_parameters()}
    engine.check_same("model", shapes)
    engine.align(model)
    materialize = Materializer(model, state.device, state.seed)
    was_meta = is_meta(model)
    for transform in state.transforms:
        if transform.axis is not None:
            materialize(model)  # a part of a layer does not know the values of the whole
        transform.apply(model, engine.axis_mesh(transform.axis))
    if compile_config is not None:
        model.compile(**compile_config)  # in place: the module tree and its names stay
    state.model = engine.prepare(model, state.device, materialize)
    if was_meta:
        for call in state.plan.calls("model_materialized"):
            with forked_randomness(state.seed, "surgery", call.plugin):
                invoke(call, {"model": state.model})


def bind_precision(state: State) -> Precision:
    """Make the precision that ``state.precision`` names, and let the model compute in it.

    Raises:
        OptimizerError: an optimizer evaluates more than once, which loss scaling does not allow.
        TrainerError: nobody provides fp8.
    """
    contexts = state.plan.call("precision_context", state=state)
    if state.precision == "amp_fp8" and not contexts:
        raise TrainerError(
            "precision: 'amp_fp8' needs a plugin that computes in fp8, and none is active. Expected one that answers "
            "precision_context. Install it, pip install kernel-plugin-fp8, and name it: algorithms=['fp8']."
        )
    precision = Precision(state.precision, state.device, contexts)
    check_reevaluation(state.optimizers, state.engine, precision)
    state.bind_model(precision.cast)
    return precision


def _wrap(optimizer: torch.optim.Optimizer, state: State) -> torch.optim.Optimizer:
    for call in state.plan.calls("wrap_optimizer"):
        wrapped = invoke(call, {"optimizer": optimizer, "state": state})
        if wrapped is not None and not is_optimizer(wrapped):
            raise OptimizerError(f"{call.plugin}.wrap_optimizer: returned {wrapped!r}. Expected an optimizer, or None.")
        optimizer = optimizer if wrapped is None else wrapped
    return optimizer


def make_instrument(calls: tuple[PlannedCall, ...]) -> Callable[[str, Callable[..., Any]], Callable[..., Any]]:
    """Return ``instrument(part, call)``, which puts around ``call`` what the plugins answer to the hook of that name."""

    def instrument(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        for planned in calls:
            call = invoke(planned, {"part": part, "call": call}) or call
        return call

    return instrument
