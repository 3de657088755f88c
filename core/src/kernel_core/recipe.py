"""Runs described as documents: sections of options, with functions behind their names.

A recipe is such a document in a package, with the functions its names stand for. A YAML file is the same thing without
functions; it may start from a recipe (``recipe: numbers``). Later documents win over earlier ones, key by key; a section
that names another function starts afresh.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kernel_core.errors import ConfigError, PluginLoadError
from kernel_core.naming import did_you_mean, normalize
from kernel_core.registry.discovery import find, installed_plugins
from kernel_core.registry.options import bind_options
from kernel_core.registry.single_file import absolute, is_file, name_of
from kernel_core.train.composer_keywords import KEYWORDS, SAVE_OPTIONS

Config = dict[str, Any]


def _train(
    max_duration: int | str = 1,
    device: str | None = None,
    precision: str | None = None,
    device_train_microbatch_size: int | Literal["auto"] | None = None,
    grad_accum: int | Literal["auto"] | None = None,
    seed: int | None = None,
    deterministic_mode: bool = False,
    compile_config: dict[str, Any] | None = None,
    run_name: str | None = None,
    iteration_length: int | str | None = None,
    train_subset_num_batches: int = -1,
    scale_schedule_ratio: float = 1.0,
    step_schedulers_every_batch: bool | None = None,
    auto_log_hparams: bool = False,
    python_log_level: str | None = None,
    strict: bool = False,
) -> None:
    """The keys of the section ``train``: arguments of Trainer."""


def _eval(interval: int | str = 1, subset_num_batches: int = -1) -> None:
    """The keys of the section ``eval``: ``eval_interval`` of Trainer, and the limit of evaluators without one."""


def _logging(folder: str = "runs", progress_bar: bool = True) -> None:
    """The keys of the section ``logging``: where the command keeps runs, and whether it shows a bar."""


def _checkpoint(
    enabled: bool = True,
    save_folder: str | None = None,
    save_filename: str | None = None,
    save_latest_filename: str | None = None,
    save_interval: int | str | None = None,
    save_overwrite: bool | None = None,
    save_weights_only: bool | None = None,
    save_ignore_keys: list[str] | None = None,
    save_num_checkpoints_to_keep: int | None = None,
    load_path: str | None = None,
    load_weights_only: bool = False,
    load_strict_model_weights: bool = True,
    load_ignore_keys: list[str] | None = None,
    load_exclude_algorithms: list[str] | None = None,
    load_allow_changes: list[str] | None = None,
    load_locked: bool = False,
    autoresume: bool = False,
) -> None:
    """The keys of the section ``checkpoint``: arguments of Trainer, and whether the run saves itself at all."""


NAMED = ("model", "data", "optimizer", "scheduler")
CHECKED: Mapping[str, Callable[..., None]] = {
    "train": _train,
    "eval": _eval,
    "checkpoint": _checkpoint,
    "logging": _logging,
}
KIND_OF = {"model": "models", "data": "data"}
SECTIONS = (*NAMED, "train", "eval", "plugins", "parallelism", "checkpoint", "logging")


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
            TrainableModel, a data function a RunData; one with an argument ``seed`` gets the seed of the run. Other names
            of models and data are looked up among the installed plugins of kind ``models`` and ``data``.
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
            value = _plugins_of_list(value)
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"config.{section}: got {value!r}. Expected a mapping of options.")
        if section in CHECKED:
            value = {key: item for key, item in value.items() if item is not None}
            value = {**value, **_only(bind_options(CHECKED[section], section, (), value), value)}
        known = merged.get(section, {})
        fresh = section == "parallelism" or (
            section in NAMED and value.get("name", known.get("name")) != known.get("name")
        )
        merged[section] = dict(value) if fresh else {**known, **_merged_plugins(section, known, value)}
    return merged


def _only(bound: inspect.BoundArguments, given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in bound.arguments.items() if key in given}


def _plugins_of_list(value: list[Any]) -> dict[str, Any]:
    """Read ``[alibi, {blurpool: {min_channels: 8}}]``."""
    plugins: dict[str, Any] = {}
    for item in value:
        entries = item if isinstance(item, Mapping) else {item: {}}
        for name, options in entries.items():
            if name in plugins:
                raise ConfigError(
                    f"plugins: {name} is named twice. Use one of them under an id of its own: 'other={name}'."
                )
            plugins[name] = options
    return plugins


def _merged_plugins(section: str, known: Mapping[str, Any], value: Mapping[str, Any]) -> Mapping[str, Any]:
    if section != "plugins":
        return value
    for name, options in value.items():
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"plugins.{name}: got {options!r}. Expected its options as a mapping of name to value.")
    return {name: {**(known.get(name) or {}), **(options or {})} for name, options in value.items()}


def plugin_requests(plugins: Mapping[str, Mapping[str, Any] | None]) -> list[tuple[str, dict[str, Any]]]:
    """Turn the ``plugins`` section into requests. A key is a name, or ``id=name`` to use a plugin twice."""
    requests = []
    for key, options in plugins.items():
        plugin_id, _, name = key.rpartition("=")
        requests.append((name.strip(), {**(options or {}), **({"id": plugin_id.strip()} if plugin_id else {})}))
    return requests


def with_absolute_paths(plugins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``plugins`` section with those that are files by their absolute paths, so that any folder will do later."""
    found = {}
    for key, options in plugins.items():
        plugin_id, equals, name = key.rpartition("=")
        found[f"{plugin_id}{equals}{absolute(name)}" if is_file(name) else key] = options
    return found


def files_among(plugins: Iterable[str]) -> list[str]:
    """Return those keys of the ``plugins`` section whose plugins are files."""
    return [key for key in plugins if is_file(key.rpartition("=")[2])]


def plugin_label(key: str) -> str:
    """Return what ``-o`` calls a plugin of the ``plugins`` section: the id of ``id=name``, else its name alone."""
    plugin_id = key.partition("=")[0]
    if "=" not in key and is_file(key):
        return name_of(key)
    return normalize(plugin_id if "=" in key else key.rpartition(":")[2])


def with_saver(config: Mapping[str, Any]) -> Config:
    """Return ``config`` with the plugin that saves among its plugins, if its section ``checkpoint`` says where to.

    What the section ``plugins`` says of it wins. With ``checkpoint.enabled`` false it is taken out.
    """
    section, plugins = config.get("checkpoint", {}), dict(config.get("plugins", {}))
    saver = KEYWORDS["save_folder"].plugin
    key = next((one for one in plugins if plugin_label(one) == saver), None)
    if not section.get("enabled", True):
        plugins.pop(key, None)  # type: ignore[arg-type]
    elif key is not None or "save_folder" in section:
        options = {SAVE_OPTIONS[name]: value for name, value in section.items() if name in SAVE_OPTIONS}
        plugins[key or saver] = {**options, **(plugins.get(key or saver) or {})}
    return {**config, "plugins": plugins}


def build_trainer(config: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], /, **overrides: Any) -> Any:
    """Build model and data and return the Trainer of a complete document.

    Args:
        config: All sections, merged; ``train.seed`` must be set.
        functions: The recipe's functions.
        overrides: More arguments for Trainer. Checkpoints keep its ``config``, which is the document unless given here.

    Raises:
        KernelError: whatever in the document cannot be used.
    """
    from kernel_core.optim.parameter_groups import optimizer_by_name, optimizer_names
    from kernel_core.optim.scheduling import SCHEDULES
    from kernel_core.train.randomness import seed_all
    from kernel_core.train.trainer import Trainer

    train = {key: value for key, value in config.get("train", {}).items() if value is not None}
    seed_all(train["seed"])
    model = _call("model", config, functions, train["seed"])
    data = _call("data", config, functions, train["seed"])
    if not isinstance(data, RunData):
        raise ConfigError(f"data.name: {config['data']['name']} returned {type(data).__name__}. Expected a RunData.")
    optimizer = _named("optimizer", config, functions, optimizer_by_name, optimizer_names())
    options = {key: value for key, value in config["optimizer"].items() if key != "name"}
    bind_options(optimizer, "optimizer", ([],), options, trusted=("params",))
    scheduler = (
        _call("scheduler", config, {**SCHEDULES, **functions}, train["seed"]) if config.get("scheduler") else None
    )
    evaluation, checkpoint = config.get("eval", {}), config.get("checkpoint", {})
    loading = {key: value for key, value in checkpoint.items() if key.startswith("load_") or key == "autoresume"}
    loading = {key: value for key, value in loading.items() if value is not None}
    return Trainer(
        model=model,
        train_dataloader=data.train,
        eval_dataloader=list(data.evaluators) or None,
        eval_interval=evaluation.get("interval", 1),
        eval_subset_num_batches=evaluation.get("subset_num_batches", -1),
        optimizers=lambda parameters: optimizer(parameters, **options),
        schedulers=scheduler,
        plugins=plugin_requests(with_saver(config)["plugins"]),
        parallelism=config.get("parallelism") or None,
        **{"config": config, **train, **loading, **overrides},
    )


def _named(
    section: str,
    config: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    fallback: Callable[[str], Callable[..., Any] | None] = lambda name: None,
    others: Sequence[str] = (),
) -> Callable[..., Any]:
    name = config.get(section, {}).get("name")
    if not name or not isinstance(name, str):
        raise ConfigError(f"{section}.name: missing. Name a function: start from a recipe, or set {section}.name.")
    function = functions.get(name) or fallback(name) or _installed(section, name)
    if function is None:
        known = [*functions, *others, *(info.name for info in installed_plugins() if info.kind == KIND_OF.get(section))]
        raise ConfigError(
            f"{section}.name: there is no {name!r}.{did_you_mean(name, known)} "
            f"Known here: {', '.join(sorted(known)) or 'nothing'}."
        )
    return function


def _installed(section: str, name: str) -> Callable[..., Any] | None:
    """Return the installed plugin of the section's kind with that name, None if there is none."""
    kind = KIND_OF.get(section)
    if kind is None or all(info.kind != kind or info.name != normalize(name) for info in installed_plugins()):
        return None
    return find(name, (kind,)).load()  # type: ignore[no-any-return]


def _call(section: str, config: Mapping[str, Any], functions: Mapping[str, Callable[..., Any]], seed: int) -> Any:
    function = _named(section, config, functions)
    options = {key: value for key, value in config[section].items() if key != "name"}
    if "seed" in inspect.signature(function).parameters:
        options.setdefault("seed", seed)
    bound = bind_options(function, section, (), options)
    try:
        return function(*bound.args, **bound.kwargs)
    except ModuleNotFoundError as error:
        if error.name is None:
            raise
        raise PluginLoadError(
            f"{section}: {config[section]['name']} needs the module {error.name!r}, which is not installed. "
            f"Install it: pip install {error.name}."
        ) from error
