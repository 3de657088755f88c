"""What the plugins and the loop share about a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kernel_core.data.spec import device_of, get_item, set_item
from kernel_core.errors import TrainerError
from kernel_core.optim.scheduling import times_of
from kernel_core.timing import Progress, Time, Timestamp, TimeUnit, reader
from kernel_core.train.precision import check_precision
from kernel_core.train.randomness import SCOPES, Scope, keyed_generator

if TYPE_CHECKING:
    from kernel_core.engine import Engine, ModelTransform
    from kernel_core.models import TrainableModel
    from kernel_core.registry.base import Plugin
    from kernel_core.registry.plan import Plan
    from kernel_core.surgery import SurgeryReport
    from kernel_core.train.evaluator import Due, Evaluator


class State:
    """A run, as plugins see it.

    Attributes:
        model: The model: the user's own until the engine has prepared it.
        optimizers: The optimizers, wrapped where a plugin wraps them.
        schedulers: Learning rate schedules.
        engine: Who runs backward and step.
        transforms: What else changes how the model computes, in order.
        plan: Which plugin runs when.
        silent: The ids of the loggers that are left out on this rank.
        surgery_report: What plugins changed in the model.
        device, seed, run_name: As resolved by the trainer.
        dataloader, dataloader_label, dataloader_len: What is being read now; the length in batches, None if unknown.
        epoch_share: ``(samples, tokens) -> share of a training epoch``, None where its size is not known.
        batch: The batch being worked on; inside ``before_forward`` … ``after_backward`` the microbatch on the device.
        outputs: What the model returned last.
        loss: The loss of the microbatch (attached), and at ``batch_end`` the detached mean over the batch.
        loss_parts: Where ``loss`` of the model returns several: the detached mean of each over the batch, by name.
        latest_parts: Those of the latest microbatch alone, attached.
        compute_outputs: ``batch -> outputs``: a forward pass of the model in the precision of the run.
        compute_loss: ``batch -> loss`` of ``outputs`` for ``batch``: the one way a training loss is computed, in the
            precision of the run; the total where the model returns several. Keyword arguments go to the model's ``loss``.
            Algorithms that mix losses call it.
        prepare_batch: ``batch -> batch`` as the model gets it in training: on the device, with the microbatch transforms.
        train_metrics, eval_metrics: Metric objects by name, and by evaluator label and name.
        train_metric_values, eval_metric_values: What they last computed: name, or ``label/name``, to number or tensor.
        evaluators: The evaluators of the run.
        eval_interval: When those evaluate that do not say: a time, or a function ``(state, event) -> bool``.
        progress: The counters behind ``timestamp`` as plain numbers, for what reads them every batch.
        max_duration: When training ends.
        microbatch: The number of the microbatch in its batch.
        evaluation: How often the batch has been evaluated before, by an optimizer that does so more than once.
        time_out_s: Time since the last batch that is not training: evaluation, and what the user does between steps.
        spin_dataloaders: Whether an epoch that was left is entered again at its place.
        train_label: The middle part of ``metrics/<label>/<name>`` of the training metrics.
        device_train_microbatch_size: Rows in a microbatch; None for the whole batch. With ``auto_microbatching`` the size
            found so far.
        auto_microbatching: Whether the size is looked for.
        trying: Whether the present batch is a try that other ranks may fail, so that gradients are averaged after it.
        grad_accum: Microbatches in a batch, instead of a size.
        interrupted: The number of the signal that ends the run after this step, None if there was none.
        wants_stop, wanted_signal: What this rank asks for and not all ranks know yet; they take effect together, with the
            next batch at the latest.
        eval_timestamp, predict_timestamp: Progress of the evaluation or prediction that is running.
    """

    def __init__(
        self,
        model: TrainableModel,
        *,
        device: torch.device,
        seed: int,
        run_name: str,
        engine: Engine,
        plan: Plan,
        precision: str = "fp32",
    ) -> None:
        self.model: Any = model
        self.compute_outputs: Callable[[Any], Any]
        self.compute_loss: Callable[..., Any]
        self.prepare_batch: Callable[[Any], Any] = lambda batch: batch
        self.device = device
        self.seed = seed
        self.run_name = run_name
        self.engine = engine
        self.transforms: Sequence[ModelTransform] = ()
        self.plan = plan
        self.silent = {one.id for one in plan.plugins if engine.rank and not getattr(one.plugin, "every_rank", True)}
        self.precision = precision
        self.bind_model(lambda function: function)
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.schedulers: tuple[Any, ...] = ()
        self.surgery_report: SurgeryReport
        self.dataloader: Iterable[Any] | None = None
        self.dataloader_label: str | None = None
        self.dataloader_len: int | None = None
        self.epoch_share: Callable[[float, float], float | None] | None = None
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.loss_parts: dict[str, Tensor] = {}
        self.latest_parts: dict[str, Tensor] = {}
        self.microbatch = 0
        self.evaluation = 0
        self.time_out_s = 0.0
        self.spin_dataloaders = True
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.train_metric_values: dict[str, Any] = {}
        self.eval_metric_values: dict[str, Any] = {}
        self.evaluators: list[Evaluator] = []
        self.eval_interval: Time | Due = Time(1, TimeUnit.EPOCH)
        self.train_label = "train"
        self.device_train_microbatch_size: int | None = None
        self.auto_microbatching = False
        self.trying = False
        self.grad_accum: int | None = None
        self.interrupted: int | None = None
        self.progress = Progress()
        self.eval_progress = Progress()
        self.predict_progress = Progress()
        self._max_duration: Time | None = None
        self._limit: float = float("inf")
        self._clock = reader(TimeUnit.BATCH)
        self._iteration_length: Time | None = None
        self._stopped = False
        self.wants_stop = False
        self.wanted_signal: int | None = None

    @property
    def precision(self) -> str:
        """The number format of forward and loss. A plugin may set it in ``init``, not later.

        Raises:
            TrainerError: there is no such precision, or the device lacks it.
        """
        return self._precision

    @precision.setter
    def precision(self, value: str) -> None:
        self._precision = check_precision(value, self.device)

    def bind_model(self, cast: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Make ``compute_outputs`` and ``compute_loss`` those of the present model, computing as ``cast`` makes them."""
        loss = cast(self.model.loss)

        def compute_loss(batch: Any, **options: Any) -> Any:
            value = loss(self.outputs, batch, **options)
            return value if value.__class__ is Tensor else total_loss(self, value)

        self.compute_outputs = cast(self.engine.forward(self.model))
        self.compute_loss = compute_loss

    @property
    def iteration_length(self) -> Time | None:
        """Epochs or tokens in an iteration; None makes the whole run one.

        Raises:
            TrainerError: another unit, or nothing at all.
        """
        return self._iteration_length

    @iteration_length.setter
    def iteration_length(self, value: Time | str | int | None) -> None:
        length = None if value is None else Time.from_input(value, TimeUnit.EPOCH)
        if length is not None and (length.unit not in (TimeUnit.EPOCH, TimeUnit.TOKEN) or length.value < 1):
            raise TrainerError(
                f"iteration_length: got {length}. Expected at least one epoch or token, such as 2, '2ep' or '1e6tok'."
            )
        self._iteration_length = length

    def iteration_in(self, unit: TimeUnit) -> int:
        """Return the length of an iteration in ``unit``, 0 if it is not measured so."""
        length = self._iteration_length
        return int(length.value) if length is not None and length.unit is unit else 0

    @property
    def at_iteration_start(self) -> bool:
        """Whether the next batch is the first of an iteration."""
        progress = self.progress
        if self.iteration_in(TimeUnit.TOKEN):
            return progress.token_in_iteration == 0
        return progress.epoch_in_iteration == 0 and progress.batch_in_epoch == 0

    def counts(self, unit: TimeUnit) -> bool:
        """Whether something of the run is measured in ``unit``: its end, iterations, schedules or evaluators."""
        intervals = [evaluator.eval_interval or self.eval_interval for evaluator in self.evaluators]
        times = [self._max_duration, self._iteration_length, *intervals]
        times += [time for schedule in self.schedulers for time in times_of(schedule)]
        return any(isinstance(time, Time) and time.unit is unit for time in times)

    @property
    def timestamp(self) -> Timestamp:
        """How far training has come (built when read: about 1 µs)."""
        return self.progress.timestamp()

    @property
    def eval_timestamp(self) -> Timestamp:
        """How far the running evaluator has come."""
        return self.eval_progress.timestamp()

    @property
    def predict_timestamp(self) -> Timestamp:
        """How far the running prediction has come."""
        return self.predict_progress.timestamp()

    @property
    def rank(self) -> int:
        """This process's number among all."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.engine.world_size

    @property
    def max_duration(self) -> Time | None:
        """When training ends."""
        return self._max_duration

    @max_duration.setter
    def max_duration(self, value: Time | str | int | None) -> None:
        if value is None:
            self._max_duration, self._limit = None, float("inf")
            return
        duration = Time.from_input(value, TimeUnit.EPOCH)
        if duration.unit is TimeUnit.DURATION:
            raise TrainerError(f"max_duration: got {duration}. A share of the run cannot say how long the run is.")
        if duration.value < 0:
            raise TrainerError(f"max_duration: got {duration}. Expected a time of at least 0.")
        self._max_duration, self._limit, self._clock = duration, duration.value, reader(duration.unit)

    @property
    def stopped(self) -> bool:
        """Whether ``stop_training`` was called, or ``max_duration`` is reached."""
        return self._stopped or self._clock(self.progress) >= self._limit  # read after every batch

    @property
    def stop(self) -> Literal["now", "soon"] | None:
        """Whether ``stop_training`` has ended the run, or is about to; a signal does not count."""
        if self._stopped and self.interrupted is None:
            return "now"
        return "soon" if self.wants_stop else None

    def stop_training(self) -> None:
        """End training after the current batch; of several ranks, after the first batch in which all know of it.

        Between epochs they know at once.
        """
        self.wants_stop = True
        if self.world_size == 1:
            self.stop_now()

    def interrupt(self, signal: int) -> None:
        """End training, evaluation or prediction because of a signal, as ``stop_training`` does."""
        self.wanted_signal = signal
        if self.world_size == 1:
            self.stop_now(signal)

    def stop_now(self, signal: int | None = None) -> None:
        """End what is going on after the current batch; of several ranks, all call it in the same batch."""
        self._stopped = True
        if signal is not None:
            self.interrupted = signal

    def resume_training(self) -> None:
        """Take back what ended the work before; called when work begins."""
        self._stopped = self.wants_stop = False
        self.interrupted = self.wanted_signal = None

    def get_elapsed_duration(self) -> Time | None:
        """Return the share of ``max_duration`` that has passed, None if there is none.

        Epochs are measured in batches where the loader's length is known, so that schedules move within an epoch.
        """
        limit = self._max_duration
        if limit is None:
            return None
        if limit.value == 0:
            return Time(1.0, TimeUnit.DURATION)
        if limit.unit is TimeUnit.EPOCH:
            done: float = self.progress.epoch
            if self.dataloader_len:
                done += self.progress.batch_in_epoch / self.dataloader_len
            elif self.epoch_share is not None:
                done += self.epoch_share(self.progress.sample_in_epoch, self.progress.token_in_epoch) or 0.0
            return Time(done / limit.value, TimeUnit.DURATION)
        return Time(float(self.progress.value(limit.unit)) / limit.value, TimeUnit.DURATION)

    def generator(
        self, plugin: Plugin, scope: Scope = "batch", *, sample: int | None = None, key: str = ""
    ) -> torch.Generator:
        """Return a generator on the device of the batch that depends on (seed, plugin id, batch) and, by ``scope``, on no more.

        Args:
            plugin: Whose stream it is: pass ``self``.
            scope: ``batch``: the same on every rank. ``rank``: differs between ranks that read different data.
                ``microbatch``: between those and between microbatches.
                ``sample``: by the sample's id alone, together with the epoch instead of the batch.
            sample: The id, for the scope ``sample``.
            key: Tells apart several streams of one plugin in one batch; without it two calls give equal streams.

        Raises:
            ValueError: an unknown scope, or ``sample`` missing.
        """
        parts: list[object] = [self.seed, self.plan.id_of(plugin), key, scope]
        if scope == "sample":
            if sample is None:
                raise ValueError("state.generator: the scope 'sample' needs sample=<id of the sample>.")
            parts += [self.progress.epoch, sample]
        elif scope in SCOPES:
            parts.append(self.progress.batch)
            if scope != "batch":
                parts.append(self.engine.data_rank)  # ranks that hold parts of one model draw for the same rows
            if scope == "microbatch":
                parts.append(self.microbatch)
        else:
            raise ValueError(f"state.generator: unknown scope {scope!r}. Expected one of {', '.join(SCOPES)}.")
        return keyed_generator(device_of(self.batch) or self.device, *parts)

    def batch_get_item(self, key: Any) -> Any:
        """Return a part of the batch by index, key, or a function."""
        return get_item(self.batch, key)

    def batch_set_item(self, key: Any, value: Any) -> None:
        """Set a part of the batch by index, key, or a pair of functions (getter, setter)."""
        self.batch = set_item(self.batch, key, value)


def total_loss(state: State, loss: Any) -> Any:
    """Return the loss to train on of several: their entry ``total``, else their sum; keep the parts in ``latest_parts``.

    Raises:
        TrainerError: it is no tensor, and no mapping or sequence of tensors.
    """
    if isinstance(loss, Tensor) or (hasattr(loss, "backward") and hasattr(loss, "detach")):
        return loss
    if isinstance(loss, Mapping):
        parts = dict(loss)
    elif isinstance(loss, list | tuple):
        parts = {str(index): part for index, part in enumerate(loss)}
    else:
        parts = {}
    if not parts or not all(isinstance(part, Tensor) for part in parts.values()):
        raise TrainerError(
            f"loss: {type(state.model).__name__}.loss returned {loss!r:.80}, a {type(loss).__name__}. Expected a scalar tensor "
            "attached to the graph, or a mapping or sequence of them. Do not call .item() or .detach() on it."
        )
    total = parts.pop("total", None)
    state.latest_parts = parts
    return sum(parts.values()) if total is None else total
