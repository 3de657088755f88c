"""How long ``kernel plugins list`` takes with 300 distributions installed, warm, beside an empty Python.

    python bench/list_plugins.py

Distributions are folders of metadata, as pip leaves them; a third of them hold a plugin.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM, PAIRS = 300, 9


def make(site: Path) -> None:
    for number in range(NUM):
        folder = site / f"some_package_{number}-1.0.dist-info"
        folder.mkdir()
        readme = "A line of a README.\n" * 200
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: some-package-{number}\nVersion: 1.0\nSummary: x\n\n{readme}"
        )
        (folder / "RECORD").write_text("some/file.py,sha256=x,1\n" * 100)
        if number % 3 == 0:
            (folder / "entry_points.txt").write_text(
                f"[kernel.callbacks]\nsome_{number} = some_package_{number}:Some\n"
            )


def timed(command: list[str], environment: dict[str, str]) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    took = time.perf_counter() - began
    assert "some_0" in done.stdout or "list" not in command
    return took


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder}
        listing = [str(Path(sys.executable).parent / "kernel"), "plugins", "list"]
        timed(listing, environment)
        pairs = [
            (timed(listing, environment), timed([sys.executable, "-c", "pass"], environment)) for _ in range(PAIRS)
        ]
    for what, values in (
        ("kernel plugins list", [one for one, _ in pairs]),
        ("an empty Python", [other for _, other in pairs]),
    ):
        print(f"{what}: {statistics.median(values):.3f} s [{min(values):.3f}, {max(values):.3f}]")


if __name__ == "__main__":
    main()
