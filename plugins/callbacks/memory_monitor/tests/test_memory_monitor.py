"""Against numbers written down by hand, what the operating system says, and two real processes."""

import json
import logging
import mmap
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_core import LoggerDestination, TrainableModel, Trainer
from kernel_core.errors import OptionError
from kernel_plugin_memory_monitor import (
    MEMORY_KEYS,
    MemoryMonitor,
    aggregate,
    check_keys,
    device_stats,
    memory_metrics,
    process_memory,
)
from torch import nn

# in the shape of torch.cuda.memory_stats(); a cut of its some hundred keys
STATS = {
    "active.all.current": 12,
    "active_bytes.all.current": 2_500_000_000,
    "active_bytes.all.peak": 3_500_000_000,
    "active_bytes.large_pool.current": 1,
    "allocated_bytes.all.allocated": 9_000_000_000,
    "allocated_bytes.all.current": 2_000_000_000,
    "allocated_bytes.all.peak": 3_000_000_000,
    "inactive_split_bytes.all.current": 250_000_000,
    "inactive_split_bytes.all.peak": 300_000_000,
    "num_alloc_retries": 3,
    "num_ooms": 1,
    "reserved_bytes.all.current": 4_000_000_000,
    "reserved_bytes.all.peak": 4_194_304_000,
}


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch)

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


class Keep(LoggerDestination):
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, Any]]] = []

    def log_metrics(self, metrics: Any, step: int) -> None:
        if any(name.startswith("memory/") for name in metrics):
            self.records.append((step, dict(metrics)))


def fit(*plugins: Any) -> Any:
    model = Line()
    trainer = Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)] * 4,
        max_duration="4ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=list(plugins),
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return trainer


def test_statistics_come_out_under_their_names_in_gigabytes_of_a_billion_bytes() -> None:
    assert memory_metrics(STATS) == {
        "memory/current_allocated_mem": 2.0,
        "memory/current_active_mem": 2.5,
        "memory/current_inactive_mem": 0.25,
        "memory/current_reserved_mem": 4.0,
        "memory/peak_allocated_mem": 3.0,
        "memory/peak_active_mem": 3.5,
        "memory/peak_inactive_mem": 0.3,
        "memory/peak_reserved_mem": 4.194304,
        "memory/alloc_retries": 3,
    }


def test_keys_of_ones_own_replace_them_and_what_a_device_does_not_count_is_left_out() -> None:
    own = {"num_ooms": "ooms", "allocated_bytes.all.allocated": "allocated_in_all", "segment.all.peak": "segments"}
    assert memory_metrics(STATS, own) == {"memory/ooms": 1, "memory/allocated_in_all": 9.0}
    assert memory_metrics({}) == {}


def test_torch_documents_every_statistic_that_is_read() -> None:
    documentation = torch.cuda.memory_stats.__doc__ or ""
    for key in MEMORY_KEYS:
        counter, _, which = key.partition(".")
        assert f'"{counter}' in documentation
        assert not which or which in ("all.current", "all.peak")


def test_a_cpu_has_no_statistics() -> None:
    assert device_stats(torch.device("cpu")) == {}


def test_process_memory_is_what_the_operating_system_says() -> None:
    status = "Name:\tpython\nVmPeak:\t  900000 kB\nVmHWM:\t  250000 kB\nVmRSS:\t  125000 kB\nRssAnon:\t 1 kB\n"
    assert process_memory(status) == {"memory/process_rss": 0.128, "memory/process_peak_rss": 0.256}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_process_memory_follows_what_is_allocated() -> None:
    before = process_memory()
    block = mmap.mmap(-1, 100_000_000)  # what tests before have freed is not used again
    for page in range(0, len(block), 4096):
        block[page] = 1
    during = process_memory()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    block.close()
    after = process_memory()
    assert during["memory/process_rss"] - before["memory/process_rss"] == pytest.approx(0.1, abs=0.02)
    assert during["memory/process_rss"] == pytest.approx(pages * 4096 / 1e9, abs=0.02)
    assert after["memory/process_rss"] < during["memory/process_rss"] - 0.08
    assert after["memory/process_peak_rss"] >= during["memory/process_rss"] - 0.001


def test_where_there_is_no_proc_the_peak_comes_from_the_resource_module(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = process_memory()["memory/process_peak_rss"]

    def missing(self: Path) -> str:
        raise FileNotFoundError(str(self))

    monkeypatch.setattr(Path, "read_text", missing)
    found = process_memory()
    assert list(found) == ["memory/process_peak_rss"]
    assert found["memory/process_peak_rss"] >= 0.9 * expected


def test_a_run_on_a_cpu_says_so_once_and_logs_what_the_process_holds(caplog: pytest.LogCaptureFixture) -> None:
    keep = Keep()
    with caplog.at_level(logging.WARNING):
        fit("memory_monitor", keep)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("kernel_plugin_memory_monitor")]
    assert lines == [
        "memory_monitor: a device of type cpu keeps no memory statistics. Logging what the process holds in RAM instead."
    ]
    assert [step for step, _ in keep.records] == [1, 2, 3, 4]
    for _, metrics in keep.records:
        assert set(metrics) == {"memory/process_rss", "memory/process_peak_rss"}
        assert 0.01 < metrics["memory/process_rss"] <= metrics["memory/process_peak_rss"] + 0.001


def test_in_one_process_the_aggregates_are_the_value_and_come_at_their_interval() -> None:
    keep = Keep()
    fit(MemoryMonitor(dist_aggregate_batch_interval=2), keep)
    assert ["memory/process_rss_avg" in metrics for _, metrics in keep.records] == [False, True, False, True]
    _, metrics = keep.records[1]
    for name in ("memory/process_rss", "memory/process_peak_rss"):
        assert metrics[name] == metrics[f"{name}_avg"] == metrics[f"{name}_min"] == metrics[f"{name}_max"]
    assert len(metrics) == 8


def test_nothing_is_read_when_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_plugin_memory_monitor as module

    calls = []
    monkeypatch.setattr(module, "process_memory", lambda: calls.append(1) or {})
    fit(MemoryMonitor(dist_aggregate_batch_interval=1))
    assert not calls
    fit(MemoryMonitor(), Keep())
    assert len(calls) == 4


def one_rank(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = aggregate({"memory/a": 1.0 + rank, "memory/b": 4.0 - 3 * rank}, torch.device("cpu"))
    (folder / f"{rank}.json").write_text(json.dumps({name: float(value) for name, value in found.items()}))
    os._exit(0)  # nothing of the test process's own is to be shut down here


@pytest.mark.ranks
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_two_ranks_agree_on_mean_minimum_and_maximum(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # what is imported already need not be imported again
    ranks = [context.Process(target=one_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    expected = {
        "memory/a_avg": 1.5,
        "memory/a_min": 1.0,
        "memory/a_max": 2.0,
        "memory/b_avg": 2.5,
        "memory/b_min": 1.0,
        "memory/b_max": 4.0,
    }
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [expected] * 2


def test_one_process_without_a_group_aggregates_over_itself() -> None:
    found = aggregate({"memory/a": 1.5}, torch.device("cpu"))
    assert found == {"memory/a_avg": 1.5, "memory/a_min": 1.5, "memory/a_max": 1.5}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_metrics_are_those_of_torch() -> None:
    model, keep = Line(), Keep()
    Trainer(
        model=model,
        train_dataloader=[torch.ones(4, 2)],
        max_duration="1ba",
        optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plugins=[MemoryMonitor(), keep],
        device="cuda",
        progress_bar=False,
    ).fit()
    _, metrics = keep.records[0]
    assert set(metrics) == {f"memory/{name}" for name in MEMORY_KEYS.values()}
    assert metrics["memory/current_allocated_mem"] > 0
    assert metrics["memory/peak_reserved_mem"] == pytest.approx(torch.cuda.max_memory_reserved() / 1e9)


def test_a_statistic_that_the_device_lacks_is_refused() -> None:
    message = (
        r"memory_monitor\.memory_keys: got 'allocated_bytes\.all\.curent', which this device does not count\. "
        r"Did you mean 'allocated_bytes\.all\.current'.*Expected a key of torch\.cuda\.memory_stats\(\)"
    )
    with pytest.raises(OptionError, match=message):
        check_keys(STATS, {"allocated_bytes.all.curent": "now"})
    check_keys(STATS, {"num_ooms": "ooms"})
    check_keys({}, {"anything": "before the device is used"})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"dist_aggregate_batch_interval": 0},
            r"memory_monitor\.dist_aggregate_batch_interval: got 0, .*or equal to 1",
        ),
        ({"memory_keys": ["a"]}, r"memory_monitor\.memory_keys: got \['a'\], expected dict\[str, str\]"),
        ({"memory_key": {}}, r"memory_monitor\.memory_key: unknown option\. Did you mean 'memory_keys'\?"),
    ],
)
def test_wrong_options(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MemoryMonitor(**kwargs)
