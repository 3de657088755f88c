"""Machines that find one another: wait for the first one, and say what to check when that fails."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator

from kernel_core.errors import LaunchError
from kernel_core.launcher import Job

DEFAULT_PORT = 29400  # torchrun's, of an endpoint without one


def wait_for_first_machine(job: Job, node_rank: int | None, timeout_s: float) -> None:
    """Wait until the first machine listens, unless this is it. Torch's own wait cannot be interrupted by Ctrl-C.

    Raises:
        LaunchError: it does not within ``timeout_s``.
    """
    if job.rendezvous_endpoint is not None:
        if job.rendezvous_backend not in (None, "c10d", "static"):
            return
        host, _, port = job.rendezvous_endpoint.rpartition(":")
        host, port = (host, port) if port.isdigit() else (job.rendezvous_endpoint, str(DEFAULT_PORT))
        first = node_rank == 0 if job.rendezvous_backend == "static" else is_this_machine(host)
    else:
        host, port = job.master_addr or "127.0.0.1", str(job.master_port)
        first = job.num_nodes[1] == 1 or node_rank == 0
    end, reason = time.monotonic() + timeout_s, ""
    while not first:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=max(0.1, end - time.monotonic())):
                return
        except OSError as error:
            reason = f"{type(error).__name__}: {error}"
        if time.monotonic() > end:
            raise joining_failed(f"{host}:{port}", f"{reason}, for {timeout_s:g} s")
        time.sleep(min(0.5, timeout_s))


def is_this_machine(host: str) -> bool:
    """Say whether ``host`` is an address of this machine: only those can be bound to."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def joining_failed(where: str, reason: str) -> LaunchError:
    """Return the error for machines that do not find one another."""
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        return LaunchError(
            f"kernel launch: port {where.rpartition(':')[2]} of this machine is taken. Expected a free one. Leave "
            "--master-port out and a free one is found, or give another, the same on all machines."
        )
    return LaunchError(
        f"kernel launch: could not join the other machines at {where} ({reason}). Check that the first machine has "
        "started, that its name leads to it from here, that all machines have the same address and port, and that no "
        "firewall closes that port."
    )


@contextlib.contextmanager
def interruptible(started: threading.Event) -> Iterator[None]:
    """End this process on a signal until ``started``: before that torch may wait in C++, and there is no rank to end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def watch() -> None:
        while number := os.read(reader, 1):
            if not started.is_set() and number[0] in (signal.SIGINT, signal.SIGTERM):
                sys.stderr.write("Error: interrupted\n")
                sys.stderr.flush()
                os._exit(128 + number[0])

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
