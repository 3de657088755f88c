"""What is done in processes of their own: runs, and looks at what a plugin does to its process. As a script, their parent.

All arguments and results are plain data.
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from kernel_core.errors import KernelError
from kernel_core.registry.discovery import installed_plugins
from kernel_core.registry.plan import invoke
from kernel_core.registry.single_file import is_file, load_file
from kernel_core.testing.conformance.cases import BATCH, CASES
from kernel_core.testing.conformance.runs import make_adamw, train
from kernel_core.testing.conformance.watching import changes, generators, model_hooks, world
from kernel_core.testing.forked import serve
from kernel_core.train.randomness import seed_all
from kernel_core.train.trainer import Trainer


def import_plugin(module: str, budget: Sequence[str] = ()) -> dict[str, Any]:
    """Import a module that is not imported yet; return what that changed, what it asked of an accelerator, and how long it took.

    Args:
        module: Its name, or the path of a file.
        budget: Modules to import before, since their time is not the plugin's.
    """
    for name in budget:
        importlib.import_module(name)
    touched: list[str] = []
    for name in ("_lazy_init", "init", "is_available", "device_count", "current_device"):
        setattr(torch.cuda, name, _touch(touched, f"torch.cuda.{name}", getattr(torch.cuda, name)))
    before, began = {**world(), **generators()}, time.process_time()
    if is_file(module):
        load_file(module)
    else:
        importlib.import_module(module)
    took_s = time.process_time() - began
    return {"changed": changes(before, {**world(), **generators()}), "touched": touched, "seconds": took_s}


def _touch(touched: list[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def touching(*arguments: Any, **options: Any) -> Any:
        touched.append(name)
        return function(*arguments, **options)

    return touching


def leave(request: str, options: Mapping[str, Any], folder: str, case: str, does_surgery: bool) -> dict[str, Any]:
    """Train in a process that has trained before; close twice; return what of the plugin is left."""
    train(None, None, folder, case=case)  # whatever is imported or made once, is
    before = world()
    os.chdir(folder)
    seed_all(0)
    model = CASES[case].make(0.2, True)
    hooks = model_hooks(model)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(CASES[case].data(torch.float32), BATCH, shuffle=True),
        max_duration="1ep",
        optimizers=make_adamw,
        plugins=[(request, dict(options))],
        seed=7,
        progress_bar=False,
        device="cpu",
        run_name="left",
    )
    if does_surgery:  # what it put into the model stays there, hooks too
        hooks = model_hooks(model, trainer.state.optimizers)
    else:
        hooks |= model_hooks(nn.Module(), trainer.state.optimizers)
    trainer.fit()
    trainer.close()
    found = changes(hooks, model_hooks(model, trainer.state.optimizers)) + changes(before, world())
    trainer.close()
    for one in trainer.plan.plugins:  # the kernel closes once; a plugin whose close is called again must not mind
        for call in trainer.plan.calls_of(one.id, "close"):
            invoke(call, {"state": trainer.state, "logger": trainer.logger})
    again = changes(before, world())
    return {"left": found, "left_again": [one for one in again if one not in found]}


def log_everything(request: str, options: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Hand a logger all that may be logged, and close it; return the error if there was one."""
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    metrics = {"whole": 3, "number": 0.5, "tensor": torch.tensor(2.0), "half": torch.tensor(1.5, dtype=torch.bfloat16)}
    metrics |= {"nan": float("nan"), "inf": torch.tensor(float("inf")), "a/b/c": 1}
    given: Any = (request, dict(options))
    with Trainer(model=CASES["mlp"].make(0.0, True), plugins=[given], progress_bar=False, device="cpu") as trainer:
        (one,) = [active.plugin for active in trainer.plan.plugins if active.kind == "loggers"]
        logger: Any = one
        for name, arguments in (
            ("log_hyperparameters", ({"lr": 0.1, "nested": {"a": [1, None, "x"]}},)),
            ("log_metrics", (metrics, 0)),
            ("log_table", (["a", "b"], [[1, "x"], [None, 2.5]], "table", 0)),
            ("log_images", (torch.zeros(2, 3, 4, 4), "images", 0)),
            ("log_metrics", ({}, 1)),
        ):
            try:
                getattr(logger, name)(*arguments)
            except Exception as error:
                return {"error": f"{name} fails: {type(error).__name__}: {error}"}
    return {}


def export(request: str | None, options: Mapping[str, Any], folder: str, case: str) -> dict[str, Any]:
    """Export the model, with the plugin's surgery, by ``torch.export``, and compare what both compute."""
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    seed_all(0)
    data = CASES[case].data(torch.float32)
    with Trainer(
        model=CASES[case].make(0.0, True),
        plugins=[] if request is None else [(request, dict(options))],
        progress_bar=False,
        device="cpu",
        run_name="export",
        seed=7,
    ) as trainer:
        model = trainer.state.model.eval()
        batch = next(iter(DataLoader(data, 4)))
        inner: Any = model.module if hasattr(model, "module") else model.model
        arguments: tuple[Any, ...] = (batch[0],) if isinstance(batch, list | tuple) else ()
        keywords = {} if arguments else {key: value for key, value in batch.items() if key != "labels"}
        with torch.no_grad():
            expected = inner(*arguments, **keywords)
            try:
                exported = torch.export.export(inner, arguments, keywords).module()
            except Exception as error:
                return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]:.200}"}
            got = exported(*arguments, **keywords)
    expected, got = (one if isinstance(one, torch.Tensor) else one["logits"] for one in (expected, got))
    return {"difference": float((expected - got).abs().max())}


def prepare(modules: Sequence[str]) -> None:
    """Import modules into the process that is forked."""
    for name in modules:
        importlib.import_module(name)


def warm_up() -> None:
    """Import what is imported late, so that no run has to."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        saved = train(None, None, folder, save_at=[1], epochs=1)
        assert "losses" in saved, saved
        os.chdir(here)
    for info in installed_plugins():
        if info.kind == "parallelism":
            with suppress(KernelError):
                info.load()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    sys.path.pop(0)  # this folder: its modules are imported by their full names
    warm_up()
    serve({one.__name__: one for one in (train, import_plugin, leave, log_everything, export, prepare)})
