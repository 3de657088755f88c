"""``kernel plugins lock``, ``from-checkpoint``, and ``kernel plan diff``: plans that were written down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
from kernel_core.checkpoint.contents import read_lock
from kernel_core.errors import CheckpointMissingError, ConfigError, PlanError
from kernel_core.registry.lock import FILE, check_lock, lock_differences, lock_of, plugins_of, read_plan, write_lock
from kernel_core.registry.plan import Plan
from packaging.utils import InvalidName, canonicalize_name
from packaging.version import InvalidVersion, Version

from kernel_cli.checkpoint import clean
from kernel_cli.output import Result
from kernel_cli.runs import find_checkpoint, run_called

PLAN = "plan.json"
RUNS = Path("runs")


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
    plan = document.get("plan")
    if not isinstance(plan, dict):
        raise PlanError(f"{target}: its plan is not one.")
    plugins_of(plan)
    environment = document.get("environment", {})
    code = {name: environment[name] for name in ("kernel-core", "torch") if name in environment}
    return {**plan, "code": code}


def requirements_of_checkpoint(path: str, as_json: bool) -> dict[str, Any]:
    """Print the requirements that recreate the run which saved a checkpoint: what `pip install -r` reads."""
    found = find_checkpoint(path)
    document = read_lock(found)
    wanted: dict[str, str] = {}
    missing = []
    for plugin in plugins_of(document.get("plan", {})):
        if plugin["distribution"] is None:
            missing.append(clean(str(plugin["id"])))
        else:
            wanted[plugin["distribution"]] = plugin["version"]
    environment = document.get("environment", {})
    for name in ("kernel-core", "kernel-cli", "torch"):
        if isinstance(environment, Mapping) and name in environment:
            wanted[name] = environment[name]
    lines = sorted(_requirement(name, version, found.url) for name, version in wanted.items())
    for name in missing:
        click.echo(
            f"{name}: belongs to no distribution, so that it cannot be installed: it was a file or a class.", err=True
        )
    if not as_json:
        click.echo("\n".join(lines))
    return {"requirements": lines, "without_distribution": missing}


def _requirement(name: Any, version: Any, where: str) -> str:
    """Return ``name==version``, the version without what a builder added to it (``2.13.0+cpu``); a file may hold anything.

    Raises:
        PlanError: it is no name, or no version.
    """
    try:
        return f"{canonicalize_name(str(name), validate=True)}=={Version(str(version)).public}"
    except (InvalidName, InvalidVersion):
        raise PlanError(
            f"{clean(where)}: names the distribution {name!r:.80} of version {version!r:.40}. Expected a name and a version that "
            "can be installed. Do not trust the file."
        ) from None
