"""Run a function of a test file on several ranks of this machine, over gloo, and get back what each returned.

As a script it is one such rank.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class RankFailed(AssertionError):
    """A rank raised, died, or did not end in time."""


def run_on_ranks(
    world_size: int,
    file: str | os.PathLike[str],
    function: str,
    *arguments: Any,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call ``function(*arguments)`` of the Python file ``file`` in ``world_size`` processes.

    Each has the environment that a launcher would give it. Arguments and results travel as JSON. A rank's exit code does not
    count if its result is there: gloo's threads may abort a process whose work is done.

    Returns:
        What the function returned on each rank, in their order.

    Raises:
        RankFailed: with the output of the ranks that gave no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            _start(rank, world_size, Path(folder), [str(file), function, json.dumps(arguments)], environment or {})
            for rank in range(world_size)
        ]
        outputs = _wait(processes, timeout_s)
        results = [_result(Path(folder), rank) for rank in range(world_size)]
        failed = [rank for rank, result in enumerate(results) if result is None]
        if failed:
            told = "\n".join(
                f"--- rank {rank}, exit code {processes[rank].returncode}\n{outputs[rank]}" for rank in failed
            )
            raise RankFailed(f"{function}: no result from rank {', '.join(map(str, failed))} of {world_size}.\n{told}")
        return [result["value"] for result in results if result is not None]


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


_ports: dict[Path, int] = {}


def _start(
    rank: int, world_size: int, folder: Path, call: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    port = _ports.setdefault(folder, free_port())
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
    }
    variables = {**os.environ, **{name: str(value) for name, value in place.items()}, **environment}
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), *call],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _wait(processes: Sequence[subprocess.Popen[str]], timeout_s: float) -> list[str]:
    """Return the output of each process; those that do not end are killed."""
    outputs = []
    for process in processes:
        try:
            outputs.append(process.communicate(timeout=timeout_s)[0])
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            outputs.append(process.communicate()[0] + f"\n(killed after {timeout_s:g} s)")
    return outputs


def _result(folder: Path, rank: int) -> dict[str, Any] | None:
    path = folder / f"{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _run(folder: str, file: str, function: str, arguments: str) -> None:
    rank = os.environ["RANK"]
    try:
        value = runpy.run_path(file)[function](*json.loads(arguments))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    part = Path(folder) / f"{rank}.part"
    part.write_text(json.dumps({"value": value}))
    part.replace(Path(folder) / f"{rank}.json")


if __name__ == "__main__":
    _run(*sys.argv[1:])
