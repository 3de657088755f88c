"""What torchmetrics' objects have gathered so far: it is not part of their ``state_dict``, and each rank has its own."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernel_core.errors import CheckpointMismatchError

State = dict[str, Any]


def metric_state(metric: Any) -> State:
    """Return what ``metric`` has gathered, by the path of each metric in it (wrappers and collections hold several).

    What is not torchmetrics' gives its own ``state_dict``.
    """
    if not isinstance(metric, nn.Module):
        return {"state_dict": metric.state_dict()} if hasattr(metric, "state_dict") else {}
    found: State = {}
    for path, part in metric.named_modules():
        if hasattr(part, "metric_state"):
            found[path] = {"state": _plain(part.metric_state), "num_updates": part.update_count}
    return found or {"state_dict": dict(metric.state_dict())}


def _plain(state: Mapping[str, Any]) -> State:
    return {name: list(value) if isinstance(value, list) else value for name, value in state.items()}


@torch.no_grad()
def load_metric_state(metric: Any, saved: Sequence[State], rank: int, world_size: int, name: str) -> None:
    """Give ``metric`` back what it had gathered.

    Args:
        metric: A fresh one.
        saved: What ``metric_state`` returned on each rank that saved.
        rank, world_size: This process among all; on another number of ranks rank 0 gets what all had together.
        name: For messages.

    Raises:
        CheckpointMismatchError: it is another metric, or its parts cannot be put together.
    """
    parts: dict[str, Any] = dict(metric.named_modules()) if isinstance(metric, nn.Module) else {}
    same = len(saved) == world_size
    for path, mine in saved[rank if same else 0].items():
        if path == "state_dict":
            metric.load_state_dict(mine)
            continue
        part = parts.get(path)
        if part is None or not hasattr(part, "metric_state") or set(part.metric_state) != set(mine["state"]):
            raise CheckpointMismatchError(
                f"metric {name}: the checkpoint has another metric under that name. Expected the same metrics; "
                "load_ignore_keys=['metrics'] leaves them out."
            )
        if same:
            _set(part, mine["state"], mine["num_updates"])
        elif rank == 0:
            _set(part, _together(part, [one[path]["state"] for one in saved], name), _updates(saved, path))


def _updates(saved: Sequence[State], path: str) -> int:
    return max(int(one[path]["num_updates"]) for one in saved)


def _set(part: Any, state: State, num_updates: int) -> None:
    for name, value in state.items():
        setattr(part, name, _moved(value, part.device))
    part._update_count = num_updates
    part._computed = None


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, Tensor) else copy.deepcopy(value)


def _together(part: Any, states: Sequence[State], metric: str) -> State:
    """Reduce the states of all ranks as the metric itself does when it computes."""
    result: State = {}
    for name, reduce in part._reductions.items():
        values = [state[name] for state in states]
        if all(isinstance(value, list) for value in values):
            result[name] = [item for value in values for item in value]
        elif reduce is None:
            raise CheckpointMismatchError(
                f"metric {metric}: says nothing about how its {name} of several ranks becomes one, and the number of ranks "
                "has changed. Resume on as many ranks, at the end of an epoch, or with load_ignore_keys=['metrics']."
            )
        else:
            kind = getattr(reduce, "__name__", "")
            result[name] = torch.cat(values) if kind == "dim_zero_cat" else reduce(torch.stack(values))
    return result
