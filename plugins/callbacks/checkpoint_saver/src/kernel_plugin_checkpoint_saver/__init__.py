"""Save a run every so often, when a signal ends it, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from kernel_core import Callback, State, Time, hookimpl
from kernel_core.checkpoint.failures import FILE as FAILURES
from kernel_core.checkpoint.files import is_intact
from kernel_core.checkpoint.locate import Damaged, checkpoints_in
from kernel_core.checkpoint.request import SaveRequest, check_placeholders, fill_in, name_fits
from kernel_core.checkpoint.retention import clear_up
from kernel_core.errors import CheckpointError, OptionError, TimeStringError
from kernel_core.storage import open_storage
from kernel_core.timing import TimeUnit
from kernel_core.train.trigger import Trigger
from pydantic import Field

__all__ = ["CheckpointSaver", "refuse_later"]

Interval = Callable[[State, str], bool]
EVENT_OF = {TimeUnit.EPOCH: "epoch_checkpoint", TimeUnit.ITERATION: "iteration_checkpoint"}  # else batch_checkpoint


class CheckpointSaver(Callback):
    """Save the run into a folder, each checkpoint in a folder of its own.

    Training stands still while the state is copied; a thread writes the copy. What is saved last, at the end of training or
    when a signal ends it, is waited for.

    Args:
        folder: Where checkpoints go: a path or URL, in which ``{run_name}`` is filled in.
        filename: The folder of one checkpoint, with placeholders such as ``{epoch}``, ``{batch}`` and ``{run_name}``.
        latest_filename: The file in ``folder`` that tells the newest checkpoint; None for no such file.
        save_interval: How often: a time in any unit, epochs as an int, or a function ``(state, event) -> bool`` that is asked
            at ``batch_checkpoint``, ``epoch_checkpoint`` and ``iteration_checkpoint``; 0 for the end of training only.
        overwrite: Whether a checkpoint of the same name, of whatever run, may be replaced, and the folder may hold some that
            are later than where this run begins.
        num_checkpoints_to_keep: How many checkpoints of this run stay, -1 for all. Older ones are deleted once so many newer
            ones are known to be good.
        weights_only: Save the model alone. From such a checkpoint nothing is resumed, and a signal saves none.
        ignore_keys: Names or globs of what is left out, such as ``optimizers`` or ``model/head.*``; or a function.
        asynchronous: Train on while a checkpoint is written.
    """

    roles = {"saves-checkpoints"}
    affects_training = False

    def __init__(
        self,
        folder: str | Path = "{run_name}/checkpoints",
        filename: str = "ep{epoch}-ba{batch}",
        latest_filename: str | None = "latest",
        save_interval: int | str | Time | Interval = "1ep",
        overwrite: bool = False,
        num_checkpoints_to_keep: Annotated[int, Field(ge=-1)] = -1,
        weights_only: bool = False,
        ignore_keys: Sequence[str] | Callable[[dict[str, Any]], None] | None = None,
        asynchronous: bool = True,
    ) -> None:
        if num_checkpoints_to_keep == 0:
            raise OptionError(
                "checkpoint_saver.num_checkpoints_to_keep: got 0. Expected at least 1, or -1 for all: with none there is nothing "
                "to resume from."
            )
        self.folder = _checked_folder(str(folder))
        self.filename = _checked_name("filename", filename)
        if latest_filename is not None:
            _checked_name("latest_filename", latest_filename, placeholders=False)
        if filename in (latest_filename, FAILURES) or latest_filename == FAILURES:
            raise OptionError(
                f"checkpoint_saver.filename: got {filename!r}, with the latest_filename {latest_filename!r}. Expected names of "
                f"their own for both, other than {FAILURES!r}, which lies in the same folder. Rename one."
            )
        self.save_interval = save_interval if callable(save_interval) else _read_interval(save_interval)
        self.request = SaveRequest(
            self.folder,
            self.filename,
            weights_only=weights_only,
            ignore=ignore_keys,
            overwrite=overwrite,
            keep=num_checkpoints_to_keep,
            latest=latest_filename,
            asynchronous=asynchronous,
        )
        self.saved_at: tuple[int, int, int] | None = None  # where the latest checkpoint is, as _place tells it
        self._resumed = False
        self._trigger: Trigger | None = None

    @hookimpl
    def checkpoint_folder(self, run_name: str) -> str | None:
        """Say where checkpoints go; nothing is resumed from weights alone."""
        return None if self.request.weights_only else self.folder.replace("{run_name}", run_name)

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Count from here; clear away what unfinished saves have left."""
        if isinstance(self.save_interval, Time) and self.save_interval.value:
            self._trigger = Trigger(self.save_interval, state)
        if self.saved_at is not None and _place(state) < self.saved_at:
            self.saved_at, self._resumed = None, True  # the time was reset: earlier checkpoints are this run's own
        if state.rank == 0:
            self._clear_up(state)
            if not self.request.overwrite:
                own = state.run_name if self._resumed or self.saved_at else None
                refuse_later(fill_in(self.folder, state), state.progress.batch, own)

    def _clear_up(self, state: State) -> None:
        """Finish what a process that was killed while it saved had begun."""
        run_name, now, request = state.run_name, state.progress.batch, self.request
        clear_up(
            open_storage(fill_in(self.folder, state)),
            run_name,
            next(active.id for active in state.plan.plugins if active.plugin is self),
            request.keep,
            replaces=fill_in(self.filename, state) if request.overwrite else None,
            latest=request.latest,
            fits=lambda name: name_fits(self.filename, run_name, name),
            spare=lambda found: int(found.manifest.timestamp.batch) == now,  # other ranks may be reading it
        )

    @hookimpl
    def should_save(self, state: State, event: str) -> SaveRequest | None:
        """Save when it is time, when a signal ends the run, and at the end what has not been saved yet."""
        if event == "finished":
            if state.rank == 0:
                self._clear_up(state)
            return None
        if not self._is_due(state, event):
            return None
        self.saved_at = _place(state)
        return self.request

    def _is_due(self, state: State, event: str) -> bool:
        if event == "interrupted":
            return not self.request.weights_only and self.saved_at != _place(state)
        if event == "fit_end":  # nothing is trained between the last batch and the end
            return self.saved_at is None or self.saved_at[2] != state.progress.batch
        if not isinstance(self.save_interval, Time):
            return bool(self.save_interval(state, event))
        trigger = self._trigger
        return trigger is not None and event == EVENT_OF.get(trigger.unit, "batch_checkpoint") and trigger()

    def state_dict(self) -> dict[str, Any]:
        """Return where the latest checkpoint is: iteration, epoch and batch."""
        return {"saved_at": self.saved_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned."""
        self.saved_at = state["saved_at"]
        self._resumed = True


def _place(state: State) -> tuple[int, int, int]:
    """Tell two checkpoints of one batch apart: before the end of its epoch, or iteration, and after it."""
    return state.progress.iteration, state.progress.epoch, state.progress.batch


def refuse_later(folder: str, batch: int, own: str | None = None) -> None:
    """Refuse to train from ``batch`` on beside good checkpoints that are later.

    Args:
        folder: Where they are.
        batch: Where the run begins.
        own: The name of the run if it goes on with what it saved itself: its own later ones are replaced as it comes there.

    Raises:
        CheckpointError: there is one.
    """
    for one in checkpoints_in(open_storage(folder)):
        if isinstance(one, Damaged) or one.manifest.run_name == own:
            continue
        if one.manifest.timestamp.batch > batch and is_intact(one):
            raise CheckpointError(
                f"checkpoint_saver: {folder} holds a checkpoint of batch {int(one.manifest.timestamp.batch)}, of the run "
                f"{one.manifest.run_name!r}, and this run begins at batch {batch}. Expected none that is later. Go on from it "
                "(autoresume=True), choose another folder, or give overwrite=True."
            )


def _read_interval(value: int | str | Time) -> Time:
    try:
        interval = Time.from_input(value, TimeUnit.EPOCH)
    except TimeStringError as error:
        raise OptionError(f"checkpoint_saver.save_interval: got {value!r}. {error}") from None
    if interval.value < 0:
        raise OptionError(f"checkpoint_saver.save_interval: got {str(value)!r}. Expected a time of at least 0.")
    return interval


def _checked_folder(folder: str) -> str:
    if "{" in folder.replace("{run_name}", ""):
        raise OptionError(
            f"checkpoint_saver.folder: got {folder!r}. Expected no placeholder but {{run_name}}: a run finds its checkpoints in "
            "one folder. Put the others into filename."
        )
    return folder


def _checked_name(option: str, name: str, placeholders: bool = True) -> str:
    try:
        check_placeholders(name, f"checkpoint_saver.{option}")
    except CheckpointError as error:
        raise OptionError(str(error)) from None
    if not name or "/" in name or "\\" in name or name.startswith(".") or (not placeholders and "{" in name):
        raise OptionError(f"checkpoint_saver.{option}: got {name!r}. Expected a plain name, without slashes.")
    return name
