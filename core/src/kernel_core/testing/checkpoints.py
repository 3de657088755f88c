"""Checkpoints of no run, for tests of how checkpoints are written and deleted: small files whose bytes the batch decides."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kernel_core.checkpoint.files import is_intact
from kernel_core.checkpoint.locate import Found, checkpoints_in
from kernel_core.checkpoint.manifest import Manifest
from kernel_core.checkpoint.writer import Saved, SaveJob, Writer
from kernel_core.storage import Storage
from kernel_core.timing import Timestamp


class DictBoard:
    """A board for ranks that are threads of one process.

    Args:
        is_gone: Whether all ranks are dead, so that nobody waits for any.
    """

    def __init__(self, is_gone: Callable[[], bool] = lambda: False) -> None:
        self._is_gone = is_gone
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def post(self, key: str, text: str) -> None:
        """Let the other ranks read ``text`` under ``key``."""
        with self._changed:
            self._texts[key] = text
            self._changed.notify_all()

    @property
    def keys(self) -> set[str]:
        """What is posted now."""
        return set(self._texts)

    def remove(self, key: str) -> None:
        """Forget ``key``."""
        with self._changed:
            self._texts.pop(key, None)

    def read(self, key: str, timeout_s: float, given_up: Callable[[], bool]) -> str:
        """Wait until some rank has posted ``key``, and return it."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while key not in self._texts:
                if given_up() or self._is_gone() or time.monotonic() > end:
                    raise TimeoutError(f"no word from another rank ({key}).")
                self._changed.wait(0.01)
            return self._texts[key]


def content(run_name: str, batch: int, rank: int = 0, num_bytes: int = 1000) -> dict[str, bytes]:
    """Return the files that a rank writes at a batch."""
    tensors = random.Random(f"{run_name} {batch} {rank}").randbytes(num_bytes)
    files = {f"model-{rank:05}.safetensors": tensors, f"rank-{rank:05}.json": b"{}"}
    if rank == 0:
        files |= {"lock.json": json.dumps({"run_name": run_name}).encode(), "state.json": f"[{batch}]".encode()}
    return files


def save_job(
    storage: Storage,
    batch: int,
    *,
    run_name: str = "run",
    saver: str = "saver",
    name: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    num_bytes: int = 1000,
    weights_only: bool = False,
    **options: Any,
) -> SaveJob:
    """Return the job to save at ``batch``; options are those of ``SaveJob``."""
    manifest = Manifest(run_name, saver, 0, Timestamp(batch=batch), world_size, weights_only, time.time())
    pieces = [
        (file, [memoryview(data)[: len(data) // 2], memoryview(data)[len(data) // 2 :]])
        for file, data in content(run_name, batch, rank, num_bytes).items()
    ]
    return SaveJob(storage, f"ba{batch}" if name is None else name, pieces, manifest, **options)


def save(writer: Writer, job: SaveJob) -> Saved:
    """Save and wait."""
    writer.start(job)
    return writer.take()


def good(storage: Storage, run_name: str = "run", num_bytes: int = 1000) -> dict[str, int]:
    """Return the batches of a run's checkpoints by their names, the newest first.

    Raises:
        AssertionError: one has a manifest, and its bytes are not those that were to be written.
    """
    found = {}
    for one in checkpoints_in(storage):
        assert isinstance(one, Found), one
        if one.manifest.run_name != run_name:
            continue
        batch = int(one.manifest.timestamp.batch)
        written: dict[str, bytes] = {}
        for rank in range(one.manifest.world_size):
            written |= content(run_name, batch, rank, num_bytes)
        assert one.manifest.files.keys() == written.keys()
        assert is_intact(one), one.url
        assert all(storage.get(one.key(file)) == data for file, data in written.items()), one.url
        found[one.name] = batch
    return found


def everything(root: Path) -> set[str]:
    """Return all paths below a folder; those of folders end in ``/``."""
    return {path.relative_to(root).as_posix() + ("/" if path.is_dir() else "") for path in root.rglob("*")}


def named(storage: Storage, *others: str) -> set[str]:
    """Return the paths that the manifests in a folder name, with the ``others``: what should be in it."""
    expected = set(others)
    for one in checkpoints_in(storage):
        if isinstance(one, Found):
            expected |= {f"{one.name}/", f"{one.name}/manifest.json", *(one.key(file) for file in one.manifest.files)}
    return expected
