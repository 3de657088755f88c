"""Randomness that belongs to a key, not to whoever draws first.

A stream is a function of (seed, plugin id, batch, scope): adding a plugin, retrying a batch or resuming shifts no other.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

Scope = Literal["batch", "rank", "microbatch", "sample"]
SCOPES: tuple[Scope, ...] = ("batch", "rank", "microbatch", "sample")


def keyed_seed(*key: object) -> int:
    """Return a seed in [0, 2**63) that depends on every part of ``key`` and is the same on every machine."""
    text = "\x1f".join(map(str, key))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def keyed_generator(device: torch.device, *key: object) -> torch.Generator:
    """Return a generator on ``device`` seeded by ``key``."""
    return torch.Generator(device=device).manual_seed(keyed_seed(*key))


def seed_all(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def forked_randomness(*key: object) -> Iterator[None]:
    """Seed the global generators by ``key`` for the block and put them back as they were."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = list(range(torch.accelerator.device_count())) if torch.accelerator.is_available() else []
    device_type = str(torch.accelerator.current_accelerator().type) if devices else "cuda"  # type: ignore[union-attr]
    try:
        with torch.random.fork_rng(devices=devices, device_type=device_type):
            seed_all(keyed_seed(*key))
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def randomness_state(devices: Iterable[torch.device] = ()) -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy and torch, and of ``devices``: plain data and tensors."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # a dict, whichever generator is NumPy's global one
        "torch": torch.get_rng_state(),
        "devices": {},
    }
    for device in devices:
        if device.type not in ("cpu", "meta"):
            state["devices"][str(device)] = torch.get_device_module(device).get_rng_state(device)
    return state


def restore_randomness(state: Mapping[str, Any]) -> None:
    """Put back what ``randomness_state`` returned; what it has of devices that are not there is left out."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    present = accelerators()
    for name, device_state in state["devices"].items():
        device = torch.device(name)
        if device in present:
            torch.get_device_module(device).set_rng_state(device_state, device)


def accelerators() -> list[torch.device]:
    """Return every accelerator that this process sees."""
    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    return [torch.device(kind, index) for index in range(torch.accelerator.device_count())]


def capture_randomness() -> Callable[[], None]:
    """Remember the state of the global generators of Python, NumPy and torch (all devices); the result puts it back."""
    return partial(restore_randomness, randomness_state(accelerators()))


def deterministic_mode() -> Callable[[], None]:
    """Let torch refuse whatever is not deterministic, naming the operation; the result puts everything back.

    On CUDA the environment variable that cuBLAS needs is set too; it counts only before its first use in the process.
    """
    held = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn
    held_cudnn = cudnn.benchmark, cudnn.deterministic
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    torch.use_deterministic_algorithms(True)
    cudnn.benchmark, cudnn.deterministic = False, True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def restore() -> None:
        torch.use_deterministic_algorithms(held[0], warn_only=held[1])
        cudnn.benchmark, cudnn.deterministic = held_cudnn
        if workspace is None:
            os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)

    return restore
