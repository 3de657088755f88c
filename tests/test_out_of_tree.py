"""Packages that live outside the repository, built as wheels: found, ordered and run by name.

The quick form installs them into a folder beside this environment; the slow one installs every wheel of the workspace into
an empty environment, with the two commands of the design, word for word.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
OUTSIDE = [ROOT / "tests" / "out_of_tree" / name for name in ("gain", "toy_attention")]
SMALL = ("--set", "data.num_train_strips=64", "--set", "data.num_test_strips=8", "--max-duration", "2ba")


def run(*command: str | Path, **kwargs: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheels(out: Path) -> None:
    for folder in OUTSIDE:
        run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", out, folder)


def check_installed(kernel: Any) -> None:
    """Both packages do what they say, through ``kernel(*arguments) -> standard output``."""
    listed = json.loads(kernel("plugins", "list", "--json"))
    (gain,) = [one for one in listed if one["name"] == "gain"]
    assert (gain["kind"], gain["distribution"], gain["version"]) == ("algorithms", "somebodys-gain", "2.5")
    plan = json.loads(kernel("plan", "--plugins", "gradient_clipping,gain", "-o", "gain.factor=3.0", "--json"))
    calls = plan["events"]["after_train_batch"]
    assert [call["plugin"] for call in calls] == ["gain", "gradient_clipping"]
    assert calls[1]["why"] == ["after gain: gradient_clipping declares after role:scales-gradients"]
    (locked,) = [one for one in plan["plugins"] if one["name"] == "gain"]
    assert locked["options"] == {"factor": 3.0}
    assert len(locked["hash"]) == 64
    trained = json.loads(kernel("train", "toy_attention", "--plugins", "alibi,toy_attention_policy,gain", "--json"))
    assert [(change["plugin"], change["path"], change["new"]) for change in trained["surgery"]] == [
        ("alibi", "attention", "ToyAttention with ALiBi")
    ]


def test_wheels_from_outside_are_found_ordered_and_run_by_name(tmp_path: Path) -> None:
    build_wheels(tmp_path / "dist")
    wheels = sorted((tmp_path / "dist").glob("*.whl"))
    assert len(wheels) == 2
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, *wheels)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    check_installed(
        lambda *arguments: run(sys.executable, "-m", "kernel_cli.main", *arguments, env=environment, cwd=tmp_path)
    )


@pytest.mark.slow
def test_an_empty_environment_needs_two_commands(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    run(sys.executable, ROOT / "tools" / "wheels.py", dist)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir()))
    build_wheels(dist)
    venv.create(tmp_path / "empty", with_pip=True)
    binaries = tmp_path / "empty" / "bin"
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "2"}
    environment.pop("PYTHONPATH", None)
    inside = {"env": environment, "cwd": tmp_path}
    pip = (binaries / "python", "-m", "pip", "install", "-q", "--find-links", "dist")
    run(*pip, "kernel-plugin-alibi", "kernel-plugin-blurpool", **inside)
    result = json.loads(run(binaries / "kernel", "train", "--plugins", "alibi,blurpool", *SMALL, "--json", **inside))
    assert {change["plugin"] for change in result["surgery"]} == {"alibi", "blurpool"}
    assert (tmp_path / result["run_dir"] / "metrics.jsonl").exists()
    run(*pip, "kernel-plugin-gradient-clipping", "somebodys-gain", "somebodys-toy-attention", **inside)
    check_installed(lambda *arguments: run(binaries / "kernel", *arguments, **inside))
