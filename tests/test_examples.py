"""The programs in docs/examples, each in a process and an empty folder of its own. About 50 s together on one core."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"


def run(name: str, folder: Path, *launcher: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, text
    return [float(number) for number in found.groups()]


def test_bert_classification_learns_and_writes_a_log(tmp_path: Path) -> None:
    printed = run("bert_classification.py", tmp_path)
    before, after = numbers(r"accuracy: ([\d.]+) before, ([\d.]+) after", printed)
    first, last = numbers(r"loss: ([\d.]+) at first, ([\d.]+) at last", printed)
    assert before < 0.5 < 0.7 < after
    assert last < first / 2
    assert [path.name for path in tmp_path.iterdir()] == ["training_log.txt"]
    records = [json.loads(line) for line in (tmp_path / "training_log.txt").read_text().splitlines()]
    logged = {name for record in records for name in record}
    assert logged >= {
        "loss/train/total",
        "lr-DecoupledAdamW/group0",
        "throughput/samples_per_sec",
        "metrics/train/CrossEntropy",
        "metrics/eval/MulticlassAccuracy",
    }
    assert any(name.startswith("memory/") for name in logged)
    settings = next(record["hyperparameters"] for record in records if "hyperparameters" in record)
    assert (settings["seed"], settings["precision"]) == (42, "amp_bf16")
    rates = [record["lr-DecoupledAdamW/group0"] for record in records if "lr-DecoupledAdamW/group0" in record]
    # up to 2e-5 at 6 percent of the run, then down to 0
    assert max(rates) == pytest.approx(2e-5, rel=0.02)
    assert 0.04 < rates.index(max(rates)) / len(rates) < 0.08
    assert rates[0] == 0
    assert rates[-1] < 1e-6


def test_resnet_vision_learns(tmp_path: Path) -> None:
    (accuracy,) = numbers(r"accuracy on 359 images: ([\d.]+)", run("resnet_vision.py", tmp_path))
    assert accuracy > 0.6
    assert list(tmp_path.iterdir()) == []


def test_mlp_mixed_precision_learns_in_bf16(tmp_path: Path) -> None:
    printed = run("mlp_mixed_precision.py", tmp_path)
    assert "precision: amp_bf16" in printed
    assert numbers(r"accuracy: ([\d.]+)", printed)[0] > 0.85
    assert list(tmp_path.iterdir()) == []


def test_multistep_schedule_steps_at_its_milestones(tmp_path: Path) -> None:
    printed = run("multistep_schedule.py", tmp_path)
    # 30, 50 and 90 percent of 450 batches are done before batches 136, 226 and 406
    steps = re.findall(r"from batch (\d+) of 450 on: learning rate ([\d.e-]+)", printed)
    assert steps == [("1", "0.1"), ("136", "0.01"), ("226", "0.001"), ("406", "0.0001")]
    assert numbers(r"accuracy: ([\d.]+)", printed)[0] > 0.9


def test_torch_scheduler_falls_in_a_line_by_epoch(tmp_path: Path) -> None:
    printed = run("torch_scheduler.py", tmp_path)
    rates = [float(rate) for rate in re.findall(r"epoch \d: learning rate ([\d.]+)", printed)]
    assert rates == pytest.approx([0.1 * (1 - 0.8 * min(epoch, 4) / 4) for epoch in range(6)])
    assert numbers(r"accuracy: ([\d.]+)", printed)[0] > 0.9


@pytest.mark.ranks
def test_bert_fsdp_learns_on_two_ranks_with_the_configuration_of_composers_users(tmp_path: Path) -> None:
    printed = run("bert_fsdp.py", tmp_path, "-m", "kernel_cli.main", "launch", "-n", "2", "--log-dir", str(tmp_path))
    shared, whole = numbers(r"(\d+) of (\d+) weights on rank 0", printed)
    assert 0.45 < shared / whole < 0.55
    (accuracy,) = numbers(r"accuracy: ([\d.]+)", printed)
    assert accuracy > 0.5  # three classes


def test_every_example_is_on_the_page_and_run_here() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    page, here = (EXAMPLES / "README.md").read_text(), Path(__file__).read_text()
    assert names == set(re.findall(r"\]\((\w+\.py)\)", page)) == set(re.findall(r'run\("(\w+\.py)"', here))
