"""Build a wheel and an sdist of every package of the workspace: ``python tools/wheels.py FOLDER``."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setup_env import packages


def build(folder: Path, out: Path) -> None:
    # the environment has the build backend: an isolated one would be made for each package
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"building {folder.name} failed:\n{done.stdout}{done.stderr}")


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for old in [*out.glob("kernel_*.whl"), *out.glob("kernel_*.tar.gz")]:
        old.unlink()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda folder: build(folder, out), packages()))
    print(f"{len(list(out.glob('kernel_*')))} files in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist"))
