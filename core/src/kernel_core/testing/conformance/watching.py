"""What is watched of a plugin while it trains: what it draws, which collectives it issues, what it leaves behind."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from kernel_core.hooks import hookimpl
from kernel_core.registry.base import Callback
from kernel_core.train.state import State

COLLECTIVES = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "recv", "isend", "irecv",
)  # fmt: skip
WATCHED_MODULES = (
    "torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.optim", "torch.utils.data", "torch.distributed",
    "torch.amp", "torch.autograd", "random", "numpy.random", "builtins", "os", "signal", "warnings", "logging",
)  # fmt: skip
WATCHED_CLASSES = (
    torch.Tensor, nn.Module, nn.Linear, nn.Conv2d, nn.LayerNorm, nn.BatchNorm2d, nn.Dropout, nn.Embedding,
    nn.MultiheadAttention, torch.optim.Optimizer, torch.optim.SGD, torch.optim.AdamW, torch.utils.data.DataLoader,
)  # fmt: skip
MODULE_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


class Watch(Callback):
    """Watches one plugin through the kernel's own ``instrument``.

    Args:
        plugin_id: Its id in the plan.
        folder: Where the collectives of this rank are written down, line by line, in case it does not end.
        generators: Whether to look at the global generators around each call, which takes longer than most calls.

    Attributes:
        drawn: The hooks in which it drew from a global generator, with which.
        seconds: How long each call of each hook took.
        losses: The loss of each batch, exactly.
    """

    affects_training = False

    def __init__(self, plugin_id: str, folder: str, generators: bool = True) -> None:
        self.plugin_id, self.folder, self.generators = plugin_id, folder, generators
        self.drawn: dict[str, str] = {}
        self.seconds: dict[str, list[float]] = {}
        self.losses: list[str] = []
        self.inside = ""

    @hookimpl
    def instrument(self, part: str, call: Callable[..., Any]) -> Callable[..., Any] | None:
        """Put a look around what the plugin does."""
        owner, _, hook = part.rpartition(".")
        if owner != self.plugin_id:
            return None

        def watched(*arguments: Any) -> Any:
            before = _generators() if self.generators else {}
            self.inside, began = hook, time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds.setdefault(hook, []).append(time.perf_counter() - began)
                self.inside = ""
                after = _generators() if self.generators else {}
                if moved := [name for name in before if before[name] != after[name]]:
                    self.drawn[hook] = " and ".join(moved)

        return watched

    @hookimpl
    def batch_end(self, state: State) -> None:
        """Note the loss."""
        self.losses.append(float(state.loss).hex())

    def write_collectives(self) -> None:
        """Write down from now on which collectives are issued inside the plugin's hooks, before each is."""
        import torch.distributed as dist

        path = Path(self.folder) / f"collectives-{os.environ.get('RANK', '0')}"
        path.touch()
        for name in COLLECTIVES:
            setattr(dist, name, self._written(name, getattr(dist, name), path))

    def _written(self, name: str, function: Callable[..., Any], path: Path) -> Callable[..., Any]:
        def called(*arguments: Any, **options: Any) -> Any:
            if self.inside:
                shapes = [list(one.shape) for one in (*arguments, *options.values()) if isinstance(one, torch.Tensor)]
                with path.open("a") as file:
                    file.write(f"{self.inside}: {name} {shapes}\n")
            return function(*arguments, **options)

        return called


def _generators() -> dict[str, Any]:
    return {
        "Python's random": random.getstate(),
        "NumPy's": np.random.get_state(legacy=False)["state"]["pos"],
        "torch's": hash(torch.get_rng_state().numpy().tobytes()),
    }


# --- the process around a plugin ---------------------------------------------------------------------------------------


def world() -> dict[str, Any]:
    """Return what a plugin could change of the process, each under words for it, to be compared with ``changes``."""
    found: dict[str, Any] = {f"the environment variable {name}": value for name, value in os.environ.items()}
    found |= {
        f"the handler of signal {int(one)}": signal.getsignal(one) for one in signal.valid_signals() if int(one) < 32
    }
    found |= {f"the {what} {owner}.{name}": id(value) for what, owner, name, value in _functions()}
    root = logging.getLogger()
    found |= {
        "the warning filters": [str(one) for one in warnings.filters],
        "the handlers of the root logger": list(map(id, root.handlers)),
        "the level of the root logger": root.level,
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.excepthook": id(sys.excepthook),
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "whether gradients are on": torch.is_grad_enabled(),
        "torch's number of threads": torch.get_num_threads(),
        "whether torch is deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch's precision of matrix products": torch.get_float32_matmul_precision(),
        **{f"a global {name} of modules": len(hooks) for name, hooks in _global_hooks().items()},
    }
    found |= {f"the thread {one.name}": True for one in threading.enumerate()}
    return found | {f"the open file {path}": True for path in _open_files()}


def generators() -> dict[str, Any]:
    """Return the state of the global generators."""
    return {f"the state of {name} generator": value for name, value in _generators().items()}


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return in words what differs."""
    found = []
    for name in [*before, *(name for name in after if name not in before)]:
        if name not in after:
            found.append(f"{name} is gone")
        elif name not in before:
            if not name.startswith("the function "):  # modules may be imported
                found.append(f"{name} is new")
        elif before[name] != after[name]:
            found.append(f"{name} is another")
    return found


def _functions() -> list[tuple[str, str, str, Any]]:
    modules = {name: sys.modules[name] for name in WATCHED_MODULES if name in sys.modules}
    modules |= {name: module for name, module in sys.modules.items() if name.startswith("kernel_core.") and module}
    classes = {f"{one.__module__}.{one.__qualname__}": one for one in WATCHED_CLASSES}
    return [
        ("function" if owner in modules else "attribute", owner, name, value)
        for owner, home in {**modules, **classes}.items()
        for name, value in list(vars(home).items())
        if callable(value) and not (owner in modules and isinstance(value, type(sys)))
    ]


def _global_hooks() -> dict[str, Any]:
    home = vars(sys.modules["torch.nn.modules.module"])
    return {name: value for name, value in home.items() if name.startswith("_global_") and isinstance(value, dict)}


def _open_files() -> set[str]:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return set()  # not Linux: nothing to look at
    found = set()
    for one in folder.iterdir():
        try:
            target = os.readlink(one)
        except OSError:
            continue
        if target.startswith("/") and not target.startswith(("/dev", "/proc", "/sys")):
            found.add(target)
    return found


def model_hooks(model: nn.Module, optimizers: Any = ()) -> dict[str, Any]:
    """Return the hooks and wrappers that hang on a model and its optimizers, each under words for it."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        where = f"the module {path or '(root)'}"
        for kind in MODULE_HOOKS:
            found |= {f"{kind} {key} of {where}": True for key in getattr(module, kind, None) or ()}
        found |= {
            f"a function {name} put on {where}": id(value) for name, value in vars(module).items() if callable(value)
        }
    for path, parameter in model.named_parameters():
        for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            found |= {f"{kind} {key} of the parameter {path}": True for key in getattr(parameter, kind, None) or ()}
    for index, optimizer in enumerate(optimizers):
        for kind in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
            found |= {f"{kind} {key} of optimizer {index}": True for key in getattr(optimizer, kind, None) or ()}
    return found
