"""Where files go: the ``Storage`` interface, the local file system, and the backend that a URL asks for."""

from __future__ import annotations

import os
import re
from typing import Any, cast

from kernel_core.errors import PluginLoadError
from kernel_core.storage.base import Buffers as Buffers
from kernel_core.storage.base import Entry as Entry
from kernel_core.storage.base import Storage as Storage
from kernel_core.storage.base import is_temporary as is_temporary
from kernel_core.storage.base import join_url as join_url
from kernel_core.storage.local import LocalStorage as LocalStorage
from kernel_core.storage.retry import Retry as Retry

__all__ = ["Buffers", "Entry", "LocalStorage", "Retry", "Storage", "is_temporary", "join_url", "open_storage"]


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Return the storage of a URL: that of the plugin named like its scheme, or for a path the file system.

    Raises:
        PluginNotFoundError: no plugin for that scheme is installed; the message says what to install.
        StorageError: the backend cannot be used like this, say without credentials.
    """
    text = os.fspath(url)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", text)
    if not scheme or scheme[1].lower() == "file":
        return LocalStorage(text)
    from kernel_core.registry.discovery import find

    info = find(scheme[1], ("storage",))
    loaded: Any = info.load()
    if not (isinstance(loaded, type) and issubclass(loaded, Storage)):
        raise PluginLoadError(
            f"{info.name}: {info.value} of {info.distribution} is {loaded!r}. A plugin in kernel.storage must be a "
            "subclass of kernel_core.storage.Storage."
        )
    opened: Storage = cast("Any", loaded)(text)
    return opened
