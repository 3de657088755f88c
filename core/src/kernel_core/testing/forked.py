"""Ranks that are forked from a process which has torch imported, so that starting them costs no imports.

That process has never run a collective, and computes in one thread: a fork would not take others along. What a function that
runs on such a rank changes in its process is gone with it.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_core.testing.ranks import free_port

Functions = Mapping[str, Callable[..., Any]]


# --- in that process -------------------------------------------------------------------------------------------------


def serve(functions: Functions) -> None:
    """Fork the ranks that each line of standard input asks for; tell their exit codes."""
    _tell([])
    for line in sys.stdin:
        asked = json.loads(line)
        call, folder = (functions[asked["function"]], asked["arguments"]), Path(asked["folder"])
        if asked["here"]:
            call[0](**call[1])
            codes = []
        else:
            port = free_port()
            children = [_fork(rank, asked["world_size"], port, call, folder) for rank in range(asked["world_size"])]
            codes = [_wait(child, asked["timeout_s"]) for child in children]
        _tell(codes)


def _tell(codes: list[int]) -> None:
    sys.stdout.write(json.dumps(codes) + "\n")
    sys.stdout.flush()


def _fork(rank: int, world_size: int, port: int, call: Any, folder: Path) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        told = os.open(folder / f"{rank}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(told, 1)
        os.dup2(told, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in (place | where).items()})
        result = call[0](**call[1])
        code = result.get("code", 0)
        (folder / f"{rank}.part").write_text(json.dumps(result))
        (folder / f"{rank}.part").replace(folder / f"{rank}.json")
        if rank == 0:  # it holds the store, which the others may still ask
            _wait_for([folder / f"{other}.json" for other in range(world_size)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for(paths: list[Path], timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths) and time.monotonic() < end:
        time.sleep(0.005)


def _wait(child: int, timeout_s: float) -> int:
    """Return the exit code of a child, which is killed if it takes longer."""
    until = time.monotonic() + timeout_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])


# --- in the tests ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Attributes:
        code: Its exit code.
        value: What its function returned, None if it did not.
        output: What it printed.
    """

    code: int
    value: Any
    output: str


class Server:
    """Starts ranks.

    Args:
        file: A Python file that serves when it is run as a script.
    """

    def __init__(self, file: str) -> None:
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen(
            [sys.executable, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
        )
        self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process that forks the ranks has ended"
        return json.loads(line)

    def start(
        self, world_size: int, function: str, timeout_s: float = 120.0, here: bool = False, **arguments: Any
    ) -> list[Ended]:
        """Call a function on new ranks, or ``here``, in the process that forks them; return how they ended."""
        with tempfile.TemporaryDirectory() as folder:
            asked = {"world_size": world_size, "function": function, "arguments": arguments, "folder": folder}
            assert self.process.stdin is not None
            print(json.dumps({**asked, "timeout_s": timeout_s, "here": here}), file=self.process.stdin, flush=True)
            return [_ended(Path(folder), rank, code) for rank, code in enumerate(self._read())]

    def run(self, world_size: int, function: str, timeout_s: float = 120.0, **arguments: Any) -> list[Any]:
        """Call a function on new ranks; return what it returned on each."""
        ended = self.start(world_size, function, timeout_s, **arguments)
        told = [f"--- rank {rank}, exit code {one.code}\n{one.output}" for rank, one in enumerate(ended) if one.code]
        assert not told, "\n".join(told)
        return [one.value for one in ended]

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _ended(folder: Path, rank: int, code: int) -> Ended:
    path, output = folder / f"{rank}.json", folder / f"{rank}.out"
    return Ended(
        code,
        json.loads(path.read_text()) if path.exists() else None,
        output.read_text(errors="replace") if output.exists() else "",
    )


@functools.cache
def server_of(file: str) -> Server:
    """Return the server of a file, the same to all tests of this process."""
    server = Server(file)
    atexit.register(server.close)
    return server
