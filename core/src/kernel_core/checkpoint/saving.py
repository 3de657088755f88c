"""When a run is saved: policies are asked at fixed points, this rank's state is copied, and a thread writes the copy."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from kernel_core.checkpoint.capture import RunParts, Shot, capture
from kernel_core.checkpoint.codec import write_json
from kernel_core.checkpoint.manifest import Manifest, readable_size
from kernel_core.checkpoint.request import SaveRequest, fill_in
from kernel_core.checkpoint.safetensors_file import Layout, Staging
from kernel_core.checkpoint.writer import Saved, SaveJob, Writer
from kernel_core.errors import HookError
from kernel_core.logger import Logger
from kernel_core.registry.plan import invoke
from kernel_core.storage import Storage, open_storage
from kernel_core.train.ranks import Ranks
from kernel_core.train.state import State

log = logging.getLogger(__name__)
GRACE_S = 10.0  # for the parts of other ranks when the run has failed


class Saves:
    """Saves a run when its policies ask for it.

    Args:
        state: The run.
        logger: Handed to plugins.
        ranks: The other ranks, None for one process.
        parts: Returns what of the run is not in ``state``.
    """

    def __init__(self, state: State, logger: Logger, ranks: Ranks | None, parts: Callable[[], RunParts]) -> None:
        self._state, self._logger, self._ranks, self._parts = state, logger, ranks, parts
        self._policies = [call for call in state.plan.calls("should_save") if call.plugin not in state.silent]
        self._told = [call for call in state.plan.calls("checkpoint_saved") if call.plugin not in state.silent]
        self._writer = Writer(state.rank, state.world_size, state.engine.board("saves"))
        self._stall_s = 0.0
        self._staging: dict[str, Staging] = {}
        self._reserving: threading.Thread | None = None
        self._storages: dict[str, Storage] = {}
        self.saved: list[Saved] = []
        if ranks is not None:
            ranks.settled = lambda: self._writer.settled

    @property
    def wanted(self) -> bool:
        """Whether there is a policy that may ask for checkpoints."""
        return bool(self._policies)

    def at(self, event: str) -> None:
        """Report what has been written meanwhile, then ask the policies, and begin to save what they ask for.

        Args:
            event: Where the run is: ``batch_checkpoint``, ``epoch_checkpoint``, ``iteration_checkpoint``, ``fit_end``,
                ``interrupted`` when a signal ends it, or ``finished`` where there is nothing left to train.

        Raises:
            SaveFailedError: the checkpoint before was not written; on every rank at the same step.
        """
        began = time.perf_counter()
        self.poll()
        for call in self._policies:
            request = invoke(call, {"state": self._state, "event": event})
            if request is None:
                continue
            if not isinstance(request, SaveRequest):
                raise HookError(f"{call.plugin}.should_save: returned {request!r}. Expected a SaveRequest, or None.")
            self.save(request, call.plugin)
        self._state.time_out_s += time.perf_counter() - began  # it is no time of training

    def poll(self) -> None:
        """Report a checkpoint that is durable, or raise what kept it from being so; never waits."""
        if self._writer.pending and (self._writer.settled if self._ranks is None else self._ranks.all_settled):
            self.settle()

    def settle(self) -> None:
        """Wait for the checkpoint that is being written and report it.

        Raises:
            SaveFailedError: it was not written.
        """
        if not self._writer.pending:
            return
        if self._ranks is not None:
            self._ranks.all_settled = False
        saved = replace(self._writer.take(), stall_s=self._stall_s)
        self.saved.append(saved)
        if self._state.rank == 0:
            log.info(
                "checkpoint %s: %s; training stood still for %.3g s, durable after %.3g s.",
                saved.url,
                readable_size(saved.manifest.num_bytes),
                saved.stall_s,
                saved.durable_s,
            )
        arguments = {"state": self._state, "logger": self._logger, "checkpoint": saved}
        for call in self._told:
            invoke(call, arguments)

    def save(self, request: SaveRequest, saver: str = "") -> None:
        """Begin to save the run as it is now; with ``asynchronous=False`` wait until it is durable.

        Args:
            request: What, and where to.
            saver: The id of the plugin that asks.
        """
        began = time.perf_counter()
        self.settle()  # one at a time: waiting for the one before is standing still too
        state = self._state
        shot = capture(state, self._parts(), request.weights_only, request.ignore)
        files = self._copy(shot)
        folder = fill_in(request.folder, state)
        job = SaveJob(
            storage=self._storage(folder),
            name=fill_in(request.name, state),
            files=[*files, *((name, [write_json(document)]) for name, document in shot.documents.items())],
            manifest=Manifest(
                run_name=state.run_name,
                saver=saver,
                sequence=0,
                timestamp=state.timestamp,
                world_size=state.world_size,
                weights_only=request.weights_only,
                created=time.time(),
            ),
            latest=request.latest,
            overwrite=request.overwrite,
            keep=request.keep,
        )
        self._writer.start(job)
        self._stall_s = time.perf_counter() - began
        if not request.asynchronous:
            self.settle()

    def _copy(self, shot: Shot) -> list[tuple[str, list[memoryview]]]:
        """Copy the tensors of ``shot`` to host memory of their own; return the files as pieces of memory."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        device, files = self._state.device, []
        for name, pieces in shot.files.items():
            tensors = [piece.tensor for piece in pieces.values()]
            layout = Layout.of(list(pieces), tensors)
            buffer = self._memory(name, layout.num_bytes)
            layout.fill(buffer, tensors)
            files.append((name, layout.blocks(buffer)))
        if device.type != "cpu":
            torch.get_device_module(device).current_stream(device).synchronize()
        return files

    def _memory(self, name: str, num_bytes: int) -> torch.Tensor:
        pinned = self._state.device.type == "cuda"
        return self._staging.setdefault(name, Staging()).reserve(num_bytes, pinned)

    def reserve(self) -> None:
        """Get the memory for the first checkpoint in the background: touching it takes longer than copying into it."""
        if not self.wanted or self._reserving is not None or self._staging:
            return
        shot = capture(self._state, self._parts())
        sizes = {name: sum(piece.tensor.nbytes for piece in pieces.values()) for name, pieces in shot.files.items()}

        def touch() -> None:
            for name, size in sizes.items():
                self._memory(name, size)

        # not a daemon: the interpreter would end under it, and with it the process, by an abort
        self._reserving = threading.Thread(target=touch, name="checkpoint memory")
        self._reserving.start()

    def _storage(self, folder: str) -> Storage:
        if folder not in self._storages:
            self._storages[folder] = open_storage(folder)
        return self._storages[folder]

    def close(self, failed: bool = False) -> None:
        """Wait for what is being written and give the memory back.

        Args:
            failed: The run has failed, so that other ranks may be gone: their part is not waited for long.

        Raises:
            SaveFailedError: it was not written.
        """
        if failed and self._ranks is not None:
            self._writer.give_up(GRACE_S)
        try:
            self.settle()
        finally:
            if self._reserving is not None:
                self._reserving.join()
            self._staging.clear()
