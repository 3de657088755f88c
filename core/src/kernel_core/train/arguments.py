"""What the trainer's arguments mean: which plugins, which engine, which device; and what cannot be meant."""

from __future__ import annotations

import logging
import math
import operator
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kernel_core.data.spec import DataSpec
from kernel_core.device import resolve_device
from kernel_core.errors import PluginLoadError, TrainerError
from kernel_core.materialize import is_meta
from kernel_core.models import TrainableModel
from kernel_core.optim.scheduling import check_ratio, check_schedulers, scale_torch_scheduler, split_schedules
from kernel_core.registry.base import Plugin
from kernel_core.registry.discovery import installed_plugins
from kernel_core.registry.plan import ActivePlugin, PluginRequest, resolve
from kernel_core.timing import Time, TimeUnit
from kernel_core.train.composer_keywords import KEYWORDS, SAVE_OPTIONS
from kernel_core.train.forward import check_size
from kernel_core.train.shared_microbatch import first_size
from kernel_core.train.state import State

log = logging.getLogger(__name__)

Plugins = PluginRequest | Sequence[PluginRequest] | Mapping[str, Mapping[str, Any]] | None


def as_list(value: Any) -> list[Any]:
    """Return a list of what may be None, one thing or several."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _requests(value: Plugins) -> list[PluginRequest]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if not isinstance(value, Iterable) and not isinstance(value, Plugin):
        return [value]  # resolve says what is wrong with it
    is_pair = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)
    return [value] if isinstance(value, str | Plugin) or is_pair else list(value)  # type: ignore[list-item, arg-type]


def resolve_all(plugins: Plugins, algorithms: Plugins, callbacks: Plugins, loggers: Plugins) -> list[ActivePlugin]:
    """Return the plugins of all four arguments, each of the kind of its argument.

    Raises:
        PluginLoadError: one is of another kind.
    """
    active = resolve(_requests(plugins))
    for kind, given in (("algorithms", algorithms), ("callbacks", callbacks), ("loggers", loggers)):
        requests = _requests(given)
        for request in requests:
            if isinstance(request, Plugin) and request.kind != kind:
                raise PluginLoadError(
                    f"{kind}: {request.name} is one of the {request.kind}. Give it as {request.kind}= or as plugins=."
                )
        active = resolve(requests, (kind,), active)
    return active


def with_defaults(active: list[ActivePlugin], keywords: Sequence[str]) -> list[ActivePlugin]:
    """Add the plugins that keywords stand for, unless they are there already or not installed."""
    names = {one.plugin.name for one in active}
    if not keywords:
        return active  # finding out what is installed takes milliseconds
    installed = {(info.kind, info.name) for info in installed_plugins()}
    wanted = [KEYWORDS[keyword] for keyword in keywords]
    extra = [key.plugin for key in wanted if key.plugin not in names and (key.kind, key.plugin) in installed]
    return resolve(extra, active=active)


def with_saver(active: list[ActivePlugin], given: Mapping[str, Any]) -> list[ActivePlugin]:
    """Add the plugin that the ``save_`` arguments stand for, unless it is there already.

    Raises:
        TrainerError: there are such arguments without ``save_folder``.
        PluginNotFoundError: it is not installed.
    """
    wanted = {name: value for name, value in given.items() if value is not None}
    if not wanted:
        return active
    if "save_folder" not in wanted:
        raise TrainerError(
            f"{next(iter(wanted))}: says how checkpoints are saved, and not where. Expected save_folder=<path or URL> beside it."
        )
    keyword = KEYWORDS["save_folder"]
    if any(one.plugin.name == keyword.plugin for one in active):
        raise TrainerError(
            f"save_folder: {keyword.plugin!r} is among the plugins already. Expected one of them. Leave save_folder out, and "
            "give its options to the plugin."
        )
    options = {SAVE_OPTIONS[name]: value for name, value in wanted.items()}
    return resolve([(keyword.plugin, options)], (keyword.kind,), active)


def _devices(model: torch.nn.Module) -> set[torch.device]:
    """Return where the real tensors of ``model`` are."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta}


def device_of(model: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    """Return where batches go: the device asked for, or that of the first parameter of a model spread over several."""
    devices = _devices(model)
    if device is None and len(devices) > 1:
        return next(tensor.device for tensor in model.parameters() if not tensor.is_meta)
    return resolve_device(device)


def place(model: TrainableModel, asked: str | torch.device | None, device: torch.device) -> TrainableModel:
    """Move the model to the run's device; one that is spread over several devices, or on meta, stays where it is."""
    devices = _devices(model)
    if len(devices) > 1:
        if asked is not None:
            raise TrainerError(
                f"device: {str(asked)!r} was asked for, and the model is spread over "
                f"{', '.join(sorted(map(str, devices)))}. Leave device out to keep it so, or move the model to one device."
            )
        return model
    if is_meta(model):
        return model  # materialised later, module by module
    return model.to(device)


def check_timeout(seconds: Any) -> float:
    """Return ``seconds`` as a number.

    Raises:
        TrainerError: it is none above 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise TrainerError(f"dist_timeout: got {seconds!r}. Expected a number of seconds above 0.")
    return float(seconds)


def check_run_name(run_name: str | None) -> None:
    """Refuse a name that is no name for a folder."""
    if run_name is not None and not (isinstance(run_name, str) and re.fullmatch(r"[^./\\\s][^/\\]*", run_name)):
        raise TrainerError(
            f"run_name: got {run_name!r}. Expected a name for a folder: no slash, no dot or blank at the start."
        )


def check_seed(seed: Any) -> int:
    """Return ``seed`` as a number.

    Raises:
        TrainerError: it is no whole number from 0 to 2**63 - 1.
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if isinstance(seed, bool) or not 0 <= number < 2**63:
        raise TrainerError(f"seed: got {seed!r}. Expected a whole number from 0 to 2**63 - 1, or None.")
    return number


def show_log(level: Any) -> None:
    """Show what the kernel logs from ``level`` on.

    Raises:
        TrainerError: there is no such level.
    """
    name = level.upper() if isinstance(level, str) else level
    if name not in logging.getLevelNamesMapping() and not isinstance(name, int):
        raise TrainerError(
            f"python_log_level: got {level!r}. Expected 'debug', 'info', 'warning', 'error', 'critical', or a number."
        )
    logging.basicConfig()
    logging.getLogger("kernel_core").setLevel(name)


def name_of_environment() -> str | None:
    """Return ``COMPOSER_RUN_NAME`` or ``RUN_NAME`` of the environment, None if neither is set."""
    name = os.environ.get("COMPOSER_RUN_NAME") or os.environ.get("RUN_NAME")
    check_run_name(name)
    return name


def fresh_run_name() -> str:
    """Return a name that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def unwrap_compiled(
    model: Any, compile_config: Mapping[str, Any] | None
) -> tuple[TrainableModel, Mapping[str, Any] | None]:
    """Return the model that ``torch.compile`` wrapped, to be compiled when surgery is done; and how.

    Raises:
        TrainerError: it is no TrainableModel.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
        if compile_config is None:
            compile_config = {}
            log.warning(
                "model: it came compiled; it is compiled anew after surgery, with torch's defaults. "
                "Give compile_config={...} for other settings."
            )
    if not isinstance(model, TrainableModel):
        raise TrainerError(
            f"model: got a {type(model).__name__}. Expected a TrainableModel, with forward(batch) and "
            "loss(outputs, batch); Classifier(module) wraps a plain classifier."
        )
    return model, compile_config


def set_microbatches(state: State, size: Any, grad_accum: Any) -> None:
    """Write into ``state`` how a batch is split.

    Raises:
        TrainerError: both are given, or one is no whole number of at least 1.
    """
    if size is not None and grad_accum is not None:
        raise TrainerError(
            f"grad_accum: got {grad_accum!r} beside device_train_microbatch_size={size!r}. Expected one of them: the size, or "
            "how many."
        )
    state.auto_microbatching = "auto" in (size, grad_accum)
    if state.auto_microbatching:
        size, grad_accum = first_size(), None
    check_size("device_train_microbatch_size", size)
    check_size("grad_accum", grad_accum)
    state.device_train_microbatch_size, state.grad_accum = size, grad_accum


def scaled(time: Time, ratio: float) -> Time:
    """Return ``time`` made ``ratio`` times as long, rounded down.

    Raises:
        TrainerError: nothing is left.
    """
    if ratio == 1.0:
        return time
    longer = Time(math.floor(time.value * ratio + 1e-6), time.unit)  # 0.29 of 100 is 29
    if not longer.value:
        raise TrainerError(f"scale_schedule_ratio: {ratio} of max_duration={time} is nothing. Give a larger one.")
    return longer


def scaled_schedulers(schedulers: Sequence[Any], ratio: float) -> tuple[Any, ...]:
    """Return ``schedulers`` made ``ratio`` times as long; torch's are changed in place.

    Raises:
        TrainerError: one is no scheduler or cannot be scaled, the ratio is not positive, or there is nothing to scale.
    """
    check_schedulers(schedulers, ratio)
    if ratio == 1.0:
        return tuple(schedulers)
    check_ratio(ratio)
    if not schedulers:
        raise TrainerError(
            f"scale_schedule_ratio: got {ratio}, and there is no scheduler. Expected at least one; without one, give another "
            "max_duration."
        )
    stepped, schedules = split_schedules(schedulers, ratio)
    for scheduler in stepped:
        scale_torch_scheduler(scheduler, ratio)
    return (*stepped, *schedules)


def check_iterations(state: State) -> None:
    """Refuse a duration in iterations that have no length.

    Raises:
        TrainerError: it is one.
    """
    limit = state.max_duration
    if limit is not None and limit.unit is TimeUnit.ITERATION and state.iteration_length is None:
        raise TrainerError(f"max_duration: {limit} counts iterations. Give Trainer iteration_length=<epochs>.")
    if state.counts(TimeUnit.ITERATION) and state.iteration_length is None:
        raise TrainerError(
            "eval_interval or schedulers: one of them counts iterations. Give Trainer iteration_length=<epochs>."
        )


def check_fit(state: State, data: DataSpec | None) -> None:
    """Refuse what cannot be trained.

    Raises:
        TrainerError: no loader, optimizer or duration, or a duration or microbatch that the loader cannot give.
    """
    limit = state.max_duration
    if data is None:
        raise TrainerError("fit: no train_dataloader. Give one to Trainer or to fit.")
    if not state.optimizers:
        raise TrainerError(
            "fit: no optimizer. Give Trainer optimizers=torch.optim.AdamW(model.parameters(), lr=...), or a function "
            "of the parameters that makes one."
        )
    if limit is None:
        raise TrainerError("fit: no max_duration. Give one to Trainer, or fit(duration=...).")
    check_iterations(state)
    if limit.unit is TimeUnit.EPOCH and state.dataloader_len is None and data.epoch_share(0, 0) is None:
        raise TrainerError(
            f"max_duration: {limit} counts epochs, and train_dataloader has no length, so nobody can say when an epoch ends. "
            "Give max_duration in batches, samples or tokens, such as '1000ba', or train_subset_num_batches=<batches>, or, if "
            "the loader does end, DataSpec(loader, num_samples=<samples>)."
        )
    if state.device_train_microbatch_size is not None or state.grad_accum is not None or state.auto_microbatching:
        state.plan.check_supported("microbatching", "batches that are split")
    size, rows = state.device_train_microbatch_size, getattr(data.dataloader, "batch_size", None)
    rows = getattr(getattr(data.dataloader, "batch_sampler", None), "batch_size", rows) if rows is None else rows
    if size is not None and isinstance(rows, int) and size > rows and not state.auto_microbatching:
        raise TrainerError(
            f"device_train_microbatch_size: got {size}, and train_dataloader gives batches of {rows}. Expected at most that. "
            "Leave it out to take each batch whole."
        )
