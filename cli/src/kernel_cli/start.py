"""How ``kernel train`` begins: with which configuration, under which name, and from which checkpoint. Decided by rank 0."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernel_core.checkpoint.contents import read_lock
from kernel_core.checkpoint.locate import Damaged, Found, locate
from kernel_core.errors import CheckpointMissingError, ConfigError, KernelError
from kernel_core.naming import normalize
from kernel_core.recipe import Config, files_among, merge, plugin_label, with_absolute_paths
from kernel_core.registry.discovery import installed_plugins

from kernel_cli.config import (
    SAVER,
    Source,
    apply_arguments,
    assignments,
    load_source,
    read_yaml,
    source_of,
    with_model,
    with_parallelism,
    write_yaml,
)
from kernel_cli.launch import RUN_NAME, is_rank, was_started_before
from kernel_cli.runs import (
    CONFIG,
    RUNS,
    Run,
    checkpoint_folder,
    config_of,
    newest_checkpoint,
    newest_run,
    run_called,
    run_in,
)

LATEST = "latest"
KEPT_BY_AUTORESUME = {"load_strict_model_weights", "load_allow_changes", "load_locked"}


@dataclass(frozen=True)
class Request:
    """What the command line asks for.

    Attributes:
        source: A recipe or a file.
        plugins, options, settings: The texts of ``--plugins``, ``-o`` and ``--set``.
        train: Keys of the section ``train``.
        model, parallelism: The texts of those flags.
        resume: A run, a checkpoint, or ``latest``.
        autoresume: Go on with the run of that name if it has a checkpoint.
        no_checkpoints: Save none.
    """

    source: str | None = None
    plugins: str = ""
    options: Sequence[str] = ()
    settings: Sequence[str] = ()
    train: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    parallelism: str | None = None
    resume: str | None = None
    autoresume: bool = False
    no_checkpoints: bool = False

    def on_top_of(self, origin: Source) -> Config:
        """Return the configuration: ``origin`` with the command line on top."""
        config = with_parallelism(with_model(origin.config, self.model), self.parallelism)
        return apply_arguments(config, self.plugins, self.options, self.all_settings, self.train)

    @property
    def all_settings(self) -> list[str]:
        """The texts of ``--set``, and what other flags stand for."""
        return [*self.settings, *(["checkpoint.enabled=false"] if self.no_checkpoints else [])]

    def given(self, section: str, prefix: str = "") -> dict[str, Any]:
        """Return the keys of ``section`` that the command line sets and that begin with ``prefix``."""
        found = assignments(self.all_settings, "--set")
        return {key: value for one, key, value in found if one == section and key.startswith(prefix)}


@dataclass(frozen=True)
class Start:
    """How the run begins, the same on all ranks.

    Attributes:
        document: The configuration as ``config.yaml`` and every checkpoint keep it.
        name: The name of the run.
        loading: Arguments of Trainer about the checkpoint to begin from, instead of those in ``document``.
        goes_on: Whether the folder of the run may be there already.
        note: A line for people, empty for none.
    """

    document: Config
    name: str
    loading: dict[str, Any]
    goes_on: bool = False
    note: str = ""

    @property
    def folder(self) -> Path:
        """The run's own folder."""
        return Path(self.document.get("logging", {}).get("folder", RUNS)) / self.name

    def config(self, origin: Source) -> Config:
        """Return the configuration to train with; ``origin`` was made of ``document``."""
        section = {key: value for key, value in origin.config.get("checkpoint", {}).items() if not _is_load(key)}
        return {**origin.config, "checkpoint": {**section, **self.loading}}


def decide(request: Request) -> Start:
    """Return how the run begins; rank 0 decides, and the others hear of it.

    Raises:
        KernelError: it cannot be begun like this.
    """
    from kernel_core.train.place import Place

    place = Place.of_environment()
    if place.world_size == 1:
        return _decide(request)
    from kernel_core.distributed.connection import agree_early  # data and model are made before the ranks are joined

    error, answer = None, {}
    if place.rank == 0:
        try:
            answer = asdict(_decide(request))
        except BaseException as caught:
            error, answer = caught, {"error": str(caught)}
    answer = read_yaml(agree_early(place, "start", write_yaml(answer)), "rank 0")
    if error is not None:
        raise error
    if "error" in answer:
        raise ConfigError(f"rank 0: {answer['error']}")
    return Start(**answer)


def _decide(request: Request) -> Start:
    return _begin(request) if request.resume is None else _resume(request, request.resume)


def _begin(request: Request) -> Start:
    """Begin a run, or go on with the one of that name where it was asked to, or is started again by the launcher."""
    origin = load_source(request.source)
    config = request.on_top_of(origin)
    autoresume = request.autoresume or config.get("checkpoint", {}).get("autoresume", False)
    name = config.get("train", {}).get("run_name") or (os.environ.get(RUN_NAME) if is_rank() else None)
    if autoresume and not name:
        raise ConfigError(
            "--autoresume: the run has no name. Expected one, by which it is found again. Give --run-name NAME."
        )
    name = name or fresh_name()
    wanted, newest = autoresume or was_started_before(), None
    if wanted and (folder := checkpoint_folder(config, name)):
        newest = newest_checkpoint(folder, name)
        autoresume = True
    section = {key: value for key, value in config.get("checkpoint", {}).items() if key != "autoresume"}
    loading = {key: value for key, value in section.items() if _is_load(key)}
    start = _start(origin, {**config, "checkpoint": section}, name, {**loading, "autoresume": autoresume}, wanted)
    return _with_seed(start, newest)


def _with_seed(start: Start, newest: Found | Damaged | None) -> Start:
    """Fill in a seed: that of the run that goes on, if nobody gave one."""
    if start.document["train"].get("seed") is not None:
        return start
    seed = read_lock(newest).get("seed") if isinstance(newest, Found) else None
    if seed is None and start.goes_on and (run := run_in(start.folder)):
        seed = run.document.get("train", {}).get("seed")
    if type(seed) is not int:
        seed = secrets.randbelow(2**31)
    document = {**start.document, "train": {**start.document["train"], "seed": seed}}
    return Start(document, start.name, start.loading, start.goes_on, start.note)


def _start(origin: Source, config: Config, name: str, loading: dict[str, Any], goes_on: bool, note: str = "") -> Start:
    train = {key: value for key, value in config.get("train", {}).items() if key != "run_name"}
    config = {key: value for key, value in config.items() if value or key != "checkpoint"}
    return Start(origin.document({**config, "train": train}), name, loading, goes_on, note)


def fresh_name() -> str:
    """Return a name that sorts by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _is_load(key: str) -> bool:
    return key.startswith("load_")


# --- --resume ----------------------------------------------------------------------------------------------------------


def _resume(request: Request, target: str) -> Start:
    """Go on with a run, or from a checkpoint; its configuration, and the command line on top."""
    given = request.given("checkpoint", "load_")
    _refuse_second_source(request, target, given)
    run, found = _find(target, str(request.given("logging").get("folder", RUNS)))
    if run is not None:
        document = merge_document(run.document, {"logging": {"folder": str(run.folder.parent)}})
        name, where, note = run.folder.name, str(run.folder / CONFIG), ""
    else:
        assert found is not None
        document, note = _document_of(found, request)
        name, where = found.manifest.run_name, found.url
    origin = source_of(document, where)
    config = request.on_top_of(origin)
    _refuse_unnamed_files(config, request, where)
    kept = {key: value for key, value in document.get("checkpoint", {}).items() if _is_load(key)}
    section = {key: value for key, value in config.get("checkpoint", {}).items() if not _is_load(key)}
    section.pop("autoresume", None)
    name = config.get("train", {}).get("run_name") or name
    start = _start(origin, {**config, "checkpoint": {**section, **kept}}, name, given, goes_on=True, note=note)
    newest = found or _newest_of(run, target)
    same_run = run is not None and start.folder.resolve() == run.folder.resolve()
    itself = found is None and same_run and _is_of(newest, start.name) and set(given) <= KEPT_BY_AUTORESUME
    if itself:
        loading = {**given, "autoresume": True}  # which goes back to an older checkpoint if the newest is damaged
    else:
        loading = {**given, "load_path": _usable(newest).url, "autoresume": was_started_before()}
    goes_on = same_run or run is None or was_started_before()
    return _with_seed(Start(start.document, start.name, loading, goes_on, start.note), newest)


def _refuse_second_source(request: Request, target: str, given: Mapping[str, Any]) -> None:
    if request.source is not None:
        raise ConfigError(
            f"--resume: got the configuration {request.source!r} beside it. Expected none: the run that is resumed has its own. "
            f"Leave it out, or begin a run from that checkpoint: kernel train {request.source} "
            f"--set checkpoint.load_path={target}."
        )
    if "load_path" in given:
        raise ConfigError("--resume: got checkpoint.load_path beside it. Expected one of them. Leave the other out.")


def _refuse_unnamed_files(config: Config, request: Request, where: str) -> None:
    """Refuse plugins that are files unless the command line names just those: what was written down may come from a stranger.

    Raises:
        ConfigError: there is one.
    """
    named = with_absolute_paths(dict.fromkeys(map(str.strip, request.plugins.split(","))))
    paths = {key.rpartition("=")[2] for key in named}
    for key in files_among(config.get("plugins", {})):
        if key.rpartition("=")[2] not in paths:
            raise ConfigError(
                f"{where}: its configuration uses the file {key.rpartition('=')[2]} as a plugin, and a file is code. Expected it "
                f"to be named again, so that nobody else decides what is run. If you trust it, add --plugins {shlex.quote(key)}."
            )


def _is_of(newest: Found | Damaged, run_name: str) -> bool:
    return isinstance(newest, Damaged) or newest.manifest.run_name == run_name


def _usable(newest: Found | Damaged) -> Found:
    """Return a checkpoint from which a run can go on.

    Raises:
        CheckpointError: it is damaged.
        ConfigError: it holds weights alone.
    """
    if isinstance(newest, Damaged):
        raise newest.problem
    if newest.manifest.weights_only:
        raise ConfigError(
            f"--resume: {newest.url} holds weights alone. Expected the whole of a run. Begin a run with them: "
            f"kernel train CONFIG --set checkpoint.load_path={newest.url}."
        )
    return newest


def merge_document(document: Mapping[str, Any], over: Mapping[str, Any]) -> Config:
    """Return ``merge`` of documents that may name a recipe."""
    rest = {key: value for key, value in document.items() if key != "recipe"}
    return {**({"recipe": document["recipe"]} if "recipe" in document else {}), **merge(merge({}, rest), over)}


def _find(target: str, runs: str) -> tuple[Run | None, Found | None]:
    """Return the run that ``target`` means, or the checkpoint, or a checkpoint and the run that it belongs to."""
    if target == LATEST:
        return newest_run(Path(runs)), None
    if named := run_called(target, Path(runs)):
        return named, None
    if Path(target).is_file():
        raise ConfigError(
            f"--resume: {target} is a file. Expected a run, or the folder of a checkpoint: a file holds weights alone. Begin "
            f"a run with them: kernel train CONFIG --set checkpoint.load_path={target}."
        )
    try:
        found = locate(target)
    except CheckpointMissingError as error:
        if "/" in target:
            raise
        raise CheckpointMissingError(
            f"--resume: there is no run {target!r} in {runs}, and no checkpoint in {target}. Expected a run, a checkpoint or "
            f"'{LATEST}'. `kernel checkpoint list` shows what there is."
        ) from error
    if found.storage.local_path("manifest.json") is not None:
        folder = Path(found.url).resolve().parent.parent
        run = run_in(folder)
        if run is not None and folder.name == found.manifest.run_name:
            return Run(Path(os.path.relpath(folder)), run.document), found
    return None, found


def _newest_of(run: Run | None, target: str) -> Found | Damaged:
    assert run is not None
    newest = newest_checkpoint(run.checkpoints, run.folder.name) if run.checkpoints else None
    if newest is None and run.checkpoints and Path(run.checkpoints).is_relative_to(run.folder):
        newest = newest_checkpoint(run.checkpoints)  # the folder was given another name since
    if newest is None:
        raise CheckpointMissingError(
            f"--resume {target}: the run has no checkpoint to go on from in {run.checkpoints or 'any folder'}. Expected one. "
            f"Begin it anew: kernel train {run.folder / CONFIG}."
        )
    return newest


def _document_of(found: Found, request: Request) -> tuple[Config, str]:
    """Return the configuration that a checkpoint alone holds, without what tells where files go; and a line about it.

    It may come from a stranger. Its names stand for installed functions and plugins only, as in a ``config.yaml``; where to
    write, and whether to trust somebody's code, the command line says.
    """
    config = config_of(found)
    try:
        config = merge_document(config, {})
    except KernelError as error:
        raise ConfigError(f"{found.url}: its configuration cannot be used: {error}") from None
    _refuse_trust(config, request, found.url)
    loggers = {info.name for info in installed_plugins() if info.kind == "loggers"}
    plugins = {key: value for key, value in config.get("plugins", {}).items() if _plugin_name(key) not in loggers}
    section = dict(config.get("checkpoint", {}))
    folder = checkpoint_folder({**config, "plugins": plugins, "logging": {}}, found.manifest.run_name)
    if folder is None or found.url.rstrip("/").rpartition("/")[0] != folder.rstrip("/"):
        section = {key: value for key, value in section.items() if key not in ("save_folder", "save_latest_filename")}
        plugins = {key: value for key, value in plugins.items() if plugin_label(key) != SAVER}
    names = ", ".join(plugins) or "no plugins"
    note = f"configuration: that in the checkpoint ({config.get('recipe', 'no recipe')}; {names})"
    return {**config, "plugins": plugins, "checkpoint": section, "logging": {}}, note


def _plugin_name(key: str) -> str:
    return normalize(key.rpartition("=")[2].rpartition(":")[2])


def _refuse_trust(config: Config, request: Request, url: str) -> None:
    for section, options in config.items():
        for key, value in options.items() if isinstance(options, dict) else ():
            if key.startswith("trust") and value and key not in request.given(section):
                raise ConfigError(
                    f"{url}: its configuration says {section}.{key}={value}, which lets code of others run. A checkpoint does "
                    f"not decide that. If you do trust it, say so: --set {section}.{key}={value}."
                )
