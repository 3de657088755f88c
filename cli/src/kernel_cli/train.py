"""``kernel train``."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from kernel_core.errors import ConfigError, Interrupted, KernelError, OrderError, StartAgain
from kernel_core.recipe import build_trainer, files_among
from kernel_core.registry.lock import check_lock

from kernel_cli.config import complete, source_of, write_yaml
from kernel_cli.lock import check_config, lock_file
from kernel_cli.output import columns, kernel_log
from kernel_cli.runs import checkpoint_folder
from kernel_cli.start import Request, Start, decide

METRICS = "metrics.jsonl"


def train(
    as_json: bool, dry_run: bool, locked: bool, lock: str | None, job: Sequence[str] = (), **asked: Any
) -> dict[str, Any] | None:
    """Train and return the result document; it is printed when ``as_json``.

    Args:
        as_json: Whether somebody reads the document.
        dry_run: Stop before anything is trained.
        locked: Refuse plugins that are not those of the lock.
        lock: The file of the lock; ``locked`` then.
        job: The flags that start as many processes again, for the command that goes on.
        asked: Arguments of ``request_of``.
    """
    started = time.perf_counter()
    request = request_of(**asked)
    start = decide(request)
    origin = source_of(start.document, f"run {start.name}")
    config = complete(start.config(origin))
    folder = start.folder
    if (folder / "plan.json").exists() and not dry_run and not start.goes_on:
        raise ConfigError(
            f"run_name: {folder} holds a run already. Choose another name, remove the folder, or go on with it: "
            f"kernel train --resume {folder}."
        )
    held = lock_file(request.source, lock) if locked or lock is not None else None
    if held is not None:
        check_config(held, config)  # before a model is built, which may take long
        if start.loading:  # a checkpoint that other plugins have saved is refused too
            config = {**config, "checkpoint": {**config["checkpoint"], "load_locked": True}}
    trainer = build_trainer(
        config,
        origin.recipe.functions,
        run_name=start.name,
        progress_bar=config["logging"].get("progress_bar", True),
        config=start.document,
    )
    done = trainer.state.progress.batch
    with trainer:
        if held is not None:
            check_lock(held, trainer.plan)  # with what the model of a checkpoint needed besides
        _say(f"run {trainer.state.run_name}: {origin.recipe.summary or request.source or start.name}")
        _say(start.note or None)
        if trainer.loaded_from is not None:
            _say(f"begins from {trainer.loaded_from}, batch {done}")
        _print_surgery(trainer)
        _print_plan(trainer)
        if config["train"].get("strict") and trainer.surgery_report.remarks:
            raise OrderError(f"--strict: {trainer.surgery_report.remarks[0]}")
        if not dry_run:
            if trainer.state.rank == 0:
                _write_run(folder, start, trainer)
            checkpoints = checkpoint_folder(start.config(origin), start.name)
            _fit(trainer, folder, checkpoints, job, files_among(config["plugins"]))
    metrics = _metrics(trainer)
    finished = not dry_run and trainer.loaded_from is not None and trainer.state.progress.batch == done
    if not dry_run:
        if finished:
            _say(f"run {trainer.state.run_name} is finished: nothing was left to train.")
        _print_metrics(metrics)
        _say(f"\n{folder}/ holds {_contents(config)}.")
    if trainer.state.rank:
        return None  # one document is enough
    return {
        "run_name": trainer.state.run_name,
        "run_dir": None if dry_run else str(folder),
        "duration": time.perf_counter() - started,
        "metrics": metrics,
        "surgery": trainer.surgery_report.to_json(),
        "plan_digest": trainer.plan.digest,
        **({"resumed_from": trainer.loaded_from, "finished": finished} if trainer.loaded_from is not None else {}),
        **({"plan": trainer.plan.to_json()} if dry_run else {}),
    }


def request_of(
    plugins: str, options: Iterable[str], settings: Iterable[str], timeline: bool, strict: bool, **asked: Any
) -> Request:
    """Return what the flags of the command ask for; those that are keys of the section ``train`` by their names."""
    train_keys = {name: asked.pop(name) for name in ("max_duration", "seed", "device", "run_name", "precision")}
    plugins = ",".join(filter(None, [plugins, "timeline" if timeline else ""]))
    return Request(
        plugins=plugins,
        options=tuple(options),
        settings=tuple(settings),
        train={**train_keys, "strict": strict or None},
        **asked,
    )


def _fit(trainer: Any, folder: Path, checkpoints: str | None, job: Sequence[str], plugin_files: Sequence[str]) -> None:
    try:
        with kernel_log():
            trainer.fit()
    except StartAgain:
        raise  # its exit code tells the launcher what to do
    except KernelError as error:
        error.exit_code = 1  # training had begun: the run failed, it was not refused
        raise
    except Interrupted as error:
        saved = error.checkpoint
        if saved is not None:
            target = (
                str(folder) if saved.rpartition("/")[0] == checkpoints else saved
            )  # that of another saver, elsewhere
            error.add_note(f"{saved} holds the run as it was after batch {trainer.state.progress.batch}. Go on:")
            error.add_note(command_that_goes_on(target, job, trainer.state.world_size, plugin_files))
        raise


def command_that_goes_on(target: str, job: Sequence[str], world_size: int, plugin_files: Sequence[str] = ()) -> str:
    """Return the command that goes on with a run, or from a checkpoint.

    Args:
        target: The folder of the run, or the checkpoint.
        job: The flags of the launcher, as they were given.
        world_size: The number of processes; one that another launcher has started them with is written as ``-n``.
        plugin_files: Plugins that are files, which have to be named each time.
    """
    job = job if job or world_size == 1 else ("-n", os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    plugins = ("--plugins", ",".join(plugin_files)) if plugin_files else ()
    return shlex.join(["kernel", "train", *job, "--resume", target, *plugins])


def _contents(config: dict[str, Any]) -> str:
    names = ["config.yaml", "plan.json", METRICS]
    here = f"{config['logging']['folder']}/{{run_name}}/checkpoints"
    if any((options or {}).get("folder") == here for options in config["plugins"].values()):
        names.append("checkpoints")
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _write_run(folder: Path, start: Start, trainer: Any) -> None:
    """Write config and plan. ``kernel train <folder>/config.yaml`` does the same run again, under a fresh name."""
    from kernel_core.storage import LocalStorage

    storage = LocalStorage(folder)
    if trainer.loaded_from is None and storage.exists(METRICS):
        storage.delete(METRICS)  # it begins anew in its own folder: what was logged before is not of this run
    storage.put("config.yaml", write_yaml(start.document).encode())
    storage.put("plan.json", json.dumps(trainer.plan.to_json(), indent=2).encode())


def _metrics(trainer: Any) -> dict[str, Any]:
    from kernel_core.train.evaluation import number

    values = {f"metrics/{name}": number(value) for name, value in trainer.state.eval_metric_values.items()}
    values |= {f"metrics/train/{name}": number(value) for name, value in trainer.state.train_metric_values.items()}
    return values


def _say(text: str | None) -> None:
    if text is not None and os.environ.get("RANK", "0") == "0":  # of several ranks one speaks
        click.echo(text, err=True)


def _print_surgery(trainer: Any) -> None:
    report = trainer.surgery_report
    if report.changes:
        _say("\nsurgery: what plugins changed in the model")
        rows = [(change.plugin, change.path, change.what) for change in report.changes]
        _say(columns([("plugin", "where", "what"), *rows], "  "))
    for plugin in report.no_effect:
        _say(f"  {plugin}: no effect on this model")
    for remark in report.remarks:
        _say(f"  {remark}")


def _print_plan(trainer: Any) -> None:
    _say(f"\nplan {trainer.plan.digest[:12]}: who runs when (`kernel plan` says why)")
    rows = [(event, " → ".join(call.plugin for call in calls)) for event, calls in trainer.plan.events.items()]
    _say(columns(rows, "  ") + "\n")


def _print_metrics(metrics: dict[str, Any]) -> None:
    if not metrics:
        return
    _say("\nevaluation")
    rows = []
    for name, value in metrics.items():
        _, label, metric = name.split("/", 2)
        rows.append((label, metric, "not finite" if value is None else f"{value:.4g}"))
    _say(columns(rows, "  "))
