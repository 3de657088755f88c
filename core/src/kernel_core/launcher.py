"""Starting a script on several processes. ``Launcher`` is what a launcher plugin implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Job:
    """What to start, and where. A launcher refuses what it cannot do.

    Attributes:
        command: The script, module or program, and its arguments.
        mode: Whether ``command`` begins with a Python file, a module (``python -m``) or a program.
        num_processes: Processes on this machine; None for one on each accelerator, one where there is none.
        num_nodes: Least and greatest number of machines.
        node_rank: This machine's number, None where rendezvous gives it one.
        world_size: Processes in all, to be checked; None for what follows from the others.
        base_rank: The rank of this machine's first process, instead of ``node_rank``.
        master_addr, master_port: Where the ranks meet; None for this machine and a free port.
        rendezvous_backend, rendezvous_endpoint, rendezvous_id: As torchrun has them; None for a static rendezvous.
        max_restarts: How often all processes are started again after one failed.
        log_folder: Where the output of each rank goes; None for a fresh temporary folder.
        stdout, stderr: File names for the output of local ranks other than 0, with ``{rank}``, ``{local_rank}``,
            ``{world_size}``, ``{local_world_size}`` and ``{node_rank}`` filled in; None for files in ``log_folder``.
        verbose: Say what is being done.
    """

    command: tuple[str, ...]
    mode: Literal["script", "module", "command"] = "script"
    num_processes: int | None = None
    num_nodes: tuple[int, int] = (1, 1)
    node_rank: int | None = None
    world_size: int | None = None
    base_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rendezvous_backend: str | None = None
    rendezvous_endpoint: str | None = None
    rendezvous_id: str | None = None
    max_restarts: int = 0
    log_folder: Path | None = None
    stdout: str | None = None
    stderr: str | None = None
    verbose: bool = False


class Launcher(ABC):
    """Starts jobs. The launcher is found by its entry-point name."""

    @abstractmethod
    def launch(self, job: Job) -> int:
        """Start ``job``, wait for its end, and return the exit code of the rank that failed first, 0 if none did.

        ``EXIT_INTERRUPTED`` is passed on and never restarted. ``EXIT_START_AGAIN`` is: see ``kernel_core.errors``.

        Raises:
            LaunchError: the job cannot be started.
        """
