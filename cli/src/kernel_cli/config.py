"""From files, ``--set`` and ``-o`` to one configuration document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from kernel_core.errors import ConfigError, TimeStringError
from kernel_core.naming import did_you_mean, normalize
from kernel_core.recipe import (
    Config,
    Recipe,
    files_among,
    load_recipe,
    merge,
    plugin_label,
    with_absolute_paths,
    with_saver,
)
from kernel_core.registry.discovery import installed_plugins
from kernel_core.timing import Time, TimeUnit

DEFAULT_RECIPE = "numbers"
LOGGER, SAVER = "file_logger", "checkpoint_saver"  # every run of the command has them, unless told otherwise


class Loader(yaml.SafeLoader):
    """YAML 1.2's scalars: ``1e-3`` is a number, and ``yes``, ``on`` and ``1:30`` are text."""


Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        list("-+0123456789."),
    ),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


class Dumper(yaml.SafeDumper):
    """Quotes what ``Loader``, or a reader of older YAML, would take for something else than text."""


Dumper.yaml_implicit_resolvers = {
    first: [*yaml.SafeDumper.yaml_implicit_resolvers.get(first, []), *Loader.yaml_implicit_resolvers.get(first, [])]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *Loader.yaml_implicit_resolvers}
}


def write_yaml(document: Any) -> str:
    """Return ``document`` as text that ``read_yaml`` reads."""
    return yaml.dump(document, Dumper=Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(text: str, where: str) -> Any:
    """Return what a YAML text holds.

    Raises:
        ConfigError: it is not YAML.
    """
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: cannot be read as YAML: {error}") from None


@dataclass(frozen=True)
class Source:
    """What the user named: its document, and the recipe whose functions it uses, if any."""

    config: Config
    recipe: Recipe
    recipe_name: str | None

    def document(self, config: Config) -> Config:
        """Return ``config``, made from this one, as a document that leads back to the recipe."""
        return {**({"recipe": self.recipe_name} if self.recipe_name else {}), **config}


def load_source(source: str | None) -> Source:
    """Return the document and the recipe for what the user named: a file, a recipe, or nothing.

    Raises:
        ConfigError: the file cannot be read or holds something else than sections.
        PluginNotFoundError: there is no such recipe.
    """
    if source is None or not source.lower().endswith((".yaml", ".yml")):
        name = source or DEFAULT_RECIPE
        recipe = load_recipe(name)
        return Source(merge({}, recipe.config), recipe, name)
    return source_of(read_document(Path(source)), source)


def read_document(path: Path) -> Config:
    """Return the document in a YAML file.

    Raises:
        ConfigError: the file cannot be read or holds something else than sections.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from None
    config = read_yaml(text, str(path))
    if not isinstance(config, dict):
        raise ConfigError(
            f"{path}: got {type(config).__name__}. Expected sections such as model, data, optimizer, train."
        )
    return config


def source_of(document: Mapping[str, Any], where: str) -> Source:
    """Return a document on top of the recipe that it names, if it names one.

    Raises:
        ConfigError: a section or key is unknown; ``where`` says where it stands.
        PluginNotFoundError: there is no such recipe.
    """
    config = dict(document)
    name = config.pop("recipe", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{where}: recipe: got {name!r}. Expected the name of an installed recipe.")
    recipe = Recipe("", {}) if name is None else load_recipe(name)
    return Source(merge(merge({}, recipe.config), config), recipe, name)


def assignments(texts: Iterable[str], flag: str) -> list[tuple[str, str, Any]]:
    """Split ``left.right=value`` texts; values are YAML scalars or flow collections.

    Raises:
        ConfigError: a text is not of that form.
    """
    parsed = []
    for text in texts:
        path, equals, value = text.partition("=")
        left, dot, right = path.strip().partition(".")
        if not (equals and dot and left and right):
            example = "plugin.option=value" if flag == "-o" else "section.key=value"
            raise ConfigError(f"{flag}: got {text!r}. Expected {example}.")
        parsed.append((left, right, read_yaml(value, f"{flag} {path}")))
    return parsed


def apply_arguments(
    config: Config, plugins: str, options: Iterable[str], settings: Iterable[str], train: Mapping[str, Any]
) -> Config:
    """Put the command line on top of ``config``.

    The result is what the run's ``config.yaml`` keeps; ``complete`` adds what the command gives every run.

    Raises:
        ConfigError: a section, key or plugin is unknown, or an argument is malformed.
    """
    section = config.get("checkpoint", {})
    if (
        "save_interval" not in section
    ):  # fixed by the document: a run that goes on for longer is saved as often as before
        interval = save_interval(config.get("train", {}).get("max_duration", 1))
        config = {**config, "checkpoint": {"save_interval": interval, **section}}
    for section, key, value in assignments(settings, "--set"):
        plugin, dot, option = key.partition(".")
        if section == "parallelism" and dot:
            config = _with_parallelism(config, plugin, option, value)
            continue
        nested = {plugin: {option: value}} if section == "plugins" and dot else {key: value}
        config = merge(config, {section: nested})
    config = merge(config, {"train": {key: value for key, value in train.items() if value is not None}})
    config = {**config, "plugins": with_absolute_paths(config.get("plugins", {}))}
    named = list(map(str.strip, filter(str.strip, plugins.split(","))))
    known = {plugin_label(key): key for key in config.get("plugins", {})}
    for name in named:
        if plugin_label(name) in map(plugin_label, named[: named.index(name)]) or named.count(name) > 1:
            raise ConfigError(f"--plugins: {name} is named twice. Give one of them an id of its own: 'other={name}'.")
        (key,) = with_absolute_paths({name: {}})
        if (held := known.get(plugin_label(name))) is not None:
            if key != held and len(files_among([key, held])) == 2:  # it lies elsewhere now
                config = {
                    **config,
                    "plugins": {key if one == held else one: its for one, its in config["plugins"].items()},
                }
                known = {plugin_label(one): one for one in config["plugins"]}
            continue
        config = merge(config, {"plugins": {key: {}}})
        known = {plugin_label(key): key for key in config["plugins"]}
    config = merge(config, {"plugins": {}})
    known |= {plugin_label(key): key for key in complete(config)["plugins"]}
    engines = {normalize(name): name for name in config.get("parallelism", {})}
    for plugin, option, value in assignments(options, "-o"):
        if normalize(plugin) in engines:
            config = _with_parallelism(config, engines[normalize(plugin)], option, value)
            continue
        if normalize(plugin) not in known:
            raise ConfigError(
                f"-o {plugin}.{option}: {plugin!r} is not among the plugins of this run."
                f"{did_you_mean(normalize(plugin), known)} They are {', '.join(sorted(known)) or 'none'}; "
                f"name it: --plugins {plugin}."
            )
        config = merge(config, {"plugins": {known[normalize(plugin)]: {option: value}}})
    return config


def with_parallelism(config: Config, names: str | None) -> Config:
    """Put ``--parallelism A,B`` in place of what ``config`` says; options of those that it names too are kept."""
    if names is None:
        return config
    known = config.get("parallelism", {})
    named = [name.strip() for name in names.split(",") if name.strip()]
    return merge(config, {"parallelism": {name: known.get(name) or {} for name in named}})


def _with_parallelism(config: Config, name: str, option: str, value: Any) -> Config:
    known = config.get("parallelism", {})
    return merge(config, {"parallelism": {**known, name: {**(known.get(name) or {}), option: value}}})


def with_model(config: Config, model: str | None) -> Config:
    """Put ``--model NAME`` or ``NAME:WHAT`` in place of the model of ``config``; WHAT is its option ``model``.

    Raises:
        ConfigError: there is no name.
    """
    if model is None:
        return config
    name, colon, what = model.partition(":")
    if not name or (colon and not what):
        raise ConfigError(f"--model: got {model!r}. Expected a name, or name:what, such as huggingface:path/to/folder.")
    chosen = {"name": name, **({"model": what} if what else {})}
    return merge({key: value for key, value in config.items() if key != "model"}, {"model": chosen})


def complete(config: Config) -> Config:
    """Return ``config`` with what every run of the command has: where its metrics and its checkpoints go.

    They are placeholders, so that the plan is the same for every run. What ``config`` says of them wins.
    """
    folder = config.get("logging", {}).get("folder", "runs")
    plugins = dict(config.get("plugins", {}))
    logger = next((key for key in plugins if plugin_label(key) == LOGGER), LOGGER)
    plugins[logger] = {"filename": f"{folder}/{{run_name}}/metrics.jsonl", **(plugins.get(logger) or {})}
    completed = {**config, "plugins": plugins, "logging": {**config.get("logging", {}), "folder": folder}}
    section = config.get("checkpoint", {})
    asked = "save_folder" in section or SAVER in map(plugin_label, plugins)
    if section.get("enabled", True) and (asked or any(info.name == SAVER for info in installed_plugins())):
        completed["checkpoint"] = {"save_folder": f"{folder}/{{run_name}}/checkpoints", **section}
    return with_saver(completed)


def save_interval(max_duration: Any) -> str:
    """Return how often a run saves itself unless told otherwise.

    A run that is counted in epochs, after each, as Composer does. One that is counted in anything else may never end an
    epoch: it is saved four times, whatever its length, so that neither time nor disk space grow with the number of batches.
    """
    try:
        unit = Time.from_input(max_duration, TimeUnit.EPOCH).unit
    except TimeStringError:  # whoever reads it next says what is wrong with it
        unit = TimeUnit.EPOCH
    return "1ep" if unit is TimeUnit.EPOCH else "0.25dur"
