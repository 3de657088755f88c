"""Stop training the first layers one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from kernel_core import Algorithm, Logger, State, hookimpl
from pydantic import Field
from torch import nn

__all__ = ["LayerFreezing", "freeze_layers", "layers_of", "num_frozen"]


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules with parameters of their own that are trained, with their paths, in the order of registration."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
    ]


def num_frozen(elapsed: float, num_layers: int, freeze_start: float, freeze_level: float) -> int:
    """Return how many layers are frozen when the share ``elapsed`` of training is done: never the last one.

    >>> [num_frozen(t, 11, 0.5, 1.0) for t in (0.4, 0.5, 0.6, 1.0)]
    [0, 0, 2, 10]
    """
    if elapsed < freeze_start:
        return 0
    # a hair more, since 0.6 - 0.5 is less than 0.1
    return int(freeze_level * (elapsed - freeze_start) / (1 - freeze_start) * (num_layers - 1) + 1e-9)


def freeze_layers(layers: Sequence[tuple[str, nn.Module]], depth: int) -> list[nn.Parameter]:
    """Return the parameters of the first ``depth`` of ``layers`` that no later one shares: those that are to be frozen."""
    kept = {id(one) for _, module in layers[depth:] for one in module.parameters(recurse=False)}
    return [one for _, module in layers[:depth] for one in module.parameters(recurse=False) if id(one) not in kept]


class LayerFreezing(Algorithm):
    """Freeze the first layers of the model, more of them after each epoch.

    At the end of an epoch, when the share t of the run is done, the first
    ``int(freeze_level * (t - freeze_start) / (1 - freeze_start) * (layers - 1))`` layers are frozen; a layer is a module
    with parameters of its own that are trained when the run begins. Frozen parameters stay in the optimizer, which leaves
    alone what has no gradient, so that neither momentum nor weight decay moves them. In one process they need no gradient
    any more, which saves time; on several ranks, whose engine waits for every gradient, the gradients are computed and
    dropped. Both give the same weights. Statistics of batch norm go on being collected.

    Args:
        freeze_start: The share of the run after which freezing begins.
        freeze_level: The share of the layers that is frozen at its end.

    Source: Brock, Lim, Ritchie, Weston, FreezeOut: Accelerate Training by Progressively Freezing Layers, 2017, section 2;
        Raghu, Gilmer, Yosinski, Sohl-Dickstein, SVCCA, 2017, section 4.
    """

    roles = {"freezes-parameters"}
    before = {"role:clips-gradients"}
    after = {"role:averages-weights"}
    example = {"freeze_start": 0.0}
    neutral = {"freeze_level": 0.0}

    def __init__(
        self,
        freeze_start: Annotated[float, Field(ge=0, lt=1)] = 0.5,
        freeze_level: Annotated[float, Field(ge=0, le=1)] = 1.0,
    ) -> None:
        self.freeze_start = freeze_start
        self.freeze_level = freeze_level
        self.depth = 0
        self._layers: list[tuple[str, nn.Module]] = []
        self._frozen: list[nn.Parameter] = []
        self._turned_off: list[nn.Parameter] = []  # not those that the user had frozen

    def state_dict(self) -> dict[str, Any]:
        """Return how many layers are frozen."""
        return {"depth": self.depth}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what ``state_dict`` returned."""
        self.depth = state["depth"]

    @hookimpl
    def after_load(self, state: State) -> None:
        """Look which layers there are, and freeze what was frozen."""
        self._layers = layers_of(state.model)
        self._freeze(state)

    @hookimpl
    def after_train_batch(self) -> None:
        """Drop the gradients of frozen layers that an engine has computed."""
        for parameter in self._frozen:
            parameter.grad = None

    @hookimpl
    def epoch_end(self, state: State, logger: Logger) -> None:
        """Freeze what is due, and log how much that is."""
        num_layers, elapsed = len(self._layers), state.get_elapsed_duration()
        if elapsed is not None:
            due = num_frozen(float(elapsed.value), num_layers, self.freeze_start, self.freeze_level)
            self.depth = max(self.depth, due)
        self._freeze(state)
        share = self.depth / num_layers
        logger.log_metrics({"layer_freezing/layers_frozen": self.depth, "layer_freezing/percentage_frozen": share})

    def _freeze(self, state: State) -> None:
        self._frozen = freeze_layers(self._layers, self.depth)
        if state.world_size > 1:
            return  # their engine would wait for gradients that never come
        report = state.surgery_report
        report.current_plugin = state.plan.id_of(self)
        frozen = {id(one) for one in self._frozen}
        for path, module in self._layers[: self.depth]:
            due = [one for one in module.parameters(recurse=False) if one.requires_grad and id(one) in frozen]
            for parameter in due:
                parameter.requires_grad_(False)
                parameter.grad = None
            self._turned_off += due
            if due:
                report.record(path, type(module).__name__, "frozen", "is not trained any more")

    @hookimpl
    def close(self, state: State) -> None:
        """Leave the model as it can be trained again."""
        for parameter in self._turned_off:
            parameter.requires_grad_(True)
        self._frozen, self._turned_off = [], []
