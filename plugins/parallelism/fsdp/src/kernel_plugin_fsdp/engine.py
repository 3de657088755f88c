"""The engine, on torch's ``fully_shard``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from kernel_core import TrainableModel
from kernel_core.distributed.engine import DistributedEngine
from kernel_core.engine import ModelTransform
from kernel_core.errors import ConflictError, OptionError
from kernel_core.train.place import Place
from pydantic import Field
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from kernel_plugin_fsdp.composer_keys import remarks
from kernel_plugin_fsdp.mixed_precision import policy
from kernel_plugin_fsdp.units import check_shapes, find_units

log = logging.getLogger(__name__)
REPLICATE, SHARD = "data_parallel_replicate", "data_parallel_shard"
Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]


class FSDPEngine(DistributedEngine):
    """Hold a share of the model on each rank, gather a block when it computes, and reduce its gradients to their shares.

    The model is changed in place: parameters keep their names and become DTensors. Composer's keys are all known; one that
    torch's second FSDP has no need for is accepted, with a line that says why.

    Args:
        sharding_strategy: ``FULL_SHARD`` frees the gathered parameters after each pass, ``SHARD_GRAD_OP`` keeps them between
            forward and backward, ``NO_SHARD`` keeps whole copies, ``HYBRID_SHARD`` (and ``_HYBRID_SHARD_ZERO2``) shards
            within groups of ranks, a machine each unless the degrees say otherwise, and keeps copies across them.
        mixed_precision: ``DEFAULT`` computes in the run's low precision and reduces gradients in fp32, ``PURE`` reduces in it
            too, ``FULL`` leaves all as it is; or a mapping with ``param_dtype`` and ``reduce_dtype``.
        cpu_offload: Keep parameters, gradients and optimizer state on the host.
        data_parallel_shard_degree: Ranks among which the model is shared out; -1 for all that are left.
        data_parallel_replicate_degree: Copies of the model.
        reshard_after_forward: Instead of what the strategy says; a number reshards to so many ranks.
        forward_prefetch: Gather the next blocks before the present one has computed, for hosts that are slow to launch.
        forward_prefetch_limit: How many.
        backward_prefetch_limit: How many blocks are gathered ahead in the backward pass.
        activation_checkpointing: Recompute the blocks, by the plugin of that name.
        activation_cpu_offload: Keep on the host what the blocks keep, by the same plugin.
        ignored_modules: Modules whose parameters stay whole, and are not averaged.
        verbose: Say what is sharded.
        auto_wrap: Not needed.
        backward_prefetch: Not needed.
        keep_low_precision_grads: Not needed.
        limit_all_gathers: Not needed.
        load_monolith_rank0_only: Not needed.
        load_planner: Not needed.
        save_planner: Not needed.
        sharded_ckpt_prefix_dir: Not needed.
        state_dict_type: Not needed.
        sync_module_states: Not needed.
        te_checkpoint_wrapper: Not needed.
        te_shard_fp8_weight: Not needed.
        use_orig_params: Not needed.
        activation_checkpointing_reentrant: Not needed.
        process_group: The degrees say it; anything but None is refused.
        device_mesh: The degrees say it; anything but None is refused.

    Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, 2023; Rajbhandari et al., ZeRO:
        Memory Optimizations Toward Training Trillion Parameter Models, 2020.
    """

    name = "fsdp"
    needs_all_ranks = True

    def __init__(
        self,
        sharding_strategy: Strategy = "FULL_SHARD",
        mixed_precision: Literal["FULL", "DEFAULT", "PURE"] | dict[str, Any] = "DEFAULT",
        cpu_offload: bool = False,
        data_parallel_shard_degree: int = -1,
        data_parallel_replicate_degree: int | None = None,
        reshard_after_forward: bool | int | None = None,
        forward_prefetch: bool = False,
        forward_prefetch_limit: Annotated[int, Field(ge=1)] = 1,
        backward_prefetch_limit: Annotated[int, Field(ge=1)] = 1,
        activation_checkpointing: bool = False,
        activation_cpu_offload: bool = False,
        ignored_modules: Any = None,
        verbose: bool = False,
        auto_wrap: bool | None = None,
        backward_prefetch: Literal["NONE", "BACKWARD_PRE", "BACKWARD_POST"] | None = None,
        keep_low_precision_grads: bool | None = None,
        limit_all_gathers: bool | None = None,
        load_monolith_rank0_only: bool | None = None,
        load_planner: Any = None,
        save_planner: Any = None,
        sharded_ckpt_prefix_dir: str | None = None,
        state_dict_type: Literal["full", "sharded", "local"] | None = None,
        sync_module_states: bool | None = None,
        te_checkpoint_wrapper: bool | None = None,
        te_shard_fp8_weight: bool | None = None,
        use_orig_params: bool | None = None,
        activation_checkpointing_reentrant: bool | None = None,
        process_group: Any = None,
        device_mesh: Any = None,
    ) -> None:
        super().__init__()
        for key, value in (("process_group", process_group), ("device_mesh", device_mesh)):
            if value is not None:
                raise OptionError(
                    f"fsdp.{key}: got {value!r:.80}. Expected None: the kernel lays out the ranks. Give "
                    "data_parallel_shard_degree and data_parallel_replicate_degree."
                )
        self._remarks = remarks(
            {
                "auto_wrap": auto_wrap,
                "backward_prefetch": backward_prefetch,
                "keep_low_precision_grads": keep_low_precision_grads,
                "limit_all_gathers": limit_all_gathers,
                "load_monolith_rank0_only": load_monolith_rank0_only,
                "load_planner": load_planner,
                "save_planner": save_planner,
                "sharded_ckpt_prefix_dir": sharded_ckpt_prefix_dir,
                "state_dict_type": state_dict_type,
                "sync_module_states": sync_module_states,
                "te_checkpoint_wrapper": te_checkpoint_wrapper,
                "te_shard_fp8_weight": te_shard_fp8_weight,
                "use_orig_params": use_orig_params,
                "activation_checkpointing_reentrant": activation_checkpointing_reentrant,
            }
        )
        policy(mixed_precision, "fp32")  # refuses what it does not know before anything starts
        self.sharding_strategy, self.mixed_precision, self.cpu_offload = sharding_strategy, mixed_precision, cpu_offload
        self.shard_degree, self.replicate_degree = data_parallel_shard_degree, data_parallel_replicate_degree
        self.reshard_after_forward = reshard_after_forward
        self.forward_prefetch = forward_prefetch_limit if forward_prefetch else 0
        self.backward_prefetch = backward_prefetch_limit
        self.recompute, self.offload_activations = activation_checkpointing, activation_cpu_offload
        self.ignored_modules: Sequence[nn.Module] = tuple(ignored_modules or ())
        self.verbose = verbose
        self._local_world_size = 1
        self._root: FSDPModule | None = None
        self._synchronizes = True

    def implied_transforms(self) -> Mapping[str, Mapping[str, Any]]:
        """Return activation checkpointing if a key asks for it."""
        if not (self.recompute or self.offload_activations):
            return {}
        return {"activation_checkpointing": {"offload": self.offload_activations, "recompute": self.recompute}}

    def connect(
        self, place: Place, device: torch.device, transforms: Sequence[ModelTransform], timeout_s: float
    ) -> torch.device:
        """Join the other processes."""
        self._local_world_size = place.local_world_size
        return super().connect(place, device, transforms, timeout_s)

    def data_axes(self) -> dict[str, int]:
        """Return one axis of shards, and one of copies before it where there are any."""
        shard, replicate = self.shard_degree, self.replicate_degree
        if self.sharding_strategy == "NO_SHARD":
            return {REPLICATE: -1 if replicate is None else replicate, SHARD: 1}
        if self.sharding_strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2") and replicate is None:
            # a machine holds the model once, as torch's first FSDP has it
            return {REPLICATE: -1, SHARD: self._local_world_size if shard == -1 else shard}
        return {SHARD: shard} if replicate is None else {REPLICATE: replicate, SHARD: shard}

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse what sharded parameters do not allow.

        Raises:
            ConflictError: it is such an optimizer.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConflictError(
                "fsdp: LBFGS needs all gradients in one vector, and they are sharded. Expected an optimizer that takes each "
                "parameter by itself. Use 'ddp'."
            )
        super().adapt_optimizer(optimizer)

    def prepare(self, model: nn.Module, device: torch.device, materialize: Callable[[nn.Module], None]) -> nn.Module:
        """Shard the units, inner ones first, then what is left; each is materialised just before, so one is whole at a time.

        Raises:
            OptionError: the model asks for an option that units do not have.
            ParallelismError: a parameter cannot be sharded.
        """
        units = find_units(model)
        check_shapes(model, [parameter for module in self.ignored_modules for parameter in module.parameters()])
        reshard = self._reshards()
        assert self.state is not None
        precision = self.state.precision
        for module, options in units.values():
            materialize(module)
            own = policy(options.get("mixed_precision", self.mixed_precision), precision)
            self._shard(module, device, options.get("reshard_after_forward", reshard), own)
        materialize(model)
        self._shard(model, device, reshard if not units else False, policy(self.mixed_precision, precision))
        assert isinstance(model, FSDPModule)
        self._root, self._synchronizes = model, True
        _prefetch(
            [module for _, (module, _) in sorted(units.items(), key=_position)],
            self.forward_prefetch,
            self.backward_prefetch,
        )
        _let_evaluation_gather(model)
        self._say(list(units))
        return model

    def _reshards(self) -> bool | int:
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")

    def _shard(self, module: nn.Module, device: torch.device, reshard: bool | int, own: Any) -> None:
        ignored = {parameter for module in self.ignored_modules for parameter in module.parameters()}
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if self.cpu_offload else OffloadPolicy()
        mesh = self.data_mesh
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=own,
            offload_policy=offload,
            ignored_params=ignored or None,
        )

    def _say(self, units: Sequence[str]) -> None:
        if self.rank:
            return
        for line in self._remarks:
            log.warning("%s", line)
        if self.verbose:
            log.warning(
                "fsdp: mesh %s; sharded in one piece: %s, and the rest.", self.mesh, ", ".join(units) or "nothing"
            )

    def set_gradient_sync(self, enabled: bool) -> None:
        """Reduce gradients in the next backward pass, or let them add up unsharded."""
        if enabled != self._synchronizes and self._root is not None:  # walks over all modules
            self._root.set_requires_gradient_sync(enabled)
            self._synchronizes = enabled

    def finish_passes(self) -> None:
        """Free the parameters that wait for a backward pass, so that the model's are the optimizers' again."""
        for module in [] if self._root is None else self._root.modules():  # type: ignore[attr-defined]
            if isinstance(module, FSDPModule):
                module.reshard()

    def close(self) -> None:
        """Leave the other processes. The model cannot compute any more."""
        self._root = None
        super().close()


def _position(item: tuple[str, Any]) -> list[tuple[int, str]]:
    """Sort paths as the model has them: layers.10 after layers.9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in item[0].split(".")]


def _prefetch(units: Sequence[nn.Module], ahead: int, behind: int) -> None:
    """Name to each unit those to gather while it computes. One behind is what torch does by itself."""
    for index, unit in enumerate(units):
        assert isinstance(unit, FSDPModule)
        if ahead and (later := list(units[index + 1 : index + 1 + ahead])):
            unit.set_modules_to_forward_prefetch(later)  # type: ignore[arg-type]
        if behind > 1 and (earlier := list(reversed(units[max(index - behind, 0) : index]))):
            unit.set_modules_to_backward_prefetch(earlier)  # type: ignore[arg-type]


def _let_evaluation_gather(model: Any) -> None:
    """Let an ``eval_forward`` of the model's own find gathered parameters, as ``generate`` of the wrapped model needs them.

    Only where it computes outputs itself: given outputs, in training, it must not wait for other ranks.
    """
    if type(model).eval_forward is TrainableModel.eval_forward:
        return
    plain = model.eval_forward
    register_fsdp_forward_method(model, "eval_forward")
    gathering = model.eval_forward

    def eval_forward(batch: Any, outputs: Any = None) -> Any:
        return gathering(batch) if outputs is None else plain(batch, outputs)

    model.eval_forward = eval_forward
