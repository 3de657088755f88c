"""What is installed, without importing it; and from a named plugin to an instance."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

import importlib_metadata

from kernel_core.errors import HookError, PluginLoadError, PluginNotFoundError
from kernel_core.naming import did_you_mean, normalize

if TYPE_CHECKING:
    from kernel_core.registry.base import PluginType

KINDS = (
    "algorithms",
    "callbacks",
    "loggers",
    "parallelism",
    "storage",
    "models",
    "data",
    "launchers",
    "recipes",
)
HOOK_KINDS = ("algorithms", "callbacks", "loggers")
PREFIX = "kernel."


@dataclass(frozen=True, order=True)
class PluginInfo:
    """An entry point of an installed distribution. Nothing of it is imported yet."""

    kind: str
    name: str
    distribution: str
    version: str
    summary: str
    value: str

    def load(self) -> Any:
        """Import and return what the entry point names.

        Raises:
            PluginLoadError: the import failed; the cause is chained.
        """
        entry_point = importlib_metadata.EntryPoint(self.name, self.value, PREFIX + self.kind)
        try:
            return entry_point.load()
        except HookError:
            raise
        except Exception as error:
            raise PluginLoadError(
                f"{self.name}: importing {self.value} of {self.distribution} {self.version} failed: "
                f"{type(error).__name__}: {error}. Mend or reinstall that distribution."
            ) from error


def find_plugins(path: Sequence[str] | None = None) -> tuple[PluginInfo, ...]:
    """Return every installed plugin, sorted, each once.

    The answer does not depend on the order of installation or of directories; of a distribution that lies on the path
    twice the first counts, as it does for imports.

    Args:
        path: Directories to search; the default is ``sys.path``.
    """
    found: dict[tuple[str, str, str], PluginInfo] = {}
    seen: set[str] = set()
    context = {} if path is None else {"path": list(path)}
    for distribution in importlib_metadata.distributions(**context):
        text = distribution.read_text("entry_points.txt")
        if not text or PREFIX not in text:
            continue
        metadata = _header(distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or "")
        project = metadata.get("Name", "unknown")
        if normalize(project) in seen:
            continue
        seen.add(normalize(project))
        for group, name, value in _entries(text):
            kind = group.removeprefix(PREFIX)
            if kind not in KINDS:
                continue
            info = PluginInfo(
                kind, normalize(name), project, metadata.get("Version", "0"), metadata.get("Summary", ""), value
            )
            found[kind, info.name, normalize(project)] = info
    return tuple(sorted(found.values()))


@lru_cache(maxsize=1)
def installed_plugins() -> tuple[PluginInfo, ...]:
    """``find_plugins()``, remembered for the life of the process."""
    return find_plugins()


def _header(text: str) -> dict[str, str]:
    # the email parser that importlib.metadata uses reads whole READMEs; three lines are wanted
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if not line:
            break
        name, _, value = line.partition(": ")
        if name in ("Name", "Version", "Summary"):
            fields[name] = value.strip()
    return fields


def _entries(text: str) -> Iterable[tuple[str, str, str]]:
    group = ""
    for line in text.splitlines():
        line = line.strip()
        if line.startswith("["):
            group = line.strip("[]")
        elif "=" in line and group.startswith(PREFIX) and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            yield group, name.strip(), value.strip()


def find(name: str, kinds: Sequence[str] = HOOK_KINDS, installed: Iterable[PluginInfo] | None = None) -> PluginInfo:
    """Return the one plugin of ``kinds`` called ``name``, ``distribution:name`` or ``kind/name``.

    Raises:
        PluginNotFoundError: there is none, or there are several.
    """
    plugins = [info for info in (installed_plugins() if installed is None else installed) if info.kind in kinds]
    kind, slash, rest = name.partition("/")
    if slash and kind in kinds:
        kinds, name = (kind,), rest
    project, _, plain = name.rpartition(":")
    wanted = normalize(plain.strip())
    what = " or ".join(kind.removesuffix("s") for kind in kinds)
    matches = [info for info in plugins if info.name == wanted]
    if project:
        matches = [info for info in matches if normalize(info.distribution) == normalize(project)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        owners = " and ".join(sorted({f"{info.distribution} ({info.kind})" for info in matches}))
        same_owner = len({info.distribution for info in matches}) == 1
        choice = " or ".join(
            f"{info.kind if same_owner else info.distribution}{'/' if same_owner else ':'}{info.name}"
            for info in matches
        )
        raise PluginNotFoundError(f"{wanted}: {owners} both provide it. Name the one you mean: {choice}.")
    if set(kinds) & set(HOOK_KINDS) and ("/" in name or os.sep in name):
        raise PluginNotFoundError(
            f"{name}: there is no plugin of that name. Expected a name, a kind and a name such as algorithms/{Path(name).stem}, "
            "or the path of a file that ends in .py."
        )
    hint = did_you_mean(wanted, {info.name for info in plugins})
    others = [info for info in (installed_plugins() if installed is None else installed) if info.name == wanted]
    if others:
        found = " and ".join(sorted({info.kind for info in others}))
        raise PluginNotFoundError(f"{name}: there is no {what} of that name; it is installed among the {found}.{hint}")
    raise PluginNotFoundError(
        f"{name}: no {what} of that name is installed.{hint} "
        f"If it is published, install it: pip install kernel-plugin-{wanted.replace('_', '-')}. "
        "`kernel plugins list` shows what is installed."
    )


def info_of_class(cls: type, installed: Iterable[PluginInfo] | None = None) -> PluginInfo | None:
    """Return the entry point through which ``cls`` is published, if there is one."""
    for info in installed_plugins() if installed is None else installed:
        entry = importlib_metadata.EntryPoint(info.name, info.value, PREFIX + info.kind)
        home = sys.modules.get(entry.module)
        # the class exists, so the module that publishes it has been imported if it is that one
        if home is not None and getattr(home, entry.attr, None) is cls:
            return info
    return None


_NO_SOURCE = frozenset({"__pycache__", ".venv", "venv", ".git", "build", "dist", "tests", "node_modules"})


def package_digest(distribution_name: str) -> str | None:
    """Return a SHA-256 over the files of a distribution: the hashes its RECORD lists, or the sources of an editable install.

    None for a distribution that is not installed.
    """
    try:
        distribution = importlib_metadata.distribution(distribution_name)
    except importlib_metadata.PackageNotFoundError:
        return None
    if source := _editable_root(distribution):
        root = source / "src" if (source / "src").is_dir() else source
        files = sorted(path for path in root.rglob("*.py") if not _NO_SOURCE & set(path.relative_to(root).parts[:-1]))
        lines = [f"{path.relative_to(source).as_posix()} {_file_hash(path)}" for path in files]
    else:
        lines = sorted(
            f"{file} {file.hash.value}"
            for file in distribution.files or []
            if file.hash and ".dist-info/" not in str(file)
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _editable_root(distribution: Any) -> Path | None:
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def load_class(info: PluginInfo) -> PluginType:
    """Import a plugin that answers hooks and check that it is of its kind.

    Raises:
        PluginLoadError: the import failed, or it is not a class of that kind.
    """
    from kernel_core.registry import base

    wanted: Mapping[str, type] = {
        "algorithms": base.Algorithm,
        "callbacks": base.Callback,
        "loggers": base.LoggerDestination,
    }
    loaded: Any = info.load()
    expected = wanted[info.kind]
    if not (isinstance(loaded, type) and issubclass(loaded, expected)):
        raise PluginLoadError(
            f"{info.name}: {info.value} of {info.distribution} is {loaded!r}. A plugin in kernel.{info.kind} must be a "
            f"subclass of kernel_core.{expected.__name__}."
        )
    return cast("PluginType", loaded)
