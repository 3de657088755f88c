"""One run with a plugin, in a process of its own, and all that can be said of it.

All arguments and results are plain data; numbers are exact (``kernel_core.testing.exact``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
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
from kernel_core.registry.plan import resolve
from kernel_core.testing.conformance.cases import BATCH, CASES
from kernel_core.testing.conformance.watching import Watch
from kernel_core.testing.exact import exact
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
    write_weights: bool = False,
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
        write_weights: Write the weights to ``weights.safetensors``.
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
        return {"refused": str(error), "conflict": isinstance(error, ConflictError)}


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
    made: Any = {"adamw": make_adamw, "sgd": _sgd, "lbfgs": _lbfgs}[case["optimizer"]]
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
            **_noted(trainer, watch, name, folder if case["write_weights"] else None),
            "loaded": loaded,
            "kept": saves.kept,
            "norms": norms.norms,
        }


def make_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the usual optimizer."""
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
        "drawn": watch.drawn,
        "seconds": watch.seconds,
        "surgery": [change for change in trainer.surgery_report.to_json() if change["plugin"] == name],
        "no_effect": name in trainer.surgery_report.no_effect,
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
