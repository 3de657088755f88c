"""Write everything that is logged to a file, one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TextIO

import torch
from kernel_core import LoggerDestination, State, hookimpl
from kernel_core.errors import OptionError
from pydantic import Field
from torch import Tensor

__all__ = ["FileLogger", "cut_back", "json_line", "jsonable", "read_scalars"]

encode = json.JSONEncoder(allow_nan=False).encode  # made once: json.dumps would make one for each record


def read_scalars(values: Iterable[Any]) -> dict[int, Any]:
    """Return the values of all 0-d tensors among ``values`` by the tensor's ``id``: one device sync for each device and dtype."""
    kinds: dict[Any, dict[int, Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor) and not value.ndim:
            kinds.setdefault((value.device, value.dtype), {})[id(value)] = value
    read: dict[int, Any] = {}
    for tensors in kinds.values():
        read |= dict(zip(tensors, torch.stack(list(tensors.values())).tolist(), strict=True))
    return read


def jsonable(value: Any) -> Any:
    """Return a number for a scalar (reading a tensor waits for its device), null for one that is not finite."""
    if hasattr(value, "numel"):
        value = value.item() if value.numel() == 1 else value.tolist()
    elif hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@cache
def _json_key(name: str) -> str:
    return f"{encode(name)}: "


def json_line(record: Mapping[str, Any], read: Mapping[int, Any]) -> str:
    """Return ``record`` as a line of JSON: what ``json.dumps`` would write, in half its time for numbers.

    Args:
        record: Names and values.
        read: Values to use for tensors, by the tensor's ``id``.
    """
    entries = []
    for name, value in record.items():
        value = read.get(id(value), value)
        kind = value.__class__
        if kind is float:
            text = repr(value) if value - value == 0 else "null"
        else:
            text = repr(value) if kind is int else encode(jsonable(value))
        entries.append(_json_key(name) + text)
    return f"{{{', '.join(entries)}}}\n"


def cut_back(path: Path, num_bytes: int | None, step: int) -> None:
    """Drop from a file of records what was written after a checkpoint was taken. Old file or new, never a part of it.

    Args:
        path: The file; one that is not there is left so.
        num_bytes: How much of it there was when the checkpoint was taken, None if nobody knows.
        step: The batch at which it was taken. It counts where the file does not reach back to then.
    """
    if not path.is_file():
        return
    data = path.read_bytes()
    if num_bytes is not None and num_bytes <= len(data) and data[:num_bytes][-1:] in (b"\n", b""):
        os.truncate(path, num_bytes)
        return
    lines = data.splitlines(keepends=True)
    temporary = path.with_name(f".{path.name}.cut")
    with temporary.open("wb") as file:
        file.writelines(line for line in lines if line.endswith(b"\n") and _step_of(line) <= step)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line).get("step", 0)  # type: ignore[no-any-return]
    except (ValueError, AttributeError):
        return float("inf")


class FileLogger(LoggerDestination):
    """Append each record to a file as a line ``{"step": …, "time": …, "<metric>": …}``.

    Tensors are kept as they are until the next flush, so that logging never waits for the device in the middle of a
    step. A checkpoint knows how much was written when it was taken; a run that goes on from it drops what came later, so that
    each step is there once.

    Args:
        filename: Where to; ``{run_name}`` and ``{rank}`` are filled in. Folders are made.
        flush_interval: Write after so many records, and at the end of an epoch, an evaluation and the run.
        overwrite: Replace a file that is there; without it, records are appended. A run that is resumed appends to its own.
    """

    def __init__(
        self,
        filename: str = "{run_name}/metrics.jsonl",
        flush_interval: Annotated[int, Field(ge=1)] = 100,
        overwrite: bool = False,
    ) -> None:
        try:
            filename.format(run_name="", rank=0)
        except (KeyError, IndexError, ValueError) as error:
            raise OptionError(
                f"file_logger.filename: got {filename!r}, with an unknown placeholder {error}. "
                "Expected {run_name} and {rank} only."
            ) from None
        self.filename = filename
        self.flush_interval = flush_interval
        self.overwrite = overwrite
        self._path = Path()
        self._file: TextIO | None = None
        self._waiting: list[dict[str, Any]] = []
        self._run_name = ""
        self._resumed: Mapping[str, Any] | None = None

    @hookimpl
    def init(self, state: State) -> None:
        """Fill in the placeholders. The file is made when the run begins, so that one that is refused leaves none."""
        self._run_name = state.run_name
        self._path = Path(self.filename.format(run_name=state.run_name, rank=state.rank))

    @hookimpl
    def fit_start(self, state: State) -> None:
        """Open the file; in a run that is resumed, without what was written after the checkpoint."""
        if self._resumed is not None and self._file is None:
            cut_back(self._path, self._resumed["num_bytes"], state.progress.batch)
        self._open()

    def state_dict(self) -> dict[str, Any]:
        """Write what is waiting, so that it is there when the run is resumed, and return how much the file holds."""
        with contextlib.suppress(OSError):  # the next flush tries again, and says so
            self.flush()
        num_bytes = None if self._resumed is None else self._resumed["num_bytes"]
        if self._file is not None:
            num_bytes = os.fstat(self._file.fileno()).st_size
        return {"run_name": self._run_name, "num_bytes": num_bytes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the file, if it is that of the same run."""
        if state.get("run_name") == self._run_name:
            self._resumed = state

    @hookimpl
    def eval_standalone_start(self) -> None:
        """Open the file."""
        self._open()

    def _open(self) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w" if self.overwrite and self._resumed is None else "a", encoding="utf-8")

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Keep the record; write when enough are waiting."""
        self._waiting.append({"step": step, "time": time.time(), **metrics})
        if len(self._waiting) >= self.flush_interval:
            self.flush()

    def log_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write a record ``{"hyperparameters": {…}}``."""
        self._waiting.append({"time": time.time(), "hyperparameters": dict(hyperparameters)})
        self.flush()

    def log_table(self, columns: list[str], rows: list[list[Any]], name: str, step: int) -> None:
        """Write a record ``{"table": name, "columns": …, "rows": …}``."""
        self._waiting.append({"step": step, "time": time.time(), "table": name, "columns": columns, "rows": rows})

    def flush(self) -> None:
        """Write what is waiting (one device sync for all scalars of one dtype in it)."""
        if self._file is None or not self._waiting:
            return
        # records go only when they are written: a disk that is full now may not be full later
        read = read_scalars(value for record in self._waiting for value in record.values())
        text = "".join(json_line(record, read) for record in self._waiting)
        self._file.write(text)
        self._file.flush()
        self._waiting.clear()

    @hookimpl
    def epoch_end(self) -> None:
        """Write what is waiting."""
        self.flush()

    @hookimpl
    def eval_after_all(self) -> None:
        """Write what is waiting."""
        self.flush()

    @hookimpl
    def fit_end(self) -> None:
        """Write what is waiting."""
        self.flush()

    @hookimpl
    def fit_failed(self) -> None:
        """Write what is waiting, so that the last steps before the failure are there."""
        self.flush()

    @hookimpl
    def close(self) -> None:
        """Write what is waiting and close the file."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None
