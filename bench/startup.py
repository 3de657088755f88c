"""How long starting takes: the commands, the kernel's import over torch's, and from process start to the first batch.

    .venv-bench/bin/python bench/startup.py                 # 4 runs of each; part of `make bench`
    .venv-bench/bin/python bench/startup.py --systems kernel,ignite --pairs 15

Whole processes, one after the other in rounds, in wall and CPU seconds. "First batch" is a script that trains an MLP on one
batch and ends: written by hand, and with each system. What is said to be "over" something is the difference of two processes
of the same round.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from systems import RAW, Figure, Taken, chosen, versions

SCRIPT = str(Path(__file__).parent / "systems.py")
COMMANDS = {
    "python": ["-c", "pass"],
    "kernel --help": ["-m", "kernel_cli.main", "--help"],
    "kernel plugins list": ["-m", "kernel_cli.main", "plugins", "list"],
    "import torch": ["-c", "import torch"],
    "import torch, kernel_core": ["-c", "import torch, kernel_core; kernel_core.Trainer, kernel_core.Algorithm"],
}


def measure(arguments: list[str]) -> Taken:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def rounds(processes: dict[str, list[str]], pairs: int) -> dict[str, list[Taken]]:
    """Run every process in turn, ``pairs`` times after one round that fills the caches; every other round backwards."""
    taken: dict[str, list[Taken]] = {name: [] for name in processes}
    for pair in range(pairs + 1):
        names = list(processes)
        for name in reversed(names) if pair % 2 else names:
            figures = measure(processes[name])
            if pair:
                taken[name].append(figures)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="runs of each process, after one to fill the caches")
    parser.add_argument("--systems", help="some of kernel,ignite,fabric,accelerate,lightning,hf; the default is all")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    systems = chosen(arguments.systems)
    first_batch = {f"first batch, {system.name}": [SCRIPT, system.name] for system in (RAW, *systems)}
    taken = rounds(COMMANDS | first_batch, arguments.pairs)
    over = {f"{name} over raw": (name, "first batch, raw") for name in list(first_batch)[1:]}
    over = {"kernel_core over torch": ("import torch, kernel_core", "import torch"), **over}
    results = {
        name: {"wall": Figure.of([one.wall for one in runs]), "cpu": Figure.of([one.cpu for one in runs])}
        for name, runs in taken.items()
    }
    for name, (one, other) in over.items():
        pairs = list(zip(taken[one], taken[other], strict=True))
        results[name] = {
            "wall": Figure.of([a.wall - b.wall for a, b in pairs]),
            "cpu": Figure.of([a.cpu - b.cpu for a, b in pairs]),
        }
    if arguments.json:
        print(json.dumps(results, indent=2))
        return
    print(f"{arguments.pairs} runs, seconds, median [least, greatest]; {versions([RAW, *systems])}")
    for name, figures in results.items():
        print(f"{name:34}wall {figures['wall']!s:24}cpu {figures['cpu']}")


if __name__ == "__main__":
    main()
