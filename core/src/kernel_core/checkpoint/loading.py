"""Opening a checkpoint on every rank: rank 0 chooses it, the ranks share out reading and checking its files."""

from __future__ import annotations

import json
import logging
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kernel_core.checkpoint.files import LocalFiles, verify
from kernel_core.checkpoint.foreign import ForeignWeights, fetch, open_foreign, without_scheme
from kernel_core.checkpoint.locate import Damaged, Found, checkpoints_in, locate, read_manifest
from kernel_core.checkpoint.reader import Reader
from kernel_core.errors import CheckpointCorruptError, CheckpointError, KernelError, StorageError
from kernel_core.storage import open_storage

if TYPE_CHECKING:
    from kernel_core.engine import Engine

log = logging.getLogger(__name__)


class Opened:
    """A checkpoint whose files are there and intact on every rank."""

    def __init__(self, engine: Engine, url: str) -> None:
        storage = open_storage(url)
        self.found = Found(storage, "", read_manifest(storage))
        self._engine = engine
        self._folder = _shared_folder(engine, self.found)
        self._files = LocalFiles(self.found, self._folder)
        self.reader = Reader(self.found, self._files)

    def verify(self) -> None:
        """Fetch what is not local, once for each machine, and check every file, each by one rank.

        Raises:
            CheckpointCorruptError: a file differs from what was written; on every rank.
            StorageError: a file cannot be fetched; on every rank.
        """
        try:
            self._verify()
        except BaseException:
            self.close()
            raise

    def _verify(self) -> None:
        engine, names = self._engine, sorted(self.found.manifest.files)
        error: Exception | None = None
        try:
            if engine.local_rank == 0 and self._folder is not None:
                for name in names:
                    self._files.path(name)
        except Exception as caught:
            error = caught
        _together(engine, error, self.found.url)
        try:
            mine = names[engine.rank :: engine.world_size] if self._folder is None else names
            verify(self._files, mine)
        except Exception as caught:
            error = caught
        _together(engine, error, self.found.url)

    def close(self) -> None:
        """Give fetched files back."""
        self._files.close()
        if self._folder is not None and self._engine.local_rank == 0:
            _remove(self._folder)


def _shared_folder(engine: Engine, found: Found) -> Path | None:
    """Return where the ranks of one machine keep the files of a remote checkpoint, None if it is local."""
    if found.storage.local_path("manifest.json") is not None:
        return None
    return _folder_of_machine(engine)


def _folder_of_machine(engine: Engine) -> Path:
    token = engine.agree("checkpoint files", secrets.token_hex(8))
    folder = Path(tempfile.gettempdir()) / f"kernel-checkpoint-{token}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _together(engine: Engine, error: Exception | None, url: str) -> None:
    """Raise on every rank what any has met: of one kind on all of them, since who tries another checkpoint must not be alone."""
    damaged, other = isinstance(error, CheckpointError), error is not None and not isinstance(error, CheckpointError)
    failed = torch.tensor([float(damaged), float(other)])
    engine.all_reduce(failed)
    if other or (damaged and not failed[1]):
        assert error is not None
        raise error
    if failed[1]:
        raise StorageError(f"{url}: another rank could not read a file. See its message.")
    if failed[0]:
        raise CheckpointCorruptError(
            f"{url}: another rank found a file that is damaged or cannot be read. See its message."
        )


def open_checkpoint(engine: Engine, path: str) -> Opened:
    """Open the checkpoint that ``path`` means; every rank must call it.

    Raises:
        CheckpointMissingError: there is none.
        CheckpointCorruptError, CheckpointFormatError: it is damaged.
    """
    url = _agreed(engine, (locate(one).url for one in [path]) if engine.rank == 0 else None)
    assert url is not None
    opened = Opened(engine, url)
    opened.verify()
    return opened


def load_foreign(engine: Engine, path: str, load: Callable[[ForeignWeights], None]) -> None:
    """Open weights of others and give them to ``load``; every rank must call it. Fetched once for each machine.

    Raises:
        CheckpointError, StorageError: they cannot be read, or do not fit.
    """
    path = without_scheme(path)
    if "://" not in path:
        load(open_foreign(path))
        return
    folder = _folder_of_machine(engine)
    try:
        error: Exception | None = None
        try:
            if engine.local_rank == 0:
                fetch(path, folder)
        except Exception as caught:
            error = caught
        _together(engine, error, path)
        load(open_foreign(path, folder))
        _together(engine, None, path)  # nobody reads from the files any more
    finally:
        if engine.local_rank == 0:
            _remove(folder)


def open_newest(engine: Engine, folder: str, run_name: str | None) -> Opened | None:
    """Open the newest good checkpoint of a run; every rank must call it.

    Args:
        engine: How the ranks agree.
        folder: The folder of checkpoints.
        run_name: The run; None for any.

    Returns:
        None if there is none at all.

    Raises:
        CheckpointCorruptError: there are some, and none of them is good.
        StorageError: the folder cannot be read; that is never taken for an empty one.
    """
    candidates = _candidates(folder, run_name) if engine.rank == 0 else None
    problem: CheckpointError | None = None
    while (url := _agreed(engine, candidates)) is not None:
        try:
            opened = Opened(engine, url)
            opened.verify()
            return opened
        except CheckpointError as error:
            problem = error
            if engine.rank == 0:
                log.warning("autoresume: %s The one before it is tried.", error)
    if problem is not None:
        raise CheckpointCorruptError(
            f"autoresume: none of the checkpoints in {folder} is good; the last problem: {problem} Expected at least one. "
            "Restore one from a copy, or remove the folder to begin anew."
        )
    return None


def _candidates(folder: str, run_name: str | None) -> Iterator[str]:
    for one in checkpoints_in(open_storage(folder)):
        if isinstance(one, Damaged):
            yield one.storage.url.rstrip("/") + "/" + one.name
        elif not one.manifest.weights_only and run_name in (None, one.manifest.run_name):
            yield one.url


def _agreed(engine: Engine, candidates: Iterator[str] | None) -> str | None:
    """Return the next of rank 0's candidates, or raise what kept rank 0 from finding one; the same on every rank."""
    error: KernelError | None = None
    answer: dict[str, str | None] = {}
    try:
        answer = {"url": next(candidates, None) if candidates is not None else None}
    except KernelError as caught:
        error, answer = caught, {"error": str(caught)}
    answer = json.loads(engine.agree("checkpoint", json.dumps(answer)))
    if error is not None:
        raise error
    if "error" in answer:
        raise CheckpointError(f"rank 0: {answer['error']}")
    return answer["url"]
