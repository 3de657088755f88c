"""The plugin that is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_core.engine import Engine
from kernel_core.errors import PluginLoadError
from kernel_core.registry.base import Plugin
from kernel_core.registry.discovery import find, load_class
from kernel_core.registry.hookmanager import hooks_of
from kernel_core.registry.plan import ActivePlugin, resolve
from kernel_core.registry.single_file import absolute, is_file, load_file
from kernel_core.surgery import SURGERY_HOOKS


@dataclass(frozen=True)
class Subject:
    """A plugin, and how a run asks for it.

    Attributes:
        request: Its name, or the path of a file that holds it.
        active: It, made with ``options``.
        options: Those it is tried with.
    """

    request: str
    active: ActivePlugin
    options: Mapping[str, Any]

    @classmethod
    def of(cls, request: str) -> Subject:
        """Return the plugin of that name, made with its ``example``.

        Raises:
            KernelError: it is not installed, cannot be imported, or its ``example`` does not fit.
        """
        request = absolute(request) if is_file(request) else request
        example = dict(class_of(request).example)
        (active,) = resolve([(request, example)])
        return cls(request, active, example)

    @property
    def plugin(self) -> Plugin:
        """An instance that takes part in no run."""
        return self.active.plugin

    @property
    def name(self) -> str:
        """Its name, which is its id."""
        return self.active.id

    @property
    def kind(self) -> str:
        """The word of its entry-point group."""
        return self.active.kind

    @property
    def hooks(self) -> Sequence[str]:
        """The hooks it answers, sorted."""
        return hooks_of(type(self.plugin))

    @property
    def does_surgery(self) -> bool:
        """Whether it may change the model."""
        return bool({*SURGERY_HOOKS} & set(self.hooks))

    @property
    def watches_only(self) -> bool:
        """Whether it says that training is the same without it."""
        return not self.plugin.affects_training


@dataclass(frozen=True)
class EngineSubject:
    """An engine for several ranks.

    Attributes:
        name: Its name.
        cls: Its class.
    """

    name: str
    cls: type[Engine]
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "parallelism"
    hooks: Sequence[str] = ()

    @property
    def world_size(self) -> int:
        """On how many ranks it is tried."""
        from kernel_core.distributed.engine import DistributedEngine  # half a second of imports

        return 2 if issubclass(self.cls, DistributedEngine) else 1

    @classmethod
    def of(cls, name: str) -> EngineSubject:
        """Return the engine of that name.

        Raises:
            KernelError: it is not installed, cannot be imported, or is no engine.
        """
        info = find(name, ("parallelism",))
        loaded = info.load()
        if not (isinstance(loaded, type) and issubclass(loaded, Engine)):
            raise PluginLoadError(
                f"{info.name}: {info.value} of {info.distribution} is no kernel_core.Engine. The conformance kit has checks for "
                "engines, and for plugins that answer hooks."
            )
        return cls(info.name, loaded)


def class_of(request: str) -> type[Plugin]:
    """Return the class of a plugin by its name, or by the path of the file that holds it.

    Raises:
        KernelError: there is none.
    """
    return load_file(request) if is_file(request) else load_class(find(request))  # type: ignore[return-value]
