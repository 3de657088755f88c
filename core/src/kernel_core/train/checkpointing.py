"""The checkpoints of one trainer: which one it begins from, what is put back when, and when it saves itself."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_core.checkpoint.capture import Ignore, RunParts
from kernel_core.checkpoint.failures import Failures
from kernel_core.checkpoint.foreign import is_foreign
from kernel_core.checkpoint.loading import Opened, load_foreign, open_checkpoint, open_newest
from kernel_core.checkpoint.plans import check_plan, in_saved_order, structural_plugins
from kernel_core.checkpoint.request import SaveRequest
from kernel_core.checkpoint.restore import Restored, load_state, load_weights, put_back_randomness
from kernel_core.checkpoint.saving import Saves
from kernel_core.data.position import capture_position, restore_position
from kernel_core.data.spec import DataSpec
from kernel_core.errors import CheckpointMismatchError, DataError, KernelError, TrainerError
from kernel_core.logger import Logger
from kernel_core.registry.lock import differences
from kernel_core.registry.plan import ActivePlugin, Plan, build_plan
from kernel_core.timing import Timestamp, TimeUnit
from kernel_core.train.arguments import fresh_run_name
from kernel_core.train.evaluation import Evaluations
from kernel_core.train.precision import Precision
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State

if TYPE_CHECKING:
    from kernel_core.engine import Engine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadOptions:
    """What of the trainer's arguments says how a checkpoint is loaded; described there."""

    path: str | None = None
    weights_only: bool = False
    strict: bool = True
    ignore: Ignore = None
    exclude_algorithms: Sequence[str] = ()
    allow_changes: Sequence[str] = ()
    locked: bool = False
    autoresume: bool = False


class Checkpoints:
    """What a trainer does with checkpoints.

    Args:
        options: How one is loaded.
        config: A document to be kept with every one that is saved.

    Attributes:
        global_batch_size: Samples in a batch over all ranks, where the run that is resumed had another number of ranks and
            loaders have to be cut anew.
        saves: What saves the run.
    """

    def __init__(self, options: LoadOptions, config: Mapping[str, Any] | None = None) -> None:
        self._options, self._config = options, config
        self._opened: Opened | None = None
        self._restored: Restored | None = None
        self._fits: list[Timestamp] = []  # where each fit began, those of the run that is resumed first
        self._next_fit = 0
        self._resumed_itself = False  # by autoresume: its calls of fit are those of before
        self._failures: Failures | None = None
        self._begun_at = -1  # the batch of the whole checkpoint that the run began from
        self.global_batch_size: int | None = None
        self.saves: Saves | None = None
        self._foreign: str | None = None  # the weights of others that it begins with
        self.loaded_from: str | None = None  # where the checkpoint is that the run began from

    # --- before the run is put together -----------------------------------------------------------------------------

    def begin_from(
        self, engine: Engine, plan: Plan, asked: Sequence[ActivePlugin], seed: int | None, run_name: str | None
    ) -> tuple[Plan, int, str]:
        """Open the checkpoint to begin from, if there is one, and agree with the other ranks on what the run is.

        Args:
            engine: Connected.
            plan: That of ``asked``.
            asked: The plugins that the user named.
            seed, run_name: As given, None for what the checkpoint has, or a fresh one.

        Returns:
            The plan with the plugins that the saved model needs too, the seed, and the name.

        Raises:
            CheckpointError, StorageError: one was asked for and cannot be used, or whether there is one cannot be told.
            RepeatedFailureError: the run has failed twice alike from there.
            ParallelismError: the ranks differ in their plugins.
        """
        self._find(engine, plan, run_name)
        if needed := self._structural(asked):
            plan = build_plan(needed)
        self._check_plan(plan)
        if engine.world_size > 1:
            engine.check_same("plan", plan.contents())
        found = self._seed(seed)
        if found is None:
            found = secrets.randbelow(2**31) if seed is None else seed
        if self._opened is not None and self._resumed_itself:
            run_name = self._opened.found.manifest.run_name
        return plan, int(engine.agree("seed", str(found))), engine.agree("run_name", run_name or fresh_run_name())

    def _find(self, engine: Engine, plan: Plan, run_name: str | None) -> None:
        options = self._options
        if options.autoresume:
            folder = self._folder(plan, run_name)
            self._opened = open_newest(engine, folder, run_name)
            self._resumed_itself = self._opened is not None
            self._failures = self._failures_from(folder)
            if self._opened is not None:
                options = self._options = LoadOptions(
                    strict=options.strict, allow_changes=options.allow_changes, locked=options.locked, autoresume=True
                )
        if self._failures is not None:
            self._failures.refuse_third(engine)
        if self._opened is None and options.path is not None:
            if engine.agree("foreign", str(is_foreign(options.path))) == "True":
                self.loaded_from = self._foreign = options.path
                return
            self._opened = open_checkpoint(engine, options.path)
        if self._opened is not None:
            self.loaded_from = self._opened.found.url
        if self._opened is not None and engine.rank == 0:
            manifest = self._opened.found.manifest
            what = "weights of" if self._weights_only else "goes on from" if options.autoresume else "loads"
            log.info("checkpoint: %s %s, batch %d.", what, self._opened.found.url, manifest.timestamp.batch)
        if self._opened is not None and not self._weights_only:
            self.global_batch_size = _other_batch_size(self._opened.reader.lock, engine)

    def _failures_from(self, folder: str) -> Failures:
        if self._opened is None:
            return Failures(folder, None)
        found = self._opened.found
        return Failures(folder, found.url.rstrip("/").rpartition("/")[2], found.manifest.sequence)

    def _folder(self, plan: Plan, run_name: str | None) -> str:
        for call in plan.calls("checkpoint_folder"):
            folder = call.function(*([run_name or "{run_name}"] if call.arguments else []))
            if folder is not None and "{" in folder:
                raise TrainerError(
                    f"autoresume: {call.plugin} saves to {folder}, and the run has no name yet. Expected one, so that it can be "
                    "found again. Give run_name=..., or a folder without {run_name}."
                )
            if folder is not None:
                return str(folder)
        raise TrainerError(
            "autoresume: nothing saves this run, so there is nothing to resume it from. Expected save_folder=..., or a plugin "
            "that answers checkpoint_folder, such as checkpoint savers do."
        )

    @property
    def _weights_only(self) -> bool:
        return self._options.weights_only or (self._opened is not None and self._opened.found.manifest.weights_only)

    def _seed(self, given: int | None) -> int | None:
        """Return the seed of the run that is resumed; None if there is none.

        Raises:
            CheckpointMismatchError: another one was given.
        """
        if self._opened is None or self._weights_only:
            return None
        seed = self._opened.reader.lock.get("seed")
        if type(seed) is not int:
            raise CheckpointMismatchError(f"checkpoint {self._opened.found.url}: its seed is {seed!r:.60}.")
        if given is not None and given != seed:
            if "seed" not in self._options.allow_changes:
                raise CheckpointMismatchError(
                    f"checkpoint {self._opened.found.url}: was saved by a run with seed {seed}, and this one has {given}. "
                    "Expected the same, which decides the order of the data. Leave it out, or allow 'seed' in load_allow_changes."
                )
            return given
        return seed

    def _structural(self, active: Sequence[ActivePlugin]) -> list[ActivePlugin]:
        """Return ``active`` with the plugins that the saved model was changed by and nobody has named; empty if all are there."""
        if self._opened is None:
            return []
        plan = self._opened.reader.lock.get("plan", {})
        found = structural_plugins(plan, active, self._options.exclude_algorithms)
        for one in found:
            log.warning("checkpoint: applies %s again, which changed the structure of the saved model.", one.id)
        return in_saved_order([*active, *found], plan) if found else []

    def _check_plan(self, plan: Plan) -> None:
        """Compare the plan of this run with that of the checkpoint.

        Raises:
            CheckpointMismatchError: they differ in something that is not allowed.
        """
        if self._opened is None or self._weights_only:
            return
        may_change = {one.id: one.plugin.may_change for one in plan.plugins}
        found = differences(self._opened.reader.lock.get("plan", {}), plan.to_json(), may_change)
        for one in check_plan(found, self._options.allow_changes, self._options.locked, self._opened.found.url):
            log.log(logging.WARNING if one.refused or one.is_of_code else logging.INFO, "checkpoint: %s.", one.text)

    # --- when model and optimizers are there ------------------------------------------------------------------------

    def load(self, state: State, precision: Precision) -> None:
        """Put back what the checkpoint has; what concerns the data waits for ``enter_data``."""
        if self._foreign is not None:
            self._load_foreign(state, self._foreign)
        if self._opened is None:
            return
        opened, options = self._opened, self._options
        try:
            if not self._weights_only:
                state.plan.check_supported("resume", "a run that is resumed")
            load_weights(state, opened.reader, options.strict, options.ignore)
            if not self._weights_only:
                self._restored = load_state(state, opened.reader, precision, options.ignore)
                self._fits = [Timestamp.from_json(one) for one in self._restored.loop.get("fits", [])]
                if options.ignore is None:
                    self._begun_at = state.progress.batch
            elif not options.weights_only and state.rank == 0:
                log.warning("checkpoint %s: holds weights only; training begins at its start.", opened.found.url)
        finally:
            opened.close()
            self._opened = None

    def _load_foreign(self, state: State, path: str) -> None:
        options = self._options
        load_foreign(state.engine, path, lambda weights: weights.load(state, options.strict, options.ignore))
        if state.rank == 0:
            log.info("checkpoint: took the weights of %s; training begins at its start.", path)

    @property
    def goes_on(self) -> bool:
        """Whether the fit that begins next is one that had begun before the run was resumed."""
        return self._resumed_itself and self._next_fit < len(self._fits)

    @property
    def pending(self) -> bool:
        """Whether something is still to be put back when training begins."""
        return self._restored is not None

    def start_of_fit(self, now: Timestamp) -> Timestamp:
        """Return where the fit that begins next has begun: at ``now``, or where it did before the run was resumed."""
        return self._fits[self._next_fit] if self.goes_on else now

    def begin_fit(self, now: Timestamp) -> None:
        """Note that a fit begins."""
        if not self.goes_on:
            self._fits.append(now)
        self._next_fit = self._next_fit + 1 if self._resumed_itself else len(self._fits)

    def resume(self, state: State, data: DataSpec, evaluations: Evaluations) -> Callable[[], None] | None:
        """Return what the loop has to call once before its first batch; None if nothing is resumed.

        Raises:
            DataError: the data is not that of the run that was saved.
        """
        restored = self._restored
        if restored is None:
            return None
        if self._is_past:
            state.stop_now()
        elif self._is_taken_up(restored):  # whoever loads from a path wants to train on
            stop = restored.loop.get("stop")
            if stop == "now":
                state.stop_now()
            elif stop == "soon":
                state.stop_training()
        evaluations.remember(restored.loop)
        self._enter_data(state, data, restored.position)

        def resume() -> None:
            put_back_randomness(state, restored)
            self._restored = self.global_batch_size = None

        return resume

    def _enter_data(self, state: State, data: DataSpec, positions: Sequence[Mapping[str, Any] | None]) -> None:
        if not positions:
            return
        same = len(positions) == state.world_size
        saved = positions[state.rank if same else 0]
        if saved is None:
            return
        if not same and not saved.get("elastic"):
            raise DataError(
                f"train_dataloader: {len(positions)} ranks saved a place of their own in it, and the run has {state.world_size} "
                "now. Expected as many, or a DataLoader whose order the kernel decides: a map-style data set with shuffle=True "
                "or False. Resume on as many ranks."
            )
        progress = state.progress
        note = restore_position(data.dataloader, saved, batches_done=progress.batch_in_epoch, epoch=progress.epoch)
        if note and state.rank == 0:
            log.warning("%s", note)

    def is_finished(self, state: State, evaluations: Evaluations) -> bool:
        """Whether a run that is at its end has nothing left to do; one that was resumed may have been killed before its end."""
        if self._restored is None or self._is_past:
            return True
        progress, epochs = state.progress, state.iteration_in(TimeUnit.EPOCH)
        owes_iteration_end = epochs and progress.epoch_in_iteration >= epochs
        ended = evaluations.ended or not (progress.batch_in_epoch or owes_iteration_end)
        return ended and evaluations.complete

    def _is_taken_up(self, restored: Restored) -> bool:
        """Whether the fit that has begun is the one that was going on when the run was saved."""
        return self._resumed_itself and self._next_fit == len(restored.loop.get("fits", []))

    @property
    def _is_past(self) -> bool:
        """Whether the fit that has begun was over, and another one had begun, before the run was resumed."""
        return self._resumed_itself and self._next_fit < len(self._fits)

    # --- while it trains --------------------------------------------------------------------------------------------

    def begin(
        self,
        state: State,
        logger: Logger,
        ranks: Ranks | None,
        precision: Callable[[], Precision],
        data: Callable[[], DataSpec | None],
        evaluations: Callable[[], Evaluations | None],
    ) -> None:
        """Get ready to save; the functions return what the trainer has when they are called."""

        def parts() -> RunParts:
            spec, evaluated = data(), evaluations()
            progress = state.progress
            position = None
            if spec is not None:
                position = capture_position(spec.dataloader, progress.batch_in_epoch, progress.sample_in_epoch)
            return RunParts(
                scaler=precision().state_dict(),
                position=position,
                loop={
                    **({} if evaluated is None else evaluated.memory()),
                    "fits": [one.to_json() for one in self._fits],
                    "stop": state.stop,
                },
                global_batch_size=_global_batch_size(spec, state),
                config=self._config,
            )

        self.saves = Saves(state, logger, ranks, parts)

    @property
    def wanted(self) -> Saves | None:
        """What saves the run, None if no plugin ever asks for it."""
        return self.saves if self.saves is not None and self.saves.wanted else None

    def reserve(self) -> None:
        """Get memory for the first checkpoint, if there will be any."""
        if self.saves is not None:
            self.saves.reserve()

    def save(self, request: SaveRequest) -> str:
        """Save now, wait until the checkpoint is durable, and return where it is."""
        assert self.saves is not None
        self.saves.save(request)
        return self.saves.saved[-1].url

    @property
    def saved(self) -> list[str]:
        """Where the checkpoints are that were saved."""
        return [] if self.saves is None else [one.url for one in self.saves.saved]

    def durable_now(self, state: State) -> str | None:
        """Return the checkpoint of the batch the run is at, None if it has none from which it could go on."""
        for one in reversed([] if self.saves is None else self.saves.saved):
            if not one.manifest.weights_only and one.manifest.timestamp.batch == state.progress.batch:
                return one.url
        return self.loaded_from if self._begun_at == state.progress.batch else None

    def note_failure(self, state: State, error: BaseException) -> None:
        """Write down that the run failed, so that one that always fails in the same way is not started for ever."""
        refused = isinstance(error, KernelError) and not self._next_fit  # nothing had begun: other arguments mend it
        if self._failures is not None and not refused:
            self._failures.note(error, state.progress.batch)

    def close(self, failed: bool = False) -> None:
        """Wait for what is being written; not for long if the run has failed."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if self.saves is not None:
            self.saves.close(failed)


def _other_batch_size(lock: Mapping[str, Any], engine: Engine) -> int | None:
    run = lock.get("run", {})
    size = run.get("global_batch_size")
    same = run.get("data_world_size") == engine.data_world_size
    return size if type(size) is int and size > 0 and not same else None


def _global_batch_size(spec: DataSpec | None, state: State) -> int | None:
    sampler = getattr(getattr(spec, "dataloader", None), "batch_sampler", None)
    size = getattr(sampler, "global_batch_size", None)
    if size is None:
        size = getattr(getattr(spec, "dataloader", None), "batch_size", None)
        size = size * state.engine.data_world_size if isinstance(size, int) else None
    return size
