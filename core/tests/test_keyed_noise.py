"""Noise keyed by sample: the same whatever reads it, and nobody else's generators moved."""

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core.data.keyed import SOURCES, EpochBatch, KeyedDataset, KeyedLoader, draws_nothing, needs_keys
from kernel_core.data.loader import begin_epoch, resumable_loader
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]
IMAGES = torch.arange(11 * 3 * 8 * 8, dtype=torch.uint8).reshape(11, 3, 8, 8)


class Noisy(Dataset[Any]):
    """Draws from all three generators; ``reads`` counts in shared memory, whichever process reads."""

    def __init__(self, rows: int = 11, draws: bool = True) -> None:
        self.rows, self.draws = rows, draws
        self.reads = torch.zeros(rows, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self.scale = 1.0

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        self.reads[index] += 1
        if not self.draws:
            return index, torch.zeros(4, dtype=torch.float64)
        noise = [random.random(), float(np.random.normal()), float(torch.rand(())), random.gauss(0, 1)]
        return index, torch.tensor(noise, dtype=torch.float64) * self.scale


class Crops(Noisy):
    """What a user has: torchvision's own transforms."""

    def __init__(self) -> None:
        super().__init__()
        v2 = pytest.importorskip("torchvision.transforms.v2")
        self.transform = v2.Compose([v2.RandomCrop(6), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4)])

    def __getitem__(self, index: int) -> Any:
        return index, self.transform(IMAGES[index])


def loader_of(data: Any, seed: int = 7, rank: int = 0, world: int = 1, **options: Any) -> DataLoader[Any]:
    plain = DataLoader(data, **({"batch_size": 4, "shuffle": True} | options))
    return resumable_loader(plain, seed, rank, world)[0]  # type: ignore[no-any-return]


def epoch_of(loader: Any, epoch: int, batch: int = 0) -> list[tuple[list[int], bytes]]:
    assert begin_epoch(loader, epoch, batch) == 0
    return [(ids.tolist(), rest.numpy().tobytes()) for ids, rest in loader]


def by_sample(loader: Any, epoch: int) -> dict[int, bytes]:
    begin_epoch(loader, epoch)
    return {int(i): row.numpy().tobytes() for ids, rows in loader for i, row in zip(ids, rows, strict=True)}


def states() -> tuple[Any, ...]:
    numpy_state: Any = np.random.get_state()
    return (
        random.getstate(),
        [x.tobytes() if hasattr(x, "tobytes") else x for x in numpy_state],
        bytes(torch.get_rng_state()),
    )


@contextmanager
def generators_untouched() -> Iterator[None]:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    random.gauss(0, 1)  # half a pair is kept by these two, and belongs to the state
    np.random.normal()
    before = states()
    yield
    assert states() == before


@pytest.mark.parametrize("make", [Noisy, Crops])
def test_batches_are_byte_equal_with_any_workers_from_any_place_and_after_any_other_draws(
    make: Callable[[], Any],
) -> None:
    plain = loader_of(make())
    expected = [epoch_of(plain, epoch) for epoch in range(2)]
    assert expected[0] != expected[1]
    for options in WORKERS:
        torch.manual_seed(99)
        loader = loader_of(make(), **options)
        assert [epoch_of(loader, epoch) for epoch in range(2)] == expected
        resumed = loader_of(make(), **options)
        assert epoch_of(resumed, 1, 1) == expected[1][1:]
        assert epoch_of(resumed, 0) == expected[0]


def test_noise_is_that_of_the_sample_on_any_number_of_ranks_and_in_any_batch() -> None:
    expected = by_sample(loader_of(Noisy()), 3)
    for world, size in ((2, 2), (3, 1), (1, 11)):
        found: dict[int, bytes] = {}
        for rank in range(world):
            found |= by_sample(loader_of(Noisy(), rank=rank, world=world, batch_size=size), 3)
        assert found == expected
    assert by_sample(loader_of(Noisy(), shuffle=False), 3) == expected


def test_noise_differs_between_samples_epochs_and_seeds_and_between_the_generators() -> None:
    class Words(Noisy):
        def __getitem__(self, index: int) -> Any:
            numpy_state: Any = np.random.get_state()  # its first word, just after it was seeded, is the seed
            drawn = [random.getrandbits(32), int(numpy_state[1][0]), torch.initial_seed() % 2**32]
            np.random.random_sample()
            torch.rand(())
            return index, torch.tensor(drawn)

    seen: list[bytes] = []
    for seed in (7, 8):
        for epoch in range(3):
            seen += by_sample(loader_of(Words(), seed), epoch).values()
    words = np.frombuffer(b"".join(seen), dtype=np.int64)
    assert len(words) == 2 * 3 * 11 * 3
    assert len(set(words.tolist())) == len(words)


@pytest.mark.parametrize("draws", [True, False])
@pytest.mark.parametrize("collate", [None, lambda rows: default_collate([(i, x + torch.rand(1)) for i, x in rows])])
def test_the_generators_of_the_main_process_are_left_as_they_were(draws: bool, collate: Any) -> None:
    loader = loader_of(Noisy(draws=draws), collate_fn=collate, generator=torch.Generator())
    for epoch in range(2):
        with generators_untouched():
            epoch_of(loader, epoch)


def test_what_the_main_process_draws_between_batches_goes_on_as_without_a_data_set() -> None:
    def drawn(loader: Any) -> list[float]:
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        return [
            float(x) for _ in loader for x in (random.gauss(0, 1), np.random.normal(), torch.randn(()), random.random())
        ]

    for data in (Noisy(9), Noisy(9, draws=False)):  # three batches: pairs of normal numbers are cut in the middle
        loader = loader_of(data, generator=torch.Generator())
        assert drawn(loader) == drawn(range(3))
        assert drawn(loader) == drawn(range(3))


def test_a_quiet_data_set_is_read_once_and_a_noisy_one_reads_its_first_batch_twice_in_each_process() -> None:
    for options in WORKERS:
        quiet, noisy = Noisy(40, draws=False), Noisy(40)
        for data in (quiet, noisy):
            loader = loader_of(data, **options)
            for epoch in range(3):
                epoch_of(loader, epoch)
        assert quiet.reads.tolist() == [3] * 40
        again = 4 * max(1, options.get("num_workers", 0))  # the workers of later epochs know from the first
        assert int(noisy.reads.sum()) == 3 * 40 + again
        assert int(noisy.reads.max()) <= 4 + (again > 4)


@pytest.mark.parametrize("which", range(3))
def test_a_data_set_that_begins_to_draw_late_is_found_then(which: int) -> None:
    class Late(Noisy):
        def __getitem__(self, index: int) -> Any:
            self.reads[index] += 1
            draws: list[Callable[[], float]] = [random.random, np.random.random_sample, lambda: float(torch.rand(()))]
            return index, torch.tensor(draws[which]() if index >= 8 else 0.0, dtype=torch.float64)

    data = Late()
    with generators_untouched():
        found = epoch_of(loader_of(data, shuffle=False, generator=torch.Generator()), 0)
    assert data.reads.tolist() == [1] * 8 + [2] * 3
    assert by_sample(loader_of(Late(), batch_size=3), 0) == {
        i: row for ids, rows in found for i, row in zip(ids, (rows[j : j + 8] for j in range(0, 32, 8)), strict=False)
    }


@pytest.mark.parametrize(
    ("normal", "seed"),
    [(lambda: float(np.random.normal()), np.random.seed), (lambda: random.gauss(0, 1), random.seed)],
)
def test_the_second_number_of_a_pair_that_was_begun_elsewhere_is_noticed(normal: Any, seed: Any) -> None:
    class One(Noisy):
        def __getitem__(self, index: int) -> Any:
            return index, torch.tensor(normal())

    expected = by_sample(loader_of(One(), batch_size=1), 0)
    seed(5)
    pair = normal(), normal()
    seed(5)
    assert normal() == pair[0]
    assert by_sample(loader_of(One(), batch_size=1), 0) == expected
    assert normal() == pair[1]


def test_a_collate_fn_that_draws_follows_from_the_batch_and_gets_fresh_samples() -> None:
    calls = []

    def collate(rows: list[Any]) -> Any:
        assert type(rows) is list
        calls.append(len(rows))
        ids = torch.tensor([row.pop("id") for row in rows])  # takes its samples apart, as tokenizing collators do
        return ids, torch.rand(2) + random.random()

    class Rows(Noisy):
        def __getitem__(self, index: int) -> Any:
            return {"id": index}

    expected = [epoch_of(loader_of(Rows(), collate_fn=collate), epoch) for epoch in range(2)]
    assert len(calls) == 2 * 3 + 2
    assert len({noise for batches in expected for _, noise in batches}) == 6
    torch.manual_seed(99)
    for options in WORKERS:
        loader = loader_of(Rows(), collate_fn=collate, **options)
        assert [epoch_of(loader, epoch) for epoch in range(2)] == expected
        assert epoch_of(loader_of(Rows(), collate_fn=collate, **options), 1, 2) == expected[1][2:]


def test_a_collate_fn_has_noise_of_its_own_where_samples_seed_the_generators() -> None:
    class Seeding(Noisy):
        def __getitem__(self, index: int) -> Any:
            random.seed(0)
            return index, torch.tensor(random.random())

    def collate(rows: list[Any]) -> Any:
        ids, noise = default_collate(rows)
        return ids, noise[0] + random.random()

    loader = loader_of(Seeding(), collate_fn=collate)
    assert len({noise for epoch in range(2) for _, noise in epoch_of(loader, epoch)}) == 6


class Batched(Noisy):
    """Reads many samples at once, as Hugging Face's data sets do."""

    asked: list[int]

    def __getitems__(self, ids: list[int]) -> Any:
        assert type(ids) is list
        self.asked.append(len(ids))
        if self.draws:
            shift = random.random()
            return [(i, torch.tensor(shift + torch.rand(()).item())) for i in ids]
        return [(i, torch.tensor(0.0)) for i in ids]


def test_a_data_set_that_reads_many_samples_at_once_goes_on_to_unless_it_draws() -> None:
    quiet, noisy = Batched(draws=False), Batched()
    quiet.asked, noisy.asked = [], []
    epoch_of(loader_of(quiet), 0)
    assert quiet.asked == [4, 4, 3]
    first = by_sample(loader_of(noisy), 0)
    assert noisy.asked == [4, *[1] * 11]
    assert by_sample(loader_of(noisy, batch_size=3), 0) == first
    subset = loader_of(Subset(noisy, range(10, -1, -1)), shuffle=False)
    assert len(set(by_sample(subset, 0).values())) == 11


def test_a_data_set_that_makes_the_batch_itself_has_noise_by_batch() -> None:
    class Whole(Noisy):
        def __getitems__(self, ids: list[int]) -> Any:
            return torch.tensor(ids), torch.rand(len(ids))

    def read(**options: Any) -> Any:
        loader = loader_of(Whole(), collate_fn=lambda batch: batch, **options)
        return [epoch_of(loader, epoch) for epoch in range(2)]

    expected = read()
    assert [len(ids) for ids, _ in expected[0]] == [4, 4, 3]
    assert read(num_workers=2) == expected


def test_an_error_in_a_keyed_sample_leaves_the_generators_as_they_were() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                random.random()
                raise RuntimeError("sample 9")
            return super().__getitem__(index)

    loader = loader_of(Broken(), shuffle=False, generator=torch.Generator())
    with generators_untouched(), pytest.raises(RuntimeError, match="sample 9"):
        epoch_of(loader, 0)


# what users see


def init(worker: int) -> None:
    data: Any = get_worker_info().dataset  # type: ignore[union-attr]
    assert data.rows == 11
    assert len(data) == 11
    assert data[0][0] == 0
    data.scale = 1000.0 + worker


def test_worker_init_fn_reads_and_writes_the_data_set() -> None:
    scaled = by_sample(loader_of(Noisy(), num_workers=1, worker_init_fn=init), 0)
    usual = by_sample(loader_of(Noisy(), num_workers=1), 0)
    for i, row in usual.items():
        assert torch.equal(torch.frombuffer(bytearray(scaled[i]), dtype=torch.float64), as_floats(row) * 1000)
    with pytest.raises(AttributeError, match="colour"):
        _ = KeyedDataset(Noisy(), default_collate, torch.zeros(3)).colour


def as_floats(row: bytes) -> Tensor:
    return torch.frombuffer(bytearray(row), dtype=torch.float64)


def test_the_loader_shows_the_users_data_set_and_collate_fn_and_what_is_set_there_counts() -> None:
    data = Noisy()
    loader = loader_of(data)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is data
    assert loader.collate_fn is default_collate
    before = by_sample(loader, 0)
    loader.dataset.scale = 2.0  # type: ignore[attr-defined]
    for i, row in by_sample(loader, 0).items():
        assert torch.equal(as_floats(row), as_floats(before[i]) * 2)


def test_what_workers_that_are_spawned_need_survives_pickling() -> None:
    batch = pickle.loads(pickle.dumps(EpochBatch([3, 1], 7, 2)))
    assert (batch, batch.seed, batch.epoch) == ([3, 1], 7, 2)
    data = KeyedDataset(Noisy(), default_collate, torch.zeros(3))
    copy = pickle.loads(pickle.dumps(data))
    assert copy.rows == 11
    assert torch.equal(copy.__getitems__(batch)[1], data.__getitems__(batch)[1])


def test_spawned_workers_give_the_same_noise() -> None:
    expected = epoch_of(loader_of(Noisy()), 0)
    assert epoch_of(loader_of(Noisy(), num_workers=1, multiprocessing_context="spawn"), 0) == expected


def test_data_sets_known_to_draw_nothing_are_not_watched() -> None:
    class Promised(Noisy):
        draws_nothing = True

    class MyTensors(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(2)

    rows = TensorDataset(torch.arange(6))
    a: Any = list(range(6))
    quiet: list[Any] = [
        rows,
        Subset(rows, [1, 2]),
        ConcatDataset([rows, Promised()]),
        StackDataset(rows, a),
    ]
    quiet += [StackDataset(x=rows, y=a), Promised(), range(5), torch.arange(5), np.arange(5)]
    loud: list[Any] = [Noisy(), MyTensors(torch.arange(6)), Subset(Noisy(), [1]), ConcatDataset([rows, Noisy()])]
    loud += [StackDataset(x=rows, y=MyTensors(torch.arange(6)))]
    assert all(map(draws_nothing, quiet))
    assert not any(map(draws_nothing, loud))
    for data in quiet:
        assert type(loader_of(data)) is DataLoader
        assert needs_keys(DataLoader(data, collate_fn=list))
    for data in loud:
        assert type(loader_of(data)) is KeyedLoader


def test_a_generator_that_the_user_put_in_numpys_place_is_left_alone() -> None:
    held = np.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        rows = by_sample(loader_of(Noisy()), 0)
        assert len(set(rows.values())) == 11
        assert type(np.random.get_bit_generator()) is np.random.PCG64  # type: ignore[attr-defined]
    finally:
        np.random.set_bit_generator(held)  # type: ignore[attr-defined]


def test_numpys_state_in_memory_is_what_its_own_functions_say() -> None:
    source = SOURCES[1]
    np.random.seed(11)
    np.random.random_sample(700)
    state: Any = np.random.get_state()
    memory = source._read_memory()
    assert memory[:2496] == state[1].tobytes()
    assert int.from_bytes(memory[2496:], "little") == state[2]
