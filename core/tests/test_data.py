import os
import random
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from itertools import chain
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from kernel_core.data.spec import (
    DataSpec,
    count_samples,
    count_tokens,
    device_of,
    get_item,
    set_item,
    split,
    tensors_of,
    to_device,
)
from kernel_core.errors import DataError
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

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


class Attributed(dict[str, Any]):
    """A mapping whose constructor takes something else, and that carries an attribute."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale


def attributed(**parts: Any) -> Attributed:
    made = Attributed(2.5)
    made.update(parts)
    return made


def encoding(**parts: Any) -> Any:
    return pytest.importorskip("transformers").BatchEncoding(parts)


def model_output(**parts: Any) -> Any:
    return pytest.importorskip("transformers.modeling_outputs").CausalLMOutput(**parts)


MAPPINGS = [
    dict,
    OrderedDict,
    UserDict,
    lambda **parts: defaultdict(list, parts),
    lambda **parts: MappingProxyType(parts),
    attributed,
    encoding,
    model_output,
]


@pytest.mark.parametrize("make", MAPPINGS)
def test_every_kind_of_mapping_keeps_its_type_when_split_and_moved(make: Any) -> None:
    batch = make(logits=X, hidden_states=(X, X + 1))
    assert count_samples(batch) == 5
    parts = split(batch, 2)
    moved = to_device(batch, torch.device("meta"))
    assert {type(part) for part in [*parts, moved]} == {type(batch)}
    assert torch.equal(torch.cat([part["logits"] for part in parts]), X)
    assert torch.equal(torch.cat([part["hidden_states"][1] for part in parts]), X + 1)
    assert [tensor.device.type for tensor in tensors_of(moved)] == ["meta"] * 3
    assert batch["logits"] is X  # the loader may hand out the same object again
    assert list(parts[0]) == list(batch)


def test_a_mapping_keeps_its_attributes_and_a_model_output_its_fields() -> None:
    batch = attributed(x=X)
    assert [part.scale for part in split(batch, 3)] == [2.5, 2.5]
    assert to_device(batch, torch.device("meta")).scale == 2.5
    output = model_output(loss=torch.tensor(1.0), logits=X)
    first, second = split(output, 3)
    assert torch.equal(first.logits, X[:3])
    assert second.loss is output.loss
    assert to_device(output, torch.device("meta")).logits.is_meta


def test_a_tokenized_batch_is_counted_split_and_moved() -> None:
    ids = torch.arange(5 * 7).reshape(5, 7)
    for make in (dict, encoding):
        batch = make(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids + 1, task="lm", temperature=0.5)
        assert (count_samples(batch), count_tokens(batch)) == (5, 35)
        parts = split(batch, 2)
        assert [count_tokens(part) for part in parts] == [14, 14, 7]
        assert torch.equal(torch.cat([part["labels"] for part in parts]), ids + 1)
        assert {(part["task"], part["temperature"]) for part in parts} == {("lm", 0.5)}
        assert to_device(batch, torch.device("meta"))["labels"].is_meta
        assert device_of(batch) == torch.device("cpu")


def random_batch(chance: random.Random, rows: int, depth: int = 0) -> Any:
    """Return a batch nested at random, whose leaf ``i`` of row ``r`` is a multiple of its own number plus ``r``."""
    leaf = torch.arange(rows) + 1000 * chance.randint(1, 99)
    kinds = ["tensor", "wide", "numpy"] if depth else []
    if depth < 3:
        kinds += ["dict", "ordered", "user", "tuple", "pair", "list"]
    kind = chance.choice(kinds)
    if kind == "tensor":
        return leaf
    if kind == "wide":
        return leaf[:, None].expand(rows, 3)
    if kind == "numpy":
        return leaf.numpy()
    parts = [random_batch(chance, rows, depth + 1) for _ in range(chance.randint(1, 3))]
    if kind == "pair":
        return Pair(leaf, chance.choice(["text", 3, None, parts[-1]]))
    if kind in ("tuple", "list"):
        parts = [leaf, *(part for part in parts if not isinstance(part, list | tuple))]
        return tuple(parts) if kind == "tuple" else parts
    named = {str(index): part for index, part in enumerate(parts)} | {
        "t": leaf,
        "note": "text",
        "texts": list(map(str, leaf)),
    }
    return {"dict": dict, "ordered": OrderedDict, "user": UserDict}[kind](named)


def leaves(batch: Any) -> list[Any]:
    if isinstance(batch, dict | UserDict):
        return [leaf for part in batch.values() for leaf in leaves(part)]
    if isinstance(batch, tuple) or (isinstance(batch, list) and not isinstance(batch[0], str)):
        return [leaf for part in batch for leaf in leaves(part)]
    return [batch]


def test_the_parts_of_nested_batches_put_together_are_the_batch() -> None:
    chance = random.Random(int(os.environ.get("KERNEL_TEST_SEED", "0")))
    for _ in range(200):
        rows, size = chance.randint(4, 9), chance.randint(1, 11)
        batch = random_batch(chance, rows)
        assert count_samples(batch) == rows
        parts = split(batch, size)
        assert [count_samples(part) for part in parts] == [min(size, rows - at) for at in range(0, rows, size)]
        for whole, *pieces in zip(leaves(batch), *map(leaves, parts), strict=True):
            if isinstance(whole, torch.Tensor | np.ndarray):
                assert np.array_equal(np.concatenate([np.asarray(piece) for piece in pieces]), np.asarray(whole))
            elif isinstance(whole, list):
                assert list(chain(*pieces)) == whole
            else:
                assert all(piece is whole for piece in pieces)


def test_what_default_collate_makes_of_nested_samples_is_columns() -> None:
    """Two inputs and a label: a list of two tensors beside a tensor, also when the batch has two rows."""
    for rows in (2, 5):
        batch = default_collate(
            [((torch.ones(3) * row, torch.ones(4) * row), row, f"name{row}") for row in range(rows)]
        )
        assert count_samples(batch) == rows
        parts = split(batch, 1)
        assert [len(part[0]) for part in parts] == [2] * rows
        assert [part[0][1].tolist() for part in parts] == [[[float(row)] * 4] for row in range(rows)]
        assert [list(part[2]) for part in parts] == [[f"name{row}"] for row in range(rows)]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("rows", [3, 4])
def test_images_of_several_sizes_hold_a_row_each_even_if_as_many_as_channels(kind: Any, rows: int) -> None:
    """As a detection data set is collated: ``tuple(zip(*samples))``, or lists."""
    images = kind(torch.ones(3, 8 + n, 8) for n in range(rows))
    targets = kind({"box": torch.ones(n + 1, 4)} for n in range(rows))
    batch = (images, targets)
    assert count_samples(batch) == rows
    parts = split(batch, 2)
    assert [len(part[0]) for part in parts] == [2, rows - 2]
    assert parts[1][0][0] is images[2]
    assert parts[1][1][0] is targets[2]


def test_a_list_of_lists_is_columns_and_uneven_ones_are_not_guessed() -> None:
    batch = [[1, 2, 3], list("abc")]
    assert count_samples(batch) == 3
    assert split(batch, 2) == [[[1, 2], ["a", "b"]], [[3], ["c"]]]
    for ragged in ([[1, 2], [3, 4, 5], [6]], {"ids": [1, 2], "names": ["a"]}):
        with pytest.raises(
            DataError, match=r"stands beside 2 rows.*Give DataSpec\(dataloader, split_batch=.*get_num_samples"
        ):
            count_samples(ragged)


def test_named_tuples_hold_columns_and_their_plain_values_go_everywhere() -> None:
    first, second = split((Pair(X, 3.0), Pair(1, 2), Y), 3)
    assert (first[0].y, second[0].y, second[1]) == (3.0, 3.0, Pair(1, 2))
    assert torch.equal(torch.cat([first[0].x, second[0].x]), X)
    pairs = Pair(torch.ones(2), Pair(torch.ones(2), "text"))  # two rows, two fields
    assert [part.y.y for part in split(pairs, 1)] == ["text", "text"]
    assert count_samples(("name", X)) == 5


@pytest.mark.parametrize(
    "batch",
    [
        {"pair": (Y, X)},
        {"inputs": {"ids": X}, "n": 3},
        {"inputs": UserDict(ids=X), "texts": list("abcde")},
        ((X, X), (Y, Y)),
        ({"x": X}, {"y": Y}),
        {"x": X.numpy()},
        [{"x": 1}] * 5,
        {"scale": torch.tensor(2.0), "x": X},
    ],
)
def test_rows_are_found_at_any_depth(batch: Any) -> None:
    assert count_samples(batch) == 5
    assert [count_samples(part) for part in split(batch, 2)] == [2, 2, 1]


def test_a_microbatch_as_large_as_the_batch_is_the_batch() -> None:
    batch = {"x": X}
    assert [split(batch, size)[0] is batch for size in (5, 6, 100)] == [True, True, True]
    assert len(split(batch, 4)) == 2
    assert split(X[:0], 3) == []


def test_tokens_are_the_area_of_input_ids() -> None:
    assert count_tokens({"input_ids": torch.ones(3, 7)}) == 21
    assert count_tokens({"input_ids": np.ones((3, 7))}) == 21
    assert count_tokens(UserDict(input_ids=torch.ones(3, 7))) == 21
    assert count_tokens((X, Y)) == 0
    assert count_tokens({"x": X}) == 0


class Windows(Dataset[Any]):
    max_seq_len = 11

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4)


def test_tokens_of_a_data_set_with_max_seq_len_are_that_for_each_row() -> None:
    loader = DataLoader(Windows(), batch_size=4)
    spec = DataSpec(loader)
    assert [spec.get_num_tokens_in_batch(batch) for batch in loader] == [44, 44, 22]
    assert spec.get_num_tokens_in_batch({"input_ids": torch.ones(3, 7)}) == 21
    halves = DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch) // 2)
    assert halves.get_num_tokens_in_batch(torch.ones(4)) == 22


def test_a_count_of_tokens_may_be_a_number_or_a_dict_with_a_total() -> None:
    assert DataSpec([X], get_num_tokens_in_batch=lambda batch: 9).get_num_tokens_in_batch(X) == 9
    both = DataSpec([X], get_num_tokens_in_batch=lambda batch: {"total": 9, "loss_generating": 4})
    assert both.get_num_tokens_in_batch(X) == 9
    wrong = DataSpec([X], get_num_tokens_in_batch=lambda batch: {"tokens": 9})
    with pytest.raises(
        DataError, match=r"get_num_tokens_in_batch: returned a dict with \['tokens'\]\. Expected a number"
    ):
        wrong.get_num_tokens_in_batch(X)


def test_the_share_of_an_epoch_is_known_where_somebody_said_how_large_it_is() -> None:
    class Unsized(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([X, Y])

    unsized = DataLoader(Unsized(), batch_size=None)
    assert DataSpec(unsized).num_batches is None
    assert DataSpec(unsized).epoch_share(5, 5) is None
    assert DataSpec(unsized, num_samples=20).epoch_share(5, 0) == 0.25
    assert DataSpec(unsized, num_tokens=20).epoch_share(7, 10) == 0.5
    assert DataSpec(unsized, num_samples=20).epoch_share(21, 0) == 1.0
    assert DataSpec(DataLoader(Windows(), batch_sampler=iter([[1]]))).epoch_share(5, 0) == 0.5  # type: ignore[arg-type]
    for name in ("num_samples", "num_tokens"):
        with pytest.raises(DataError, match=rf"{name}: got 0\. Expected a whole number of at least 1, or None"):
            DataSpec(unsized, **{name: 0})  # type: ignore[arg-type]


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
