"""The author's journey: an idea becomes a package that strangers install, see, train with, lock, and resume elsewhere."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SMALL = ("--set", "data.num_train_strips=96", "--set", "data.num_test_strips=8", "--set", "data.batch_size=16")


def run(*command: str | Path, **options: Any) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


INIT = "        self.factor = factor\n"
STATE = '''        self.num_batches = 0

    def state_dict(self) -> dict[str, int]:
        """Return how many batches are done."""
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take what ``state_dict`` returned."""
        self.num_batches = state["num_batches"]

    @hookimpl
    def batch_end(self) -> None:
        """Count."""
        self.num_batches += 1
'''


def edit(module: Path) -> None:
    """Some ten lines: gradients are multiplied by something that shrinks, for which the batches are counted."""
    text = module.read_text().replace(INIT, INIT + STATE)
    text = text.replace("is not None), self.factor)", "is not None), self.factor**self.num_batches)")
    text = text.replace("import Iterable\n", "import Iterable, Mapping\n")
    assert text.count("num_batches") == 7
    module.write_text(text)


def environment(folder: Path, dist: Path, *wanted: str) -> tuple[Path, dict[str, str]]:
    """Make a fresh environment with what is wanted; return where its programs are, and its variables."""
    venv.create(folder, with_pip=True)
    variables = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "2"}
    variables.pop("PYTHONPATH", None)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", "--find-links", dist, *wanted, env=variables)
    return folder / "bin", variables


@pytest.mark.slow
def test_a_stranger_can_use_resume_and_trust_what_an_author_made(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    run(sys.executable, ROOT / "tools" / "wheels.py", dist)

    # the author: new, edited, checked, built
    author = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path / "kernel-plugin-fading" / "src")}}
    run(sys.executable, "-m", "kernel_cli.main", "plugins", "new", "fading", "--kind", "algorithm", **author)
    package = tmp_path / "kernel-plugin-fading"
    edit(package / "src" / "kernel_plugin_fading" / "__init__.py")
    build = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir")
    run(*build, tmp_path / "first", package)
    pip = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target")
    run(*pip, tmp_path / "site", *(tmp_path / "first").glob("*.whl"))  # its entry point, beside this environment
    author["env"]["PYTHONPATH"] = str(tmp_path / "site")
    told = json.loads(
        run(sys.executable, "-m", "kernel_cli.main", "plugins", "check", "fading", "--write", "--json", **author)
    )
    assert not [name for name, found in told["checks"].items() if found.startswith("refuted")]
    card = tmp_path / "site" / "kernel_plugin_fading" / "conformance.json"
    (package / "src" / "kernel_plugin_fading" / "conformance.json").write_text(card.read_text())
    run(*build, dist, package)
    run(sys.executable, "-m", "twine", "check", "--strict", *dist.glob("kernel_plugin_fading*"))

    # a stranger: installed, seen, trained with, locked
    here = tmp_path / "work"
    here.mkdir()
    programs, variables = environment(tmp_path / "one", dist, "kernel-plugin-fading", "kernel-plugin-gradient-clipping")
    inside: dict[str, Any] = {"cwd": here, "env": variables}
    listed = json.loads(run(programs / "kernel", "plugins", "list", "--json", **inside))
    (mine,) = [one for one in listed if one["name"] == "fading"]
    assert (mine["kind"], mine["distribution"], mine["version"]) == ("algorithms", "kernel-plugin-fading", "0.1.0")
    shown = json.loads(run(programs / "kernel", "plugins", "show", "fading", "--json", **inside))
    assert shown["card"]["checks"]["resume"] == "proven"
    plugins = (
        "--plugins",
        "fading,gradient_clipping",
        "-o",
        "fading.factor=0.9",
        "--set",
        "checkpoint.save_interval=1ba",
    )
    run(programs / "kernel", "plugins", "lock", *plugins, **inside)
    train = (programs / "kernel", "train", *SMALL, *plugins, "--locked", "--seed", "1")
    run(*train, "--max-duration", "4ba", "--run-name", "whole", **inside)

    # elsewhere: an environment made by what the checkpoint says, in which the run goes on
    (here / "requirements.txt").write_text(run(programs / "kernel", "plugins", "from-checkpoint", "whole", **inside))
    assert "kernel-plugin-fading==0.1.0" in (here / "requirements.txt").read_text()
    programs, variables = environment(tmp_path / "two", dist, "-r", str(here / "requirements.txt"), "kernel-train")
    inside["env"] = variables
    run(
        programs / "kernel",
        "train",
        "--resume",
        "runs/whole/checkpoints/ep0-ba2",
        "--run-name",
        "again",
        "--locked",
        **inside,
    )
    told = json.loads(run(programs / "kernel", "checkpoint", "diff", "runs/whole", "runs/again", "--json", **inside))
    assert told["plan"] == []
    assert told["tensors"]["different"] == {}
    assert told["tensors"]["equal"] > 10
