"""Checkpoints of the kernel for tools built on torch.distributed.checkpoint: its storage interfaces over the same files.

Optional: nothing else imports this module. The files hold no pickle. Between ranks, torch's planner sends its plans as pickles.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from kernel_core.checkpoint.codec import write_json
from kernel_core.checkpoint.files import LocalFiles, verify
from kernel_core.checkpoint.locate import locate
from kernel_core.checkpoint.manifest import LOCK, MANIFEST, FileRecord, Manifest, checksum
from kernel_core.checkpoint.pieces import Piece, check_savable, overlap
from kernel_core.checkpoint.reader import Reader, StoredTensor, rank_file, tensor_file
from kernel_core.checkpoint.safetensors_file import Layout
from kernel_core.errors import CheckpointError, CheckpointMismatchError, UnsavableError
from kernel_core.storage import open_storage
from kernel_core.timing import Timestamp

ID = str | os.PathLike[str]


class _At:
    """Where a checkpoint is.

    Args:
        path: Its folder or URL.
    """

    def __init__(self, path: ID) -> None:
        self._path = os.fspath(path)

    def reset(self, checkpoint_id: ID | None = None) -> None:
        """Use another path, if one is given."""
        if checkpoint_id is not None:
            self._path = os.fspath(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: ID) -> bool:
        """Say whether it can be a path or URL."""
        return bool(os.fspath(checkpoint_id))


class KernelStorageReader(_At, StorageReader):
    """Reads the weights of a checkpoint of the kernel; every rank verifies its files first.

    Args:
        path: The folder or URL of a checkpoint, or of several: then the newest.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Verify all files and say which tensors there are.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        found = locate(self._path)
        files = LocalFiles(found)
        verify(files, found.manifest.files)
        self._files = files  # which go with it
        self._tensors = Reader(found, files).tensors("model")
        return Metadata({name: _described(tensor) for name, tensor in self._tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``read_metadata`` did it."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for into the planner's tensors.

        Raises:
            CheckpointMismatchError: it asks for something that is no tensor.
        """
        for item in plan.items:
            name = item.storage_index.fqn
            if name not in self._tensors or item.storage_index.offset is None:
                raise CheckpointMismatchError(f"{self._path}: has no tensor {name!r}. Expected one of its weights.")
            wanted = (_sum(item.storage_index.offset, item.storage_offsets), tuple(item.lengths))
            target = planner.resolve_tensor(item).detach()
            for piece in self._tensors[name].pieces:
                if meeting := overlap(wanted, piece.box):
                    target[meeting[0]].copy_(piece.read()[meeting[1]])
            planner.commit_tensor(item, target)
        return _done(None)


class KernelStorageWriter(_At, StorageWriter):
    """Writes a state dict of tensors as a checkpoint of weights only.

    Args:
        path: The new checkpoint's folder or URL.
    """

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse a folder that is a checkpoint already.

        Raises:
            CheckpointError: it is.
        """
        self._storage = open_storage(self._path)
        if is_coordinator and self._storage.exists(MANIFEST):
            raise CheckpointError(f"{self._path}: is a checkpoint already. Expected a new folder. Choose another.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what torch would pickle.

        Raises:
            UnsavableError: names it.
        """
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise UnsavableError(
                    f"{item.index.fqn}: is no tensor, so that torch.distributed.checkpoint would pickle it. Expected tensors "
                    "alone. Save the rest in JSON, or the run with the trainer's save_checkpoint."
                )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank its number among those that save."""
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors, durably."""
        rank, pieces = plan.storage_data, [_piece(item, planner) for item in plan.items]
        name = tensor_file("model", rank)
        parts = {piece.name: [list(piece.shape), list(piece.offset)] for piece in pieces if not piece.is_whole}
        document = {"parts": {name: parts} if pieces else {}, **({"aliases": {}, "extra": {}} if rank == 0 else {})}
        records = {rank_file(rank): self._put(rank_file(rank), [write_json(document)])}
        if pieces:
            tensors = [piece.tensor for piece in pieces]
            layout = Layout.of([piece.name for piece in pieces], tensors)
            buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
            layout.fill(buffer, [tensor.cpu() for tensor in tensors])
            records[name] = self._put(name, layout.blocks(buffer))
        return _done([WriteResult(MetadataIndex(""), 0, records)])

    def _put(self, name: str, blocks: list[Any]) -> FileRecord:
        self._storage.put(name, blocks)
        return FileRecord(sum(len(block) for block in blocks), checksum(blocks))

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the folder a checkpoint by writing its manifest."""
        files = {LOCK: self._put(LOCK, [write_json({"plan": {"plugins": [], "events": {}}, "run": {}})])}
        for of_rank in results:
            files |= of_rank[0].storage_data
        manifest = Manifest("", "torch.distributed.checkpoint", 1, Timestamp(), len(results), True, time.time(), files)
        self._storage.put(MANIFEST, manifest.to_bytes())


def _piece(item: Any, planner: SavePlanner) -> Piece:
    tensor, chunk = planner.resolve_data(item), item.tensor_data.chunk
    assert isinstance(tensor, torch.Tensor)
    tensor = tensor.detach()
    check_savable(tensor, item.index.fqn)
    return Piece(item.index.fqn, tensor, tuple(item.tensor_data.size), tuple(chunk.offsets))


def _described(tensor: StoredTensor) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), [whole])


def _sum(a: Any, b: Any) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(a, b, strict=True))


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
