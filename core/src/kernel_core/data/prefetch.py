"""Batches copied to the device while the device works on the one before."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from kernel_core.data.loader import set_epoch
from kernel_core.data.spec import device_of, tensors_of, to_device
from kernel_core.errors import DataError


class DevicePrefetcher(Iterable[Any]):
    """Iterates over ``loader`` with every batch on ``device``, read and copied ``depth`` batches ahead.

    On the CPU it is the loader: its own iterator, nothing read ahead. On an accelerator the copies run on a stream of their
    own and overlap with computing if the loader pins its memory (``pin_memory=True``). ``depth + 1`` batches then lie in
    device memory.

    Reading ahead moves whatever reading moves: the global generators if samples draw from them in this process, and the
    position of a loader that keeps its own. ``safe_depth(loader)`` says how far ahead nobody notices.

    Args:
        loader: An iterable of batches.
        device: Where the batches go.
        depth: Batches to read ahead; 0 copies each batch when it is asked for.
        transform: Runs on each batch on the CPU, before it is copied.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        depth: int = 1,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if depth < 0:
            raise DataError(f"depth: got {depth}. Expected a number of batches of at least 0.")
        self.loader = loader
        self.device = device
        self.depth = depth
        self.transform = transform

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader and its samplers which epoch is read next."""
        set_epoch(self.loader, epoch)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        if self.transform is not None:
            batches = map(self.transform, batches)
        if self.device.type == "cpu":
            return batches
        if self.depth == 0 or not has_streams(self.device):
            return (to_device(batch, self.device) for batch in batches)
        copies = SideStreamCopies(self.device)
        return (copies.wait_for(copy) for copy in read_ahead(map(copies.begin, batches), self.depth))

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]


def has_streams(device: torch.device) -> bool:
    """Say whether copies to ``device`` can run beside computing; mps shares the host's memory, so nothing is to be gained."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type and device.type != "mps"


def read_ahead(items: Iterator[Any], depth: int) -> Iterator[Any]:
    """Yield ``items``, each after the ``depth`` that follow it were fetched."""
    waiting: deque[Any] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting


def safe_depth(loader: Any) -> int:
    """Return 1 if reading a batch ahead changes nothing that a checkpoint holds, else 0.

    That is so for ready batches in a list or tuple, and for a DataLoader whose workers read ahead anyway, unless it keeps
    its own position (``state_dict``).
    """
    if isinstance(loader, list | tuple):
        return 1
    reads_elsewhere = isinstance(loader, DataLoader) and loader.num_workers > 0
    return int(reads_elsewhere and not any(hasattr(part, "state_dict") for part in _parts(loader)))


def _parts(loader: Any) -> tuple[Any, ...]:
    return (loader, loader.dataset, loader.sampler, loader.batch_sampler)


class SideStreamCopies:
    """Copies batches to an accelerator on a stream of its own.

    Args:
        device: The accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.Stream(device=device)

    def begin(self, batch: Any) -> tuple[Any, torch.Event | None]:
        """Start copying ``batch`` and return the copy, with the event that ends the copying.

        No event: the batch was copied on the current stream, because part of it is on a device already (the current
        stream may still write there) or moves in a way of its own (its tensors are not seen, so their memory could not be
        kept from being used again too early).
        """
        if device_of(batch) != torch.device("cpu") or holds_unknown_objects(batch):
            return to_device(batch, self.device), None
        with self.stream:
            copy = to_device(batch, self.device)
        return copy, self.stream.record_event()

    def wait_for(self, begun: tuple[Any, torch.Event | None]) -> Any:
        """Return the copy; what is queued on the current stream from now on runs after the copying. The host does not wait."""
        copy, event = begun
        if event is not None:
            stream = torch.accelerator.current_stream(self.device)
            stream.wait_event(event)
            for tensor in tensors_of(copy):
                tensor.record_stream(stream)  # type: ignore[arg-type]
        return copy


def holds_unknown_objects(batch: Any) -> bool:
    """Say whether something inside ``batch`` can move itself and is no tensor, mapping, list or tuple."""
    if isinstance(batch, Tensor):
        return False
    if isinstance(batch, list | tuple):
        return any(map(holds_unknown_objects, batch))
    if hasattr(batch, "values") and hasattr(batch, "keys"):
        return any(map(holds_unknown_objects, batch.values()))
    return hasattr(batch, "to")
