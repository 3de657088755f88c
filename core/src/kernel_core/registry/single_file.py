"""A plugin that is a single Python file, for the first hour of an idea: ``kernel train --plugins ./my_idea.py``.

It is called like the file, or like the class where that is chosen by name, whatever ``name`` the class has: names are read
from what runs were configured with too, which must not import a file that a stranger wrote down there.

Its module can be imported nowhere but here. Objects of its classes reach the workers of a DataLoader that are forked, and
not those that are spawned; that takes a package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

from kernel_core.errors import HookError, PluginLoadError, PluginNotFoundError
from kernel_core.naming import did_you_mean, normalize, snake_case

if TYPE_CHECKING:
    from kernel_core.registry.base import PluginType

PREFIX = "kernel_plugin_file_"  # of the names under which such files are imported: nothing else has one
_DIGESTS: WeakKeyDictionary[type, str] = WeakKeyDictionary()  # of the bytes that a plugin class was made from
_LOADED: dict[str, str] = {}  # the same, by the name of the module


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
    """Import the file, once as long as it stays as it is, and return the plugin class in it.

    Raises:
        PluginNotFoundError: there is no such file, or no such class in it.
        PluginLoadError: importing it failed, or it is not clear which class is meant.
    """
    path, wanted = split(name)
    if not Path(path).is_file():
        raise PluginNotFoundError(
            f"{path}: there is no such file. Expected a Python file with a plugin class. Put it there, or correct the path."
        )
    module = _import(Path(path).resolve())
    classes = _classes_in(module)
    if wanted:
        if wanted not in classes:
            hint = did_you_mean(wanted, classes)
            raise PluginNotFoundError(
                f"{path}: there is no plugin class {wanted} in it.{hint} It has {_list(classes, module)}."
            )
        return classes[wanted]
    public = {key: cls for key, cls in classes.items() if not key.startswith("_")}  # the others are their bases
    if len(public) != 1:
        which = f" Choose one: {path}:{next(iter(public))}." if public else ""
        raise PluginLoadError(
            f"{path}: it has {_list(public, module)}. "
            f"Expected one class that is an Algorithm, a Callback or a LoggerDestination.{which}"
        )
    return next(iter(public.values()))


def _list(classes: dict[str, PluginType], module: ModuleType) -> str:
    if classes:
        return f"the plugin classes {', '.join(classes)}"
    return "no plugin class" + (f", only {', '.join(others)}" if (others := _own(module)) else "")


def _import(path: Path) -> ModuleType:
    """Import a file under a name that depends on its path, so that none hides another; anew if it is not what it was.

    What is run is what the digest is of: neither a change meanwhile nor a compiled file from before comes between.
    """
    module_name = f"{PREFIX}{normalize(snake_case(path.stem))}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    before, source = sys.modules.get(module_name), path.read_bytes()
    digest = hashlib.sha256(source).hexdigest()
    if before is not None and _LOADED.get(module_name) == digest:
        return before
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = sys.modules[module_name] = importlib.util.module_from_spec(spec)
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException as error:
        del sys.modules[module_name]
        if before is not None:
            sys.modules[module_name] = before
        if isinstance(error, HookError) or not isinstance(error, Exception | SystemExit):
            raise
        script = " A script that ends by itself is no plugin." if isinstance(error, SystemExit) else ""
        raise PluginLoadError(
            f"{path}: importing it failed: {type(error).__name__}: {error}.{script} Mend the file."
        ) from error
    _LOADED[module_name] = digest
    _DIGESTS.update(dict.fromkeys(_classes_in(module).values(), digest))
    return module


def _own(module: ModuleType) -> dict[str, type]:
    """Return the classes that the file itself defines, each under the first of its names."""
    found: dict[str, type] = {}
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__ and value not in found.values():
            found[name] = value
    return found


def _classes_in(module: ModuleType) -> dict[str, PluginType]:
    from kernel_core.registry.base import Plugin

    return {name: cast("PluginType", cls) for name, cls in _own(module).items() if issubclass(cls, Plugin)}


def digest_of_class(cls: type) -> str | None:
    """Return the SHA-256 of the file that ``cls`` was loaded from, as it was then; None for a class from elsewhere."""
    return _DIGESTS.get(cls)
