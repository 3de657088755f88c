"""The facade: keyword arguments in, a run out."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from kernel_core.data.spec import DataSpec
from kernel_core.engine import Engine
from kernel_core.errors import OptimizerError, SurgeryError, TrainerError
from kernel_core.logger import Logger
from kernel_core.models import TrainableModel
from kernel_core.optim.parameter_groups import (
    OptimizerRequest,
    ParameterGroups,
    build_optimizers,
    check_coverage,
    check_reevaluation,
    is_optimizer,
)
from kernel_core.registry.base import LoggerDestination
from kernel_core.registry.plan import Plan, PlannedCall, build_plan, invoke
from kernel_core.schedules import check_schedulers
from kernel_core.surgery import StructureWatch, SurgeryReport, changed_paths, fingerprint, perform_surgery
from kernel_core.timing import Time, TimeUnit
from kernel_core.train.arguments import (
    Plugins,
    as_list,
    check_positive,
    check_run_name,
    device_of,
    place,
    resolve_all,
    resolve_engine,
    with_defaults,
)
from kernel_core.train.evaluation import Evaluations, Evaluator, as_evaluators, check_subset, evaluate, predict
from kernel_core.train.failure import annotate, call_all, raise_all
from kernel_core.train.loop import training_steps
from kernel_core.train.randomness import seed_all
from kernel_core.train.state import State

log = logging.getLogger(__name__)


class Trainer:
    """Trains a model.

    Start-up, all in the constructor: ``init`` → surgery → ``model_transformed`` → the engine prepares the model → the
    optimizers are pointed at its parameters → ``wrap_optimizer`` → ``before_load`` → ``after_load``.

    Args:
        model: What to train.
        train_dataloader: A loader, DataSpec, or dict of DataSpec's arguments; may be given to ``fit`` instead.
        max_duration: When to stop: epochs as an int, a time string such as ``"500ba"`` or ``"1h30m"``, or a Time.
        eval_dataloader: A loader, DataSpec, Evaluator, or a sequence of Evaluators.
        eval_interval: When to evaluate; 0 for never. What was not evaluated since the last batch is, at the end.
        eval_subset_num_batches: For a bare ``eval_dataloader``: evaluate on the first batches only.
        train_subset_num_batches: Cut every epoch to so many batches; -1 for whole epochs.
        optimizers: Ready optimizers, or functions that make one from the parameters; one or several.
        schedulers: torch's schedulers, or callables ``state -> multiplier``; one or several.
        step_schedulers_every_batch: How torch's schedulers are stepped; None means by epoch.
        plugins: Names, ``(name, options)`` and instances of algorithms, callbacks and loggers, or ``{name: options}``.
        algorithms, callbacks, loggers: The same, for one kind.
        parallelism: An engine: its name, ``{name: options}``, or an instance.
        device: ``cpu``, ``gpu``, ``cuda:1``, ``mps``, …; None for the accelerator if there is one.
        device_train_microbatch_size: Rows in a microbatch; None for the whole batch at once.
        iteration_length: Epochs in an iteration; None makes the whole run one.
        seed: For all randomness; None draws one.
        run_name: None makes a fresh one.
        progress_bar: Use the plugin of that name if it is installed.
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
        max_duration: int | str | Time | None = None,
        eval_dataloader: Any = None,
        eval_interval: int | str | Time = 1,
        eval_subset_num_batches: int = -1,
        train_subset_num_batches: int = -1,
        optimizers: OptimizerRequest | Sequence[OptimizerRequest] | None = None,
        schedulers: Any = None,
        step_schedulers_every_batch: bool | None = None,
        plugins: Plugins = None,
        algorithms: Plugins = None,
        callbacks: Plugins = None,
        loggers: Plugins = None,
        parallelism: str | Mapping[str, Mapping[str, Any]] | Engine = "single",
        device: str | torch.device | None = None,
        device_train_microbatch_size: int | None = None,
        iteration_length: int | None = None,
        seed: int | None = None,
        run_name: str | None = None,
        progress_bar: bool = True,
        strict: bool = False,
    ) -> None:
        if not isinstance(model, TrainableModel):
            raise TrainerError(
                f"model: got a {type(model).__name__}. Expected a TrainableModel, with forward(batch) and "
                "loss(outputs, batch); Classifier(module) wraps a plain classifier."
            )
        check_positive("device_train_microbatch_size", device_train_microbatch_size)
        check_positive("iteration_length", iteration_length)
        check_run_name(run_name)
        if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
            raise TrainerError(f"seed: got {seed!r}. Expected a whole number, or None.")
        seed = secrets.randbelow(2**31) if seed is None else seed
        seed_all(seed)
        asked = resolve_all(plugins, algorithms, callbacks, loggers)
        keywords = [name for name, wanted in {"progress_bar": progress_bar}.items() if wanted]
        self.plan: Plan = build_plan(with_defaults(asked, keywords))
        self.state = State(
            place(model, device),
            device=device_of(model, device),
            seed=seed,
            run_name=run_name or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
            engine=resolve_engine(parallelism),
            plan=self.plan,
        )
        self.surgery_report = self.state.surgery_report = SurgeryReport()
        destinations = [one.plugin for one in self.plan.plugins if isinstance(one.plugin, LoggerDestination)]
        self.logger = Logger(destinations, self.state.progress)
        self._hooks = self.plan.bind(self._guard, state=self.state, logger=self.logger)
        self._closed = False
        self._fitting = False
        self._begun: set[str] = set()  # plugins that had their init, so that only they are closed
        self._strict = strict
        self._train_subset_num_batches = train_subset_num_batches
        self._step_schedulers_every_batch = step_schedulers_every_batch
        self._eval_interval = Time.from_input(eval_interval, TimeUnit.EPOCH)
        self.state.max_duration = max_duration  # type: ignore[assignment]
        self.state.iteration_length = iteration_length
        self._check_iterations()
        self.state.device_train_microbatch_size = device_train_microbatch_size
        self.state.schedulers = tuple(as_list(schedulers))
        self.state.evaluators = as_evaluators(eval_dataloader, eval_subset_num_batches)
        self._data: DataSpec | None = None
        if train_dataloader is not None:
            self._set_train_data(train_dataloader)
        for evaluator in self.state.evaluators:
            evaluator.select(model.get_metrics(is_train=False))
        try:
            self._start(as_list(optimizers))
        except BaseException as error:
            self._fail(error)
            raise

    def _start(self, optimizers: list[OptimizerRequest]) -> None:
        state, plan = self.state, self.plan
        for active in plan.plugins:
            active.plugin.check(state)
        self._init_plugins()
        ready = [optimizer for optimizer in optimizers if isinstance(optimizer, torch.optim.Optimizer)]
        groups = ParameterGroups(state.model, ready)
        perform_surgery(state, self._strict)
        for call in plan.calls("model_transformed"):
            invoke(call, {"model": state.model, "report": self.surgery_report})
        state.model = state.engine.prepare(state.model, state.device)
        groups.repoint(state.model, [change.path for change in self.surgery_report.changes])
        made = build_optimizers(state.model, optimizers)
        state.optimizers = tuple(self._wrap(optimizer) for optimizer in made)
        if made:
            check_coverage(state.model, state.optimizers)
            check_reevaluation(state.optimizers, state.engine)
        check_schedulers(state.schedulers)
        state.train_metrics = state.model.get_metrics(is_train=True)
        for metric in state.train_metrics.values():
            if hasattr(metric, "to"):
                metric.to(state.device)
        self.logger.log_hyperparameters(
            {
                "run_name": state.run_name,
                "seed": state.seed,
                "device": str(state.device),
                "engine": state.engine.name,
                "plugins": [active.id for active in plan.plugins],
                "plan_digest": plan.digest,
            }
        )
        for name in ("before_load", "after_load"):
            for bound in getattr(self._hooks, name):
                bound()
        self._watch = StructureWatch(state.model, self.surgery_report, self._strict)
        seed_all(state.seed)  # what plugins drew while they started must not shift what training draws

    def _guard(self, call: PlannedCall, hook: str, bound: Callable[[], Any]) -> Callable[[], Any]:
        return self.logger.guard(self.plan.by_id(call.plugin).plugin, hook, bound)

    def _init_plugins(self) -> None:
        before = fingerprint(self.state.model)
        for call in self.plan.calls("init"):
            self._begun.add(call.plugin)
            invoke(call, {"state": self.state, "logger": self.logger})
            if changed := changed_paths(before, fingerprint(self.state.model)):
                raise SurgeryError(
                    f"{call.plugin}: changed the model in init, at {changed[0] or 'its root'}. Surgery belongs in the hooks "
                    "module_replacements or transform_model, where it is ordered, checked and reported."
                )
        self._begun |= {active.id for active in self.plan.plugins}

    def _wrap(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        for call in self.plan.calls("wrap_optimizer"):
            wrapped = invoke(call, {"optimizer": optimizer, "state": self.state})
            if wrapped is not None and not is_optimizer(wrapped):
                raise OptimizerError(
                    f"{call.plugin}.wrap_optimizer: returned {wrapped!r}. Expected an optimizer, or None."
                )
            optimizer = optimizer if wrapped is None else wrapped
        return optimizer

    def _set_train_data(self, train_dataloader: Any) -> None:
        self._data = DataSpec.of(train_dataloader)
        self.state.dataloader = self._data.dataloader
        self.state.dataloader_label = "train"
        length, limit = self._data.num_batches, self._train_subset_num_batches
        self.state.dataloader_len = length if limit < 0 else limit if length is None else min(length, limit)

    def fit(self, train_dataloader: Any = None, *, duration: int | str | Time | None = None) -> None:
        """Train until ``max_duration``. May be called again.

        Args:
            train_dataloader: Train on this from now on.
            duration: Train for so much more, whatever was trained before.

        Raises:
            TrainerError: there is no loader, optimizer or duration, or the trainer is closed.
        """
        for _ in self.steps(train_dataloader, duration=duration):
            pass

    def steps(self, train_dataloader: Any = None, *, duration: int | str | Time | None = None) -> Iterator[None]:
        """Train one batch each time the iterator is advanced; the arguments are those of ``fit``.

        An exception is passed to ``fit_failed``, the trainer closes, and the exception goes on.
        """
        steps = self._prepare_fit(train_dataloader, duration)
        try:
            yield from steps
        except GeneratorExit:
            raise
        except BaseException as error:
            self._fail(error)
            raise

    def _prepare_fit(self, train_dataloader: Any, duration: int | str | Time | None) -> Iterator[None]:
        """Check what ``fit`` was given, before anything begins, and return the loop."""
        state = self.state
        self._refuse_closed("fit")
        if train_dataloader is not None:
            self._set_train_data(train_dataloader)
            state.progress.restart_epoch()  # the place in the old loader means nothing in the new one
        if self._data is None:
            raise TrainerError("fit: no train_dataloader. Give one to Trainer or to fit.")
        if not state.optimizers:
            raise TrainerError(
                "fit: no optimizer. Give Trainer optimizers=torch.optim.AdamW(model.parameters(), lr=...), or a function "
                "of the parameters that makes one."
            )
        if duration is not None:
            more = Time.from_input(duration, TimeUnit.EPOCH)
            state.max_duration = Time(state.progress.value(more.unit) // 1, more.unit) + more
        if state.max_duration is None:
            raise TrainerError("fit: no max_duration. Give one to Trainer, or fit(duration=...).")
        self._check_iterations()
        state.resume_training()
        if state.stopped:
            log.warning("fit: max_duration=%s is reached already; nothing is trained.", state.max_duration)
        for optimizer in state.optimizers:
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        for evaluator in state.evaluators:
            check_subset(evaluator)
        evaluations = Evaluations(state, self._hooks, self.logger, self._eval_interval)
        by_batch = bool(self._step_schedulers_every_batch)
        self._fitting = True
        return training_steps(state, self._hooks, self.logger, self._data, evaluations, self._watch, by_batch)

    def _check_iterations(self) -> None:
        limit = self.state.max_duration
        if limit is not None and limit.unit is TimeUnit.ITERATION and self.state.iteration_length is None:
            raise TrainerError(f"max_duration: {limit} counts iterations. Give Trainer iteration_length=<epochs>.")

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise TrainerError(f"{what}: this trainer is closed. Make a new one.")

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
        self._refuse_closed("eval")
        evaluators: list[Evaluator] = (
            self.state.evaluators if eval_dataloader is None else as_evaluators(eval_dataloader, subset_num_batches)
        )
        if not evaluators:
            raise TrainerError("eval: no eval_dataloader. Give one to Trainer or to eval.")
        for evaluator in evaluators:
            check_subset(evaluator, subset_num_batches)
        limit = None if subset_num_batches < 0 else subset_num_batches
        try:
            for call in self._hooks.eval_standalone_start:
                call()
            evaluate(self.state, self._hooks, self.logger, evaluators, limit)
            for call in self._hooks.eval_standalone_end:
                call()
        except BaseException as error:
            annotate(error, self.state)
            raise
        labels = {evaluator.label for evaluator in evaluators}
        values = self.state.eval_metric_values
        return {name: value for name, value in values.items() if name.partition("/")[0] in labels}

    def predict(self, dataloader: Any, subset_num_batches: int = -1, *, return_outputs: bool = True) -> list[Any]:
        """Return the model's outputs for each batch, on the CPU; an empty list without ``return_outputs``."""
        self._refuse_closed("predict")
        try:
            return predict(self.state, self._hooks, DataSpec.of(dataloader), subset_num_batches, return_outputs)
        except BaseException as error:
            annotate(error, self.state)
            raise

    def close(self) -> None:
        """Run every plugin's ``close``, then the engine's. May be called twice.

        Raises:
            Exception: what a plugin raised, after all had their turn; several come as one ``ExceptionGroup``.
        """
        raise_all("closing the trainer failed", self._close())

    def _close(self) -> list[BaseException]:
        if self._closed:
            return []
        self._closed = True
        calls = [call for call in self.plan.calls("close") if call.plugin in self._begun]
        arguments = {"state": self.state, "logger": self.logger}
        errors = call_all([partial(invoke, call, arguments) for call in calls])
        for error in errors:
            annotate(error, self.state)
        return errors + call_all([self.state.engine.close])

    def _fail(self, error: BaseException) -> None:
        """Tell the plugins, close, and raise everything together if that fails too."""
        annotate(error, self.state)
        calls = self.plan.calls("fit_failed") if self._fitting else ()
        later = (
            call_all([partial(invoke, call, {"state": self.state, "error": error}) for call in calls]) + self._close()
        )
        if later:
            raise BaseExceptionGroup("the run failed, and so did closing it", [error, *later])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            for later in self._close():
                error.add_note(f"closing the trainer failed too: {type(later).__name__}: {later}")
