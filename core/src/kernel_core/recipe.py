"""Runs described as documents: sections of options, with functions behind their names.

A recipe is such a document in a package, with the functions its names stand for. A YAML file is the same thing without
functions; it may start from a recipe (``recipe: numbers``). Later documents win over earlier ones, key by key; a section
that names another function starts afresh.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_core.errors import ConfigError, PluginLoadError
from kernel_core.naming import did_you_mean
from kernel_core.registry.discovery import find
from kernel_core.registry.options import bind_options
from kernel_core.train.composer_keywords import KEYWORDS

Config = dict[str, Any]

NAMED = ("model", "data", "optimizer", "scheduler")
KEYS: Mapping[str, tuple[str, ...]] = {
    "train": (
        "max_duration",
        "device",
        "device_train_microbatch_size",
        "seed",
        "run_name",
        "iteration_length",
        "train_subset_num_batches",
        "step_schedulers_every_batch",
        "strict",
    ),
    "eval": ("interval", "subset_num_batches"),
    "logging": ("folder", *KEYWORDS),
}
SECTIONS = (*NAMED, "train", "eval", "plugins", "parallelism", "logging")


@dataclass(frozen=True)
class RunData:
    """What a data function returns: a train loader or DataSpec, and evaluators."""

    train: Any
    evaluators: Sequence[Any] = ()


@dataclass(frozen=True)
class Recipe:
    """A run ready to start.

    Attributes:
        summary: What it trains, in a line.
        config: The document: sections of options. ``model``, ``data``, ``optimizer`` and ``scheduler`` name a function.
        functions: The functions behind those names that are the recipe's own. A model function returns a
            TrainableModel, a data function a RunData; one with an argument ``seed`` gets the seed of the run.
    """

    summary: str
    config: Mapping[str, Any]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


def load_recipe(name: str) -> Recipe:
    """Return the installed recipe ``name``.

    Raises:
        PluginNotFoundError: there is none.
        PluginLoadError: importing it failed, or it is no Recipe.
    """
    info = find(name, ("recipes",))
    recipe = info.load()
    if not isinstance(recipe, Recipe):
        raise PluginLoadError(f"{info.name}: {info.value} of {info.distribution} is no kernel_core.recipe.Recipe.")
    return recipe


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Config:
    """Return ``base`` with ``over`` on top, checked.

    Raises:
        ConfigError: a section or key is unknown, or a section is not a mapping.
    """
    merged: Config = copy.deepcopy(dict(base))
    for section, value in over.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"config: unknown section {section!r}.{did_you_mean(section, SECTIONS)} "
                f"The sections are {', '.join(SECTIONS)}."
            )
        if section == "parallelism" and isinstance(value, str):
            value = {value: {}}
        elif section == "plugins" and isinstance(value, list):
            value = {name: {} for name in value}
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.{section}: got {value!r}. Expected a mapping of options.")
        for key in value:
            if section in KEYS and key not in KEYS[section]:
                raise ConfigError(
                    f"{section}.{key}: unknown key.{did_you_mean(str(key), KEYS[section])} "
                    f"Expected one of {', '.join(KEYS[section])}."
                )
        known = merged.get(section, {})
        fresh = section == "parallelism" or (
            section in NAMED and value.get("name", known.get("name")) != known.get("name")
        )
        merged[section] = dict(value) if fresh else {**known, **_merged_plugins(section, known, value)}
    return merged


def _merged_plugins(section: str, known: Mapping[str, Any], value: Mapping[str, Any]) -> Mapping[str, Any]:
    if section != "plugins":
        return value
    return {name: {**(known.get(name) or {}), **(options or {})} for name, options in value.items()}


def plugin_requests(plugins: Mapping[str, Mapping[str, Any] | None]) -> list[tuple[str, dict[str, Any]]]:
    """Turn the ``plugins`` section into requests. A key is a name, or ``id=name`` to use a plugin twice."""
    requests = []
    for key, options in plugins.items():
        plugin_id, _, name = key.rpartition("=")
        requests.append((name.strip(), {**(options or {}), **({"id": plugin_id.strip()} if plugin_id else {})}))
    return requests


def build_trainer(config: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], **overrides: Any) -> Any:
    """Build model and data and return the Trainer of a complete document.

    Args:
        config: All sections, merged; ``train.seed`` must be set.
        functions: The recipe's functions.
        overrides: More arguments for Trainer.

    Raises:
        KernelError: whatever in the document cannot be used.
    """
    from kernel_core.optim import optimizer_by_name
    from kernel_core.schedules import SCHEDULES
    from kernel_core.train.randomness import seed_all
    from kernel_core.train.trainer import Trainer

    train = {key: value for key, value in config.get("train", {}).items() if value is not None}
    seed_all(train["seed"])
    model = _call("model", config, functions, train["seed"])
    data = _call("data", config, functions, train["seed"])
    if not isinstance(data, RunData):
        raise ConfigError(f"data.name: {config['data']['name']} returned {type(data).__name__}. Expected a RunData.")
    optimizer = _named("optimizer", config, functions, optimizer_by_name)
    options = {key: value for key, value in config["optimizer"].items() if key != "name"}
    bind_options(optimizer, "optimizer", ([],), options, trusted=("params",))
    scheduler = (
        _call("scheduler", config, {**SCHEDULES, **functions}, train["seed"]) if config.get("scheduler") else None
    )
    evaluation = config.get("eval", {})
    return Trainer(
        model=model,
        train_dataloader=data.train,
        eval_dataloader=list(data.evaluators) or None,
        eval_interval=evaluation.get("interval", 1),
        optimizers=lambda parameters: optimizer(parameters, **options),
        schedulers=scheduler,
        plugins=plugin_requests(config.get("plugins", {})),
        parallelism=config.get("parallelism") or "single",
        **{**train, **overrides},
    )


def _named(
    section: str,
    config: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    fallback: Callable[[str], Callable[..., Any] | None] = lambda name: None,
) -> Callable[..., Any]:
    name = config.get(section, {}).get("name")
    if not name:
        raise ConfigError(f"{section}.name: missing. Name a function: start from a recipe, or set {section}.name.")
    function = functions.get(name) or fallback(name)
    if function is None:
        raise ConfigError(
            f"{section}.name: there is no {name!r}.{did_you_mean(name, functions)} "
            f"Known here: {', '.join(sorted(functions)) or 'nothing'}."
        )
    return function


def _call(section: str, config: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], seed: int) -> Any:
    function = _named(section, config, functions)
    options = {key: value for key, value in config[section].items() if key != "name"}
    if "seed" in inspect.signature(function).parameters:
        options.setdefault("seed", seed)
    bound = bind_options(function, section, (), options)
    try:
        return function(*bound.args, **bound.kwargs)
    except ModuleNotFoundError as error:
        raise PluginLoadError(
            f"{section}: {config[section]['name']} needs the module {error.name!r}, which is not installed. "
            f"Install it: pip install {error.name}."
        ) from error
