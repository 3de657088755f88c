"""Samplers and the loaders rebuilt with them: order, world size, skipping, and what is left alone."""

import inspect
import os
import random
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from kernel_core.data.loader import begin_epoch, resumable_loader, set_epoch
from kernel_core.data.sampler import ResumableBatchSampler, ResumableSampler, epoch_order
from kernel_core.errors import DataError
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

SEED = int(os.environ.get("KERNEL_TEST_SEED", "0"))
WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


class Ids(Dataset[int]):
    """Sample i is i; counts what is read in this process."""

    def __init__(self, rows: int = 23) -> None:
        self.rows, self.reads = rows, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.rows:
            raise IndexError(index)
        self.reads.append(index)
        return index


def batches_of(n: int, size: int, *, epoch: int = 0, shuffle: bool = True, **kwargs: Any) -> list[list[int]]:
    sampler = ResumableBatchSampler(ResumableSampler(n, shuffle=shuffle, seed=7), size, **kwargs)
    sampler.set_epoch(epoch)
    return list(sampler)


def rebuilt(data: Any = None, *, seed: int = 7, rank: int = 0, world_size: int = 1, **kwargs: Any) -> DataLoader[Any]:
    options = {"batch_size": 4, "shuffle": True} | kwargs
    loader, note = resumable_loader(DataLoader(Ids() if data is None else data, **options), seed, rank, world_size)
    assert note
    return loader  # type: ignore[no-any-return]


def read(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


# the order


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    orders = [epoch_order(50, shuffle=True, seed=seed, epoch=epoch).tolist() for seed in (0, 1) for epoch in range(4)]  # type: ignore[union-attr]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    assert list(epoch_order(50, shuffle=False, seed=0, epoch=3)) == list(range(50))


def test_the_order_depends_on_nothing_but_seed_and_epoch_and_draws_from_no_global_generator() -> None:
    sampler = ResumableSampler(Ids(), shuffle=True, seed=7)
    sampler.set_epoch(3)
    expected = list(sampler)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    sampler.set_epoch(1)
    list(sampler)
    sampler.set_epoch(3)
    with torch.device("meta"):
        assert list(sampler) == expected
    assert torch.equal(torch.get_rng_state(), before)
    assert list(ResumableSampler(23, shuffle=True, seed=8)) != list(ResumableSampler(23, shuffle=True, seed=7))
    assert len(sampler) == 23


# the ranks


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_the_global_batches_are_the_same_on_1_2_3_4_and_6_ranks(shuffle: bool, drop_last: bool) -> None:
    chance = random.Random(SEED)
    for _ in range(30):
        n, epoch = chance.randint(1, 100), chance.randint(0, 5)
        order = list(epoch_order(n, shuffle=shuffle, seed=7, epoch=epoch))
        expected = [[int(i) for i in order[first : first + 12]] for first in range(0, n, 12)]
        if drop_last and len(expected[-1]) < 12:
            expected.pop()
        for world in (1, 2, 3, 4, 6):
            options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last, "epoch": epoch, "world_size": world}
            ranks = [batches_of(n, 12 // world, rank=rank, **options) for rank in range(world)]
            together = [list(chain(*(rank[t] for rank in ranks if t < len(rank)))) for t in range(len(expected))]
            assert together == expected
            assert all(len(batch) == 12 // world for rank in ranks for batch in rank[: n // 12])


def test_a_short_last_batch_is_shared_evenly_and_the_first_ranks_have_more() -> None:
    def last(n: int) -> list[list[int]]:
        return [batches_of(n, 3, shuffle=False, rank=rank, world_size=4)[-1] for rank in range(4)]

    assert last(12 + 6) == [[12, 13], [14, 15], [16], [17]]
    ranks = [batches_of(12 + 2, 3, shuffle=False, rank=rank, world_size=4) for rank in range(4)]
    assert [len(rank) for rank in ranks] == [2, 2, 1, 1]  # no row is left for the last two
    order = ResumableSampler(14, shuffle=False, seed=0)
    assert {len(ResumableBatchSampler(order, 3, rank=rank, world_size=4)) for rank in range(4)} == {2}
    assert len(ResumableBatchSampler(order, 3, True, world_size=4)) == 1


def test_on_one_rank_the_batches_are_cut_as_torch_cuts_them() -> None:
    for n in range(1, 20):
        for drop_last in (False, True):
            order = ResumableSampler(n, shuffle=True, seed=n)
            ours = ResumableBatchSampler(order, 4, drop_last)
            theirs = BatchSampler(order, 4, drop_last)
            assert list(ours) == list(theirs)
            assert len(ours) == len(theirs)


# skipping


def test_start_at_gives_the_rest_of_the_epoch_once_at_every_place() -> None:
    sampler = ResumableBatchSampler(ResumableSampler(23, shuffle=True, seed=7), 4)
    whole = list(sampler)
    for place in range(len(whole) + 1):
        sampler.start_at(place)
        assert len(sampler) == len(whole)
        assert list(sampler) == whole[place:]
        assert list(sampler) == whole


def test_a_place_is_that_of_the_run_whatever_the_number_of_ranks() -> None:
    whole = batches_of(50, 12)
    for world in (1, 2, 3, 4):
        ranks = []
        for rank in range(world):
            order = ResumableSampler(50, shuffle=True, seed=7)
            sampler = ResumableBatchSampler(order, 12 // world, rank=rank, world_size=world)
            sampler.start_at(3)
            ranks.append(list(sampler))
        assert [list(chain(*(rank[t] for rank in ranks if t < len(rank)))) for t in range(2)] == whole[3:]


def test_an_iterator_keeps_the_epoch_and_place_it_was_made_for() -> None:
    sampler = ResumableBatchSampler(ResumableSampler(23, shuffle=True, seed=7), 4)
    first, second = list(sampler), batches_of(23, 4, epoch=1)
    old = iter(sampler)
    sampler.set_epoch(1)
    sampler.start_at(2)
    unread = iter(sampler)  # as a DataLoader with workers makes one for nothing
    used = iter(sampler)
    assert next(old) == first[0]
    assert list(used) == second[2:]
    assert list(sampler) == second
    assert next(unread) == second[2]


@pytest.mark.parametrize("options", WORKERS, ids=["no workers", "workers", "persistent workers"])
def test_a_loader_goes_on_at_its_batch_and_the_next_epoch_is_whole(options: dict[str, Any]) -> None:
    straight = rebuilt(**options)
    epochs = []
    for epoch in range(3):
        set_epoch(straight, epoch)
        epochs.append(read(straight))
    assert len({str(epoch) for epoch in epochs}) == 3
    for place in (0, 1, 5, 6):
        resumed = rebuilt(**options)  # as a new process makes it
        assert begin_epoch(resumed, 1, place) == 0
        assert read(resumed) == epochs[1][place:]
        assert begin_epoch(resumed, 2) == 0
        assert read(resumed) == epochs[2]


@pytest.mark.parametrize("options", WORKERS, ids=["no workers", "workers", "persistent workers"])
def test_an_epoch_that_was_left_in_the_middle_is_taken_up_in_the_same_process(options: dict[str, Any]) -> None:
    loader = rebuilt(**options)
    whole = read(loader)
    iterator = iter(loader)
    begun = [next(iterator).tolist() for _ in range(2)]
    begin_epoch(loader, 0, 2)
    assert begun + read(loader) == whole


def test_skipping_reads_no_data() -> None:
    data = Ids(1000)
    loader = rebuilt(data)
    begin_epoch(loader, 0, 248)
    assert len(read(loader)) == 2
    assert len(data.reads) == 8


def test_a_place_beyond_the_epoch_is_refused() -> None:
    sampler = ResumableBatchSampler(ResumableSampler(23, shuffle=True, seed=7), 4)
    with pytest.raises(
        DataError, match=r"start_at: got batch 7, and an epoch has 6 batches of 4 samples\. The data set"
    ):
        sampler.start_at(7)
    with pytest.raises(DataError, match="start_at: got batch -1"):
        sampler.start_at(-1)


@pytest.mark.parametrize(
    ("size", "kwargs", "message"),
    [
        (0, {}, "batch_size: got 0. Expected a whole number of at least 1."),
        (2.0, {}, "batch_size: got 2.0"),
        (2, {"rank": 2, "world_size": 2}, "rank: got 2 of 2. Expected a number from 0 to 1."),
        (2, {"rank": -1}, "rank: got -1 of 1"),
    ],
)
def test_impossible_sizes_and_ranks_are_refused(size: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        batches_of(5, size, **kwargs)


# rebuilding


def test_a_rebuilt_loader_has_every_argument_of_the_one_it_was_made_from() -> None:
    generator = torch.Generator()
    loader = DataLoader(
        Ids(),
        batch_size=3,
        shuffle=True,
        num_workers=1,
        collate_fn=list,
        drop_last=True,
        timeout=9,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        generator=generator,
        prefetch_factor=5,
        persistent_workers=True,
        pin_memory=True,
        in_order=False,
    )
    made, _ = resumable_loader(loader, 7)
    assert isinstance(made, DataLoader)
    for name in inspect.signature(DataLoader.__init__).parameters:
        if name not in ("self", "shuffle", "sampler", "batch_sampler"):
            assert getattr(made, name) == getattr(loader, name), name
    assert len(made) == len(loader) == 7
    assert type(loader.sampler) is RandomSampler  # the user's own is as it was
    assert type(loader.batch_sampler) is BatchSampler
    with pytest.raises(ValueError, match="should not be set after"):
        made.batch_size = 4


def test_a_sequential_loader_reads_what_it_read_before() -> None:
    for drop_last in (False, True):
        plain = DataLoader(Ids(), batch_size=4, drop_last=drop_last)
        made, note = resumable_loader(plain, 7)
        assert read(made) == read(plain)
        assert note == "dataloader: its SequentialSampler is replaced by a resumable one: the order stays."


def test_a_batch_sampler_given_by_hand_and_a_sampler_over_part_of_the_data_are_rebuilt_alike() -> None:
    data = Ids()
    by_hand = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(range(9)), 4, True))
    made, _ = resumable_loader(by_hand, 7)
    assert read(made) == batches_of(9, 4, drop_last=True)
    made, _ = resumable_loader(DataLoader(data, batch_size=4, sampler=RandomSampler(range(9))), 7)
    assert read(made) == batches_of(9, 4)


def test_ranks_share_what_one_loader_reads() -> None:
    whole = read(rebuilt(batch_size=6))
    ranks = [read(rebuilt(batch_size=2, rank=rank, world_size=3)) for rank in range(3)]
    assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole


def test_the_line_for_the_log_says_what_decides_the_order() -> None:
    def note(world_size: int = 1, **kwargs: Any) -> str:
        _, line = resumable_loader(DataLoader(Ids(), batch_size=4, **kwargs), 7, 0, world_size)
        return line or ""

    line = "dataloader: its RandomSampler is replaced by a resumable one: the order follows from the run's seed and the epoch"
    assert note(shuffle=True) == line + "."
    own = note(shuffle=True, generator=torch.Generator())
    assert own == line + ", and no longer from the sampler's own generator."
    assert note(3, shuffle=True) == line + "; each of 3 ranks reads its share of every 12 samples."
    mixed = note(shuffle=True, num_workers=1, in_order=False)
    assert mixed == line + ". With in_order=False a resumed run may read some batches twice and miss others."


@pytest.mark.parametrize("options", WORKERS, ids=["no workers", "workers", "persistent workers"])
def test_a_rebuilt_loader_draws_from_the_global_generator_what_a_plain_one_does(options: dict[str, Any]) -> None:
    def state_after(loader: Any) -> torch.Tensor:
        torch.manual_seed(5)
        for epoch in range(2):
            set_epoch(loader, epoch)
            read(loader)
        return torch.get_rng_state()

    plain = state_after(DataLoader(Ids(), batch_size=4, **options))
    assert torch.equal(state_after(rebuilt(**options)), plain)
    assert torch.equal(state_after(rebuilt(shuffle=False, **options)), plain)
    torch.manual_seed(5)
    own = rebuilt(generator=torch.Generator(), **options)
    read(own)
    assert torch.equal(torch.get_rng_state(), torch.random.manual_seed(5).get_state())


# left alone


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class ForeignLoader(DataLoader[Any]):
    pass


class ForeignOrder(SequentialSampler):
    pass


class ForeignBatches(BatchSampler):
    pass


AGAIN = "A resumed run reads the batches before its place again and throws them away."
DATA = Ids()
LEFT: list[tuple[Callable[[], Any], str | None]] = [
    (lambda: [1, 2, 3], None),
    (lambda: DataLoader(Stream(), batch_size=2), None),
    (lambda: rebuilt(), None),
    (lambda: ForeignLoader(DATA, batch_size=2), "it is a ForeignLoader"),
    (lambda: DataLoader(DATA, batch_size=None), "batch_size=None leaves batching to its data set"),
    (lambda: DataLoader(DATA, sampler=ForeignOrder(DATA)), "its sampler is a ForeignOrder"),
    (lambda: DataLoader(DATA, sampler=SubsetRandomSampler([3, 1])), "its sampler is a SubsetRandomSampler"),
    (lambda: DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 23, 5)), "its sampler is a WeightedRandomSampler"),
    (
        lambda: DataLoader(DATA, batch_sampler=ForeignBatches(SequentialSampler(DATA), 2, False)),
        "its batch sampler is a ForeignBatches",
    ),
    (lambda: DataLoader(DATA, batch_sampler=[[1], [2, 3]]), "its batch sampler is a list"),
    (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "with replacement or another number"),
    (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=5)), "with replacement or another number"),
    (lambda: DataLoader(DATA, sampler=range(5)), "its sampler is a range"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "why"), LEFT)
def test_a_loader_with_an_order_of_its_own_is_left_alone(make: Callable[[], Any], why: str | None) -> None:
    loader = make()
    same, note = resumable_loader(loader, 7)
    assert same is loader
    if why is None:
        assert note is None
    else:
        assert note
        assert note.startswith("dataloader: left as it is, because")
        assert why in note
        assert note.endswith(AGAIN)
        _, on_two = resumable_loader(loader, 7, 1, 2)
        assert on_two == f"{note} It is not shared among the 2 ranks: each reads what it gives."


def test_a_loader_whose_persistent_workers_run_is_left_alone() -> None:
    loader = DataLoader(Ids(), batch_size=4, num_workers=1, persistent_workers=True)
    iterator = iter(loader)
    next(iterator)
    same, note = resumable_loader(loader, 7)
    assert same is loader
    assert note == f"dataloader: left as it is, because its persistent workers run already. {AGAIN}"


def test_a_distributed_sampler_is_not_shared_twice_and_is_told_the_epoch() -> None:
    sampler = DistributedSampler(DATA, num_replicas=2, rank=1, seed=3)
    for loader in (
        DataLoader(DATA, batch_size=4, sampler=sampler),
        DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, False)),
    ):
        assert resumable_loader(loader, 7, 1, 2) == (loader, None)
        assert begin_epoch(loader, 5, 3) == 3
        assert sampler.epoch == 5
        sampler.set_epoch(0)
        _, note = resumable_loader(loader, 7, 0, 4)
        assert note
        assert "its DistributedSampler shares the data among 2 ranks, and the run has 4" in note


def test_each_holder_of_an_epoch_is_told_once() -> None:
    told = []

    class Told(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            told.append(epoch)

    assert begin_epoch(DataLoader(DATA, sampler=Told(DATA)), 4, 9) == 9
    assert told == [4]
    assert begin_epoch([1, 2, 3], 1, 2) == 2


# another number of ranks


def test_the_recorded_global_batch_is_kept_on_another_number_of_ranks() -> None:
    whole = read(rebuilt(batch_size=12))
    for world in (1, 2, 3, 4):
        ranks = []
        for rank in range(world):
            plain = DataLoader(Ids(), batch_size=4, shuffle=True)
            loader, _ = resumable_loader(plain, 7, rank, world, global_batch_size=12)
            assert loader.batch_size == 12 // world
            ranks.append(read(loader))
        assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole


def test_a_global_batch_that_cannot_be_met_is_refused_by_name() -> None:
    plain = DataLoader(Ids(), batch_size=4, shuffle=True)
    with pytest.raises(
        DataError, match=r"global batch of 12 samples cannot be shared by 8 ranks\. Use a number of ranks"
    ):
        resumable_loader(plain, 7, 0, 8, global_batch_size=12)
    for fixed in (DataLoader(Stream(), batch_size=4), DataLoader(DATA, batch_size=4, sampler=ForeignOrder(DATA))):
        with pytest.raises(DataError, match=r"gives 4 samples to each of 2 ranks, .* had 12 in all, .* batch_size=6"):
            resumable_loader(fixed, 7, 0, 2, global_batch_size=12)
        assert resumable_loader(fixed, 7, 0, 3, global_batch_size=12)[0] is fixed


def test_a_distributed_sampler_is_left_in_training_and_replaced_where_each_sample_counts_once() -> None:
    data = TensorDataset(torch.arange(5))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(data, 2, sampler=sampler)
    left, _ = resumable_loader(loader, 0, 1, 2)
    assert left is loader
    shares = [resumable_loader(loader, 0, rank, 2, once=True)[0] for rank in range(2)]
    seen = [[int(x) for batch in share for x in batch[0]] for share in shares]
    assert seen == [[0, 1, 4], [2, 3]]  # torch's would give sample 0 twice, to fill up
