"""The engine, on torch's ``DistributedDataParallel``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from kernel_core.distributed.engine import DistributedEngine
from kernel_core.errors import ConflictError
from kernel_core.train.state import State
from pydantic import Field
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def _buffers(broadcast: bool) -> dict[str, Any]:
    """Return the argument that broadcasts buffers, which torch is renaming."""
    known = signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": broadcast}


class _FixedBuckets(DistributedDataParallel):
    """Sums gradients in buckets that are the same from the first pass on: those of the last parameters first.

    torch lays its buckets out anew after the first pass, in the order in which gradients came. Where a gradient lies in a
    bucket decides in which order more than two ranks add it up. A run that is resumed begins with another first pass, and
    its weights would differ in the last bits.
    """

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]

    def fix(self) -> None:
        """Lay the buckets out now, as if gradients had come in the order of the parameters above. A collective."""
        if hasattr(self.reducer, "_push_all_rebuilt_params"):  # torch's own business: without it only last bits differ
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()


class DDPEngine(DistributedEngine):
    """Average gradients over the ranks while the backward pass still runs.

    The model stays what it is, with its own names; only training's forward pass goes through torch's wrapper. A model
    without buffers and with every parameter used needs none of the options.

    Args:
        sync_strategy: When gradients are averaged: ``single_auto_sync`` in the backward pass of the last microbatch,
            ``multi_auto_sync`` in that of each, ``forced_sync`` after the last one, whatever parts of the model each
            microbatch and rank used.
        find_unused_parameters: Look in each pass for parameters that got no gradient. Needed where a batch uses only a part
            of the model; costs a walk over the graph.
        static_graph: The same parameters are used in every pass; allows more overlap, and activation checkpointing that is
            reentrant. Each pass averages then, unless ``forced_sync`` is asked for.
        gradient_as_bucket_view: Keep gradients inside the buffers that are sent; saves a copy of their size.
        broadcast_buffers: Give all ranks rank 0's buffers, such as the statistics of batch norm, before each pass that
            averages.
        bucket_cap_mb: How much is sent at once.

    Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, 2020.
    """

    name = "ddp"

    def __init__(
        self,
        sync_strategy: Literal["single_auto_sync", "multi_auto_sync", "forced_sync"] = "single_auto_sync",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        broadcast_buffers: bool = True,
        bucket_cap_mb: Annotated[float, Field(gt=0)] | None = None,
    ) -> None:
        super().__init__()
        self.sync_strategy = sync_strategy
        # torch's static graph cannot do with passes that average nothing among others that do
        self._averages_each = sync_strategy == "multi_auto_sync" or (
            static_graph and sync_strategy == "single_auto_sync"
        )
        self.needs_all_ranks = self._averages_each  # the ranks' passes wait for one another
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.broadcast_buffers = broadcast_buffers
        self.bucket_cap_mb = bucket_cap_mb
        self._wrapped: DistributedDataParallel | None = None
        self._averages = True  # whether the present pass does
        self._unaveraged = False  # whether a pass did not, and no later one has
        self._parameters: list[nn.Parameter] = []

    def check(self, state: State) -> None:
        """Refuse a model that a transform splits.

        Raises:
            ConflictError: one does.
        """
        super().check(state)
        split = [
            transform.name for transform in state.transforms if transform.axis is not None and transform.degree > 1
        ]
        if split:
            raise ConflictError(
                f"ddp: cannot average the gradients of a model that {split[0]} splits. Expected whole parameters on every rank. "
                "Use parallelism={'fsdp': {'sharding_strategy': 'NO_SHARD'}, ...} beside it."
            )

    def prepare(self, model: nn.Module, device: torch.device, materialize: Callable[[nn.Module], None]) -> nn.Module:
        """Wrap the model for training's passes and return the model itself."""
        materialize(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.world_size == 1 or not self._parameters:
            return model
        # in search of unused parameters torch keeps the buckets it begins with, in that same order
        wrapper = DistributedDataParallel if self.find_unused_parameters else _FixedBuckets
        self._wrapped = wrapper(
            model,
            device_ids=None if device.type == "cpu" else [device],
            init_sync=False,  # the kernel has aligned the ranks
            find_unused_parameters=self.find_unused_parameters,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            bucket_cap_mb=self.bucket_cap_mb,
            **_buffers(self.broadcast_buffers),
        )
        if isinstance(self._wrapped, _FixedBuckets):
            self._wrapped.fix()
        return model

    def forward(self, model: nn.Module) -> Callable[[Any], Any]:
        """Return the model's own pass, and in passes that average gradients torch's around it."""
        if self._wrapped is None:
            return model

        def forward(batch: Any) -> Any:
            # read anew each time: whoever keeps this function must not keep the wrapper, nor through it the process group
            return self._wrapped(batch) if self._averages and self._wrapped is not None else model(batch)

        return forward

    def set_gradient_sync(self, enabled: bool) -> None:
        """Decide whether the next pass averages gradients."""
        self._averages = (enabled or self._averages_each) and self.sync_strategy != "forced_sync"
        self._unaveraged = not self._averages

    def reduce_gradients(self) -> None:
        """Average the gradients if no pass did: as one message for each dtype."""
        if not self._unaveraged or self._wrapped is None:
            return
        self._unaveraged = False
        used = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters])
        dist.all_reduce(used)  # what nobody used keeps no gradient
        kinds: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for parameter, by_any in zip(self._parameters, used.tolist(), strict=True):
            if by_any:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                kinds[parameter.grad.dtype].append(parameter.grad)
        for gradients in kinds.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat)
            flat /= self.world_size
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [part.view_as(to) for part, to in zip(parts, gradients, strict=True)])

    def close(self) -> None:
        """Let go of the wrapper, whose hooks hold tensors of the communication, then leave."""
        self._wrapped, self._parameters = None, []
        super().close()
