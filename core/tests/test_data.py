from collections import OrderedDict, UserDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core.data.spec import DataSpec, count_samples, count_tokens, get_item, set_item, split, to_device
from kernel_core.errors import DataError
from kernel_core.storage import LocalStorage

Pair = namedtuple("Pair", "x y")
X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        OrderedDict(x=X),
        UserDict(x=X),
        Pair(X, Y),
        [1, 2, 3, 4, 5],
        {"t": list("abcde")},
    ],
)
def test_rows_are_counted_in_every_kind_of_batch_and_splits_put_together_are_the_batch(batch: Any) -> None:
    assert count_samples(batch) == 5
    parts = split(batch, 2)
    assert [count_samples(part) for part in parts] == [2, 2, 1]
    assert all(type(part) is type(batch) for part in parts)
    assert len(split(batch, 7)) == 1


def test_split_parts_hold_the_rows_in_order_and_share_what_is_no_row() -> None:
    batch = {"x": X, "pair": (Y, X), "scale": 3.0, "name": "a", "table": torch.ones(7, 2), "texts": list("abcde")}
    first, second = split(batch, 3)
    assert torch.equal(torch.cat([first["x"], second["x"]]), X)
    assert torch.equal(torch.cat([first["pair"][0], second["pair"][0]]), Y)
    assert (first["scale"], second["name"]) == (3.0, "a")
    assert first["table"].shape == (7, 2)
    assert first["texts"] + second["texts"] == list("abcde")


@pytest.mark.parametrize("batch", [3, "text", {}, {"a": 1}, torch.tensor(3.0), []])
def test_a_batch_whose_rows_cannot_be_counted_says_which_argument_helps(batch: Any) -> None:
    with pytest.raises(DataError, match="get_num_samples_in_batch"):
        count_samples(batch)


def test_what_cannot_be_split_says_which_argument_helps() -> None:
    with pytest.raises(DataError, match=r"cannot split a set\. Give DataSpec\(dataloader, split_batch="):
        split({1, 2}, 1)


def test_lists_beside_each_other_hold_a_row_an_entry() -> None:
    images = [torch.ones(3, 8, 8) * n for n in range(4)]
    targets = [{"box": torch.ones(n + 1, 4)} for n in range(4)]
    assert count_samples((images, targets)) == count_samples(targets) == 4
    first, second = split((images, targets), 2)
    assert [len(first[0]), len(first[1]), len(second[0])] == [2, 2, 2]
    assert second[0][0] is images[2]
    assert second[1][1] is targets[3]
    with pytest.raises(DataError, match="a list of 3 entries stands beside 4 rows"):
        split((images, targets[:3]), 2)


def test_tokens_are_the_area_of_input_ids() -> None:
    assert count_tokens({"input_ids": torch.ones(3, 7)}) == 21
    assert count_tokens((X, Y)) == 0


def test_items_are_got_and_set_by_index_key_and_function() -> None:
    assert get_item((X, Y), 1) is Y
    assert set_item((X, Y), 0, Y) == (Y, Y)
    assert set_item(Pair(X, Y), 0, 3) == Pair(3, Y)
    assert set_item({"a": 1}, "a", 2) == {"a": 2}
    key = (lambda batch: batch["deep"]["a"], lambda batch, value: {"deep": {"a": value}})
    assert get_item({"deep": {"a": 1}}, key) == 1
    assert set_item({"deep": {"a": 1}}, key, 2) == {"deep": {"a": 2}}
    assert get_item((X, Y), lambda batch: batch[0]) is X


def test_everything_inside_a_batch_moves() -> None:
    moved = to_device({"a": [X, (Y, "text")], "p": Pair(X, 3)}, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert moved["a"][1][1] == "text"
    assert moved["p"].x.is_meta


def test_a_spec_knows_its_length() -> None:
    assert DataSpec([1, 2, 3]).num_batches == 3
    assert DataSpec(iter([1])).num_batches is None
    assert DataSpec.of({"dataloader": [1], "num_samples": 4}).num_samples == 4


def test_local_storage_writes_whole_files_and_stays_below_its_root(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    storage.write("a/b.json", b"one")
    storage.write("a/b.json", b"two")
    storage.write("c", b"")
    assert storage.read("a/b.json") == b"two"
    assert list(storage.list()) == ["a/b.json", "c"]
    assert list(storage.list("a")) == ["a/b.json"]
    assert storage.exists("a")
    storage.delete("a")
    storage.delete("a")
    assert not storage.exists("a/b.json")
    with pytest.raises(FileNotFoundError):
        storage.read("a/b.json")
    with pytest.raises(ValueError, match="leads out of"):
        storage.write("../elsewhere", b"")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
