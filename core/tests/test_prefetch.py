"""Batches copied ahead: what is read when, and that on the CPU nothing happens at all."""

from collections import UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_core.data.loader import begin_epoch, resumable_loader
from kernel_core.data.prefetch import DevicePrefetcher, has_streams, holds_unknown_objects, read_ahead, safe_depth
from kernel_core.errors import DataError
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

CPU, META = torch.device("cpu"), torch.device("meta")
Pair = namedtuple("Pair", "x y")
ROWS = torch.arange(20.0).reshape(10, 2)


class Watched:
    """An iterable of batches that notes what was read."""

    def __init__(self, num: int = 5) -> None:
        self.num, self.read = num, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.num):
            self.read.append(index)
            yield {"x": torch.full((2,), float(index)), "index": index}

    def __len__(self) -> int:
        return self.num


def test_on_the_cpu_it_is_the_loader_itself() -> None:
    watched = Watched()
    batches = iter(DevicePrefetcher(watched, CPU))
    first = next(batches)
    assert watched.read == [0]
    assert first["x"].device == CPU
    assert [batch["index"] for batch in batches] == [1, 2, 3, 4]

    ready = [ROWS, ROWS]
    assert all(batch is ROWS for batch in DevicePrefetcher(ready, CPU))
    loader = DataLoader(TensorDataset(ROWS), batch_size=3)
    assert type(iter(DevicePrefetcher(loader, CPU))) is type(iter(loader))


def test_it_can_be_read_again_each_epoch_and_has_the_length_of_the_loader() -> None:
    prefetcher = DevicePrefetcher(Watched(3), CPU)
    assert len(prefetcher) == 3
    assert [[batch["index"] for batch in prefetcher] for _ in range(2)] == [[0, 1, 2]] * 2
    with pytest.raises(TypeError):
        len(DevicePrefetcher(iter([1]), CPU))


def test_the_epoch_is_passed_on_and_a_place_that_was_set_stays() -> None:
    loader, _ = resumable_loader(DataLoader(TensorDataset(ROWS), batch_size=2, shuffle=True), 7)
    prefetcher = DevicePrefetcher(loader, CPU)
    prefetcher.set_epoch(3)
    whole = [batch[0].tolist() for batch in prefetcher]
    begin_epoch(loader, 0, 2)
    prefetcher.set_epoch(3)
    assert [batch[0].tolist() for batch in prefetcher] == whole[2:]


def test_without_streams_each_batch_is_moved_when_it_is_asked_for() -> None:
    watched = Watched()
    batches = iter(DevicePrefetcher(watched, META))
    assert next(batches)["x"].is_meta
    assert watched.read == [0]
    assert not has_streams(META)
    assert not has_streams(CPU)


@pytest.mark.parametrize("device", [CPU, META])
def test_a_transform_runs_on_the_batch_before_it_is_moved(device: torch.device) -> None:
    devices = []

    def double(batch: Any) -> Any:
        devices.append(batch["x"].device)
        return {"x": batch["x"] * 2, "rows": len(batch["x"])}

    moved = list(DevicePrefetcher(Watched(2), device, transform=double))
    assert devices == [CPU, CPU]
    assert [batch["rows"] for batch in moved] == [2, 2]
    assert {batch["x"].device for batch in moved} == {device}


@pytest.mark.parametrize("depth", [0, 1, 2, 7])
def test_reading_ahead_keeps_the_order_and_fetches_so_many_more(depth: int) -> None:
    fetched = []

    def items() -> Iterator[int]:
        for item in range(5):
            fetched.append(item)
            yield item

    given = []
    for item in read_ahead(items(), depth):
        given.append(item)
        assert len(fetched) == min(5, item + 1 + depth)
    assert given == [0, 1, 2, 3, 4]
    assert list(read_ahead(iter([]), depth)) == []


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(DataError, match=r"depth: got -1\. Expected a number of batches of at least 0"):
        DevicePrefetcher([], CPU, depth=-1)


def test_reading_ahead_is_safe_only_where_nothing_that_is_saved_moves() -> None:
    class Stateful(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

        def state_dict(self) -> dict[str, int]:
            return {}

    data = TensorDataset(ROWS)
    assert safe_depth([ROWS]) == 1
    assert safe_depth(DataLoader(data, num_workers=1)) == 1
    assert safe_depth(DataLoader(data)) == 0  # its samples may draw from this process's generators
    assert safe_depth(DataLoader(Stateful(), num_workers=1)) == 0
    assert safe_depth(Watched()) == 0


def test_objects_that_move_in_a_way_of_their_own_are_noticed_at_any_depth() -> None:
    class Graph:
        def to(self, device: torch.device) -> "Graph":
            return self

    assert holds_unknown_objects({"a": [1, (Graph(),)]})
    assert holds_unknown_objects(UserDict(a=Graph()))
    assert not holds_unknown_objects({"a": [ROWS, Pair(ROWS, "text")], "b": UserDict(c=ROWS), "n": None})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_an_accelerator_gets_the_same_values_while_it_is_busy() -> None:
    """Many large copies beside long kernels: a copy read too early or overwritten too early would give other values."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    rows = torch.arange(1 << 22, dtype=torch.float32).pin_memory()
    work = torch.randn(2048, 2048, device=device)
    for depth in (0, 1, 3):
        batches = ({"x": rows + index, "pair": Pair(rows * index, "text")} for index in range(20))
        pinned = ({"x": b["x"].pin_memory(), "pair": Pair(b["pair"].x.pin_memory(), "text")} for b in batches)
        sums = []
        for batch in DevicePrefetcher(pinned, device, depth):
            for _ in range(10):
                work = torch.tanh(work @ work)
            assert batch["pair"].y == "text"
            sums.append(torch.stack([batch["x"].double().sum(), batch["pair"].x.double().sum()]))
            del batch
        base = rows.double().sum()
        expected = torch.stack([torch.stack([base + i * len(rows), base * i]) for i in range(20)])
        torch.testing.assert_close(torch.stack(sums).cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_an_accelerator_reads_one_batch_ahead() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    watched = Watched()
    batches = iter(DevicePrefetcher(watched, device))
    assert next(batches)["x"].device.type == device.type
    assert watched.read == [0, 1]
    assert [batch["index"] for batch in batches] == [1, 2, 3, 4]
