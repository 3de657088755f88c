"""Run folders, and the checkpoints that what a user names leads to. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernel_core.checkpoint.contents import read_lock
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in, locate
from kernel_core.checkpoint.manifest import LOCK
from kernel_core.errors import CheckpointFormatError, CheckpointMissingError, ConfigError, KernelError
from kernel_core.recipe import Config, merge, plugin_label
from kernel_core.storage import open_storage

from kernel_cli.config import SAVER, complete, read_document

CONFIG = "config.yaml"
RUNS = "runs"  # the folder of runs, unless the configuration says otherwise


@dataclass(frozen=True)
class Run:
    """A folder that ``kernel train`` made.

    Attributes:
        folder: It; its name is the run's.
        document: What its ``config.yaml`` says.
    """

    folder: Path
    document: Config

    @property
    def checkpoints(self) -> str | None:
        """Where its checkpoints are, None if it saves none to go on from."""
        config = merge({}, {key: value for key, value in self.document.items() if key != "recipe"})
        config = merge(config, {"logging": {"folder": str(self.folder.parent)}})
        return checkpoint_folder(config, self.folder.name)


def checkpoint_folder(config: Config, run_name: str) -> str | None:
    """Return where a run of that name keeps the checkpoints from which it can go on, None if it saves none."""
    for key, options in complete(config)["plugins"].items():
        if plugin_label(key) == SAVER and not (options or {}).get("weights_only"):
            folder = (options or {}).get("folder")
            return None if folder is None else str(folder).replace("{run_name}", run_name)
    return None


def run_in(folder: Path) -> Run | None:
    """Return the run in ``folder``, None if there is none.

    Raises:
        ConfigError: its ``config.yaml`` cannot be used.
    """
    return Run(folder, read_document(folder / CONFIG)) if (folder / CONFIG).is_file() else None


def run_called(target: str, runs: Path) -> Run | None:
    """Return the run that a user means by a path or a name; None if there is none."""
    named = [Path(target), *([runs / target] if "/" not in target else [])]
    return next((run for path in named if (run := run_in(path)) is not None), None)


def runs_in(folder: Path) -> Iterator[Run]:
    """Yield the runs below a folder of runs."""
    for path in sorted(folder.glob(f"*/{CONFIG}")):
        yield Run(path.parent, read_document(path))


def newest_checkpoint(folder: str, run_name: str | None = None) -> Found | Damaged | None:
    """Return the newest checkpoint in ``folder`` from which a run can go on: of that name, or of any; damaged ones count last.

    Raises:
        StorageError: the folder cannot be read.
    """
    for one in checkpoints_in(open_storage(folder)):
        if isinstance(one, Damaged):
            return one
        if not one.manifest.weights_only and run_name in (None, one.manifest.run_name):
            return one
    return None


def newest_run(folder: Path) -> Run:
    """Return the run below ``folder`` that has the newest checkpoint.

    Raises:
        CheckpointMissingError: none has any.
    """
    found = []
    for run in runs_in(folder):
        newest = newest_checkpoint(run.checkpoints, run.folder.name) if run.checkpoints else None
        if isinstance(newest, Found):
            found.append((newest.manifest.created, run))
    if not found:
        raise CheckpointMissingError(
            f"--resume latest: no run in {folder} has a checkpoint. Expected one to go on from. Name another folder of runs: "
            "--set logging.folder=FOLDER, or begin a run."
        )
    return max(found, key=lambda one: one[0])[1]


def find_checkpoint(path: str) -> Found:
    """Return the checkpoint that a user means: what ``locate`` finds, or the newest of a run.

    Raises:
        CheckpointMissingError: there is none.
        CheckpointError, StorageError: it cannot be used, or cannot be asked for.
    """
    run = run_called(path, Path(RUNS))
    return locate(run.checkpoints if run is not None and run.checkpoints else path)


@contextmanager
def read_as_written(*found: Found) -> Iterator[None]:
    """Say in one message that what a checkpoint tells of its run is not of the form that the kernel writes.

    Raises:
        CheckpointFormatError: the block could not use it.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, KernelError):
            raise
        where = " or ".join(f"{one.url}/{LOCK}" for one in found)
        raise CheckpointFormatError(f"{where}: is not as this kernel writes it: {error!r:.120}.") from error


def config_of(found: Found) -> Config:
    """Return the configuration that a checkpoint holds.

    Raises:
        ConfigError: it holds none: it was saved by a program that gave none.
    """
    config = read_lock(found).get("config")
    if not isinstance(config, dict):
        raise ConfigError(
            f"--resume: {found.url} holds no configuration: it was saved by a Python program, not by kernel train. Expected one. "
            f"Run that program again with load_path={found.url!r}, or give a configuration of your own: "
            f"kernel train CONFIG --set checkpoint.load_path={found.url}."
        )
    return config
