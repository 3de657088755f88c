"""The weights of a checkpoint as files that other programs read, put together from the ranks' pieces one tensor at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_core.checkpoint.files import LocalFiles, verify
from kernel_core.checkpoint.locate import Found
from kernel_core.checkpoint.reader import Reader, StoredTensor
from kernel_core.checkpoint.safetensors_file import Layout
from kernel_core.errors import CheckpointFormatError, CheckpointMismatchError
from kernel_core.storage.base import temporary_name

WEIGHTS = "model.safetensors"
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.json")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: Where to.
        num_tensors, num_bytes: How much.
    """

    path: Path
    num_tensors: int
    num_bytes: int


class Weights:
    """The weights of a checkpoint whose files were compared with its manifest. A context manager: fetched files go in the end.

    Args:
        found: The checkpoint.
    """

    def __init__(self, found: Found) -> None:
        self._files = LocalFiles(found)
        self.reader = Reader(found, self._files)

    def __enter__(self) -> Weights:
        try:
            names = self.reader.manifest.files
            verify(self._files, [name for name in names if not name.startswith("state")])
        except BaseException:
            self._files.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The model's tensors by name; one that has two names is there under both."""
        return self.reader.tensors("model")


def export_file(weights: Weights, path: Path, dtype: str | None = None, prefix: str = "") -> Exported:
    """Write one safetensors file with all tensors of the model.

    Args:
        weights: Those of a checkpoint.
        path: The file; it appears when it is complete.
        dtype: What floating-point tensors become, one of ``DTYPES``; None leaves them as they are.
        prefix: Taken off names that begin with it.
    """
    tensors = weights.tensors
    stored = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if len(stored) != len(tensors):
        raise CheckpointFormatError(
            f"{weights.reader.found.url}: two tensors have one name without the prefix {prefix!r:.80}."
        )
    dtypes = {name: _dtype(tensor.dtype, dtype) for name, tensor in stored.items()}
    empty = [torch.empty(tensor.shape, dtype=dtypes[name], device="meta") for name, tensor in stored.items()]
    layout = Layout.of(list(stored), empty, _metadata(weights.reader))
    order = sorted(zip(layout.places, stored.items(), strict=True), key=lambda one: one[0])
    temporary = path.with_name(temporary_name())
    try:
        with temporary.open("wb") as file:
            file.write(layout.header)
            for _, (name, tensor) in order:
                file.write(_bytes(tensor.whole().to(dtypes[name])))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(path, len(stored), len(layout.header) + layout.num_bytes)


def export_folder(
    weights: Weights, lock: Mapping[str, Any], folder: Path, form: str, dtype: str | None = None
) -> Exported:
    """Write a folder that another library loads a model from.

    Args:
        weights: Those of a checkpoint.
        lock: What the checkpoint says about its run.
        folder: Made; it must not be there, or be empty.
        form: The library.
        dtype: As for ``export_file``.

    Raises:
        CheckpointMismatchError: the checkpoint does not know how that library describes its model.
        CheckpointFormatError: what it says about that cannot be used.
    """
    prefix, files = _form(lock, form, weights.reader.found.url)
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in files.items():
        if dtype is not None and isinstance(document, dict):
            document = {key: dtype if key in ("dtype", "torch_dtype") else value for key, value in document.items()}
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    written = export_file(weights, folder / WEIGHTS, dtype, prefix)
    return Exported(folder, written.num_tensors, written.num_bytes)


def _form(lock: Mapping[str, Any], form: str, url: str) -> tuple[str, Mapping[str, Any]]:
    model = lock.get("model") if isinstance(lock.get("model"), Mapping) else {}
    assert isinstance(model, Mapping)
    told = model.get("export")
    if not isinstance(told, Mapping) or told.get("format") != form:
        raise CheckpointMismatchError(
            f"{url}: does not hold how {form} describes its model, a {model.get('class')}. Expected a model whose export_form "
            "says so, such as those of the plugin of that name, and without adapters. Export it as safetensors."
        )
    prefix, files = told.get("prefix", ""), told.get("files", {})
    names = list(files) if isinstance(files, Mapping) else [None]
    if not isinstance(prefix, str) or not all(isinstance(name, str) and FILE_NAME.fullmatch(name) for name in names):
        raise CheckpointFormatError(
            f"{url}: its files for {form} are named {names!r:.120}. Expected names such as 'config.json'."
        )
    return prefix, files


def _dtype(dtype: torch.dtype, wanted: str | None) -> torch.dtype:
    return DTYPES[wanted] if wanted is not None and dtype.is_floating_point else dtype


def _bytes(tensor: Tensor) -> memoryview:
    view: memoryview = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return view


def _metadata(reader: Reader) -> dict[str, str]:
    return {"run_name": reader.manifest.run_name, "batch": str(int(reader.manifest.timestamp.batch))}
