"""Make ``.venv-bench`` hold the workspace and the frameworks that it is compared with; nothing else uses it.

    python3 bench/setup_peers.py        # part of `make bench`

Standard library only. A second call does nothing; when only the workspace's sources changed, it installs those anew.
"""

import hashlib
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from setup_env import packages, requirements  # noqa: E402

VENV = ROOT / ".venv-bench"
PYTHON = str(VENV / "bin" / "python")
# lower bounds: what was measured first; what a run measured, it prints
PEERS = ["lightning>=2.6.6", "accelerate>=1.15", "transformers>=5.23", "pytorch-ignite>=0.5.5"]
# the packages that the benchmarks run; the others are only there to be found as plugins, without what they need:
# beside a CPU build of torch, the index's torchvision breaks torchmetrics, and with it Lightning
USED = [ROOT, *(ROOT / path for path in ("core", "cli", "plugins/loggers/progress_bar", "plugins/loggers/file_logger"))]


def once(name: str, content: bytes, install: Callable[[], None]) -> None:
    """Run ``install`` unless it ran for the same ``content`` before."""
    stamp = VENV / f"{name}.sha256"
    digest = hashlib.sha256(content + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    print(f"{VENV.name}: installing the {name}.", flush=True)
    install()
    stamp.write_text(digest)


def install_frameworks() -> None:
    if not Path(PYTHON).exists():
        venv.create(VENV, with_pip=True)
    pip = [PYTHON, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    own = [requirement for requirement in requirements(USED) if not requirement.startswith("kernel-")]
    # torch first and by itself: a constraint decides its build before anything else asks for it
    for wanted in (["torch", "numpy", "uv"], [*own, *PEERS]):
        subprocess.run([*pip, *wanted], check=True)


def install_workspace() -> None:
    # not editable: each editable package is one more place on sys.path, and some of the frameworks look for modules that
    # are not installed in every step, so that 24 places more made a step of Accelerate 0.4 ms slower
    command = ["-m", "uv", "pip", "install", "-q", "--reinstall", "--no-deps", "--no-build-isolation", "--offline"]
    folders = [str(folder) for folder in packages()]
    subprocess.run([PYTHON, *command, *folders], check=True, env={**os.environ, "VIRTUAL_ENV": str(VENV)})


def main() -> None:
    projects = [folder / "pyproject.toml" for folder in USED]
    outside = b"".join(file.read_bytes() for file in [*projects, ROOT / "constraints.txt"]) + "\n".join(PEERS).encode()
    once("frameworks", outside, install_frameworks)
    files = [file for folder in packages() for file in (folder / "pyproject.toml", *sorted(folder.glob("src/**/*.py")))]
    sources = b"".join(str(file).encode() + file.read_bytes() for file in files)
    once("workspace", sources, install_workspace)


if __name__ == "__main__":
    main()
