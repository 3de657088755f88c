"""From a job to what torch's elastic agent is told."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_core.errors import LaunchError
from kernel_core.launcher import Job

NAMES = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")  # what file names may hold

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsDest
    from torch.distributed.launcher.api import LaunchConfig

    from kernel_plugin_torchrun.launcher import TorchrunLauncher
    from kernel_plugin_torchrun.logs import RankLogs


def check(job: Job) -> None:
    """Refuse what cannot be started.

    Raises:
        LaunchError: there is no such script or program, or the numbers do not fit together.
    """
    if not job.command:
        raise LaunchError("kernel launch: nothing to start. Expected a script: kernel launch -n 2 train.py.")
    program = job.command[0]
    if job.mode == "script" and not Path(program).is_file():
        raise LaunchError(f"kernel launch: there is no file {program!r}. Expected a Python script; -m starts a module.")
    if job.mode == "command" and shutil.which(program) is None:
        raise LaunchError(
            f"kernel launch: there is no program {program!r} on the path. Expected one to start on each rank."
        )
    if job.num_processes is not None and job.num_processes < 1:
        raise LaunchError(f"kernel launch: got -n {job.num_processes}. Expected at least one process.")
    least, most = job.num_nodes
    if not 1 <= least <= most:
        raise LaunchError(f"kernel launch: got --nnodes {least}:{most}. Expected at least 1, and the least first.")
    if job.max_restarts < 0:
        raise LaunchError(f"kernel launch: got --max-restarts {job.max_restarts}. Expected at least 0.")
    if job.master_port is not None and not 0 < job.master_port < 65536:
        raise LaunchError(
            f"kernel launch: got --master-port {job.master_port}. Expected 1 to 65535, or none for a free one."
        )
    for flag, form in (("--stdout", job.stdout), ("--stderr", job.stderr)):
        _check_form(flag, form)
    if most > 1 and job.rendezvous_endpoint is None:
        _check_static(job)
    number = node_rank(job)
    if number is not None and not 0 <= number < most:
        raise LaunchError(
            f"kernel launch: got machine number {number} of {most}. Expected --node-rank 0 to {most - 1}."
        )
    processes = num_processes(job)
    if job.world_size is not None and not least * processes <= job.world_size <= most * processes:
        raise LaunchError(
            f"kernel launch: got --world-size {job.world_size}, and {least if least == most else f'{least}:{most}'} machines "
            f"with {processes} processes each make another number. Change one of --world-size, --nnodes and -n."
        )


def _check_form(flag: str, form: str | None) -> None:
    try:
        (form or "").format(**dict.fromkeys(NAMES, "0"))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        known = ", ".join(f"{{{name}}}" for name in NAMES)
        raise LaunchError(f"kernel launch: got {flag} {form}. Expected a file name; it may hold {known}.") from error


def _check_static(job: Job) -> None:
    if job.num_nodes[0] != job.num_nodes[1]:
        raise LaunchError(
            "kernel launch: a number of machines that may change needs a rendezvous. Give --rdzv-endpoint host:port, the same on "
            "all machines, or one number to --nnodes."
        )
    if node_rank(job) is None or job.master_addr is None or job.master_port is None:
        raise LaunchError(
            f"kernel launch: {job.num_nodes[0]} machines need to find one another. Expected --node-rank, --master-addr and "
            "--master-port on each, or --rdzv-endpoint host:port alone, the same on all."
        )


def num_processes(job: Job) -> int:
    """Return the processes on this machine: as asked, else one for each accelerator, else one."""
    if job.num_processes is not None:
        return job.num_processes
    import torch

    return max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 1)


def node_rank(job: Job) -> int | None:
    """Return this machine's number, from the rank of its first process if only that is known.

    Raises:
        LaunchError: both are given and do not fit.
    """
    if job.base_rank is None:
        return job.node_rank
    number, rest = divmod(job.base_rank, num_processes(job))
    if rest or (job.node_rank is not None and job.node_rank != number):
        raise LaunchError(
            f"kernel launch: got --base-rank {job.base_rank} with --node-rank {job.node_rank} and -n {num_processes(job)}. "
            "Expected the number of the machine times its processes. Give one of the two."
        )
    return number


def configure(
    launcher: TorchrunLauncher, job: Job, folder: Path, number: int, before_start: Callable[[int, LogsDest], None]
) -> tuple[LaunchConfig, RankLogs]:
    """Return what torch's agent is told at start ``number``, and where the ranks write."""
    from torch.distributed.launcher.api import LaunchConfig

    from kernel_plugin_torchrun.logs import RankLogs

    backend, endpoint, settings = _rendezvous(job)
    alone = job.num_nodes == (1, 1)
    name = job.rendezvous_id or (uuid.uuid4().hex[:8] if alone else "kernel")
    logs = RankLogs(str(folder), job.stdout, job.stderr, before_start=before_start)
    timeout_s = launcher.join_timeout_s
    config = LaunchConfig(
        min_nodes=job.num_nodes[0],
        max_nodes=job.num_nodes[1],
        nproc_per_node=num_processes(job),
        logs_specs=logs,
        run_id=f"{name}-{number}" if number else name,  # a rendezvous that has ended is closed to its name
        rdzv_backend=backend,
        rdzv_endpoint=endpoint,
        rdzv_configs={"timeout": timeout_s, "join_timeout": timeout_s, **settings},
        max_restarts=job.max_restarts,
        monitor_interval=launcher.monitor_interval_s,
        local_addr="127.0.0.1" if alone else None,
        shutdown_timeout=launcher.shutdown_timeout_s,
    )
    return config, logs


def meeting_point(job: Job) -> str:
    """Return the address where machines meet, as the user gave it."""
    return job.rendezvous_endpoint or f"{job.master_addr or '127.0.0.1'}:{job.master_port}"


def _rendezvous(job: Job) -> tuple[str, str, Mapping[str, Any]]:
    """Return backend, endpoint and settings."""
    if job.rendezvous_endpoint is not None:
        backend = job.rendezvous_backend or "c10d"
        return backend, job.rendezvous_endpoint, {"rank": node_rank(job) or 0} if backend == "static" else {}
    if job.num_nodes == (1, 1) and job.master_port is None:
        return "c10d", "localhost:0", {}  # a free port
    return "static", meeting_point(job), {"rank": node_rank(job) or 0}


def entry_point(job: Job) -> tuple[str, ...]:
    """Return the arguments of Python that start a rank. Torch's agent fills in ``$`` macros; ours are to stay as they are."""
    command = (argument.replace("$", "$$") for argument in job.command)
    return ("-u", "-P", "-m", "kernel_plugin_torchrun.rank", job.mode, *command)
