"""What can go wrong, one class for each thing a user can do about it.

Every message reads *where: what is wrong with which value. What was expected. What to do.* The command line
prints a ``KernelError`` without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

EXIT_INTERRUPTED = 75  # after a durable checkpoint: the run can go on, and whoever interrupted it decides when
EXIT_START_AGAIN = 76  # memory ran out on a rank whose peers cannot try again in place; a smaller size is written down


class KernelError(Exception):
    """Base of every error that a user can mend. ``exit_code`` is what the command line ends with."""

    exit_code = 2


class PluginNotFoundError(KernelError, LookupError):
    """A plugin, recipe, engine or other entry point was named and is not installed, or its name is ambiguous."""


class PluginLoadError(KernelError, ImportError):
    """A named plugin is installed, but importing it failed or gave something that is not such a plugin."""


class OptionError(KernelError, ValueError):
    """An option is unknown, missing, or has a value of the wrong type or range."""


class ConfigError(KernelError, ValueError):
    """A configuration file, section or key cannot be used."""


class HookError(KernelError, TypeError):
    """A plugin's hook does not fit the hookspec it answers."""


class OrderError(KernelError):
    """The declared constraints of the plugins cannot all be met."""


class ConflictError(KernelError):
    """Two plugins that exclude each other were asked for together, or one of them cannot work in this run."""


class PlanError(KernelError, ValueError):
    """A plan that was written down cannot be read, or is another than that of this run."""


class SurgeryError(KernelError, ValueError):
    """A change to the model is impossible or would break it."""


class OptimizerError(KernelError, ValueError):
    """The optimizers do not fit the model's parameters."""


class TimeStringError(KernelError, ValueError):
    """A text is not a time, or a time is used where its unit makes no sense."""


class DataError(KernelError, ValueError):
    """A batch or dataloader cannot be used."""


class TrainerError(KernelError, ValueError):
    """The arguments of the trainer cannot work together."""


class ParallelismError(KernelError, ValueError):
    """Processes, machines, mesh and model do not fit together."""


class CheckpointError(KernelError):
    """A checkpoint cannot be saved, found, read or used."""


class UnsavableError(CheckpointError, TypeError):
    """Something in the state of a run cannot be expressed in a checkpoint."""


class SaveFailedError(CheckpointError):
    """Writing a checkpoint failed; those before it are as they were."""

    exit_code = 1


class CheckpointMissingError(CheckpointError, FileNotFoundError):
    """There is no checkpoint where one was asked for."""


class CheckpointFormatError(CheckpointError, ValueError):
    """A file is not what a checkpoint consists of, or of a newer version."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """A checkpoint is damaged: a file is missing, or its content is not what was written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint does not fit the model, the optimizers, the plugins or the data of the run that loads it."""


class RepeatedFailureError(CheckpointError):
    """The run failed twice in the same way at the same place, so that starting again would not help."""

    exit_code = 1


class StartAgain(KernelError):
    """All ranks have to end and start again with smaller microbatches.

    Attributes:
        size: Rows in a microbatch.
    """

    exit_code = EXIT_START_AGAIN

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class LaunchError(KernelError):
    """A job cannot be started on several processes."""


class Interrupted(SystemExit):
    """The run ended early and in order because of a signal.

    As a ``SystemExit`` it ends a script: with 75 if it can go on from a durable checkpoint, else with 128 + the signal.

    Attributes:
        signal: The number of the signal.
        checkpoint: The checkpoint from which the run goes on as if nothing had happened; None if there is none.
    """

    def __init__(self, signal: int, checkpoint: str | None = None) -> None:
        super().__init__(128 + signal if checkpoint is None else EXIT_INTERRUPTED)
        self.signal = signal
        self.checkpoint = checkpoint


class StorageError(KernelError):
    """A file or object could not be read or written. The subclasses say what a user can do about it."""


class StorageMissingError(StorageError, FileNotFoundError):
    """There is nothing under the key. Never raised because the store could not be asked."""


class StorageForbiddenError(StorageError, PermissionError):
    """Credentials are missing or wrong, or do not allow the operation."""


class StorageTransientError(StorageError):
    """The store was busy, out of reach, too slow, or broke off. Trying again later may succeed.

    Attributes:
        attempts: How often it was tried.
    """

    def __init__(self, message: str, attempts: int = 1) -> None:
        super().__init__(message)
        self.attempts = attempts


class StorageExistsError(StorageError, FileExistsError):
    """Something is stored under the key already."""


class StorageConflictError(StorageError):
    """Somebody else changed what is stored under the key in the meantime."""


class StorageFullError(StorageError):
    """The disk is full, or a quota is used up."""


class StorageKeyError(StorageError, ValueError):
    """A key cannot be one, or leads out of the storage."""


class StorageRootError(StorageError):
    """The bucket does not exist or lies elsewhere, or the URL names none. Not a missing object: nothing can be found."""
