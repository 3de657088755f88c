"""The base classes of plugins that answer hooks. Each is a kind and its declared order."""

from __future__ import annotations

import re
from abc import ABCMeta
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_core.errors import OptionError
from kernel_core.hooks import HOOK_API, Band
from kernel_core.naming import normalize, snake_case
from kernel_core.registry.options import bind_options

if TYPE_CHECKING:
    from kernel_core.train.state import State


class PluginType(ABCMeta):
    """Checks and records the options of every plugin, made by name or by hand alike."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance after checking its options; ``id=`` belongs to every plugin."""
        return cls.make(normalize(cls.name or snake_case(cls.__name__)), *args, **kwargs)  # type: ignore[attr-defined]

    def make(cls, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make an instance called ``name``: that of its entry point, when it was asked for by name.

        Raises:
            OptionError: an option is unknown, missing, or has a value that its annotation does not allow.
        """
        plugin_id = kwargs.pop("id", None)
        if plugin_id is not None and not re.fullmatch(r"[A-Za-z0-9_.-]+", str(plugin_id)):
            raise OptionError(f"{name}.id: got {plugin_id!r}. Expected letters, digits, '_', '-' or '.'.")
        arguments: dict[str, Any] = {}
        if cls.__init__ is not object.__init__:  # type: ignore[misc]
            bound = bind_options(cls, name, args, kwargs)
            args, kwargs, arguments = bound.args, bound.kwargs, dict(bound.arguments)
        elif args or kwargs:
            given = ", ".join([*map(repr, args), *kwargs])
            raise OptionError(f"{name}: unknown option {given}. It takes no options.")
        for taken in {"name", "id", "options"} & arguments.keys():
            raise OptionError(f"{name}.{taken}: every plugin has an attribute of that name. Rename the option.")
        plugin = super().__call__(*args, **kwargs)
        plugin.name = name
        plugin.id = None if plugin_id is None else str(plugin_id)
        plugin.options = arguments
        return plugin


class Plugin(metaclass=PluginType):
    """What algorithms, callbacks and loggers share.

    Attributes:
        name: The name in the plan. The kernel sets it to the entry point's name; a class without an entry point may
            set it, else it is the class name in snake case.
        id: What labels options, state and plan when a plugin is used twice: ``FileLogger(..., id="second")``.
        options: The constructor's arguments by name, defaults filled in. Part of the lock.
        roles: Words for what the plugin does (``clips-gradients``), so that others can order themselves against it.
        before: Plugin names, or ``role:`` words, that must run later.
        after: Plugin names, or ``role:`` words, that must run earlier.
        conflicts: Plugin names, or ``role:`` words, that must not be active; on a role the plugin itself provides it
            means every other provider.
        structural: Whether it changes the model so that a checkpoint fits only a model changed alike: it is applied again
            when one is loaded, even if nobody names it.
        affects_training: Whether a run that is resumed must have it too, with the same options.
        may_change: Names of options that may be others when a run is resumed.
        unsupported: What it cannot work with, by word, and why: the name of an engine, ``microbatching``, ``resume``. A run
            that has it is refused at start.
        hook_api: The level of the hook interface the plugin was written for.

    What the conformance kit (``kernel_core.testing``) should know:

    Attributes:
        example: Options to try the plugin with: what has no default, at least.
        neutral: Options with which a run is bit for bit one without the plugin; None if there are none.
        commutes: Names of plugins with which either order gives the same result.
        split_invariant: Whether splitting a batch, into microbatches or over ranks, changes the result by rounding only.
    """

    kind: ClassVar[Band]
    name: str = ""
    id: str | None = None
    options: Mapping[str, Any] = {}
    roles: Iterable[str] = frozenset()
    before: Iterable[str] = frozenset()
    after: Iterable[str] = frozenset()
    conflicts: Iterable[str] = frozenset()
    structural: ClassVar[bool] = False
    affects_training: ClassVar[bool] = True
    may_change: Iterable[str] = frozenset()
    unsupported: Mapping[str, str] = {}
    hook_api: int = HOOK_API
    example: ClassVar[Mapping[str, Any]] = {}
    neutral: ClassVar[Mapping[str, Any] | None] = None
    commutes: ClassVar[Iterable[str]] = frozenset()
    split_invariant: ClassVar[bool] = True

    def active_hooks(self) -> Iterable[str] | None:
        """Return the names of the hooks that are active with these options; None, the default, for all. Read once."""
        return None

    def check(self, state: State) -> None:
        """Raise ``ConflictError`` when the plugin cannot work with this engine, precision, device or option.

        Runs before anything starts: the model is there and unchanged, ``state.engine`` and ``state.precision`` are known.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what must be restored for a resumed run to go on as if it had not stopped: plain data and tensors.

        Asked between batches only, on every rank. What depends on the options alone does not belong here. Of several ranks
        rank 0's is kept, with every rank's shards of DTensors; what differs from rank to rank is wrapped in ``PerRank``.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned, between ``before_load`` and ``after_load``.

        Tensors are the plugin's own, on the CPU; one saved under the name of a parameter, and of its shape, is placed and
        sharded as that parameter is.
        """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return f"{type(self).__name__}({arguments})"


class Algorithm(Plugin):
    """A plugin that changes training. Runs before callbacks and loggers; part of what a resumed run must match."""

    kind = "algorithms"


class Callback(Plugin):
    """A plugin that watches training, or decides when it stops. Runs after the algorithms, before the loggers."""

    kind = "callbacks"


class LoggerDestination(Plugin):
    """A plugin that writes down what is logged. Runs last, so that what callbacks log reaches it in the same event.

    Metrics may be tensors on the device. Reading one stops the host until the device is done: keep them and read them a
    step later.

    Of several ranks the first one logs: on the others nothing is handed over and no hook is called, so that none of them
    may wait for another rank.

    Attributes:
        every_rank: Whether each rank logs what it sees itself.
    """

    kind = "loggers"
    every_rank: ClassVar[bool] = False
    affects_training = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Take ``metrics``, name to scalar (a number or a 0-d tensor), of batch ``step``."""

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Take settings that hold for the whole run."""

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int) -> None:
        """Take a table of ``rows`` under ``columns``."""

    def log_images(self, images: Any, name: str, step: int, channels_last: bool = False) -> None:
        """Take images: one (C, H, W) or (H, W, C) array, or a sequence of them."""
