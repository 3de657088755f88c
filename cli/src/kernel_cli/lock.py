"""``kernel plugins lock``, ``from-checkpoint``, and ``kernel plan diff``: plans that were written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from kernel_core.checkpoint.contents import read_lock
from kernel_core.errors import CheckpointMissingError, ConfigError, PlanError
from kernel_core.registry.lock import (
    FILE,
    check_lock,
    lock_differences,
    lock_of,
    plugins_of,
    public_version,
    read_plan,
    requirement,
    write_lock,
)
from kernel_core.registry.plan import Plan

from kernel_cli.checkpoint import clean
from kernel_cli.output import Result
from kernel_cli.runs import find_checkpoint, run_called

PLAN = "plan.json"
RUNS = Path("runs")
CODE = ("kernel-core", "kernel-cli", "torch")  # whose versions a checkpoint records besides those of plugins


def plan_of(config: Mapping[str, Any]) -> Plan:
    """Return the plan of a complete configuration, without building its model."""
    from kernel_core.recipe import plugin_requests
    from kernel_core.registry.plan import build_plan, resolve
    from kernel_core.train.arguments import with_defaults

    active = resolve(plugin_requests(config["plugins"]))
    wishes = {
        "progress_bar": config["logging"].get("progress_bar", True),
        "amp_fp8": config.get("train", {}).get("precision") == "amp_fp8",
    }
    return build_plan(with_defaults(active, [name for name, wanted in wishes.items() if wanted]))


def plan_of_arguments(source: str | None, plugins: str, options: Iterable[str], settings: Iterable[str]) -> Plan:
    """Return the plan of a run that is begun with these arguments."""
    from kernel_cli.config import apply_arguments, complete, load_source

    return plan_of(complete(apply_arguments(load_source(source).config, plugins, options, settings, {})))


def write_plugin_lock(
    source: str | None, plugins: str, options: Iterable[str], settings: Iterable[str], output: str, as_json: bool
) -> dict[str, Any]:
    """Write the plan of a run with its versions, hashes and options, and return it."""
    lock = lock_of(plan_of_arguments(source, plugins, options, settings))
    write_lock(Path(output), lock)
    if not as_json:
        click.echo(f"{output}: {len(lock['plugins'])} plugins, plan {lock['digest'][:12]}")
    return lock


def lock_file(source: str | None, given: str | None) -> Path:
    """Return the lock that ``--locked`` means: that of ``--lock``, else that of this folder or of the configuration's."""
    if given is not None:
        return Path(given)
    beside = Path(source).parent / FILE if source is not None else Path(FILE)
    return Path(FILE) if Path(FILE).exists() or not beside.exists() else beside


def check_config(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a run whose plan is not that of the lock.

    Raises:
        PlanError: it differs in any way, or there is no lock.
    """
    check_lock(path, plan_of(config))


# --- what is written down elsewhere ------------------------------------------------------------------------------------


def diff_plans(a: str, b: str, as_json: bool) -> Result:
    """Say in words what two runs, checkpoints or locks differ in; exit code 1 if they do."""
    told = lock_differences(_written_plan(a), _written_plan(b))
    if not as_json:
        click.echo("\n".join(map(clean, told)) if told else "the plans are the same")
    return Result({"a": a, "b": b, "differences": told}, 1 if told else 0)


def _written_plan(target: str) -> dict[str, Any]:
    path = Path(target)
    if path.is_file():
        return read_plan(path)
    if (path / PLAN).is_file():
        return read_plan(path / PLAN)
    if (run := run_called(target, RUNS)) is not None and (run.folder / PLAN).is_file():
        return read_plan(run.folder / PLAN)
    try:
        document = read_lock(find_checkpoint(target))
    except CheckpointMissingError as error:
        raise ConfigError(
            f"plan diff: {target} is no run, checkpoint or lock. Expected one. `kernel checkpoint list` shows what there is."
        ) from error
    environment = _section(document, "environment")
    return {
        **_plan_in(document, target),
        "code": {name: environment[name] for name in ("kernel-core", "torch") if name in environment},
    }


def _plan_in(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the plan in what a checkpoint says of its run, which may hold anything.

    Raises:
        PlanError: it is none.
    """
    plan = dict(_section(document, "plan"))
    try:
        plugins_of(plan)
    except PlanError as error:
        raise PlanError(f"{clean(where)}: {clean(str(error))} Do not trust the file.") from None
    return plan


def _section(document: Any, name: str) -> Mapping[str, Any]:
    section = document.get(name) if isinstance(document, Mapping) else None
    return section if isinstance(section, Mapping) else {}


def requirements_of_checkpoint(path: str, as_json: bool) -> dict[str, Any]:
    """Print the requirements that recreate the run which saved a checkpoint: what `pip install -r` reads."""
    found = find_checkpoint(path)
    document = read_lock(found)
    plugins = plugins_of(_plan_in(document, found.url))
    environment = _section(document, "environment")
    wanted = [(one["distribution"], one["version"]) for one in plugins if one["distribution"] is not None]
    wanted += [(name, environment[name]) for name in CODE if name in environment]
    lines = sorted({_checked(name, version, found.url) for name, version in wanted})
    _refuse_two_versions(lines, found.url)
    missing = [clean(one["id"]) for one in plugins if one["distribution"] is None]
    unrecorded = _unrecorded(document)
    for name in missing:
        click.echo(
            f"{name}: belongs to no distribution, so that it cannot be installed: it was a file or a class.", err=True
        )
    for name in unrecorded:
        click.echo(f"{name}: a checkpoint does not tell of which distribution. Install that too.", err=True)
    if not as_json:
        click.echo("\n".join(lines))
    return {"requirements": lines, "without_distribution": missing, "not_recorded": unrecorded}


def _checked(name: Any, version: Any, where: str) -> str:
    """Return ``name==version``; what the builder of torch added to its version (``2.13.0+cpu``) is said, and left out.

    Raises:
        PlanError: it is no name, or no version.
    """
    line = requirement(name, version)
    if line is None:
        raise PlanError(
            f"{clean(where)}: names the distribution {name!r:.80} of version {version!r:.40}. Expected a name and a version that "
            "can be installed. Do not trust the file."
        )
    if public_version(version) != str(version):
        click.echo(f"{line}: the version was {clean(str(version))}, a build of its own.", err=True)
    return line


def _refuse_two_versions(lines: Iterable[str], where: str) -> None:
    seen: dict[str, str] = {}
    for line in lines:
        other = seen.setdefault(line.partition("==")[0], line)
        if other != line:
            raise PlanError(
                f"{clean(where)}: asks for {other} and for {line}. Expected one version of each distribution. Do not trust the "
                "file."
            )


def _unrecorded(document: Mapping[str, Any]) -> list[str]:
    """Return the recipe, model and engine of a run, whose distributions no checkpoint records."""
    config, run = _section(document, "config"), _section(document, "run")
    transforms = run.get("transforms")
    named = [
        ("recipe", config.get("recipe")),
        ("model", _section(config, "model").get("name")),
        ("engine", run.get("engine") if run.get("engine") != "single" else None),
        *(("transform", one) for one in (transforms if isinstance(transforms, list | tuple) else ())),
    ]
    return [clean(f"{what} {name}") for what, name in named if isinstance(name, str)]
