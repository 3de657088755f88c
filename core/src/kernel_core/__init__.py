"""The kernel of a PyTorch training framework made of plugins.

Importing this package imports nothing else: each name below is imported when it is first used, so that tools which
only list plugins never wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_core.checkpoint.per_rank import PerRank as PerRank
    from kernel_core.checkpoint.request import SaveRequest as SaveRequest
    from kernel_core.data.spec import DataSpec as DataSpec
    from kernel_core.engine import Engine as Engine
    from kernel_core.engine import ModelTransform as ModelTransform
    from kernel_core.errors import Interrupted as Interrupted
    from kernel_core.errors import KernelError as KernelError
    from kernel_core.hooks import hookimpl as hookimpl
    from kernel_core.hooks import hookspec as hookspec
    from kernel_core.logger import Logger as Logger
    from kernel_core.models import Classifier as Classifier
    from kernel_core.models import TrainableModel as TrainableModel
    from kernel_core.registry.base import Algorithm as Algorithm
    from kernel_core.registry.base import Callback as Callback
    from kernel_core.registry.base import LoggerDestination as LoggerDestination
    from kernel_core.registry.plan import Plan as Plan
    from kernel_core.surgery import SurgeryReport as SurgeryReport
    from kernel_core.timing import Time as Time
    from kernel_core.timing import Timestamp as Timestamp
    from kernel_core.timing import TimeUnit as TimeUnit
    from kernel_core.train.evaluator import Evaluator as Evaluator
    from kernel_core.train.state import State as State
    from kernel_core.train.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOME = {
    "Algorithm": "registry.base",
    "Callback": "registry.base",
    "Classifier": "models",
    "DataSpec": "data.spec",
    "Engine": "engine",
    "Evaluator": "train.evaluator",
    "Interrupted": "errors",
    "KernelError": "errors",
    "Logger": "logger",
    "LoggerDestination": "registry.base",
    "ModelTransform": "engine",
    "PerRank": "checkpoint.per_rank",
    "Plan": "registry.plan",
    "SaveRequest": "checkpoint.request",
    "State": "train.state",
    "SurgeryReport": "surgery",
    "Time": "timing",
    "TimeUnit": "timing",
    "Timestamp": "timing",
    "TrainableModel": "models",
    "Trainer": "train.trainer",
    "hookimpl": "hooks",
    "hookspec": "hooks",
}

__all__ = sorted(_HOME)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kernel_core' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kernel_core.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
