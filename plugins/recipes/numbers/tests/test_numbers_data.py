"""Strips: which images, where on the strip, and that nothing but seed and index decides."""

import numpy as np
import pytest
import torch
from kernel_plugin_numbers import DigitStrips, StripCollator
from kernel_plugin_numbers.data import canvas_width, compose_strip, digit_images, shift_right, split_indices
from sklearn.datasets import load_digits


def test_train_and_test_images_are_disjoint_and_together_all() -> None:
    train, test = split_indices()["train"], split_indices()["test"]
    assert not set(train) & set(test)
    assert sorted([*train, *test]) == list(range(1797))
    # Scikit-learn has 174 to 183 images of each digit; a fifth of them is 35 to 37.
    assert set(np.bincount(load_digits().target[test])) <= {35, 36, 37}


def test_images_are_those_of_the_split_with_ink_from_0_to_1() -> None:
    images, digits = digit_images("test")
    assert images.shape == (len(digits), 8, 8)
    assert images.min() == 0
    assert images.max() == 1
    first = split_indices()["test"][0]
    np.testing.assert_array_equal(images[0] * 16, load_digits().images[first])
    assert digits[0] == load_digits().target[first]


def test_a_strip_depends_on_seed_and_index_alone() -> None:
    strips = DigitStrips("train", 100, seed=3)
    expected = [strips[index] for index in range(20)]
    longer = DigitStrips("train", 5000, seed=3)
    np.random.seed(1)
    for index in reversed(range(20)):
        again = longer[index]
        np.testing.assert_array_equal(again["pixels"], expected[index]["pixels"])
        np.testing.assert_array_equal(again["digits"], expected[index]["digits"])


def test_other_seeds_indices_and_splits_give_other_strips() -> None:
    strips = [DigitStrips("train", 9, (5, 5), seed=seed)[index] for seed in (0, 1) for index in (0, 1)]
    strips.append(DigitStrips("test", 9, (5, 5), seed=0)[0])
    assert len({strip["pixels"].tobytes() for strip in strips}) == 5


@pytest.mark.parametrize("num_digits", [(3, 6), (5, 5), (24, 24)])
def test_strips_have_the_asked_number_of_digits_and_a_width_that_fits(num_digits: tuple[int, int]) -> None:
    strips = [DigitStrips("test", 200, num_digits)[index] for index in range(200)]
    lengths = [len(strip["digits"]) for strip in strips]
    assert set(lengths) == set(range(num_digits[0], num_digits[1] + 1))
    for strip, length in zip(strips, lengths, strict=True):
        height, width = strip["pixels"].shape
        assert height == 12
        assert 8 * length + 4 <= width <= canvas_width(length)
        assert not strip["pixels"][:, -4:].any()
    # 6 before, 8 per digit, 4 between, 4 after.
    assert canvas_width(5) == 6 + 40 + 16 + 4


def test_gaps_and_heights_vary_and_every_digit_is_whole() -> None:
    images = np.ones((3, 8, 8), dtype=np.float32)
    generator = np.random.default_rng(0)
    strips = [compose_strip(images, generator) for _ in range(300)]
    assert all(strip.sum() == 3 * 64 for strip in strips)
    inked = [np.flatnonzero(strip.any(axis=0)) for strip in strips]
    assert {int(columns[0]) for columns in inked} == set(range(7))
    assert {int(columns[-1] - columns[0]) + 1 for columns in inked} == set(range(24, 33))
    assert {int(np.flatnonzero(strip[:, columns[0]])[0]) for strip, columns in zip(strips, inked, strict=True)} == set(
        range(5)
    )


def test_collator_puts_strips_on_one_canvas_whatever_the_batch() -> None:
    strips = DigitStrips("train", 8)
    collate = StripCollator(canvas_width(6))
    together, alone = collate([strips[0], strips[1]]), collate([strips[1]])
    assert together["pixel_values"].shape == (2, 1, 12, 78)
    assert together["pixel_values"].dtype == torch.float32
    assert torch.equal(together["pixel_values"][1:], alone["pixel_values"])
    for row in range(2):
        width, length = int(together["widths"][row]), int(together["label_lengths"][row])
        np.testing.assert_array_equal(together["pixel_values"][row, 0, :, :width].numpy(), strips[row]["pixels"])
        assert not together["pixel_values"][row, 0, :, width:].any()
        assert together["labels"][row, :length].tolist() == strips[row]["digits"].tolist()
        assert (together["labels"][row, length:] == -1).all()


def test_shifted_strips_are_moved_right_and_lose_no_ink() -> None:
    strips = DigitStrips("test", 4, (5, 5))
    batch = StripCollator(canvas_width(5), with_shifts=True)([strips[index] for index in range(4)])
    pixels, shifted = batch["pixel_values"], batch["shifted_pixel_values"]
    assert shifted.shape == (4, 3, 1, 12, 66)
    for place, shift in enumerate((1, 2, 3)):
        assert torch.equal(shifted[:, place, ..., shift:], pixels[..., :-shift])
        assert not shifted[:, place, ..., :shift].any()
    torch.testing.assert_close(shifted.sum(dim=(2, 3, 4)), pixels.sum(dim=(1, 2, 3))[:, None].expand(4, 3))
    assert torch.equal(shift_right(pixels, 0), pixels)


def test_an_index_beyond_the_end_is_refused_so_that_iteration_ends() -> None:
    strips = DigitStrips("train", 2)
    assert len(strips) == 2
    for index in (2, -1):
        with pytest.raises(IndexError) as error:
            strips[index]
        assert str(error.value) == f"numbers: there is no strip {index}. Expected 0 to 1."
