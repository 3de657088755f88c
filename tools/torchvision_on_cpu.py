"""Lets ``import torchvision`` succeed in an environment whose torch is a CPU build and whose torchvision is not.

``setup_env.py`` puts this module into ``.venv`` and has every process of it imported at start, because transformers and
torchmetrics import torchvision by themselves. Costs nothing until torchvision is imported; the mending itself is that of
``kernel_plugin_torchvision.compat``.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class MendingLoader(Loader):
    """Runs torchvision; where its compiled operators are missing, declares them and runs it again."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        try:
            self._loader.exec_module(module)
        except RuntimeError as error:
            from kernel_plugin_torchvision import compat

            if str(error) != compat.MISSING_OPERATOR:
                raise
            compat.declare_operators()
            sys.modules[module.__name__] = module
            self._loader.exec_module(module)


class Finder(MetaPathFinder):
    """Finds torchvision as ever, with the loader above around its own."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = MendingLoader(spec.loader)
        return spec


sys.meta_path.insert(0, Finder())
