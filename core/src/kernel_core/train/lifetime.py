"""When a trainer works, when it is interrupted or fails, and how it closes."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from kernel_core.errors import Interrupted, TrainerError
from kernel_core.logger import Logger
from kernel_core.registry.plan import invoke
from kernel_core.train.failure import annotate, call_all
from kernel_core.train.interrupts import signals_noted
from kernel_core.train.state import State

log = logging.getLogger(__name__)


class Lifetime:
    """The life of one trainer.

    Attributes:
        begun: The ids of the plugins that had their ``init``, so that only they are closed.
        before_close: Called first when the trainer closes, with whether it failed.
        at_failure: Told of the error that ended the run.
        at_close: What else is put back when the trainer closes.
        checkpoint: Returns where the checkpoint is from which a run that a signal ended can go on, None if there is none.
        closed: Whether it is.
    """

    def __init__(self, state: State, logger: Logger) -> None:
        self._state, self._logger = state, logger
        self.begun: set[str] = set()
        self.before_close: list[Callable[[bool], None]] = []
        self.at_failure: list[Callable[[BaseException], None]] = []
        self.at_close: list[Callable[[], None]] = []
        self.checkpoint: Callable[[], str | None] = lambda: None
        self._failed = False
        self.closed = False
        self._fitting = False  # whether a fit has ever begun, which plugins are told of when something fails
        self._working = False
        self._closing = False
        self._passes = 0  # evaluations and predictions that are going on, perhaps between two steps of a fit
        self._suspended = False  # whether a fit waits for its next step to be asked for

    @property
    def busy(self) -> bool:
        """Whether the trainer is at work, or closing; a fit that waits to be asked for its next step is not."""
        return (self._working and not self._suspended) or self._passes > 0 or self._closing

    def refuse_closed(self, what: str) -> None:
        """Refuse to work when closed.

        Raises:
            TrainerError: it is.
        """
        if self.closed:
            raise TrainerError(f"{what}: this trainer is closed. Make a new one.")

    def drive(self, steps: Iterator[None], after_first: Callable[[], None]) -> Iterator[None]:
        """Yield at each of ``steps``; end in order after a signal, and close after an error.

        Args:
            after_first: Called after the first step, before it is given out.
        """
        self._fitting = True
        self._suspended = False  # one that was left in the middle may have been
        begun = False
        try:
            with self._work(fitting=True):
                for _ in steps:
                    if not begun:
                        after_first()
                        begun = True
                    self._suspended = True
                    yield
                    self._suspended = False
                    self.refuse_closed("fit")
        except GeneratorExit:
            raise
        except BaseException as error:
            if not self._ended_in_order(error):
                self.fail(error)
            raise

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work on something inside the block; end in order after a signal, and tell the plugins of an error."""
        self._passes += 1
        try:
            with self._work():
                yield
        except BaseException as error:
            inside_fit = self._working and not self._suspended  # which tells the plugins itself
            if not (inside_fit or self._ended_in_order(error)):
                if self._state.world_size > 1:  # the others wait for this one, and cannot go on without it
                    self._fitting = True
                    self.fail(error)
                else:
                    self._tell(error)
            raise
        finally:
            self._passes -= 1

    @contextmanager
    def _work(self, fitting: bool = False) -> Iterator[None]:
        """Note signals inside the block; after one, close and raise ``Interrupted``."""
        if self._working:  # inside another such block, which sees to it
            yield
            return
        state = self._state
        self._working, state.interrupted, state.wanted_signal = True, None, None
        try:
            with signals_noted(state):
                yield
        except GeneratorExit:
            if state.wanted_signal is not None:  # nobody asks for another step, so nobody would hear of it
                signal.raise_signal(state.wanted_signal)
            raise
        finally:
            self._working = False
        if state.wanted_signal is not None or state.interrupted is not None:
            saved = self.checkpoint() if fitting else None
            log.warning("the run %r ended after batch %d.", state.run_name, state.progress.batch)
            self.close()
            raise Interrupted(state.interrupted or state.wanted_signal or 0, saved)

    def _ended_in_order(self, error: BaseException) -> bool:
        """Whether ``error`` says that a signal ended the work; not that a second one tore it apart."""
        return self.closed and isinstance(error, Interrupted)

    def close(self) -> list[BaseException]:
        """Run every plugin's ``close``, then the engine's, whatever they raise; return that. May be called twice."""
        if self.closed:
            return []
        self.closed = self._closing = True
        state = self._state
        arguments = {"state": state, "logger": self._logger}
        errors = call_all([partial(call, self._failed) for call in self.before_close])
        calls = [call for call in state.plan.calls("close") if call.plugin in self.begun]
        errors += call_all([partial(invoke, call, arguments) for call in calls])
        for error in errors:
            annotate(error, state)
        if errors:
            state.engine.abort(errors[0])
        errors += call_all([*self.at_close, state.engine.close])
        self._closing = False
        return errors

    def fail(self, error: BaseException) -> None:
        """Tell the plugins, close, and raise everything together if that fails too."""
        annotate(error, self._state)
        self._failed = True
        self._state.engine.abort(error)
        call_all([partial(call, error) for call in self.at_failure])
        later = (self._tell(error) if self._fitting and not self.closed else []) + self.close()
        if later:
            raise BaseExceptionGroup("the run failed, and so did closing it", [error, *later])

    def _tell(self, error: BaseException) -> list[BaseException]:
        """Say in ``error`` where it happened, and tell the plugins; return what they raised."""
        annotate(error, self._state)
        calls = [call for call in self._state.plan.calls("fit_failed") if call.plugin not in self._state.silent]
        return call_all([partial(invoke, call, {"state": self._state, "error": error}) for call in calls])
