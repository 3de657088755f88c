"""What the trainer's arguments mean: which plugins, which engine, which device; and what cannot be meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kernel_core.device import resolve_device
from kernel_core.engine import Engine
from kernel_core.errors import OptionError, PluginLoadError, TrainerError
from kernel_core.models import TrainableModel
from kernel_core.registry.base import Plugin
from kernel_core.registry.discovery import find, installed_plugins
from kernel_core.registry.options import bind_options
from kernel_core.registry.plan import ActivePlugin, PluginRequest, resolve
from kernel_core.train.composer_keywords import KEYWORDS

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


def with_defaults(active: list[ActivePlugin], keywords: Iterable[str]) -> list[ActivePlugin]:
    """Add the plugins that keywords stand for, unless they are there already or not installed."""
    names = {one.plugin.name for one in active}
    installed = {(info.kind, info.name) for info in installed_plugins()}
    wanted = [KEYWORDS[keyword] for keyword in keywords]
    extra = [key.plugin for key in wanted if key.plugin not in names and (key.kind, key.plugin) in installed]
    return resolve(extra, active=active)


def resolve_engine(parallelism: str | Mapping[str, Mapping[str, Any]] | Engine) -> Engine:
    """Return the engine for a name, ``{name: options}`` or an instance.

    Raises:
        TrainerError: several are named.
        PluginLoadError: the entry point is not an engine.
        OptionError: an option does not fit.
    """
    if isinstance(parallelism, Engine):
        return parallelism
    named = {parallelism: {}} if isinstance(parallelism, str) else dict(parallelism)
    if len(named) != 1:
        raise TrainerError(f"parallelism: got {sorted(named)}. Expected one engine.")
    ((name, options),) = named.items()
    info = find(name, ("parallelism",))
    engine_class = info.load()
    if not (isinstance(engine_class, type) and issubclass(engine_class, Engine)):
        raise PluginLoadError(f"{info.name}: {info.value} of {info.distribution} is no kernel_core.Engine.")
    if engine_class.__init__ is object.__init__:
        if options:
            raise OptionError(f"{info.name}.{min(options)}: unknown option. It takes no options.")
        return engine_class()
    bound = bind_options(engine_class, info.name, (), options or {})
    return engine_class(*bound.args, **bound.kwargs)


def _devices(model: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())}


def device_of(model: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    """Return where batches go: the device asked for, or that of the first parameter of a model spread over several."""
    devices = _devices(model)
    if device is None and len(devices) > 1:
        return next(tensor.device for tensor in model.parameters())
    return resolve_device(device)


def place(model: TrainableModel, device: str | torch.device | None) -> TrainableModel:
    """Move the model to the run's device; one that is spread over several devices, or on meta, stays where it is."""
    devices = _devices(model)
    if len(devices) > 1 or any(where.type == "meta" for where in devices):
        if device is not None and len(devices) > 1:
            raise TrainerError(
                f"device: {str(device)!r} was asked for, and the model is spread over "
                f"{', '.join(sorted(map(str, devices)))}. Leave device out to keep it so, or move the model to one device."
            )
        return model
    return model.to(resolve_device(device))


def check_run_name(run_name: str | None) -> None:
    """Refuse a name that is no name for a folder."""
    if run_name is not None and not (isinstance(run_name, str) and re.fullmatch(r"[^./\\\s][^/\\]*", run_name)):
        raise TrainerError(
            f"run_name: got {run_name!r}. Expected a name for a folder: no slash, no dot or blank at the start."
        )


def check_positive(name: str, value: int | None) -> None:
    """Refuse anything but a whole number of at least 1, or None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise TrainerError(f"{name}: got {value!r}. Expected a whole number of at least 1, or None.")
