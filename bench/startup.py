"""How long starting takes: importing the kernel over torch, and the commands that need no torch.

    python bench/startup.py [--runs 15]

Whole processes, alternated, in wall and CPU seconds; the import is the difference of two processes.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

COMMANDS = {
    "python": ["-c", "pass"],
    "import torch": ["-c", "import torch"],
    "import torch, kernel_core": ["-c", "import torch, kernel_core; kernel_core.Trainer, kernel_core.Algorithm"],
    "kernel --help": ["-m", "kernel_cli.main", "--help"],
    "kernel plugins list": ["-m", "kernel_cli.main", "plugins", "list"],
}


def measure(arguments: list[str]) -> tuple[float, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    runs = parser.parse_args().runs
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for run in range(runs + 1):
        for name, arguments in COMMANDS.items():
            figures = measure(arguments)
            if run:  # the first round warms the caches
                taken[name].append(figures)
    print(f"{runs} runs of each, seconds: median [least, greatest]")
    for name, figures in taken.items():
        columns = []
        for label, values in zip(("wall", "cpu"), zip(*figures, strict=True), strict=True):
            columns.append(f"{label} {statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]")
        print(f"{name:28} {'   '.join(columns)}")
    for index, label in enumerate(("wall", "cpu")):
        over = [
            kernel[index] - torch[index]
            for kernel, torch in zip(taken["import torch, kernel_core"], taken["import torch"], strict=True)
        ]
        print(f"kernel_core over torch, {label}: {statistics.median(over):.3f} [{min(over):.3f}, {max(over):.3f}]")


if __name__ == "__main__":
    main()
