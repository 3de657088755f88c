"""Randomness that belongs to a key, not to whoever draws first.

A stream is a function of (seed, plugin id, batch, scope): adding a plugin, retrying a batch or resuming shifts no other.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

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
