"""The engine: how a model is prepared, and where backward, synchronisation, clipping and the optimizer step happen.

Everything that differs between one process, DDP, FSDP or DeepSpeed is behind ``Engine``; the loop has no branch for it.
Engines over several processes build on ``kernel_core.distributed.engine.DistributedEngine``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernel_core.errors import ParallelismError
from kernel_core.train.composer_keywords import KEYWORDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from kernel_core.checkpoint.writer import Board
    from kernel_core.train.place import Place
    from kernel_core.train.state import State

TrainBatch = Callable[[], Tensor]
EVALUATE_ONCE = frozenset(cls for cls in vars(torch.optim).values() if isinstance(cls, type)) - {torch.optim.LBFGS}
STAGES = (
    "split",
    "recompute",
    "compile",
)  # over ranks, in the backward pass, by torch.compile: whole layers are split first


class Engine(ABC):
    """How a model is prepared and stepped. What is not overridden is what one process does.

    Attributes:
        name: The name in messages and in the log.
        rank, world_size, local_rank: This process's place among all.
        data_rank, data_world_size: Its place among those that read different data: ranks that hold parts of one layer
            read the same.
        can_reevaluate: Whether an optimizer may call ``train_batch`` more than once in a step.
        data_group: The process group of the ranks that read different data, None for all.
        needs_all_ranks: Whether a forward or backward pass waits for other ranks even with gradient synchronisation off. A
            rank that runs out of memory in one cannot try again while its peers wait in it.
    """

    name: str = "engine"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    data_rank: int = 0
    data_world_size: int = 1
    can_reevaluate: bool = True
    needs_all_ranks: bool = False
    data_group: Any = None

    def connect(
        self, place: Place, device: torch.device, transforms: Sequence[ModelTransform], timeout_s: float
    ) -> torch.device:
        """Join the other processes. Called first of all; what it takes ``close`` gives back.

        Args:
            place: This process among all.
            device: What was asked for, without a number for the rank.
            transforms: Those of the run; they split the model along axes of their own.
            timeout_s: How long ranks wait for one another.

        Returns:
            The device of this rank.

        Raises:
            ParallelismError: the processes cannot be joined, or their number does not fit.
        """
        if place.world_size > 1:
            raise ParallelismError(
                f"parallelism: the engine {self.name!r} trains in one process, and {place.world_size} were started. Expected "
                f"an engine for several, such as parallelism={KEYWORDS['several_ranks'].plugin!r}. Or start one process."
            )
        split = [transform.name for transform in transforms if transform.axis is not None and transform.degree > 1]
        if split:
            raise ParallelismError(
                f"{split[0]}: splits the model over several processes, and there is one. Start more: kernel launch -n 2 ..."
            )
        return device

    def agree(self, key: str, value: str) -> str:
        """Return rank 0's ``value``. Every rank must call it, in the same order with the same keys."""
        return value

    def check_same(self, what: str, mine: Mapping[str, Any]) -> None:  # noqa: B027
        """Make sure that ``mine``, plain data, is the same on every rank.

        Raises:
            ParallelismError: names the ranks and entries that differ.
        """

    def all_reduce(self, tensor: Tensor) -> None:  # noqa: B027
        """Add up ``tensor`` over all ranks, in place, without waiting for the device."""

    def board(self, name: str) -> Board | None:
        """Return a board on which threads of all ranks leave word for one another; None in one process."""
        return None

    def watch(self, state: State, busy: Callable[[], bool]) -> None:  # noqa: B027
        """Begin to notice when ranks stand still, or when another one fails; ``close`` ends it.

        Args:
            state: The run.
            busy: Whether the trainer is at work.
        """

    def abort(self, error: BaseException) -> None:  # noqa: B027
        """Tell the other ranks that this one ends because of ``error``; no collective, never raises."""

    def axis_mesh(self, axis: str | None) -> DeviceMesh | None:
        """Return the mesh of one axis, None if there is no such axis."""
        return None

    def align(self, model: nn.Module) -> None:  # noqa: B027
        """Give every rank the parameters and buffers of rank 0, but for those on the meta device."""

    def check(self, state: State) -> None:  # noqa: B027 (most have nothing to refuse)
        """Raise ``ConflictError`` when the engine cannot work with this run. Called before anything starts."""

    def implied_transforms(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the model transforms that the engine's own options ask for, by name, with their options."""
        return {}

    @abstractmethod
    def prepare(self, model: nn.Module, device: torch.device, materialize: Callable[[nn.Module], None]) -> nn.Module:
        """Return the model to train, after surgery: sharded, or as it is, on ``device``.

        Parameter names must not change; the kernel points the optimizers to the new parameters by name.

        Args:
            model: On ``device`` or, in whole or in part, on the meta device.
            device: This rank's.
            materialize: Gives what is on the meta device in a module, submodules included, its place and initial values.
        """

    def adapt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027
        """Change what of a ready optimizer does not work on the prepared model's parameters."""

    def forward(self, model: nn.Module) -> Callable[[Any], Any]:
        """Return ``batch -> outputs`` for training: ``model``, or something around it that has to see each pass."""
        return model

    def begin_passes(self, model: nn.Module) -> None:  # noqa: B027
        """Let every rank compute alike in the passes of an evaluation or prediction that begins."""

    def finish_passes(self) -> None:  # noqa: B027
        """Give back what passes without a backward pass have left in place. Called after an evaluation or prediction."""

    def set_gradient_sync(self, enabled: bool) -> None:  # noqa: B027
        """Turn gradient synchronisation on or off; on for the last microbatch of a batch only."""

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of ``loss``, a scalar."""
        loss.backward()  # type: ignore[no-untyped-call]

    def reduce_gradients(self) -> None:  # noqa: B027
        """Average gradients over the ranks that no backward pass has averaged. Called after the last of a batch."""

    def step(self, optimizers: Sequence[torch.optim.Optimizer], train_batch: TrainBatch) -> Tensor:
        """Run ``train_batch`` (zero gradients, all microbatches; returns the loss) and step every optimizer.

        One optimizer gets ``train_batch`` as its closure; several get one evaluation and then each its step. So do torch's
        own that would call a closure once, and first of all: the same without its context (4 µs).

        Returns:
            The detached mean loss of this rank's batch, a scalar; of the first evaluation where there are several.
        """
        if len(optimizers) == 1 and type(optimizers[0]) not in EVALUATE_ONCE:
            closure: Any = train_batch  # torch's stubs say that a closure returns a float
            return optimizers[0].step(closure)  # type: ignore[no-any-return]
        loss = train_batch()
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def total_norm(self, tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all ``tensors`` together over the whole model: a plain scalar on the device."""
        return torch.nn.utils.get_total_norm(tensors, norm_type)

    def clip_grad_norm(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most ``max_norm``.

        Returns:
            The norm before clipping, a plain scalar on the device.
        """
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def model_state(self, model: nn.Module, *, full: bool) -> dict[str, Tensor]:
        """Return parameters and persistent buffers by name.

        Args:
            model: As ``prepare`` returned it.
            full: Whole tensors on the CPU, on rank 0 only (other ranks get an empty dict; a collective); else this rank's
                own, sharded ones as DTensor, without copying.
        """
        state = model.state_dict()
        return {name: self.gather(value) for name, value in state.items()} if full else state

    def load_model_state(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Take what ``model_state`` returned: whole tensors, the same on every rank, or sharded ones like the model's.

        Raises:
            KeyError: ``state`` has other names than the model.
        """
        own = model.state_dict()
        if own.keys() != state.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise KeyError(f"model state: missing {missing[:3]}, unexpected {extra[:3]}.")
        for name, value in own.items():
            self.scatter(state[name], value)

    def optimizer_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, full: bool) -> dict[str, Any]:
        """Return the optimizer's state by parameter name: ``{"state": {name: {...}}, "param_groups": [{"params": [names]}]}``.

        Args:
            model: What the optimizer trains.
            optimizer: One of the run.
            full: As for ``model_state``.
        """
        packed = optimizer.state_dict()
        names = _names_in_order(model, optimizer)
        state = {
            names[index]: {
                key: self.gather(value) if full and isinstance(value, Tensor) else value for key, value in of.items()
            }
            for index, of in packed["state"].items()
        }
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
        return {**packed, "state": state, "param_groups": groups}

    def load_optimizer_state(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, copy: bool = True
    ) -> None:
        """Take what ``optimizer_state`` returned; whole tensors are sharded as their parameters are.

        Args:
            model: What the optimizer trains.
            optimizer: One of the run.
            state: What was saved.
            copy: Leave the tensors in ``state`` to the caller; else the optimizer goes on with them.

        Raises:
            ValueError: its groups hold other parameters than the optimizer's.
        """
        names = _names_in_order(model, optimizer)
        parameters = dict(model.named_parameters(remove_duplicate=False))
        index_of = {name: index for index, name in enumerate(names)}
        saved_groups = {frozenset(group["params"]): group for group in state["param_groups"]}
        groups, start = [], 0
        for group in optimizer.param_groups:
            members = names[start : start + len(group["params"])]
            saved = saved_groups.get(frozenset(members))
            if saved is None or len(saved_groups) != len(optimizer.param_groups):
                raise ValueError(f"no saved group holds just {members[:3]} and {max(len(members) - 3, 0)} more.")
            # in the order of the optimizer, which is how torch tells parameters apart
            groups.append({**saved, "params": list(range(start, start + len(members)))})
            start += len(members)
        entries = {
            index_of[name]: {key: self.like(value, parameters[name], copy) for key, value in of.items()}
            for name, of in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": entries, "param_groups": groups})
        _keep_dtypes(optimizer, entries)

    def gather(self, tensor: Tensor) -> Tensor:
        """Return a copy of the whole of ``tensor`` on the CPU; a collective where it is sharded."""
        return tensor.detach().to("cpu", copy=True)

    def scatter(self, whole: Tensor, target: Tensor) -> None:
        """Copy ``whole``, or this rank's part of it, into ``target``."""
        target.copy_(whole)

    def like(self, value: Any, parameter: Tensor, copy: bool = True) -> Any:
        """Return ``value``, of a parameter's optimizer state, sharded as the parameter is; a ``copy`` or perhaps itself."""
        return value.clone() if copy and isinstance(value, Tensor) else value

    def close(self) -> None:  # noqa: B027
        """Give back what ``connect`` and ``prepare`` took. May be called twice."""


def _names_in_order(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters in the order in which it counts them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _keep_dtypes(optimizer: torch.optim.Optimizer, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Give state its own dtype back where torch has converted it to that of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, entry in entries.items():
        loaded = optimizer.state[parameters[index]]
        for key, value in entry.items():
            if isinstance(value, Tensor) and isinstance(loaded.get(key), Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)


class SingleEngine(Engine):
    """One process, one device."""

    name = "single"

    def prepare(self, model: nn.Module, device: torch.device, materialize: Callable[[nn.Module], None]) -> nn.Module:
        """Return the model itself."""
        materialize(model)
        return model


class ModelTransform(ABC):
    """A change to how a model computes, not what: split over ranks, recomputed, compiled. Runs after surgery, before the engine.

    Attributes:
        name: The name in messages.
        stage: Which of ``STAGES`` it belongs to; transforms run in that order.
        axis: The axis of the device mesh it splits the model along, None if it needs none.
        degree: The number of ranks along that axis.
    """

    name: str = "transform"
    stage: str = "recompute"
    axis: str | None = None
    degree: int = 1

    def check(self, state: State) -> None:  # noqa: B027
        """Raise ``ConflictError`` when the transform cannot work with this run. Called before anything starts."""

    @abstractmethod
    def apply(self, model: nn.Module, mesh: DeviceMesh | None) -> None:
        """Change ``model`` in place. Names and values of its parameters stay.

        Args:
            model: After surgery, on its device.
            mesh: The one-dimensional mesh of ``axis``, None without an axis.
        """


def in_order(transforms: Iterable[ModelTransform]) -> list[ModelTransform]:
    """Return ``transforms`` in the order in which they run.

    Raises:
        ParallelismError: one names an unknown stage, or two split along one axis.
    """
    found = list(transforms)
    for transform in found:
        if transform.stage not in STAGES:
            raise ParallelismError(
                f"{transform.name}.stage: got {transform.stage!r}. Expected one of {', '.join(STAGES)}."
            )
    axes = [transform.axis for transform in found if transform.axis is not None]
    for axis in axes:
        if axes.count(axis) > 1:
            raise ParallelismError(f"parallelism: two transforms split the model along {axis!r}. Name one of them.")
    return sorted(found, key=lambda transform: STAGES.index(transform.stage))
