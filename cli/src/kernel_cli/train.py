"""``kernel train``."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import yaml
from kernel_core.errors import ConfigError, KernelError, OrderError, StartAgain
from kernel_core.recipe import Config, build_trainer, merge

from kernel_cli.config import Source, apply_arguments, load_source, with_model, with_parallelism
from kernel_cli.launch import was_started_before
from kernel_cli.output import columns, kernel_log


def train(
    source: str | None,
    plugins: str,
    options: Iterable[str],
    settings: Iterable[str],
    as_json: bool,
    max_duration: str | None,
    seed: int | None,
    device: str | None,
    run_name: str | None,
    precision: str | None,
    model: str | None,
    parallelism: str | None,
    timeline: bool,
    dry_run: bool,
    strict: bool,
) -> dict[str, Any] | None:
    """Train and return the result document; it is printed when ``as_json``."""
    started = time.perf_counter()
    given = {
        "max_duration": max_duration,
        "seed": seed,
        "device": device,
        "run_name": run_name,
        "precision": precision,
        "strict": strict or None,
    }
    origin = load_source(source)
    plugins = ",".join(filter(None, [plugins, "timeline" if timeline else ""]))
    config = with_parallelism(with_model(origin.config, model), parallelism)
    config, name = _complete(apply_arguments(config, plugins, options, settings, given))
    folder = Path(config["logging"]["folder"]) / name
    if (folder / "plan.json").exists() and not dry_run and not was_started_before():
        raise ConfigError(f"run_name: {folder} holds a run already. Choose another name, or remove the folder.")
    trainer = build_trainer(
        config, origin.recipe.functions, run_name=name, progress_bar=config["logging"].get("progress_bar", True)
    )
    with trainer:
        _say(f"run {trainer.state.run_name}: {origin.recipe.summary or source}")
        _print_surgery(trainer)
        _print_plan(trainer)
        if config["train"].get("strict") and trainer.surgery_report.remarks:
            raise OrderError(f"--strict: {trainer.surgery_report.remarks[0]}")
        if not dry_run:
            if trainer.state.rank == 0:
                _write_run(folder, origin, config, trainer)
            try:
                with kernel_log():
                    trainer.fit()
            except StartAgain:
                raise  # its exit code tells the launcher what to do
            except KernelError as error:
                error.exit_code = 1  # training had begun: the run failed, it was not refused
                raise
    metrics = _metrics(trainer)
    if not dry_run:
        _print_metrics(metrics)
        _say(f"\n{folder}/ holds config.yaml, plan.json and metrics.jsonl.")
    if trainer.state.rank:
        return None  # one document is enough
    return {
        "run_name": trainer.state.run_name,
        "run_dir": None if dry_run else str(folder),
        "duration": time.perf_counter() - started,
        "metrics": metrics,
        "surgery": trainer.surgery_report.to_json(),
        "plan_digest": trainer.plan.digest,
        **({"plan": trainer.plan.to_json()} if dry_run else {}),
    }


def _complete(config: Config) -> tuple[Config, str]:
    """Fill in what every run of the command has, the same on all ranks: a seed and a name."""
    from kernel_core.train.place import Place

    seed = config.get("train", {}).get("seed")
    name = config.get("train", {}).get("run_name")
    place = Place.of_environment()
    seed = secrets.randbelow(2**31) if seed is None else seed
    name = name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    if place.world_size > 1:  # data and model are made before the trainer joins the ranks
        from kernel_core.distributed.connection import agree_early

        seed, name = json.loads(agree_early(place, "run", json.dumps([seed, name])))
    return merge(config, {"train": {"seed": seed}}), name


def _write_run(folder: Path, origin: Source, config: Config, trainer: Any) -> None:
    """Write config and plan. ``kernel train <folder>/config.yaml`` does the same run again, under a fresh name."""
    from kernel_core.storage import LocalStorage

    settings = {key: value for key, value in config["train"].items() if key != "run_name"}
    config = {**({"recipe": origin.recipe_name} if origin.recipe_name else {}), **config, "train": settings}
    storage = LocalStorage(folder)
    storage.write("config.yaml", yaml.safe_dump(config, sort_keys=False).encode())
    storage.write("plan.json", json.dumps(trainer.plan.to_json(), indent=2).encode())


def _metrics(trainer: Any) -> dict[str, Any]:
    from kernel_core.train.evaluation import number

    values = {f"metrics/{name}": number(value) for name, value in trainer.state.eval_metric_values.items()}
    values |= {f"metrics/train/{name}": number(value) for name, value in trainer.state.train_metric_values.items()}
    return values


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":  # of several ranks one speaks
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
