"""What the plugins and the loop share about a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernel_core.data.spec import device_of, get_item, set_item
from kernel_core.errors import TrainerError
from kernel_core.timing import Progress, Time, Timestamp, TimeUnit, reader
from kernel_core.train.randomness import SCOPES, Scope, keyed_generator

if TYPE_CHECKING:
    from kernel_core.engine import Engine
    from kernel_core.models import TrainableModel
    from kernel_core.registry.base import Plugin
    from kernel_core.registry.plan import Plan
    from kernel_core.surgery import SurgeryReport
    from kernel_core.train.evaluation import Evaluator


class State:
    """A run, as plugins see it.

    Attributes:
        model: The model: the user's own until the engine has prepared it.
        optimizers: The optimizers, wrapped where a plugin wraps them.
        schedulers: Learning rate schedules.
        engine: Who runs backward and step.
        plan: Which plugin runs when.
        surgery_report: What plugins changed in the model.
        device, precision, seed, run_name: As resolved by the trainer.
        dataloader, dataloader_label, dataloader_len: What is being read now; the length in batches, None if unknown.
        batch: The batch being worked on; inside ``before_forward`` … ``after_backward`` the microbatch on the device.
        outputs: What the model returned last.
        loss: The loss of the microbatch (attached), and at ``batch_end`` the detached mean over the batch.
        train_metrics, eval_metrics: Metric objects by name, and by evaluator label and name.
        train_metric_values, eval_metric_values: What they last computed: name, or ``label/name``, to number or tensor.
        evaluators: The evaluators of the run.
        progress: The counters behind ``timestamp`` as plain numbers, for what reads them every batch.
        max_duration: When training ends.
        iteration_length: Epochs in an iteration; None makes the whole run one.
        device_train_microbatch_size: Rows in a microbatch; None for the whole batch.
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
        self.device = device
        self.seed = seed
        self.run_name = run_name
        self.engine = engine
        self.plan = plan
        self.precision = precision
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.schedulers: tuple[Any, ...] = ()
        self.surgery_report: SurgeryReport
        self.dataloader: Iterable[Any] | None = None
        self.dataloader_label: str | None = None
        self.dataloader_len: int | None = None
        self.batch: Any = None
        self.outputs: Any = None
        self.loss: Any = None
        self.microbatch = 0
        self.train_metrics: dict[str, Any] = {}
        self.eval_metrics: dict[str, dict[str, Any]] = {}
        self.train_metric_values: dict[str, Any] = {}
        self.eval_metric_values: dict[str, Any] = {}
        self.evaluators: list[Evaluator] = []
        self.iteration_length: int | None = None
        self.device_train_microbatch_size: int | None = None
        self.progress = Progress()
        self.eval_progress = Progress()
        self.predict_progress = Progress()
        self._max_duration: Time | None = None
        self._limit: float = float("inf")
        self._clock = reader(TimeUnit.BATCH)
        self._stopped = False

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

    def stop_training(self) -> None:
        """End training after the current batch."""
        self._stopped = True

    def resume_training(self) -> None:
        """Take back ``stop_training``; called when ``fit`` begins."""
        self._stopped = False

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
            return Time(done / limit.value, TimeUnit.DURATION)
        return Time(float(self.progress.value(limit.unit)) / limit.value, TimeUnit.DURATION)

    def compute_outputs(self, batch: Any) -> Any:
        """Return the model's outputs for ``batch``, in the precision of the run: the one place of a training forward pass."""
        return self.model(batch)

    def compute_loss(self, batch: Any) -> Tensor:
        """Return the model's loss of ``outputs`` for ``batch``: the one place where a training loss is computed."""
        return self.model.loss(self.outputs, batch)  # type: ignore[no-any-return]

    def generator(
        self, plugin: Plugin, scope: Scope = "batch", *, sample: int | None = None, key: str = ""
    ) -> torch.Generator:
        """Return a generator on the device of the batch that depends on (seed, plugin id, batch) and, by ``scope``, on no more.

        Args:
            plugin: Whose stream it is: pass ``self``.
            scope: ``batch``: the same on every rank. ``rank``: differs by rank. ``microbatch``: by rank and microbatch.
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
                parts.append(self.engine.rank)
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
