"""A plugin that is a single Python file, for the first hour of an idea: ``kernel train --plugins ./my_idea.py``."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kernel_core.errors import HookError, PluginLoadError, PluginNotFoundError
from kernel_core.naming import did_you_mean, normalize, snake_case

if TYPE_CHECKING:
    from kernel_core.registry.base import PluginType

PREFIX = "kernel_plugin_file_"  # of the names under which such files are imported: nothing else has one


def is_file(name: str) -> bool:
    """Return whether a plugin is asked for as a file: ``path.py``, or ``path.py:ClassName``."""
    return split(name)[0].endswith(".py")


def split(name: str) -> tuple[str, str]:
    """Return path and class name; the latter is empty if none is given."""
    path, colon, cls = name.rpartition(":")
    return (path, cls) if colon and cls.isidentifier() and path.endswith(".py") else (name, "")


def absolute(name: str) -> str:
    """Return the same plugin by its absolute path."""
    path, cls = split(name)
    return os.path.abspath(path) + (f":{cls}" if cls else "")


def name_of(name: str) -> str:
    """Return what a plugin asked for as a file is called: the class, if it is chosen by name, else the file, in snake case."""
    path, cls = split(name)
    return normalize(snake_case(cls) if cls else Path(path).stem)


def load_file(name: str) -> PluginType:
    """Import the file, once, and return the plugin class in it.

    Raises:
        PluginNotFoundError: there is no such file, or no such class in it.
        PluginLoadError: importing it failed, or it is not clear which class is meant.
    """
    path, wanted = split(name)
    if not Path(path).is_file():
        raise PluginNotFoundError(f"{path}: there is no such file. Expected a Python file with a plugin class.")
    classes = _classes_in(_import(Path(path).resolve()))
    if wanted:
        if wanted not in classes:
            hint = did_you_mean(wanted, classes)
            raise PluginNotFoundError(
                f"{path}: there is no plugin class {wanted} in it.{hint} It has {_list(classes)}."
            )
        return classes[wanted]
    if len(classes) != 1:
        which = f" Choose one: {path}:{next(iter(classes))}." if classes else ""
        raise PluginLoadError(
            f"{path}: it has {_list(classes)}. Expected one class that is an Algorithm, a Callback or a LoggerDestination.{which}"
        )
    return next(iter(classes.values()))


def _list(classes: dict[str, PluginType]) -> str:
    return f"the plugin classes {', '.join(classes)}" if classes else "no plugin class"


def _import(path: Path) -> str:
    """Import a file under a name that depends on its path, so that none hides another; return that name."""
    module_name = f"{PREFIX}{snake_case(path.stem)}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if module_name in sys.modules:
        return module_name
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, HookError) or not isinstance(error, Exception):
            raise
        raise PluginLoadError(
            f"{path}: importing it failed: {type(error).__name__}: {error}. Mend the file."
        ) from error
    return module_name


def _classes_in(module_name: str) -> dict[str, PluginType]:
    from kernel_core.registry.base import Plugin

    return {
        name: cast("PluginType", value)
        for name, value in vars(sys.modules[module_name]).items()
        if isinstance(value, type) and issubclass(value, Plugin) and value.__module__ == module_name
    }


def digest_of_class(cls: type) -> str | None:
    """Return a SHA-256 of the file that ``cls`` was loaded from, None for a class that comes from elsewhere."""
    if not cls.__module__.startswith(PREFIX):
        return None
    path = sys.modules[cls.__module__].__file__
    return None if path is None else hashlib.sha256(Path(path).read_bytes()).hexdigest()
