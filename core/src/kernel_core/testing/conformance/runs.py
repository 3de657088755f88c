"""One run with a plugin, in a forked process, and all that can be said of it. As a script it is the process that is forked.

All arguments and results are plain data; numbers are exact (``kernel_core.testing.exact``).
"""

from __future__ import annotations

import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Subset

from kernel_core.checkpoint.request import SaveRequest
from kernel_core.errors import ConflictError, KernelError
from kernel_core.hooks import hookimpl
from kernel_core.registry.base import Algorithm, Callback
from kernel_core.registry.discovery import installed_plugins
from kernel_core.registry.plan import invoke, resolve
from kernel_core.registry.single_file import is_file, load_file
from kernel_core.testing.conformance.cases import BATCH, CASES
from kernel_core.testing.conformance.watching import Watch, changes, generators, model_hooks, world
from kernel_core.testing.exact import exact
from kernel_core.testing.forked import serve
from kernel_core.train.evaluator import Evaluator
from kernel_core.train.randomness import randomness_state, seed_all
from kernel_core.train.state import State
from kernel_core.train.trainer import Trainer

EPOCHS = 2
TIMEOUT_S = 6.0  # of a collective that nobody joins


class Saves(Callback):
    """Saves at the end of some batches, and notes what the plugin keeps there."""

    affects_training = False

    def __init__(self, folder: str, batches: list[int], plugin_id: str) -> None:
        self.folder, self.batches, self.plugin_id = folder, batches, plugin_id
        self.kept: dict[str, Any] = {}

    @hookimpl
    def should_save(self, state: State, event: str) -> SaveRequest | None:
        """Save each under the name of its batch."""
        batch = state.progress.batch
        if event != "batch_checkpoint" or batch not in self.batches:
            return None
        self.kept[str(batch)] = exact(_plugin_state(state, self.plugin_id))
        return SaveRequest(self.folder, str(batch), latest=None)


class Norms(Algorithm):
    """Notes the norm of the gradients over all ranks, as a plugin that clips them would look at it."""

    after = {"role:scales-gradients"}
    affects_training = False

    def __init__(self) -> None:
        self.norms: list[float] = []

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        """Ask the engine."""
        gradients = [one.grad for one in state.model.parameters() if one.grad is not None]
        self.norms.append(float(state.engine.total_norm(gradients)))


class Stops(Callback):
    """Ends a fit after a batch, or has batches split into pieces of ``split_to`` rows from then on."""

    affects_training = False

    def __init__(self, stop_at: int | None, split_at: int | None, split_to: int | None) -> None:
        self.stop_at, self.split_at, self.split_to = stop_at, split_at, split_to

    @hookimpl
    def batch_end(self, state: State) -> None:
        """Look at the number of batches done."""
        if state.progress.batch == self.stop_at:
            state.stop_training()
        if state.progress.batch == self.split_at:
            state.device_train_microbatch_size = self.split_to


class Full(nn.Module):
    """Memory that runs out, once, on the last microbatch of a batch: all before it is done for nothing.

    Args:
        batch: After how many batches.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.state = batch, None
        self.failed = False

    def hook(self, module: nn.Module, arguments: Any) -> None:
        """Fail where it is time; to be called before the model's forward pass."""
        state: Any = self.state
        if not self.failed and module.training and state is not None and state.progress.batch == self.batch:
            self.failed = True
            raise torch.OutOfMemoryError("conformance kit: memory ran out here on purpose.")


def train(
    request: str | None,
    options: Mapping[str, Any] | None,
    folder: str,
    *,
    case: str = "mlp",
    dtype: str = "float32",
    dropout: float = 0.2,
    across_rows: bool = True,
    optimizer: str = "adamw",
    micro: int | str | None = None,
    engine: str | None = None,
    evaluate: bool = True,
    others: Sequence[str] = (),
    others_first: bool = False,
    save_at: Sequence[int] = (),
    load: str | None = None,
    stop_at: int | None = None,
    split_at: int | None = None,
    split_to: int | None = None,
    out_of_memory_at: int | None = None,
    numbers: bool = False,
    norms: bool = False,
    generators: bool = True,
    init: int = 0,
    epochs: int = EPOCHS,
) -> dict[str, Any]:
    """Train and return what was noted; ``refused`` if the run was refused.

    Args:
        request: The plugin, None to train without.
        options: Its options.
        folder: Where files go; the working directory of the run.
        case: The model.
        dtype, dropout, across_rows: Of the model.
        optimizer: ``adamw``, ``sgd``, with momentum, or ``lbfgs``, which evaluates several times in a step.
        micro: Rows in a microbatch, ``"auto"``.
        engine: How several ranks train.
        evaluate: Whether to evaluate after each epoch.
        others: Other plugins, after it, or before.
        save_at: After which batches to save.
        load: The checkpoint to begin from.
        stop_at: The batch after which the first of two fits ends.
        split_at, split_to: The batch after which batches are split, and into how many rows each.
        out_of_memory_at: The batch in which memory runs out, once.
        numbers: Write the weights to ``weights-<rank>.safetensors``.
        norms: Note the norms of gradients.
        generators: Whether to watch the global generators.
        init: Decides the weights to begin with.
        epochs: How long.
    """
    case_arguments = dict(locals())
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    try:
        return _train(**case_arguments)
    except KernelError as error:
        return {"refused": str(error), "kind": type(error).__name__, "conflict": isinstance(error, ConflictError)}


def _train(request: str | None, options: Mapping[str, Any] | None, folder: str, **case: Any) -> dict[str, Any]:
    world_size, engine = int(os.environ.get("WORLD_SIZE", "1")), case["engine"]
    chosen, dtype = CASES[case["case"]], getattr(torch, case["dtype"])
    seed_all(case["init"])
    model = chosen.make(case["dropout"], case["across_rows"]).to(dtype)
    data = chosen.data(dtype)
    asked: list[Any] = [] if request is None else [(request, dict(options or {}))]
    asked = [*case["others"], *asked] if case["others_first"] else [*asked, *case["others"]]
    name = "" if request is None else resolve([(request, dict(options or {}))])[0].id
    watch = Watch(name, folder, case["generators"])
    if world_size > 1:
        watch.write_collectives()
    full = None if case["out_of_memory_at"] is None else Full(case["out_of_memory_at"])
    made: Any = {"adamw": _adamw, "sgd": _sgd, "lbfgs": _lbfgs}[case["optimizer"]]
    norms = Norms()
    asked += [norms] if case["norms"] else []
    saves = Saves(folder, list(case["save_at"]), name)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, BATCH // world_size, shuffle=True),
        eval_dataloader=Evaluator("held", DataLoader(Subset(data, range(6)), 3)) if case["evaluate"] else None,
        max_duration=f"{case['epochs']}ep",
        optimizers=made,
        plugins=[*asked, watch, saves, Stops(case["stop_at"], case["split_at"], case["split_to"])],
        parallelism=engine,
        device_train_microbatch_size=case["micro"],
        load_path=case["load"],
        seed=7 if case["load"] is None else None,
        progress_bar=False,
        device="cpu",
        precision="fp32",
        run_name="run",
        dist_timeout=TIMEOUT_S,
    )
    loaded = exact(_plugin_state(trainer.state, name))
    if full is not None:
        full.state = trainer.state  # type: ignore[assignment]
        trainer.state.model.register_forward_pre_hook(full.hook)
    with trainer:
        for _ in range(1 if case["stop_at"] is None else 2):
            trainer.fit()
        return {
            **_noted(trainer, watch, name, folder if case["numbers"] else None),
            "loaded": loaded,
            "kept": saves.kept,
            "norms": norms.norms,
        }


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _lbfgs(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def _plugin_state(state: State, name: str) -> Any:
    return {one.id: one.plugin.state_dict() for one in state.plan.plugins if one.id == name}


def _noted(trainer: Trainer, watch: Watch, name: str, folder: str | None) -> dict[str, Any]:
    state = trainer.state
    engine, model = state.engine, state.model
    whole = engine.model_state(model, full=True)
    if folder is not None and state.rank == 0:
        tensors = {key: value.detach().double().contiguous().clone() for key, value in whole.items()}
        save_file(tensors, Path(folder) / "weights.safetensors")
    return {
        "weights": exact(whole),
        "parts": exact(engine.model_state(model, full=False)),
        "optimizers": exact([engine.optimizer_state(model, one, full=False) for one in state.optimizers]),
        "plugin": exact(_plugin_state(state, name)),
        "generators": exact(randomness_state()),
        "losses": watch.losses,
        "batches": state.progress.batch,
        "micro": state.device_train_microbatch_size,
        "calls": watch.calls,
        "drawn": watch.drawn,
        "seconds": watch.seconds,
        "surgery": [change for change in trainer.surgery_report.to_json() if change["plugin"] == name],
        "no_effect": name in trainer.surgery_report.no_effect,
        "frozen": [key for key, one in model.named_parameters() if not one.requires_grad],
        "outside": _outside(trainer),
        "shared": _shared(model),
    }


def _outside(trainer: Trainer) -> list[str]:
    """Return the parameters that are to be trained and that no optimizer holds."""
    held = {
        id(one) for optimizer in trainer.state.optimizers for group in optimizer.param_groups for one in group["params"]
    }
    return [name for name, one in trainer.state.model.named_parameters() if one.requires_grad and id(one) not in held]


def _shared(model: nn.Module) -> list[list[str]]:
    """Return the names of parameters that are one, in groups."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in groups.values() if len(group) > 1]


# --- the process around it ---------------------------------------------------------------------------------------------


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
        optimizers=_adamw,
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
        close = getattr(one.plugin, "close", None)
        if close is not None and hasattr(close, "kernel_impl"):
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
