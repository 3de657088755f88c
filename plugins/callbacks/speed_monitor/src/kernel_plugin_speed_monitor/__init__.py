"""Log throughput over a sliding window of batches, and how much of the device's peak the model uses."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, Literal, NamedTuple

import torch
from kernel_core import Callback, Logger, State, hookimpl
from pydantic import Field

__all__ = ["PEAK_FLOPS", "Sample", "SpeedMonitor", "peak_flops", "throughput"]

# Dense peak FLOP/s in bf16 (fp16 where there is no bf16), without sparsity, as the vendor's data sheets give them.
PEAK_FLOPS = {
    "h200": 989.5e12,  # NVIDIA H200 SXM data sheet: 1,979 with sparsity
    "h100 pcie": 756.5e12,  # NVIDIA H100 PCIe data sheet: 1,513 with sparsity
    "h100": 989.5e12,  # NVIDIA H100 SXM data sheet
    "a100": 312e12,  # NVIDIA A100 data sheet
    "a10": 125e12,  # NVIDIA A10 data sheet
    "v100": 125e12,  # NVIDIA V100 SXM data sheet, fp16
    "t4": 65e12,  # NVIDIA T4 data sheet, fp16
}
SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0, "days": 86400.0}


class Sample(NamedTuple):
    """Totals at the end of a batch, those of all ranks."""

    seconds: float
    batches: int
    samples: int
    tokens: int
    flops: float


def peak_flops(device_name: str) -> float | None:
    """Return the dense peak FLOP/s of a device by its name, None for one that is not known."""
    words = device_name.lower().replace("-", " ").split()
    for name, flops in PEAK_FLOPS.items():
        if all(word in words for word in name.split()):
            return flops
    return None


def throughput(first: Sample, last: Sample, world_size: int) -> dict[str, float]:
    """Return what was done per second between two samples, in all and per device; tokens and FLOPs only if counted."""
    seconds = last.seconds - first.seconds
    if seconds <= 0:
        return {}
    rates: dict[str, float] = {}
    for unit in ("batches", "samples", "tokens", "flops"):
        done = getattr(last, unit) - getattr(first, unit)
        if not done and unit in ("tokens", "flops"):
            continue
        rates[f"throughput/{unit}_per_sec"] = done / seconds
        rates[f"throughput/device/{unit}_per_sec"] = done / seconds / world_size
    return rates


class SpeedMonitor(Callback):
    """Log throughput at the end of every batch, from the second batch on.

    ``throughput/{batches,samples,tokens,flops}_per_sec`` and the same under ``throughput/device``;
    ``throughput/device/mfu`` where the model has ``flops_per_batch(batch)`` and the device's peak is known;
    ``time/train``, ``time/val`` and ``time/total``.

    Args:
        window_size: Batches to average over.
        gpu_flops_available: The device's peak FLOP/s, where the table does not know it or is not to be used.
        time_unit: The unit of ``time/*``.
    """

    affects_training = False

    def __init__(
        self,
        window_size: Annotated[int, Field(ge=1)] = 100,
        gpu_flops_available: float | None = None,
        time_unit: Literal["seconds", "minutes", "hours", "days"] = "hours",
    ) -> None:
        self.window_size = window_size
        self.gpu_flops_available = gpu_flops_available
        self.time_unit = time_unit
        self._window: deque[Sample] = deque(maxlen=window_size + 1)
        self._flops = 0.0
        self._eval_seconds = 0.0
        self._flops_per_batch: Any = None
        self._peak: float | None = None

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Look up the device's peak and whether the model counts its FLOPs."""
        self._window.clear()
        self._flops_per_batch = getattr(state.model, "flops_per_batch", None)
        self._peak = self.gpu_flops_available
        if self._peak is None and state.device.type == "cuda":
            self._peak = peak_flops(torch.cuda.get_device_name(state.device))

    @hookimpl
    def batch_end(self, state: State, logger: Logger) -> None:
        """Take the totals and log the rates over the window."""
        if not logger.listening:
            return
        if self._flops_per_batch is not None:
            # counted on this rank, and taken to be as many wherever other data is read
            self._flops += self._flops_per_batch(state.batch) * state.engine.data_world_size
        progress = state.progress
        now = Sample(progress.total_wct, progress.batch, progress.sample, progress.token, self._flops)
        self._window.append(now)
        metrics = throughput(self._window[0], now, state.world_size)
        flops = metrics.get("throughput/device/flops_per_sec")
        if flops is not None and self._peak:
            metrics["throughput/device/mfu"] = flops / self._peak
        unit = SECONDS[self.time_unit]
        metrics["time/train"] = progress.total_wct / unit
        metrics["time/val"] = self._eval_seconds / unit
        metrics["time/total"] = (progress.total_wct + self._eval_seconds) / unit
        logger.log_metrics(metrics)

    @hookimpl
    def eval_end(self, state: State) -> None:
        """Add up the time spent in evaluation."""
        self._eval_seconds += state.eval_progress.total_wct
