"""Positions in the data: run + resume reads what an uninterrupted run reads, for every kind of loader, at every place."""

import copy
import random
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core.data.loader import begin_epoch, resumable_loader
from kernel_core.data.position import (
    capture_position,
    enter_epoch,
    position_kind,
    restore_position,
)
from kernel_core.data.sampler import epoch_order
from kernel_core.errors import DataError
from kernel_core.train.randomness import randomness_state, restore_randomness
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

ROWS, SIZE, EPOCHS = 10, 3, 3
PLAIN: dict[str, Any] = {}
WORKERS: dict[str, Any] = {"num_workers": 2}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
Step = tuple[int, list[int], bytes, tuple[Any, ...]]


class Noisy(Dataset[Any]):
    def __init__(self) -> None:
        self.reads: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return index, torch.tensor([random.random(), np.random.normal(), float(torch.rand(()))])


class Quiet(Noisy):
    def __getitem__(self, index: int) -> Any:
        self.reads.append(index)
        return index, torch.zeros(1)


class Stream(IterableDataset[Any]):
    """Without state; shuffles from the global generators, or from the epoch if it is told."""

    def __init__(self, told: bool = False) -> None:
        self.told, self.epoch, self.reads = told, -1, []  # type: ignore[var-annotated]
        if told:
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(ROWS), ROWS) if self.told else list(np.random.permutation(ROWS))

    def __iter__(self) -> Iterator[Any]:
        for index in self.order():
            self.reads.append(index)
            yield int(index), torch.zeros(1)


class Sized(Stream):
    def __len__(self) -> int:
        return ROWS


class Resetting(IterableDataset[Any]):
    """With state: goes on where it is, and begins anew by itself after its end, in another order."""

    def __init__(self, size: int = ROWS) -> None:
        self.size, self.place, self.passes, self.reads = size, 0, 0, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.passes).sample(range(self.size), self.size)
        while self.place < self.size:
            index = order[self.place]
            self.place += 1
            self.reads.append(index)
            yield index, torch.zeros(1)
        self.place, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.passes = state.pop("place"), state.pop("passes")


class SizedResetting(Resetting):
    def __len__(self) -> int:
        return self.size


class LikeHuggingFace(Stream):
    """A state counts for its own epoch alone, and stays at the end until the epoch is another."""

    def __init__(self) -> None:
        super().__init__(told=True)
        self.state: dict[str, Any] = {}
        self.loaded: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        first = self.loaded["place"] if self.loaded.get("epoch") == self.epoch else 0
        self.state = {"epoch": self.epoch, "place": first}
        for index in self.order()[first:]:
            self.state["place"] += 1
            self.reads.append(index)
            yield index, torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class LikeStreaming(Stream):
    """Is told the samples by whoever reads; counts its epochs when it begins to read one, in memory shared with workers."""

    def __init__(self) -> None:
        super().__init__(told=True)
        self.set_epoch = None  # type: ignore[assignment]
        self.next_epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.resume: dict[str, int] = {"epoch": -1}

    def __iter__(self) -> Iterator[Any]:
        self.epoch, first = int(self.next_epoch), 0
        if self.resume["epoch"] >= self.epoch:
            self.epoch, first = self.resume["epoch"], self.resume["sample_in_epoch"]
        self.next_epoch.fill_(self.epoch + 1)
        for index in self.order()[first:]:
            yield index, torch.zeros(1)

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        assert from_beginning
        return {"epoch": int(self.next_epoch) - 1, "sample_in_epoch": num_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.resume = state


class StatefulLoader:
    """A loader that keeps its position, as torchdata's does: a state loaded at the end of an epoch gives nothing more of it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.place, self.reads = 0, []  # type: ignore[var-annotated]
        self.generator = torch.Generator().manual_seed(5)
        self.order: list[int] = []

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        if self.state is None:
            self.place, self.order = 0, torch.randperm(ROWS, generator=self.generator).tolist()
        else:
            self.place, self.order = self.state["place"], self.state["order"]
        self.state = None
        return self.batches()

    def batches(self) -> Iterator[Any]:
        while self.place < ROWS:
            ids = self.order[self.place : self.place + SIZE]
            self.place += SIZE
            self.reads += ids
            yield torch.tensor(ids), torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "order": self.order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class StreamingLoader(DataLoader[Any]):
    """Counts the samples it gave and tells them to its data set when it is saved, also at the end of an epoch."""

    given = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.given, resumed = 0, self.dataset.resume  # type: ignore[attr-defined]
        if resumed["epoch"] >= int(self.dataset.next_epoch):  # type: ignore[attr-defined]
            self.given = resumed["sample_in_epoch"]
        for batch in super().__iter__():
            self.given += len(batch[0])
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict(self.given, True)  # type: ignore[attr-defined, no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)  # type: ignore[attr-defined]


def rebuilt(data: Any, **options: Any) -> Any:
    return resumable_loader(DataLoader(data, SIZE, **options), 7)[0]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def weighted(**own: Any) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * ROWS, ROWS, **own)


def length_of(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def start() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def run(loader: Any, epoch: int = 0, done: int = 0, stop: tuple[int, int] | None = None) -> Iterator[Step]:
    """Read as the training loop does, and draw beside it from the global generators, as dropout would."""
    for number in range(epoch, EPOCHS):
        length = length_of(loader)
        batches = enter_epoch(loader, number, done)
        batches = islice(batches, None if length is None else length - done)
        for ids, rest in batches:
            yield (
                number,
                ids.tolist(),
                rest.numpy().tobytes(),
                (random.random(), np.random.normal(), float(torch.rand(()))),
            )
        done = 0


def uninterrupted(make: Callable[[], Any]) -> list[Step]:
    start()
    return list(run(make()))


def interrupted_at(make: Callable[[], Any], steps: int, boundary: bool) -> tuple[list[Step], Any]:
    """Stop after so many steps, at a ``boundary`` after the epoch was ended, and go on with all made anew."""
    start()
    loader = make()
    running = run(loader)
    before = list(islice(running, steps))
    epoch = before[-1][0] if before else 0
    done = sum(step[0] == epoch for step in before)
    if boundary and before:
        epoch, done = epoch + 1, 0
        saved: dict[str, Any] = {}

        def at_end(*_: Any) -> Any:
            saved.update(position=capture_position(loader, 0), host=randomness_state())
            raise InterruptedError

        # the loop's own place between two epochs: the iterator was read to its length, the next one not begun
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(run.__globals__, "enter_epoch", at_end)
            with pytest.raises(InterruptedError):
                next(running)
    else:
        saved = {"position": capture_position(loader, done), "host": randomness_state()}
    saved = copy.deepcopy(saved)
    del running, loader
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    loader = make()
    note = restore_position(loader, saved["position"], batches_done=done, epoch=epoch)
    restore_randomness(saved["host"])
    return before + list(run(loader, epoch, done)), note


KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "map": ("map", lambda: rebuilt(Noisy(), shuffle=True)),
    "map, workers": ("map", lambda: rebuilt(Noisy(), shuffle=True, **WORKERS)),
    "map, persistent": ("map", lambda: rebuilt(Noisy(), shuffle=True, **PERSISTENT)),
    "map, own generator": ("map", lambda: rebuilt(Noisy(), shuffle=True, generator=generator())),
    "map, own generator, persistent": (
        "map",
        lambda: rebuilt(Noisy(), shuffle=True, generator=generator(), **PERSISTENT),
    ),
    "map, drop_last": ("map", lambda: rebuilt(Noisy(), drop_last=True)),
    "stateful": ("stateful", StatefulLoader),
    "streaming loader": ("stateful", lambda: StreamingLoader(LikeStreaming(), SIZE)),
    "streaming loader, worker": ("stateful", lambda: StreamingLoader(LikeStreaming(), SIZE, num_workers=1)),
    "data set": ("dataset", lambda: rebuilt(Resetting())),
    "data set, sized": ("dataset", lambda: rebuilt(SizedResetting())),
    "data set, even": ("dataset", lambda: rebuilt(Resetting(9))),
    "data set, drop_last": ("dataset", lambda: rebuilt(Resetting(), drop_last=True)),
    "data set, one by one": ("dataset", lambda: DataLoader(Resetting(4), batch_size=1)),
    "like Hugging Face": ("dataset", lambda: rebuilt(LikeHuggingFace())),
    "like streaming": ("dataset", lambda: rebuilt(LikeStreaming())),
    "like streaming, worker": ("dataset", lambda: rebuilt(LikeStreaming(), num_workers=1)),
    "sampler": ("count", lambda: rebuilt(Quiet(), sampler=weighted())),
    "sampler, noisy data": ("count", lambda: rebuilt(Noisy(), sampler=weighted())),
    "sampler, own generator": ("count", lambda: rebuilt(Quiet(), sampler=weighted(generator=generator()))),
    "sampler, workers": ("count", lambda: rebuilt(Noisy(), sampler=SubsetRandomSampler(range(ROWS)), **WORKERS)),
    "sampler, persistent": ("count", lambda: rebuilt(Quiet(), sampler=weighted(), **PERSISTENT)),
    "sampler, loader's generator": (
        "count",
        lambda: rebuilt(
            Noisy(), sampler=RandomSampler(range(ROWS), replacement=True), generator=generator(), **WORKERS
        ),
    ),
    "stream": ("count", lambda: rebuilt(Stream())),
    "stream, told the epoch": ("count", lambda: rebuilt(Stream(told=True), num_workers=1)),
    "stream, sized": ("count", lambda: rebuilt(Sized())),
    "list": ("count", lambda: [(torch.tensor([i]), torch.zeros(1)) for i in range(4)]),
}


@pytest.mark.parametrize("name", KINDS)
def test_run_and_resume_are_the_uninterrupted_run_to_the_bit(name: str) -> None:
    kind, make = KINDS[name]
    assert position_kind(make()) == kind
    expected = uninterrupted(make)
    per_epoch = len(expected) // EPOCHS
    assert len({str([step[1] for step in expected if step[0] == epoch]) for epoch in range(EPOCHS)}) in (1, 3)
    slow = make_has_workers(make)
    for steps in (0, per_epoch + 1, 2 * per_epoch) if slow else range(2 * per_epoch + 1):
        for boundary in (False, True) if steps % per_epoch == 0 else (False,):
            found, note = interrupted_at(make, steps, boundary)
            assert found == expected, (steps, boundary)
            skipped = kind == "count" and steps and not boundary
            assert bool(note) == bool(skipped)


def make_has_workers(make: Callable[[], Any]) -> bool:
    return bool(getattr(make(), "num_workers", 0))


@pytest.mark.parametrize(
    ("make", "reads"),
    [
        (lambda: rebuilt(Quiet(), shuffle=True), lambda loader: loader.dataset.reads),
        (lambda: rebuilt(Resetting()), lambda loader: loader.dataset.reads),
        (lambda: rebuilt(LikeHuggingFace()), lambda loader: loader.dataset.reads),
        (StatefulLoader, lambda loader: loader.reads),
    ],
)
def test_nothing_is_read_again_where_the_place_is_exact(make: Callable[[], Any], reads: Callable[[Any], Any]) -> None:
    loader = make()
    ids = list(chain(*(step[1] for step in islice(run(loader), 6))))
    saved = capture_position(loader, 2)
    again = make()
    assert restore_position(again, saved, batches_done=2, epoch=1) is None
    ids += chain(*(step[1] for step in run(again, 1, 2)))
    assert reads(loader) + reads(again) == ids
    assert sorted(ids) == sorted([*range(ROWS)] * EPOCHS)


def test_a_place_in_mid_epoch_is_taken_up_in_the_same_process() -> None:
    for name in ("map", "stateful", "data set", "like Hugging Face", "sampler", "stream", "stream, sized", "list"):
        _, make = KINDS[name]
        expected = uninterrupted(make)
        start()
        loader = make()
        found = list(islice(run(loader), 2))
        assert found + list(run(loader, 0, 2)) == expected, name


def test_loaders_that_compare_equal_have_places_of_their_own() -> None:
    class Equal(StatefulLoader):
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    first, second, again = Equal(), Equal(), Equal()
    expected = [batch[0].tolist() for batch in enter_epoch(first, 0)]
    batches = enter_epoch(second, 0)
    next(batches)
    restore_position(again, capture_position(second, 1), batches_done=1, epoch=0)
    assert [batch[0].tolist() for batch in enter_epoch(again, 0, 1)] == expected[1:]


def test_samples_over_all_ranks_are_told_to_a_data_set_that_counts_them() -> None:
    loader = rebuilt(LikeStreaming())
    assert capture_position(loader, 2)["state"]["sample_in_epoch"] == 6
    assert capture_position(loader, 2, samples_done=24)["state"]["sample_in_epoch"] == 24


def test_a_saved_state_is_a_copy_and_stays_one() -> None:
    loader = rebuilt(LikeHuggingFace())
    batches = enter_epoch(loader, 0)
    next(batches)
    saved = capture_position(loader, 1)
    next(batches)
    assert saved["state"]["place"] == SIZE
    restore_position(
        rebuilt(Resetting()), position := capture_position(rebuilt(Resetting()), 1), batches_done=1, epoch=0
    )
    assert position["state"] == {"place": 0, "passes": 0}  # that data set takes apart what it is given


def test_positions_say_whether_another_number_of_ranks_can_use_them() -> None:
    elastic = {
        name: capture_position(KINDS[name][1](), 0)["elastic"] for name in ("map", "stateful", "data set", "sampler")
    }
    assert elastic == {"map": True, "stateful": False, "data set": False, "sampler": False}
    assert capture_position(rebuilt(LikeStreaming()), 0)["elastic"]


def test_capturing_and_entering_draw_nothing_that_a_plain_loop_does_not() -> None:
    def drawn(begin: Callable[[Any, int], Any]) -> float:
        torch.manual_seed(5)
        loader = DataLoader(Quiet(), SIZE, sampler=weighted())
        for epoch in range(2):
            list(begin(loader, epoch))
        return float(torch.rand(()))

    def ours(loader: Any, epoch: int) -> Iterator[Any]:
        for batch in enter_epoch(loader, epoch):
            capture_position(loader, 1)
            yield batch

    assert drawn(ours) == drawn(lambda loader, epoch: iter(loader))


def test_the_seed_of_the_run_that_was_saved_decides_the_order() -> None:
    saved = capture_position(rebuilt(Quiet(), shuffle=True), 0)
    other, _ = resumable_loader(DataLoader(Quiet(), SIZE, shuffle=True), 8)
    restore_position(other, saved, batches_done=0, epoch=2)
    ids = list(chain(*(batch[0].tolist() for batch in enter_epoch(other, 2))))
    assert ids == list(epoch_order(ROWS, shuffle=True, seed=7, epoch=2))


def test_a_place_is_found_on_another_number_of_ranks() -> None:
    whole = [step[1] for step in uninterrupted(lambda: resumable_loader(DataLoader(Quiet(), 6, shuffle=True), 7)[0])]
    saved = capture_position(resumable_loader(DataLoader(Quiet(), 6, shuffle=True), 7)[0], 1)
    for world in (1, 2, 3):
        ranks = []
        for rank in range(world):
            loader, _ = resumable_loader(DataLoader(Quiet(), 6, shuffle=True), 7, rank, world, global_batch_size=6)
            restore_position(loader, saved, batches_done=1, epoch=1)
            ranks.append([batch[0].tolist() for batch in enter_epoch(loader, 1, 1)])
        assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole[3:4]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_samples": 11},
            "dataloader: num_samples is 10, and the run that was saved had 11. Resume with the same data set",
        ),
        ({"global_batch_size": 4}, "dataloader: global_batch_size is 3, and the run that was saved had 4."),
        ({"shuffle": False}, "dataloader: shuffle is True, and the run that was saved had False."),
        ({"drop_last": True}, "dataloader: drop_last is False, and the run that was saved had True."),
        (
            {"kind": "stateful"},
            r"dataloader: the run that was saved had a loader that keeps its position \(stateful\), and this one has a "
            r"map-style data set in an order of the kernel's \(map\). Resume with the loader of that run, its sampler and num_",
        ),
    ],
)
def test_other_data_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    loader = rebuilt(Quiet(), shuffle=True)
    with pytest.raises(DataError, match=message):
        restore_position(loader, capture_position(loader, 1) | change, batches_done=1, epoch=0)


def test_a_loader_that_says_it_has_no_state_is_skipped_by_count() -> None:
    class Stateless(StatefulLoader):
        def state_dict(self) -> Any:
            return None

    def loader() -> Stateless:
        return Stateless()

    saved = capture_position(loader(), 2)
    assert saved["kind"] == "count"
    again = loader()
    assert restore_position(again, saved, batches_done=2, epoch=0)
    assert len(list(enter_epoch(again, 0, 2))) == 2


AGAIN = "Batches 0 to 1 of epoch 1 are read again and thrown away; what follows is what the run would have read only if"
PASS = "each pass over an epoch gives the same samples in the same order."
WARNINGS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: DataLoader(Resetting(), SIZE, num_workers=2),
        f"dataloader: its data set Resetting keeps its position in 2 worker processes, out of reach. {AGAIN} {PASS} Use "
        "num_workers=0, or torchdata's StatefulDataLoader, for an exact place.",
    ),
    (
        lambda: DataLoader(Stream(), SIZE),
        f"dataloader: its data set Stream has no state_dict and load_state_dict. {AGAIN} {PASS} Give it these methods and "
        "num_workers=0, or use a map-style data set, for an exact place.",
    ),
    (
        lambda: DataLoader(Quiet(), SIZE, sampler=weighted()),
        f"dataloader: the order of its BatchSampler and WeightedRandomSampler is not known to the kernel. {AGAIN} that order "
        "follows from the epoch, or from generators of torch, Python and NumPy or the sampler's `generator`. Use shuffle=True "
        "or shuffle=False, or torchdata's StatefulDataLoader, for an exact place.",
    ),
    (
        lambda: [1, 2, 3],
        f"dataloader: a list has no state_dict and load_state_dict. {AGAIN} {PASS} Give it these methods.",
    ),
    (
        lambda: iter([1, 2, 3]),
        "dataloader: a list_iterator is an iterator, which cannot go back to a place. The run goes on with the batches it "
        "gives next, whichever these are. Give something that can be iterated anew each epoch.",
    ),
]


@pytest.mark.parametrize(("make", "warning"), WARNINGS)
def test_the_warning_names_what_cannot_be_exact(make: Callable[[], Any], warning: str) -> None:
    assert restore_position(make(), capture_position(make(), 2), batches_done=2, epoch=1) == warning


def test_an_iterator_goes_on_where_it_is_and_skipping_can_be_refused() -> None:
    batches = iter(range(6))
    assert next(enter_epoch(batches, 0)) == 0
    assert next(enter_epoch(batches, 0, 1)) == 1
    assert next(enter_epoch([1, 2, 3], 0, 1)) == 2
    assert next(enter_epoch([1, 2, 3], 0, 1, skip=False)) == 1


def test_a_data_set_is_told_the_epoch() -> None:
    loader = DataLoader(Stream(told=True), SIZE)
    assert begin_epoch(loader, 4, 2) == 2
    assert loader.dataset.epoch == 4  # type: ignore[attr-defined]


def test_an_epoch_that_is_empty_stays_empty() -> None:
    assert list(enter_epoch(DataLoader(Resetting(0), SIZE), 0)) == []


def test_global_generators_are_put_back_from_plain_data() -> None:
    start()
    random.gauss(0, 1)
    np.random.normal()
    saved = randomness_state()
    expected = (
        random.gauss(0, 1),
        np.random.normal(),
        random.random(),
        np.random.random_sample(),
        torch.rand(3).tolist(),
    )
    start()
    restore_randomness(saved)
    found = random.gauss(0, 1), np.random.normal(), random.random(), np.random.random_sample(), torch.rand(3).tolist()
    assert found == expected


def test_torchdatas_loader_goes_on_where_it_was() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(TensorDataset(torch.arange(ROWS), torch.zeros(ROWS)), SIZE, shuffle=True)

    expected = uninterrupted(make)
    for steps in range(9):
        for boundary in (False, True) if steps % 4 == 0 else (False,):
            assert interrupted_at(make, steps, boundary) == (expected, None)
