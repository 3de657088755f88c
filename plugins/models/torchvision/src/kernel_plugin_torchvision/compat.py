"""One way to import torchvision that also works where its compiled operators do not fit the installed torch.

The wheels on PyPI are built for CUDA. Beside a CPU build of torch their operators cannot be loaded, and torchvision then
fails on the first of them that it describes to torch, although models and transforms never call it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

MISSING_OPERATOR = "operator torchvision::nms does not exist"
SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))

_library: Any = None  # torch forgets the operators when the object that defined them goes


def import_torchvision() -> Any:
    """Import torchvision, if need be without its compiled operators.

    On exactly the error that ``torchvision::nms`` does not exist, ``nms`` and ``qnms`` are declared to torch and the
    import is tried again. Models and transforms then work; ``torchvision.ops.nms`` and reading images do not. Packages
    that import torchvision by themselves (transformers, torchmetrics) work too once this was called.

    Returns:
        The module ``torchvision``.

    Raises:
        ImportError: torchvision is not installed.
        RuntimeError: importing it failed in another way.
    """
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if str(error) != MISSING_OPERATOR:
            raise
    declare_operators()
    return importlib.import_module("torchvision")


def declare_operators() -> None:
    """Tell torch the schemas of the missing operators, and forget what the failed import left behind."""
    global _library  # noqa: PLW0603
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema in SCHEMAS:
        _library.define(schema)
