"""The facade: keyword arguments in, a run out."""

from __future__ import annotations

import copy
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from kernel_core.checkpoint.capture import Ignore
from kernel_core.checkpoint.request import SaveRequest
from kernel_core.data.spec import DataSpec
from kernel_core.engine import Engine
from kernel_core.errors import TrainerError
from kernel_core.logger import Logger
from kernel_core.models import TrainableModel
from kernel_core.optim.parameter_groups import OptimizerRequest
from kernel_core.optim.scheduling import apply_schedules, split_schedules
from kernel_core.registry.base import LoggerDestination
from kernel_core.registry.options import to_json
from kernel_core.registry.plan import Plan, PlannedCall, build_plan
from kernel_core.surgery import StructureWatch, SurgeryReport
from kernel_core.timing import Progress, Time, Timestamp, TimeUnit
from kernel_core.train.arguments import (
    Plugins,
    as_list,
    check_fit,
    check_iterations,
    check_run_name,
    check_seed,
    check_timeout,
    device_of,
    name_of_environment,
    place,
    resolve_all,
    scaled,
    scaled_schedulers,
    set_microbatches,
    show_log,
    unwrap_compiled,
    with_defaults,
    with_saver,
)
from kernel_core.train.checkpointing import Checkpoints, LoadOptions
from kernel_core.train.composer_keywords import SAVE_OPTIONS
from kernel_core.train.evaluation import Evaluations, evaluate, share_metrics
from kernel_core.train.evaluator import Evaluator, Interval, as_evaluators, as_interval, check_subset
from kernel_core.train.failure import raise_all
from kernel_core.train.first_step import look_at_first_step
from kernel_core.train.forward import Microbatch
from kernel_core.train.lifetime import Lifetime
from kernel_core.train.loaders import Loaders
from kernel_core.train.loop import training_steps
from kernel_core.train.parallelism import Parallelism, resolve_parallelism
from kernel_core.train.place import Place
from kernel_core.train.precision import default_precision
from kernel_core.train.prediction import predict
from kernel_core.train.randomness import deterministic_mode as _deterministic
from kernel_core.train.randomness import keyed_seed, seed_all
from kernel_core.train.ranks import Ranks
from kernel_core.train.startup import bind_precision, init_plugins, make_instrument, prepare_model
from kernel_core.train.state import State
from kernel_core.train.step import make_run_batch

log = logging.getLogger(__name__)


def _abort(engine: Engine, kind: Any, error: BaseException | None, traceback: Any) -> None:
    if error is not None:
        engine.abort(error)


class Trainer:
    """Trains a model.

    Start-up, all in the constructor: ``init`` → surgery → ``model_transformed`` → the engine prepares the model → the
    optimizers are pointed at its parameters → ``wrap_optimizer`` → ``before_load`` → ``after_load``.

    Args:
        model: What to train; one that went through ``torch.compile`` is taken out of it and compiled after surgery.
        train_dataloader: A loader, DataSpec, or dict of DataSpec's arguments; may be given to ``fit`` instead.
        train_dataloader_label: The middle part of ``metrics/<label>/<name>`` for the training metrics.
        train_subset_num_batches: Cut every epoch to so many batches; -1 for whole epochs.
        spin_dataloaders: Enter an epoch that was left at its place; False starts its loader anew.
        max_duration: When to stop: epochs as an int, a time string such as ``"500ba"`` or ``"1h30m"``, or a Time.
        iteration_length: Epochs as an int, or epochs or tokens as a time, in an iteration; None makes the whole run one.
        optimizers: Ready optimizers, or functions that make one from the parameters; one or several.
        schedulers: torch's schedulers, or callables ``state -> multiplier``; one or several.
        scale_schedule_ratio: Makes the run and its schedules so many times as long.
        step_schedulers_every_batch: How torch's schedulers are stepped; None means by epoch.
        eval_dataloader: A loader, DataSpec, Evaluator, or a sequence of Evaluators.
        eval_interval: When to evaluate: a time, epochs as an int, or a function ``(state, event) -> bool``; 0 for never.
            What was not evaluated since the last batch is, at the end.
        eval_subset_num_batches: Evaluate on the first batches only; an Evaluator may say otherwise.
        plugins: Names, ``(name, options)`` and instances of algorithms, callbacks and loggers, or ``{name: options}``.
        algorithms, callbacks, loggers: The same, for one kind.
        run_name: None takes the environment variable ``RUN_NAME``, or else makes a fresh one.
        progress_bar: Use the plugin of that name if it is installed.
        auto_log_hparams: Log these arguments as hyperparameters.
        parallelism: An engine: its name, ``{name: options}``, or an instance.
        parallelism: The engine, and transforms beside it: a name, names to options such as
            ``{"fsdp": {}, "tensor_parallel": {"degree": 2}}``, an instance, or a list of those. None means ``single`` for one
            process and ``ddp`` for several.
        fsdp_config, parallelism_config: The same as Composer's users write it.
        dist_timeout: Seconds that ranks wait for one another before the run counts as hanging.
        device: ``cpu``, ``gpu``, ``cuda:1``, ``mps``, …; None for the accelerator if there is one.
        precision: ``fp32``, ``amp_bf16``, ``amp_fp16`` or ``amp_fp8``; None for what suits the device.
        device_train_microbatch_size: Rows in a microbatch; None for the whole batch at once, ``"auto"`` for as many as fit.
        grad_accum: Microbatches in a batch, instead of their size; ``"auto"`` as above.
        compile_config: Arguments for ``torch.compile``, ``{}`` for its defaults; None leaves the model uncompiled.
        save_folder: Save to this path or URL; stands for the plugin ``checkpoint_saver``, and the other ``save_`` arguments
            for its options.
        save_filename: The folder of a checkpoint in it, such as ``"ep{epoch}-ba{batch}"``.
        save_latest_filename: The file in it that tells the newest checkpoint.
        save_interval: When to save: a time, epochs as an int, or a function ``(state, event) -> bool``.
        save_overwrite: Whether checkpoints of other runs, or later ones, may be replaced.
        save_weights_only: Save the model alone.
        save_ignore_keys: What to leave out, such as ``["optimizers"]``.
        save_num_checkpoints_to_keep: How many stay; -1 for all.
        load_path: Begin from this checkpoint: a path or URL of one, of a folder of several (the newest), or ``.../latest``.
            Or from weights of others: a file of Composer's, a state dict, safetensors, or a folder of Hugging Face.
        load_weights_only: Load the model alone.
        load_strict_model_weights: Refuse names that only model or checkpoint has.
        load_ignore_keys: What to leave out, such as ``["optimizers", "model/head.*"]``, or a function that takes it out.
        load_exclude_algorithms: Algorithms not to be applied again though they changed the structure of the saved model.
        load_allow_changes: What may differ from the plugins that saved it: an id, or ``id.option``; or ``seed``.
        load_locked: Refuse any difference, other versions too.
        autoresume: Go on from the newest good checkpoint in ``save_folder``, if there is one: the same script started again
            ends where it would have ended.
        config: A document to be kept with every checkpoint: plain data.
        seed: For all randomness; None draws one, or takes that of the run that is resumed.
        deterministic_mode: Let torch refuse operations that are not deterministic.
        python_log_level: Show what the kernel logs from this level on, such as ``"info"``.
        strict: Make surgery without effect an error.

    Raises:
        KernelError: whatever cannot work is refused here, before anything starts.

    Example:
        >>> with Trainer(
        ...     model=model,
        ...     train_dataloader=loader,
        ...     max_duration="2ep",
        ...     optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     plugins=["gradient_clipping"],
        ... ) as trainer:
        ...     trainer.fit()
    """

    def __init__(
        self,
        *,
        model: TrainableModel,
        train_dataloader: Any = None,
        train_dataloader_label: str = "train",
        train_subset_num_batches: int = -1,
        spin_dataloaders: bool = True,
        max_duration: int | str | Time | None = None,
        iteration_length: int | str | Time | None = None,
        optimizers: OptimizerRequest | Sequence[OptimizerRequest] | None = None,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_interval: Interval = 1,
        eval_subset_num_batches: int = -1,
        plugins: Plugins = None,
        algorithms: Plugins = None,
        callbacks: Plugins = None,
        loggers: Plugins = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        auto_log_hparams: bool = False,
        parallelism: Parallelism = None,
        fsdp_config: Mapping[str, Any] | None = None,
        parallelism_config: Mapping[str, Any] | None = None,
        dist_timeout: float = 300.0,
        device: str | torch.device | None = None,
        precision: str | None = None,
        device_train_microbatch_size: int | Literal["auto"] | None = None,
        grad_accum: int | Literal["auto"] | None = None,
        compile_config: Mapping[str, Any] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        save_filename: str | None = None,
        save_latest_filename: str | None = None,
        save_interval: int | str | Time | Callable[[State, str], bool] | None = None,
        save_overwrite: bool | None = None,
        save_weights_only: bool | None = None,
        save_ignore_keys: Ignore = None,
        save_num_checkpoints_to_keep: int | None = None,
        load_path: str | os.PathLike[str] | None = None,
        load_weights_only: bool = False,
        load_strict_model_weights: bool = True,
        load_ignore_keys: Ignore = None,
        load_exclude_algorithms: Sequence[str] = (),
        load_allow_changes: Sequence[str] = (),
        load_locked: bool = False,
        autoresume: bool = False,
        config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        deterministic_mode: bool = False,
        python_log_level: str | int | None = None,
        strict: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        model, compile_config = unwrap_compiled(model, compile_config)
        check_run_name(run_name)
        seed = None if seed is None else check_seed(seed)
        if python_log_level is not None:
            show_log(python_log_level)
        asked = resolve_all(plugins, algorithms, callbacks, loggers)
        wishes = {"progress_bar": progress_bar, "amp_fp8": precision == "amp_fp8"}
        asked = with_defaults(asked, [name for name, wanted in wishes.items() if wanted])
        asked = with_saver(asked, {name: given[name] for name in SAVE_OPTIONS})
        self.plan: Plan = build_plan(asked)
        self._checkpoints = Checkpoints(
            LoadOptions(
                path=None if load_path is None else os.fspath(load_path),
                weights_only=load_weights_only,
                strict=load_strict_model_weights,
                ignore=load_ignore_keys,
                exclude_algorithms=load_exclude_algorithms,
                allow_changes=load_allow_changes,
                locked=load_locked,
                autoresume=autoresume,
            ),
            config,
        )
        where = Place.of_environment()
        engine, transforms = resolve_parallelism(parallelism, fsdp_config, parallelism_config, where)
        self._starting = True
        with ExitStack() as undo:
            undo.callback(engine.close)
            undo.push(partial(_abort, engine))
            place_on = engine.connect(where, device_of(model, device), transforms, check_timeout(dist_timeout))
            undo.callback(self._checkpoints.close)
            self.plan, seed, run_name = self._checkpoints.begin_from(
                engine, self.plan, asked, seed, run_name or name_of_environment()
            )
            seed_all(seed)
            self.state = State(
                place(model, device, place_on),
                device=place_on,
                seed=seed,
                run_name=run_name,
                engine=engine,
                plan=self.plan,
                precision=precision or default_precision(place_on),
            )
            self.state.transforms = transforms
            self.surgery_report = self.state.surgery_report = SurgeryReport()
            self._ranks = Ranks(self.state) if engine.world_size > 1 else None
            loggers_here = [one.plugin for one in self.plan.plugins if one.id not in self.state.silent]
            self.logger = Logger(
                [one for one in loggers_here if isinstance(one, LoggerDestination)], self.state.progress
            )
            self._instrument = make_instrument(self.plan.calls("instrument"))
            self._hooks = self.plan.bind(self._guard, state=self.state, logger=self.logger)
            self._lifetime = Lifetime(self.state, self.logger)
            self._lifetime.at_failure.append(partial(self._checkpoints.note_failure, self.state))
            self._lifetime.before_close.append(self._checkpoints.close)
            self._lifetime.checkpoint = partial(self._checkpoints.durable_now, self.state)
            engine.watch(self.state, lambda: self._starting or self._lifetime.busy)
            self._strict = strict
            self._loaders = Loaders(self.state, self._ranks, train_subset_num_batches)
            self._step_schedulers_every_batch = step_schedulers_every_batch
            self.state.spin_dataloaders = spin_dataloaders
            self.state.eval_interval = as_interval(eval_interval)
            self.state.train_label = train_dataloader_label
            self.state.max_duration = max_duration  # type: ignore[assignment]
            self.state.iteration_length = iteration_length  # type: ignore[assignment]
            set_microbatches(self.state, device_train_microbatch_size, grad_accum)
            self.state.schedulers = scaled_schedulers(as_list(schedulers), scale_schedule_ratio)
            if scale_schedule_ratio != 1.0 and self.state.max_duration is not None:
                self.state.max_duration = scaled(self.state.max_duration, scale_schedule_ratio)
            self._loaders.set_evaluators(eval_dataloader, eval_subset_num_batches)
            check_iterations(self.state)
            self._evaluations: Evaluations | None = None
            if train_dataloader is not None:
                self._loaders.set_train(train_dataloader, self._checkpoints.global_batch_size)
            if deterministic_mode:
                self._lifetime.at_close.append(_deterministic())
            try:
                self._start(as_list(optimizers), compile_config, given if auto_log_hparams else {})
            except BaseException as error:
                self._lifetime.fail(error)
                raise
            undo.pop_all()
        self._starting = False

    def _start(
        self,
        optimizers: list[OptimizerRequest],
        compile_config: Mapping[str, Any] | None,
        hparams: Mapping[str, Any],
    ) -> None:
        state = self.state
        init_plugins(state, self.logger, self._lifetime.begun.add)
        self._precision = prepare_model(state, optimizers, compile_config, self._strict)
        state.train_metrics = copy.deepcopy(state.model.get_metrics(is_train=True))
        share_metrics(state, state.train_metrics)
        self.local_hparams = {name: to_json(value) for name, value in hparams.items()}
        self.logger.log_hyperparameters(
            {
                **self.local_hparams,
                "run_name": state.run_name,
                "seed": state.seed,
                "device": str(state.device),
                "precision": state.precision,
                "engine": state.engine.name,
                "plugins": [active.id for active in self.plan.plugins],
                "plan_digest": self.plan.digest,
            }
        )
        for call in self._hooks.before_load:
            call()
        self._checkpoints.load(state, self._precision)
        for call in self._hooks.after_load:
            call()
        self._checkpoints.begin(
            state,
            self.logger,
            self._ranks,
            lambda: self._precision,
            lambda: self._loaders.train,
            lambda: self._evaluations,
        )
        self._watch = StructureWatch(state.model, self.surgery_report, self._strict)
        # what plugins drew while they started must not shift what training draws; ranks with different data draw differently
        rank = state.engine.data_rank
        seed_all(state.seed if rank == 0 else keyed_seed(state.seed, "rank", rank))

    def _guard(self, call: PlannedCall, hook: str, bound: Callable[[], Any]) -> Callable[[], Any] | None:
        if call.plugin in self.state.silent:
            return None
        guarded = self.logger.guard(self.plan.by_id(call.plugin).plugin, hook, bound)
        return self._instrument(f"{call.plugin}.{hook}", guarded)

    def fit(self, train_dataloader: Any = None, **arguments: Any) -> None:
        """Train until ``max_duration``. May be called again.

        Args:
            train_dataloader: Train on this from now on.
            arguments: Those of ``steps``.

        Raises:
            TrainerError: there is no loader, optimizer or duration, or the trainer is closed.
            Interrupted: a signal ended the run early, in order.
        """
        for _ in self.steps(train_dataloader, **arguments):
            pass

    def steps(
        self,
        train_dataloader: Any = None,
        *,
        train_dataloader_label: str | None = None,
        train_subset_num_batches: int | None = None,
        spin_dataloaders: bool | None = None,
        duration: int | str | Time | None = None,
        reset_time: bool = False,
        schedulers: Any = None,
        scale_schedule_ratio: float = 1.0,
        step_schedulers_every_batch: bool | None = None,
        eval_dataloader: Any = None,
        eval_subset_num_batches: int = -1,
        eval_interval: Interval | None = None,
        device_train_microbatch_size: int | Literal["auto"] | None = None,
        precision: str | None = None,
    ) -> Iterator[None]:
        """Train one batch each time the iterator is advanced.

        An exception is passed to ``fit_failed``, the trainer closes, and the exception goes on.

        Args:
            train_dataloader: Train on this from now on.
            train_dataloader_label, train_subset_num_batches, spin_dataloaders, schedulers, scale_schedule_ratio,
                step_schedulers_every_batch, eval_dataloader, eval_subset_num_batches, eval_interval,
                device_train_microbatch_size, precision: As for ``Trainer``, from now on; None keeps what holds.
            duration: Train for so much more, whatever was trained before.
            reset_time: Count from zero again; weights and optimizer state stay.
        """
        state = self.state
        self._lifetime.refuse_closed("fit")
        with self._unchanged_if_refused():
            if train_dataloader_label is not None:
                state.train_label = train_dataloader_label
            if train_subset_num_batches is not None:
                self._loaders.subset_num_batches = train_subset_num_batches
            if spin_dataloaders is not None:
                state.spin_dataloaders = spin_dataloaders
            if reset_time and not self._checkpoints.goes_on:
                state.progress.restore(Timestamp())
            if train_dataloader is not None:
                self._loaders.set_train(train_dataloader, self._checkpoints.global_batch_size)
                if not self._checkpoints.pending:
                    state.progress.restart_epoch()  # the place in the old loader means nothing in the new one
            elif train_subset_num_batches is not None and self._loaders.train is not None:
                self._loaders.set_train(self._loaders.train)
            if duration is not None:
                more = scaled(Time.from_input(duration, TimeUnit.EPOCH), scale_schedule_ratio)
                begun = Progress(self._checkpoints.start_of_fit(state.timestamp))
                state.max_duration = Time(math.ceil(begun.value(more.unit)), more.unit) + more
            if schedulers is not None:
                self._set_schedulers(as_list(schedulers), scale_schedule_ratio)
            elif scale_schedule_ratio != 1.0:
                raise TrainerError(
                    f"scale_schedule_ratio: got {scale_schedule_ratio} without schedulers. Expected both: what is scaled "
                    "already would be scaled again. Give fit(schedulers=..., scale_schedule_ratio=...)."
                )
            if step_schedulers_every_batch is not None:
                self._step_schedulers_every_batch = step_schedulers_every_batch
            if eval_interval is not None:
                state.eval_interval = as_interval(eval_interval)
            if eval_dataloader is not None:
                self._loaders.set_evaluators(eval_dataloader, eval_subset_num_batches)
            if device_train_microbatch_size is not None:
                set_microbatches(state, device_train_microbatch_size, None)
            if precision is not None:
                state.precision = precision
            if state.precision != self._precision.name:
                self._precision = bind_precision(state)
            steps = self._prepare_fit()
        return self._lifetime.drive(steps, self._after_first_step)

    def _after_first_step(self) -> None:
        look_at_first_step(self.state, self.logger)
        self._checkpoints.reserve()

    @contextmanager
    def _unchanged_if_refused(self) -> Iterator[None]:
        """Put back what the block changed in the run if it raises."""
        state, held, held_state = self.state, vars(self).copy(), vars(self.state).copy()
        held_loaders = vars(self._loaders).copy()
        timestamp = state.timestamp
        try:
            yield
        except BaseException:
            vars(self).update(held)
            vars(state).update(held_state)
            vars(self._loaders).update(held_loaders)
            state.progress.restore(timestamp)
            raise

    def _set_schedulers(self, schedulers: list[Any], ratio: float) -> None:
        state = self.state
        scheduled = split_schedules(state.schedulers)[1]
        state.schedulers = scaled_schedulers(schedulers, ratio)
        if scheduled and not schedulers:  # nobody sets the rate any more
            for group in (group for optimizer in state.optimizers for group in optimizer.param_groups):
                group["lr"] = group["initial_lr"]

    def _prepare_fit(self) -> Iterator[None]:
        """Check what there is before anything begins, and return the loop."""
        state, data = self.state, self._loaders.train
        check_fit(state, data)
        assert data is not None  # else check_fit raised
        state.dataloader, state.dataloader_label = data.dataloader, state.train_label
        state.resume_training()
        self._checkpoints.begin_fit(state.timestamp)
        run_evaluators = self._instrument("evaluation", self._evaluate)
        self._evaluations = evaluations = Evaluations(state, run_evaluators, state.eval_interval)
        resume = self._checkpoints.resume(state, data, evaluations)
        if state.stopped and (resume is None or self._checkpoints.is_finished(state, evaluations)):
            reason = "stop_training ended it" if state.stop else f"max_duration={state.max_duration} is reached"
            log.warning("fit: %s already; nothing is trained.", reason)
            if self._checkpoints.wanted is not None:
                self._checkpoints.wanted.settle()
                self._checkpoints.wanted.at("finished")
            return iter(())
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        for evaluator in state.evaluators:
            check_subset(evaluator)
        if schedules := split_schedules(state.schedulers)[1]:
            groups = [group for optimizer in state.optimizers for group in optimizer.param_groups]
            rates = [group["lr"] for group in groups]
            apply_schedules(state, schedules)  # what cannot be asked is refused before anything begins
            if resume is not None:  # a rate stays that of the last batch until there is another
                for group, rate in zip(groups, rates, strict=True):
                    group["lr"] = rate
        run_batch = make_run_batch(
            state, self._hooks, self.logger, data, schedules, self._precision, self._instrument, self._ranks
        )
        return training_steps(
            state,
            self._hooks,
            self.logger,
            data,
            evaluations,
            self._watch,
            run_batch,
            self._instrument("data", next),
            bool(self._step_schedulers_every_batch),
            self._ranks,
            self._checkpoints.wanted,
            resume,
        )

    def _evaluate(self, evaluators: Sequence[Evaluator], subset_num_batches: int | None = None) -> None:
        evaluate(self.state, self._hooks, self.logger, self._precision, evaluators, subset_num_batches, self._ranks)

    def eval(self, eval_dataloader: Any = None, subset_num_batches: int = -1) -> dict[str, Any]:
        """Evaluate now.

        Args:
            eval_dataloader: What to evaluate on; the default is the trainer's evaluators.
            subset_num_batches: The first batches only; -1 for what each evaluator says.

        Returns:
            ``<label>/<name>`` to what the metric computed.

        Raises:
            TrainerError: there is nothing to evaluate on, or the trainer is closed.
        """
        self._lifetime.refuse_closed("eval")
        evaluators: list[Evaluator] = (
            self.state.evaluators if eval_dataloader is None else as_evaluators(eval_dataloader, subset_num_batches)
        )
        if eval_dataloader is not None:
            for label in {one.label for one in evaluators} & {one.label for one in self.state.evaluators}:
                log.warning("eval: the values of the run's evaluator %r are replaced by those of this one.", label)
        if not evaluators:
            raise TrainerError("eval: no eval_dataloader. Give one to Trainer or to eval.")
        for evaluator in evaluators:
            check_subset(evaluator, subset_num_batches)
            if eval_dataloader is not None:
                self._loaders.share(evaluator)
        limit = None if subset_num_batches < 0 else subset_num_batches
        with self._lifetime.working():
            for call in self._hooks.eval_standalone_start:
                call()
            self._evaluate(evaluators, limit)
            for call in self._hooks.eval_standalone_end:
                call()
        labels = {evaluator.label for evaluator in evaluators}
        values = self.state.eval_metric_values
        return {name: value for name, value in values.items() if name.partition("/")[0] in labels}

    def predict(
        self,
        dataloader: Any,
        subset_num_batches: int = -1,
        *,
        return_outputs: bool = True,
        device_microbatch_size: int | Literal["auto"] | None = None,
    ) -> list[Any]:
        """Return the model's outputs for each batch.

        Args:
            dataloader: A loader or DataSpec.
            subset_num_batches: The first batches only; -1 for all.
            return_outputs: Without it nothing is kept, for plugins that take the outputs in ``predict_batch_end``.
            device_microbatch_size: Rows in a forward pass; None for the whole batch, ``"auto"`` for as many as fit.

        Returns:
            One entry for each batch, on the CPU; an empty list without ``return_outputs``. Of several ranks each returns
            those of its share of every global batch.
        """
        self._lifetime.refuse_closed("predict")
        microbatch = Microbatch.of(device_microbatch_size, "device_microbatch_size")
        data = DataSpec.of(dataloader)
        data = self._loaders.shared(data)
        with self._lifetime.working():
            return predict(
                self.state,
                self._hooks,
                self._precision,
                data,
                subset_num_batches,
                return_outputs,
                microbatch,
                self._ranks,
            )

    def save_checkpoint(
        self,
        folder: str | os.PathLike[str],
        name: str = "ep{epoch}-ba{batch}",
        *,
        weights_only: bool = False,
        ignore_keys: Ignore = None,
        overwrite: bool = False,
    ) -> str:
        """Save the run as it is now, between two steps, and wait until the checkpoint is durable. Every rank must call it.

        Args:
            folder: A path or URL.
            name: The checkpoint's own folder in it.
            weights_only: The model alone.
            ignore_keys: What to leave out, such as ``["optimizers"]``.
            overwrite: Replace a checkpoint of that name.

        Returns:
            Where it is: a value for ``load_path``.

        Raises:
            SaveFailedError: it was not saved.
            UnsavableError: something in the state of the run cannot be expressed.
        """
        self._lifetime.refuse_closed("save_checkpoint")
        return self._checkpoints.save(
            SaveRequest(
                os.fspath(folder),
                name,
                weights_only=weights_only,
                ignore=ignore_keys,
                overwrite=overwrite,
                asynchronous=False,
            )
        )

    @property
    def loaded_from(self) -> str | None:
        """Where the checkpoint is that this trainer began from, None if it began from none."""
        return self._checkpoints.loaded_from

    @property
    def saved_checkpoints(self) -> list[str]:
        """Where the checkpoints are that this trainer has saved, the oldest first."""
        return self._checkpoints.saved

    def close(self) -> None:
        """Run every plugin's ``close``, then the engine's. May be called twice.

        Raises:
            Exception: what a plugin raised, after all had their turn; several come as one ``ExceptionGroup``.
        """
        raise_all("closing the trainer failed", self._lifetime.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            if not self._lifetime.closed:
                self.state.engine.abort(error)
            for later in self._lifetime.close():
                error.add_note(f"closing the trainer failed too: {type(later).__name__}: {later}")
