"""Log how much memory of the accelerator is in use."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
from kernel_core import Callback, Logger, State, hookimpl
from kernel_core.errors import OptionError
from kernel_core.naming import did_you_mean
from pydantic import Field

__all__ = ["MEMORY_KEYS", "MemoryMonitor", "aggregate", "device_stats", "memory_metrics", "process_memory"]

log = logging.getLogger(__name__)
GB = 1e9  # bytes
MEMORY_KEYS = {
    f"{key}_bytes.all.{when}": f"{when}_{name}_mem"
    for when in ("current", "peak")
    for key, name in {
        "allocated": "allocated",
        "active": "active",
        "inactive_split": "inactive",
        "reserved": "reserved",
    }.items()
} | {"num_alloc_retries": "alloc_retries"}


def memory_metrics(stats: Mapping[str, float], keys: Mapping[str, str] = MEMORY_KEYS) -> dict[str, float]:
    """Return ``memory/<name>`` for each of ``keys`` that ``stats`` has: bytes in GB of 1e9 bytes, counts as they are.

    Args:
        stats: What ``torch.cuda.memory_stats`` returns.
        keys: Key of ``stats`` to name.
    """
    return {
        f"memory/{name}": stats[key] / GB if "bytes" in key else stats[key]
        for key, name in keys.items()
        if key in stats
    }


def device_stats(device: torch.device) -> Mapping[str, Any]:
    """Return the allocator's counters of an accelerator, empty where there are none. They are the host's: no device sync."""
    if device.type == "cuda":
        return torch.cuda.memory_stats(device)
    if device.type != "cpu":
        with suppress(RuntimeError):  # an allocator that keeps no such counters
            return torch.accelerator.memory_stats(device)
    return {}


def process_memory(status: str | None = None) -> dict[str, float]:
    """Return ``memory/process_rss`` and ``memory/process_peak_rss``: what this process holds in RAM, in GB of 1e9 bytes.

    Args:
        status: The text of ``/proc/self/status``; None reads it. Where there is none (macOS) the peak alone is known.
    """
    names = {"VmRSS": "memory/process_rss", "VmHWM": "memory/process_peak_rss"}
    with suppress(OSError):
        text = Path("/proc/self/status").read_text() if status is None else status
        lines = (line.split() for line in text.splitlines() if line.startswith(tuple(names)))
        return {names[name.rstrip(":")]: int(kibibytes) * 1024 / GB for name, kibibytes, _ in lines}
    with suppress(ImportError):  # Windows
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS, KiB elsewhere
        return {"memory/process_peak_rss": peak * (1 if sys.platform == "darwin" else 1024) / GB}
    return {}


def aggregate(metrics: Mapping[str, float], device: torch.device) -> dict[str, Any]:
    """Return mean, minimum and maximum over the ranks, under ``<name>_avg``, ``_min`` and ``_max``.

    Every rank must call it, with the same names. Two collectives if ``torch.distributed`` is initialised; the results
    are then scalars on ``device``, and no host waits for them.
    """
    if not _distributed():
        return {f"{name}_{how}": value for name, value in metrics.items() for how in ("avg", "min", "max")}
    values = torch.tensor(list(metrics.values()), dtype=torch.float32).to(device, non_blocking=True)
    extremes = torch.stack([-values, values])
    dist.all_reduce(values)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    found = zip(metrics, values / dist.get_world_size(), -extremes[0], extremes[1], strict=True)
    return {
        f"{name}_{how}": value
        for name, *three in found
        for how, value in zip(("avg", "min", "max"), three, strict=True)
    }


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


class MemoryMonitor(Callback):
    """Log the memory in use at the end of every batch, after the optimizer's step.

    ``memory/{current,peak}_{allocated,active,inactive,reserved}_mem`` in GB of 1e9 bytes, and ``memory/alloc_retries``;
    peaks are those since the process began. On a CPU, ``memory/process_rss`` and ``memory/process_peak_rss``.

    Args:
        memory_keys: Keys of ``torch.cuda.memory_stats`` to names, instead of the above.
        dist_aggregate_batch_interval: Every so many batches ``_avg``, ``_min`` and ``_max`` over the ranks are logged too.
    """

    affects_training = False

    def __init__(
        self,
        memory_keys: dict[str, str] | None = None,
        dist_aggregate_batch_interval: Annotated[int, Field(ge=1)] | None = None,
    ) -> None:
        self.memory_keys = memory_keys
        self.dist_aggregate_batch_interval = dist_aggregate_batch_interval
        self._keys = MEMORY_KEYS if memory_keys is None else memory_keys
        self._has_stats = False

    @hookimpl
    def init(self, state: State) -> None:
        """Find out what can be monitored here, and say so if it is not an accelerator.

        Raises:
            OptionError: the accelerator has no such counter.
        """
        stats = device_stats(state.device)
        self._has_stats = bool(stats) or state.device.type == "cuda"
        if self._has_stats:
            check_keys(stats, self.memory_keys or {})
        elif state.rank == 0:
            log.warning(
                "memory_monitor: a device of type %s keeps no memory statistics. Logging what the process holds in RAM instead.",
                state.device.type,
            )

    @hookimpl
    def batch_end(self, state: State, logger: Logger) -> None:
        """Log; over the ranks too when it is due. A rank nobody listens on takes part in that, or the others would wait."""
        interval = self.dist_aggregate_batch_interval
        due = interval is not None and state.progress.batch % interval == 0
        if not logger.listening and not (due and state.world_size > 1):
            return
        metrics: dict[str, Any] = (
            memory_metrics(device_stats(state.device), self._keys) if self._has_stats else process_memory()
        )
        if due and (state.world_size == 1 or _distributed()):
            metrics |= aggregate(metrics, state.device)
        logger.log_metrics(metrics)


def check_keys(stats: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """Refuse keys that ``stats`` lacks; empty statistics, of a device not used yet, tell nothing.

    Raises:
        OptionError: a key is unknown.
    """
    for key in keys:
        if stats and key not in stats:
            raise OptionError(
                f"memory_monitor.memory_keys: got {key!r}, which this device does not count.{did_you_mean(key, stats)} "
                "Expected a key of torch.cuda.memory_stats(), such as 'allocated_bytes.all.current'."
            )
