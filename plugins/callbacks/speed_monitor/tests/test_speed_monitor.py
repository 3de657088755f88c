from typing import Any

import pytest
import torch
from kernel_core import LoggerDestination, TrainableModel, Trainer
from kernel_plugin_speed_monitor import PEAK_FLOPS, Sample, SpeedMonitor, peak_flops, throughput
from torch import nn


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch["x"])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()

    def flops_per_batch(self, batch: Any) -> float:
        return 1000.0


class Keep(LoggerDestination):
    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        self.records.append(dict(metrics))


def fit(**options: Any) -> tuple[list[dict[str, Any]], Any]:
    model, keep = Line(), Keep()
    batch = {"x": torch.ones(4, 2), "input_ids": torch.ones(4, 7, dtype=torch.long)}
    trainer = Trainer(
        model=model,
        train_dataloader=[batch] * 6,
        max_duration="6ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[SpeedMonitor(**options), keep],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return [record for record in keep.records if "time/train" in record], trainer.state


def test_rates_are_differences_of_totals() -> None:
    rates = throughput(Sample(1.0, 10, 80, 0, 0.0), Sample(3.0, 14, 112, 0, 0.0), world_size=2)
    assert rates == {
        "throughput/batches_per_sec": 2.0,
        "throughput/device/batches_per_sec": 1.0,
        "throughput/samples_per_sec": 16.0,  # 112 - 80 of all ranks in 2 seconds
        "throughput/device/samples_per_sec": 8.0,
    }
    assert throughput(Sample(1.0, 1, 1, 1, 1.0), Sample(1.0, 2, 2, 2, 2.0), 1) == {}


def test_a_run_logs_rates_that_fit_together() -> None:
    records, state = fit(window_size=3, gpu_flops_available=1e6, time_unit="seconds")
    assert len(records) == 6
    assert "throughput/batches_per_sec" not in records[0]  # one batch is no window yet
    last = records[-1]
    batches = last["throughput/batches_per_sec"]
    assert batches > 0
    assert last["throughput/samples_per_sec"] == pytest.approx(4 * batches)
    assert last["throughput/tokens_per_sec"] == pytest.approx(28 * batches)
    assert last["throughput/flops_per_sec"] == pytest.approx(1000 * batches)
    assert last["throughput/device/mfu"] == pytest.approx(1000 * batches / 1e6)
    assert last["time/train"] == pytest.approx(state.progress.total_wct)
    assert last["time/total"] == pytest.approx(last["time/train"] + last["time/val"])


def test_utilisation_is_unknown_where_the_peak_is() -> None:
    assert "throughput/device/mfu" not in fit()[0][-1]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", "h100 pcie"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A10", "a10"),
    ],
)
def test_devices_are_known_by_their_names(name: str, key: str) -> None:
    assert peak_flops(name) == PEAK_FLOPS[key]


def test_an_unknown_device_has_no_peak() -> None:
    assert peak_flops("NVIDIA Future 9000") is None
    assert peak_flops("NVIDIA A1000 Laptop") is None


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match=r"speed_monitor\.window_size: got 0, .*greater than or equal to 1"):
        SpeedMonitor(window_size=0)
    with pytest.raises(ValueError, match=r"speed_monitor\.time_unit: got 'weeks'"):
        SpeedMonitor(time_unit="weeks")  # type: ignore[arg-type]
