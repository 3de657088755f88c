"""Every hook of the kernel, in the order in which a run fires them. The one page a plugin author reads.

A plugin answers a hook with a method of the same name marked ``@hookimpl``; it takes the arguments it needs, by name.
Each docstring says when the hook fires, what an answer may change, and what a return value means (where nothing is
said about it, it is ignored). ``order`` is the direction in which the plugins of one band run:

* ``forward``: the order of the plan. Algorithms, then callbacks, then loggers.
* ``reverse``: the same order backwards inside each band, so that what was done last is undone first.

``closes`` names the hook that opens the pair which this one ends. ``since``, ``deprecated`` and ``replaced_by`` speak of levels
of the hook interface, ``HOOK_API``: docs/hook-api.md has the policy.

What ``state`` holds: from ``fit_start`` on the dataloader, its length and ``max_duration``; ``state.batch`` is the whole
batch of this rank, as the loader gave it (perhaps on its way to an accelerator already), outside ``before_forward`` …
``after_backward``, where it is the current microbatch on the device; ``state.outputs`` is set from ``after_forward``,
``state.loss`` from ``after_loss``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import pluggy

from kernel_core.errors import HookError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kernel_core.checkpoint.request import SaveRequest
    from kernel_core.checkpoint.writer import Saved
    from kernel_core.logger import Logger
    from kernel_core.registry.plan import HookAdder
    from kernel_core.surgery import SurgeryReport
    from kernel_core.train.state import State

PROJECT = "kernel"
HOOK_API = 1
Band = Literal["algorithms", "callbacks", "loggers"]
BANDS: tuple[Band, ...] = ("algorithms", "callbacks", "loggers")
F = TypeVar("F", bound=Callable[..., Any])

_pluggy_spec = pluggy.HookspecMarker(PROJECT)
_pluggy_impl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True)
class HookSpec:
    """What the kernel knows about a hook besides its arguments.

    Attributes:
        order: The direction in which the plugins of a band run.
        closes: The hook that opens the pair which this one ends.
        bands: The order of the bands.
        since: The level of the hook interface that brought it.
        deprecated: The level from which on it should no longer be answered; it still fires.
        replaced_by: What to answer instead.
    """

    order: Literal["forward", "reverse"] = "forward"
    closes: str | None = None
    bands: tuple[Band, ...] = BANDS
    since: int = 1
    deprecated: int | None = None
    replaced_by: str | None = None


class HookDeprecationWarning(DeprecationWarning):
    """A plugin answers a hook that will go. The command ``kernel`` shows it; elsewhere Python's filters decide."""


@dataclass(frozen=True)
class HookConstraints:
    """The order that one implementation asks for on one hook only."""

    before: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()


def hookspec(
    *,
    order: Literal["forward", "reverse"] = "forward",
    closes: str | None = None,
    bands: tuple[Band, ...] = BANDS,
    since: int = 1,
    deprecated: int | None = None,
    replaced_by: str | None = None,
) -> Callable[[F], F]:
    """Mark a function as a hookspec. Plugins that define hooks of their own use it too.

    Args:
        order, closes, bands, since, deprecated, replaced_by: Those of ``HookSpec``.
    """

    def mark(function: F) -> F:
        spec = HookSpec(order, closes, bands, since, deprecated, replaced_by)
        function.kernel_hook = spec  # type: ignore[attr-defined]
        return _pluggy_spec(function)

    return mark


@overload
def hookimpl(function: F) -> F: ...
@overload
def hookimpl(*, before: Iterable[str] = (), after: Iterable[str] = (), optional: bool = False) -> Callable[[F], F]: ...
def hookimpl(
    function: Callable[..., Any] | None = None,
    *,
    before: Iterable[str] = (),
    after: Iterable[str] = (),
    optional: bool = False,
    **unsupported: Any,
) -> Any:
    """Mark a method as the answer to the hook of its name.

    Args:
        function: The method, when used without parentheses.
        before: Plugins or ``role:`` words that must run later *on this hook*, as written, whatever its direction.
        after: The same for those that must run earlier.
        optional: The hook may be unknown, because the package that defines it need not be installed.

    Raises:
        HookError: an option of pluggy's that the kernel does not have (``tryfirst``, ``trylast``, wrappers).
    """
    if unsupported:
        raise HookError(
            f"@hookimpl: unknown option {', '.join(sorted(unsupported))}. There is no first or last here and no "
            "wrapper. Declare before={...} or after={...} with plugin names or roles."
        )

    def mark(method: F) -> F:
        method.kernel_constraints = HookConstraints(_words(before), _words(after))  # type: ignore[attr-defined]
        return _pluggy_impl(optionalhook=optional)(method)

    return mark if function is None else mark(function)


def _words(value: Iterable[str]) -> frozenset[str]:
    return frozenset({value} if isinstance(value, str) else value)


# --- start-up ---------------------------------------------------------------------------------------------------


@hookspec()
def kernel_addhooks(hooks: HookAdder) -> None:
    """Fires first of all. Call ``hooks.add(module)`` to define hooks of your own, marked with ``hookspec``."""


@hookspec()
def instrument(part: str, call: Callable[..., Any]) -> Callable[..., Any] | None:  # type: ignore[empty-body]
    """Return a function to be called instead of ``call``, to time or trace that part of the loop; None leaves it alone.

    Fires once for each part when the loop is put together, never in a batch, so that what nobody looks at costs nothing.
    ``part`` is ``<plugin>.<hook>`` for a plugin's answer to a hook, or a phase: ``data`` (the next batch), ``forward``,
    ``loss``, ``backward``, ``step`` (the optimizers, with all that they evaluate inside), ``evaluation``. The function
    must pass arguments, result and exceptions on unchanged.
    """


@hookspec(bands=("loggers", "callbacks", "algorithms"))
def init(state: State, logger: Logger) -> None:
    """Fires once, at the start of ``Trainer``: loggers first, so that they can take what the others log.

    The model is on its device and not yet changed. Set up your own things here; ``state.precision`` may be set.
    Changing the model here is an error: that is what the surgery hooks are for.
    """


Replacements = Mapping["type[nn.Module]", Callable[["nn.Module", str], "nn.Module | None"]]


@hookspec()
def module_replacements(state: State) -> Replacements:  # type: ignore[empty-body]
    """Surgery by type. Return ``{module type: function(module, path) -> new module or None}``.

    Fires once for each plugin, in plan order, before the engine prepares the model. The kernel walks the model, calls the
    function of the exact type of a module, else that of its nearest base, and puts the answer in its place; None keeps
    it. What a plugin put in place it is not asked about again; later plugins see it. A replacement must be a module that
    accepts every positional call of the old one; it gets the old one's device, dtype and training mode, and stays frozen
    where that was frozen whole.
    """


@hookspec()
def transform_model(model: nn.Module, report: SurgeryReport, state: State) -> None:
    """Surgery that is not by type. Change ``model`` in place and call ``report.record(path, old, new, what)`` for each.

    Fires for each plugin right after its ``module_replacements``.
    """


@hookspec()
def model_materialized(model: nn.Module) -> None:
    """Set values that the surgery of this plugin needs in parameters and buffers.

    Fires right after this plugin's ``transform_model`` for a model with real tensors, and after materialisation for one
    that was built on the meta device.
    """


@hookspec()
def model_transformed(model: nn.Module, report: SurgeryReport) -> None:
    """Fires once when all surgery is done. Look at the final model; change nothing."""


@hookspec()
def precision_context(state: State) -> Callable[[], AbstractContextManager[Any]]:  # type: ignore[empty-body]
    """Return a function that makes a context around every training forward and loss, inside autocast: for fp8 and the like.

    Fires when the precision of the run is set up. Such a context costs on every microbatch: leave the hook out of
    ``active_hooks`` where ``state.precision`` does not call for it, or return None.
    """


@hookspec()
def wrap_optimizer(optimizer: torch.optim.Optimizer, state: State) -> torch.optim.Optimizer | None:  # type: ignore[empty-body]
    """Return an optimizer to use instead of ``optimizer``, or None to keep it.

    Fires for each optimizer after its groups point to the model's final parameters. Each plugin gets the answer of the
    one before.
    """


@hookspec()
def before_load(state: State, logger: Logger) -> None:
    """Fires before a checkpoint is loaded, and also when there is none to load. Everything to be restored exists."""


@hookspec(closes="before_load")
def after_load(state: State, logger: Logger) -> None:
    """Fires when the restored state is in place. Forward: it undoes nothing."""


# --- training ---------------------------------------------------------------------------------------------------


@hookspec()
def fit_start(state: State, logger: Logger) -> None:
    """Fires when ``fit`` begins, with dataloader and ``max_duration`` set. Datasets may be given transforms here."""


@hookspec()
def iteration_start(state: State, logger: Logger) -> None:
    """Fires before the first batch of an iteration: epochs or tokens set by ``iteration_length``, else the whole run."""


@hookspec()
def epoch_start(state: State, logger: Logger) -> None:
    """Fires before the first batch of an epoch."""


@hookspec()
def before_dataloader(state: State, logger: Logger) -> None:
    """Fires before a batch is asked of the loader, also before the call that finds it exhausted."""


@hookspec(closes="before_dataloader")
def after_dataloader(state: State, logger: Logger) -> None:
    """Fires when ``state.batch`` is a new batch, counted as the loader gave it. Change, select or reshape its rows here."""


@hookspec()
def batch_start(state: State, logger: Logger) -> None:
    """Fires at the start of a step. The last place where ``state.batch`` may get other rows."""


@hookspec()
def before_train_batch(state: State, logger: Logger) -> None:
    """Fires before gradients are zeroed and the microbatches run; once more for each re-evaluation of an optimizer."""


@hookspec()
def before_forward(state: State, logger: Logger) -> None:
    """Fires before the forward pass of each microbatch. Inputs in ``state.batch`` may be changed."""


@hookspec(order="reverse", closes="before_forward")
def after_forward(state: State, logger: Logger) -> None:
    """Fires when ``state.outputs`` is set. Outputs may be changed."""


@hookspec()
def before_loss(state: State, logger: Logger) -> None:
    """Fires before the loss is computed. Targets in ``state.batch`` may be changed, to be restored in ``after_loss``."""


@hookspec(order="reverse", closes="before_loss")
def after_loss(state: State, logger: Logger) -> None:
    """Fires when ``state.loss`` is set: a scalar, attached to the graph. It may be replaced by another scalar."""


@hookspec()
def before_backward(state: State, logger: Logger) -> None:
    """Fires before the backward pass of each microbatch."""


@hookspec(order="reverse", closes="before_backward")
def after_backward(state: State, logger: Logger) -> None:
    """Fires after the backward pass of each microbatch. Gradients are those accumulated so far."""


@hookspec(closes="before_train_batch")
def after_train_batch(state: State, logger: Logger) -> None:
    """Fires when the gradients of the batch are complete, averaged and unscaled. Change gradients here. Forward."""


@hookspec(closes="batch_start")
def batch_end(state: State, logger: Logger) -> None:
    """Fires after the optimizer step. The timestamp has advanced; ``state.loss`` is the detached mean over the batch.

    The place to change what a plugin keeps between batches: up to here a batch can still be tried again.
    """


@hookspec()
def eval_before_all(state: State, logger: Logger) -> None:
    """Fires before the first evaluator of an evaluation, during training and in ``Trainer.eval`` alike."""


@hookspec()
def eval_start(state: State, logger: Logger) -> None:
    """Fires before each evaluator. The model is in eval mode, gradients are off, ``dataloader_label`` is its label."""


@hookspec()
def eval_batch_start(state: State, logger: Logger) -> None:
    """Fires when ``state.batch`` is a batch of the evaluator, on the device."""


@hookspec()
def eval_before_forward(state: State, logger: Logger) -> None:
    """Fires before ``eval_forward``."""


@hookspec(order="reverse", closes="eval_before_forward")
def eval_after_forward(state: State, logger: Logger) -> None:
    """Fires when ``state.outputs`` is set, before the metrics are updated with it."""


@hookspec(closes="eval_batch_start")
def eval_batch_end(state: State, logger: Logger) -> None:
    """Fires after each batch of an evaluator; ``eval_timestamp`` has advanced."""


@hookspec(order="reverse", closes="eval_start", bands=("callbacks", "algorithms", "loggers"))
def eval_end(state: State, logger: Logger) -> None:
    """Fires when the metrics of an evaluator are computed. Callbacks come first: they see the weights that were evaluated."""


@hookspec(order="reverse", closes="eval_before_all")
def eval_after_all(state: State, logger: Logger) -> None:
    """Fires after the last evaluator."""


@hookspec()
def batch_checkpoint(state: State, logger: Logger) -> None:
    """Fires at the end of a step, after its evaluation: the point at which a run can be saved in mid-epoch."""


@hookspec(closes="epoch_start")
def epoch_end(state: State, logger: Logger) -> None:
    """Fires when the loader is exhausted. The timestamp already counts the epoch. An epoch cut short does not fire it."""


@hookspec()
def epoch_checkpoint(state: State, logger: Logger) -> None:
    """Fires after ``epoch_end`` and its evaluation."""


@hookspec(closes="iteration_start")
def iteration_end(state: State, logger: Logger) -> None:
    """Fires when an iteration of ``iteration_length`` is complete. The timestamp already counts it."""


@hookspec()
def iteration_checkpoint(state: State, logger: Logger) -> None:
    """Fires after ``iteration_end``."""


@hookspec()
def checkpoint_folder(run_name: str) -> str | None:  # type: ignore[empty-body]
    """Return the folder, a path or URL, in which this plugin keeps the checkpoints of that run, so that it can be resumed.

    Fires before anything starts, where the run looks for a checkpoint of its own (``autoresume``).
    """


@hookspec()
def should_save(state: State, event: str) -> SaveRequest | None:  # type: ignore[empty-body]
    """Return what to save now, or None. The kernel captures the run right then, and writes it while training goes on.

    Fires when every answer to the hook that ``event`` names has returned: ``batch_checkpoint``, ``epoch_checkpoint``,
    ``iteration_checkpoint``, ``fit_end``; with ``interrupted`` when a signal ends the run, and with ``finished`` where a fit
    finds nothing left to train. Every rank must answer alike.
    """


@hookspec(closes="should_save")
def checkpoint_saved(state: State, logger: Logger, checkpoint: Saved) -> None:
    """Fires when a checkpoint is durable, at the first step boundary at which every rank knows of it. Forward.

    One that could not be written fires nothing: the run fails, at such a boundary too.
    """


@hookspec(closes="fit_start")
def fit_end(state: State, logger: Logger) -> None:
    """Fires when training is over, after the last evaluation. Does not fire when ``fit`` failed or a signal ended it."""


# --- evaluation and prediction on their own ---------------------------------------------------------------------


@hookspec()
def eval_standalone_start(state: State, logger: Logger) -> None:
    """Fires at the start of ``Trainer.eval``."""


@hookspec(closes="eval_standalone_start")
def eval_standalone_end(state: State, logger: Logger) -> None:
    """Fires at the end of ``Trainer.eval``."""


@hookspec()
def predict_start(state: State, logger: Logger) -> None:
    """Fires at the start of ``Trainer.predict``. The model is in eval mode, gradients are off."""


@hookspec()
def predict_batch_start(state: State, logger: Logger) -> None:
    """Fires when ``state.batch`` is a batch to predict, on the device."""


@hookspec()
def predict_before_forward(state: State, logger: Logger) -> None:
    """Fires before the forward pass of a prediction."""


@hookspec(order="reverse", closes="predict_before_forward")
def predict_after_forward(state: State, logger: Logger) -> None:
    """Fires when ``state.outputs`` is the prediction. It may be changed."""


@hookspec(closes="predict_batch_start")
def predict_batch_end(state: State, logger: Logger) -> None:
    """Fires after each predicted batch; ``predict_timestamp`` has advanced."""


@hookspec(order="reverse", closes="predict_start", bands=("callbacks", "algorithms", "loggers"))
def predict_end(state: State, logger: Logger) -> None:
    """Fires at the end of ``Trainer.predict``."""


# --- the end ----------------------------------------------------------------------------------------------------


@hookspec()
def fit_failed(state: State, error: BaseException) -> None:
    """Fires when ``fit``, ``eval`` or ``predict`` ended by an exception; after a failed ``fit``, ``close`` follows.

    Write down what helps, put back what was swapped for an evaluation; issue no collective.
    """


@hookspec()
def close(state: State, logger: Logger) -> None:
    """Fires once, when the trainer closes, for every plugin, whatever another one raises. Free files and threads."""
