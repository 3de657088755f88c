"""Decoding and the metrics, by hand."""

import pytest
import torch
from kernel_plugin_numbers import greedy_reading, to_numbers
from kernel_plugin_numbers.metrics import ExactMatch, ShiftConsistency
from kernel_plugin_numbers.reading import same_numbers

BLANK = 10


def one_hot_logits(rows: list[list[int]]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(rows), 11).float()


@pytest.mark.parametrize(
    ("classes", "number"),
    [
        ([7, 7, 7, 7, 7, 7], "7"),
        ([7, 7, BLANK, 7, 7, 7], "77"),
        ([BLANK, 1, 2, 2, BLANK, 1], "121"),
        ([0, BLANK, BLANK, 0, 9, BLANK], "009"),
        ([BLANK] * 6, ""),
    ],
)
def test_repeats_are_joined_and_blanks_left_out(classes: list[int], number: str) -> None:
    assert to_numbers(greedy_reading(one_hot_logits([classes]), torch.tensor([6]))) == [number]


def test_columns_beyond_the_strip_are_not_read() -> None:
    rows = one_hot_logits([[1, 2, 3, 4], [1, 2, 3, 4], [5, 5, 5, BLANK]])
    digits = greedy_reading(rows, torch.tensor([2, 4, 4]))
    assert digits.tolist() == [[1, 2, -1, -1], [1, 2, 3, 4], [5, -1, -1, -1]]


def test_shifted_copies_are_read_with_the_length_of_their_strip() -> None:
    rows = one_hot_logits([[1, 2], [3, 4], [5, 6], [7, 8]]).reshape(2, 2, 2, 11)
    digits = greedy_reading(rows, torch.tensor([1, 2])[:, None])
    assert digits.tolist() == [[[1, -1], [3, -1]], [[5, 6], [7, 8]]]


def test_numbers_are_the_same_whatever_their_padding() -> None:
    one = torch.tensor([[1, 2, -1, -1], [1, 2, 3, -1]])
    other = torch.tensor([[1, 2], [1, 2]])
    assert same_numbers(one, other).tolist() == [True, False]
    assert same_numbers(other, one).tolist() == [True, False]


def test_exact_match_is_the_share_of_right_numbers_over_all_batches() -> None:
    metric = ExactMatch()
    metric.update(torch.tensor([[1, 2, -1], [3, -1, -1]]), torch.tensor([[1, 2], [3, 4]]))
    metric.update(torch.tensor([[5, 6, -1]]), torch.tensor([[5, 6]]))
    assert metric.compute().item() == pytest.approx(2 / 3)
    metric.reset()
    metric.update(torch.tensor([[5]]), torch.tensor([[6]]))
    assert metric.compute().item() == 0


def test_shift_consistency_is_the_share_of_shifted_strips_read_alike() -> None:
    metric = ShiftConsistency()
    readings = torch.tensor([[1, 2], [3, -1]])
    shifted = torch.tensor([[[1, 2], [1, 2], [1, -1]], [[3, -1], [3, 3], [-1, -1]]])
    metric.update(readings, shifted)
    assert metric.compute().item() == pytest.approx(3 / 6)
