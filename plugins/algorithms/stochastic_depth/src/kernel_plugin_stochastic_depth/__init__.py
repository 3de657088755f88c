"""Skip residual blocks at random while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from kernel_core import Algorithm, Logger, State, Time, hookimpl
from kernel_core.errors import OptionError
from kernel_core.surgery import SurgeryReport
from kernel_core.timing import TimeUnit
from pydantic import Field
from torch import nn

from kernel_plugin_stochastic_depth.blocks import Method, StochasticBlock, branch, shortcut
from kernel_plugin_stochastic_depth.surgery import Distribution, apply_stochastic_depth, drop_rates

__all__ = ["StochasticBlock", "StochasticDepth", "apply_stochastic_depth", "branch", "drop_rates", "shortcut"]


def read_warmup(value: float | int | str | Time) -> Time:
    """Return how long rates rise: a number from 0 to 1 is a share of the run, an integer from 2 on a number of epochs.

    Raises:
        OptionError: it is no time, less than nothing, or longer than the run.
    """
    try:
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 1
        unit = TimeUnit.EPOCH if whole else TimeUnit.DURATION
        warmup = Time(value, unit) if isinstance(value, int | float) else Time.from_input(value, unit)
    except ValueError as error:
        raise OptionError(f"stochastic_depth.drop_warmup: got {value!r}. {error}") from None
    if warmup.value < 0:
        raise OptionError(f"stochastic_depth.drop_warmup: got {value!r}. Expected a time of at least 0.")
    if warmup.unit is TimeUnit.DURATION and warmup.value > 1:
        raise OptionError(f"stochastic_depth.drop_warmup: got {value!r}. Expected a share of the run of at most 1.")
    return warmup


class StochasticDepth(Algorithm):
    """Leave the branches of residual blocks out at random while training; in evaluation they count by their chance to be there.

    A block is ``relu(branch + shortcut)``, with the parts of torchvision's BasicBlock and Bottleneck by name, or a class that
    has the methods ``branch`` and ``shortcut``. As in the paper, and other than in torchvision, nothing is scaled in training.
    What is left out follows from seed and batch, and is the same on every rank by block; a block that is left out costs no
    time, and its gradient is zero.

    Args:
        target_layer_name: The class of the blocks, or a base of it; ``ResNetBottleneck`` is torchvision's ``Bottleneck``.
        stochastic_method: ``block``: a block is there for the whole batch or not; ``sample``: for each sample by itself.
        drop_rate: The probability that a block is left out: of the last one, or of all.
        drop_distribution: ``linear``: block l of L has l/L times the rate; ``uniform``: all have it.
        drop_warmup: Over how long rates rise from 0: a share of the run up to 1, whole epochs from 2 on, or a time: ``100ba``.

    Source: Huang, Sun, Liu, Sedra, Weinberger, Deep Networks with Stochastic Depth, 2016, section 3.
    """

    roles = {"replaces-modules", "drops-blocks"}
    after = {"role:replaces-convs"}
    structural = True  # all keys of the state dict stay, but without the plugin no evaluation would scale the branches
    example = {"target_layer_name": "ResidualBlock", "drop_rate": 0.5, "drop_warmup": 0.5}
    neutral = {"drop_rate": 0.0}

    def __init__(
        self,
        target_layer_name: str = "ResNetBottleneck",
        stochastic_method: Method = "block",
        drop_rate: Annotated[float, Field(ge=0, lt=1)] = 0.2,
        drop_distribution: Distribution = "linear",
        drop_warmup: float | int | str | Time = 0.0,
    ) -> None:
        self.target_layer_name = target_layer_name
        self.stochastic_method: Method = stochastic_method
        self.drop_rate = drop_rate
        self.drop_distribution: Distribution = drop_distribution
        self.drop_warmup = read_warmup(drop_warmup)
        self.split_invariant = stochastic_method == "block"  # type: ignore[misc]
        self._blocks: list[Any] = []
        self._rates: list[float] = []
        self._share = 1.0  # of the rates, now

    def active_hooks(self) -> set[str]:
        """Return the hooks: rates change in a warmup only."""
        draws = "before_train_batch" if self.stochastic_method == "block" else "before_forward"
        warms = {"batch_end"} if self.drop_warmup.value else set()
        return {"transform_model", "fit_start", "close", draws} | warms

    @hookimpl
    def transform_model(self, model: nn.Module, report: SurgeryReport) -> None:
        """Change the class of the blocks; parameters and their names stay."""
        self._blocks, self._share = [], 1.0  # those of another trainer's model are not ours
        names = {id(module): type(module).__name__ for module in model.modules()}
        options = (self.stochastic_method, self.drop_rate, self.drop_distribution)
        for path in apply_stochastic_depth(model, self.target_layer_name, *options):
            block = model.get_submodule(path)
            self._blocks.append(block)
            what = f"left out with probability {block.drop_rate:.3g}, by {self.stochastic_method}"
            report.record(path, names[id(block)], type(block).__name__, what)
        self._rates = [block.drop_rate for block in self._blocks]

    @hookimpl
    def fit_start(self, state: State, logger: Logger) -> None:
        """Take the rates of where the run is, now that its length is known."""
        self._set_rates(self._share_at(state))
        logger.log_metrics({"stochastic_depth/num_stochastic_layers": len(self._blocks)})

    @hookimpl
    def before_train_batch(self, state: State) -> None:
        """Draw which blocks are left out in this batch: the same on every rank, in every microbatch and evaluation."""
        draws = torch.rand(len(self._blocks), generator=torch.Generator().manual_seed(self._seed(state, "batch")))
        for block, draw in zip(self._blocks, draws.tolist(), strict=True):
            block.dropped = draw < block.drop_rate

    @hookimpl
    def before_forward(self, state: State) -> None:
        """Say with what each block draws the samples that it is left out for."""
        for index, block in enumerate(self._blocks):
            block.seed = self._seed(state, "microbatch", str(index))

    def _seed(self, state: State, scope: Literal["batch", "microbatch"], key: str = "") -> int:
        return state.generator(self, scope, key=key).initial_seed()

    @hookimpl
    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the rates of the next batch, and log that of the last block."""
        self._set_rates(self._share_at(state))
        logger.log_metrics({"stochastic_depth/drop_rate": self._share * self.drop_rate})

    @hookimpl
    def close(self) -> None:
        """Leave blocks to torch's generator."""
        for block in self._blocks:
            block.dropped = block.seed = None

    def state_dict(self) -> dict[str, Any]:
        """Return how much of the rates holds: whoever evaluates a checkpoint need not know how long the run was to be."""
        return {"share": self._share} if self.drop_warmup.value else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take that."""
        self._set_rates(state.get("share", 1.0))

    def _set_rates(self, share: float) -> None:
        self._share = share
        for block, rate in zip(self._blocks, self._rates, strict=True):
            block.drop_rate = share * rate

    def _share_at(self, state: State) -> float:
        """Return how much of the rates holds now, from 0 to exactly 1."""
        warmup = self.drop_warmup
        if not warmup.value:
            return 1.0
        if warmup.unit is TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            done = 0.0 if elapsed is None else float(elapsed.value)
        else:
            done = float(state.progress.value(warmup.unit))
        return min(done / float(warmup.value), 1.0)
