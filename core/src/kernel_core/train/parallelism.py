"""What ``parallelism=`` means: one engine, and the transforms beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from kernel_core.engine import Engine, ModelTransform, SingleEngine, in_order
from kernel_core.errors import OptionError, ParallelismError, PluginLoadError, PluginNotFoundError
from kernel_core.naming import did_you_mean, normalize
from kernel_core.registry.discovery import find
from kernel_core.registry.options import bind_options
from kernel_core.train.composer_keywords import KEYWORDS
from kernel_core.train.place import Place

T = TypeVar("T")
Parallelism = str | Mapping[str, Any] | Engine | ModelTransform | Sequence[Engine | ModelTransform | str] | None


def resolve_parallelism(
    parallelism: Parallelism,
    fsdp_config: Mapping[str, Any] | None,
    parallelism_config: Mapping[str, Any] | None,
    place: Place,
) -> tuple[Engine, list[ModelTransform]]:
    """Return the engine and the transforms, in the order in which they run.

    Args:
        parallelism: A name, names to options, an instance, or a list of those; None for what suits the number of processes.
        fsdp_config, parallelism_config: The same in Composer's words.
        place: This process among all.

    Raises:
        ParallelismError: several engines, or two of the arguments.
        PluginNotFoundError, PluginLoadError: one is not installed, or cannot be imported or is something else.
        OptionError: an option does not fit.
    """
    named = _named(parallelism, fsdp_config, parallelism_config)
    parts = [
        value if isinstance(value, Engine | ModelTransform) else _make(name, value) for name, value in named.items()
    ]
    for engine in [part for part in parts if isinstance(part, Engine)]:
        known = {normalize(name) for name in named}
        parts += [_make(name, options) for name, options in engine.implied_transforms().items() if name not in known]
    engines = [part for part in parts if isinstance(part, Engine)]
    if len(engines) > 1:
        raise ParallelismError(
            f"parallelism: got the engines {' and '.join(engine.name for engine in engines)}. Expected one, and any number of "
            "transforms beside it."
        )
    transforms = in_order(part for part in parts if isinstance(part, ModelTransform))
    return engines[0] if engines else _default_engine(transforms, place), transforms


def _named(
    parallelism: Parallelism, fsdp_config: Mapping[str, Any] | None, parallelism_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return names to options or instances, whichever argument they came in."""
    given = {"parallelism": parallelism, "fsdp_config": fsdp_config, "parallelism_config": parallelism_config}
    used = [name for name, value in given.items() if value is not None]
    if len(used) > 1:
        raise ParallelismError(
            f"{used[0]}: was given together with {used[1]}. Expected one of them; parallelism= says it all."
        )
    if fsdp_config is not None:
        return {KEYWORDS["fsdp_config"].plugin: fsdp_config}
    if parallelism_config is not None:
        return _of_composer(parallelism_config)
    if parallelism is None:
        return {}
    if isinstance(parallelism, Mapping):
        return dict(parallelism)
    items = [parallelism] if isinstance(parallelism, str | Engine | ModelTransform) else list(parallelism)
    return {
        item if isinstance(item, str) else f"{item.name} {index}": {} if isinstance(item, str) else item
        for index, item in enumerate(items)
    }


def _of_composer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read ``{"fsdp": {...}, "tp": {"tensor_parallel_degree": 2, "layer_plan": {...}}}``."""
    words = {
        name.partition(".")[2]: key.plugin for name, key in KEYWORDS.items() if name.startswith("parallelism_config.")
    }
    renamed = {"tensor_parallel_degree": "degree", "layer_plan": "plan"}
    named = {}
    for word, options in config.items():
        if word not in words:
            raise OptionError(
                f"parallelism_config.{word}: unknown key.{did_you_mean(word, list(words))} Expected {', '.join(words)}."
            )
        if options is not None:
            named[words[word]] = {renamed.get(key, key): value for key, value in dict(options).items()}
    return named


def _make(name: str, options: Any) -> Engine | ModelTransform:
    info = find(name, ("parallelism",))
    cls = info.load()
    if not (isinstance(cls, type) and issubclass(cls, Engine | ModelTransform)):
        raise PluginLoadError(
            f"{info.name}: {info.value} of {info.distribution} is no kernel_core.Engine and no kernel_core.ModelTransform."
        )
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"{info.name}: got {options!r}. Expected its options as a mapping of name to value.")
    if cls.__init__ is object.__init__ or "__init__" not in vars(cls):
        if options:
            raise OptionError(f"{info.name}.{min(options)}: unknown option. It takes no options.")
        made = cls()
    else:
        bound = bind_options(cls, info.name, (), dict(options or {}))
        made = cls(*bound.args, **bound.kwargs)
    made.name = info.name
    return made  # type: ignore[no-any-return]


def _default_engine(transforms: Sequence[ModelTransform], place: Place) -> Engine:
    """Return what a run without a named engine gets: one process needs none, transforms may split the model alone."""
    if any(transform.axis is not None and transform.degree > 1 for transform in transforms):
        from kernel_core.distributed.engine import DistributedEngine  # half a second of imports

        return DistributedEngine()
    if place.world_size == 1:
        return SingleEngine()
    keyword = KEYWORDS["several_ranks"]
    try:
        return _make(keyword.plugin, {})  # type: ignore[return-value]
    except PluginNotFoundError as error:
        raise ParallelismError(
            f"parallelism: {place.world_size} processes were started, and no engine is named. Name one that is installed, or "
            f"pip install kernel-plugin-{keyword.plugin}."
        ) from error
