"""The README's code does what the README says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_plugin_is_as_short_as_it_says_and_trains_by_name(tmp_path: Path) -> None:
    plugin = blocks("python")[0]
    assert len(plugin.strip().splitlines()) <= 25
    (pyproject,) = blocks("toml")
    (tmp_path / "mine.py").write_text(plugin)
    (tmp_path / "pyproject.toml").write_text(pyproject)
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(site), str(tmp_path)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def kernel(*arguments: str) -> str:
        run = [sys.executable, "-m", "kernel_cli.main", *arguments]
        return subprocess.run(run, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout

    listed = json.loads(kernel("plugins", "list", "--json"))
    assert any(one["name"] == "mine" and one["distribution"] == "kernel-plugin-mine" for one in listed)
    plan = json.loads(kernel("plan", "--plugins", "mine,gradient_clipping", "--json"))
    calls = plan["events"]["after_train_batch"]
    assert [call["plugin"] for call in calls] == ["gradient_clipping", "mine"]
    assert calls[1]["why"] == ["after gradient_clipping: mine declares after role:clips-gradients"]
    small = ("--set", "data.num_train_strips=64", "--set", "data.num_test_strips=8", "--max-duration", "2ba")
    result = json.loads(
        kernel("train", "--plugins", "mine,gradient_clipping", "-o", "mine.scale=0.1", *small, "--json")
    )
    assert set(result["metrics"]) >= {"metrics/digits5/exact_match", "metrics/digits12/exact_match"}


def test_the_trainer_example_runs_and_learns(tmp_path: Path) -> None:
    script = blocks("python")[1] + "\nprint(float(trainer.state.loss))\n"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=tmp_path)
    assert "gradient_clipping" in done.stdout
    assert float(done.stdout.splitlines()[-1]) < 2.0  # the targets have variance 8


def test_the_files_it_links_to_exist() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / target).exists(), target
