"""Slopes and biases against numbers written out by hand and against transformers' Bloom."""

import pytest
import torch
from kernel_core.errors import DataError, OptionError, SurgeryError
from kernel_plugin_alibi import AlibiBias, alibi_slopes
from transformers.models.bloom.modeling_bloom import build_alibi_tensor


def test_slopes_of_eight_heads_are_the_papers() -> None:
    assert alibi_slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_slopes_of_twelve_heads_are_those_of_eight_and_every_second_of_sixteen() -> None:
    between = [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert torch.equal(alibi_slopes(12)[:8], alibi_slopes(8))
    torch.testing.assert_close(alibi_slopes(12)[8:], torch.tensor(between))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 12, 16, 20, 71, 96, 128, 1000])
def test_slopes_are_blooms_for_any_head_count(num_heads: int) -> None:
    bloom = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(num_heads), bloom)
    assert len(set(alibi_slopes(num_heads).tolist())) == num_heads


@pytest.mark.parametrize("num_heads", [0, -4, 2.5])
def test_an_impossible_head_count_is_refused(num_heads: int) -> None:
    with pytest.raises(
        SurgeryError, match=r"^alibi: got (0|-4|2.5) attention heads. Expected a whole number of at least 1."
    ):
        alibi_slopes(num_heads)


def test_bias_is_minus_slope_times_distance_in_both_directions() -> None:
    expected = [[[0, -1, -2], [-1, 0, -1], [-2, -1, 0]], [[0, -1, -2], [-1, 0, -1], [-2, -1, 0]]]
    slopes = torch.tensor([1 / 16, 1 / 256])
    torch.testing.assert_close(AlibiBias(2)(3, 3), torch.tensor(expected) * slopes[:, None, None])


def test_bias_of_the_last_queries_is_the_end_of_the_whole_bias() -> None:
    bias = AlibiBias(6)
    assert torch.equal(bias(2, 7), bias(7, 7)[:, 5:])
    assert torch.equal(bias(2, 7, q_offset=torch.tensor(3)), bias(7, 7)[:, 3:5])
    assert torch.equal(bias(1, 4, q_offset=6, kv_offset=3), bias(7, 7)[:, 6:, 3:])


def test_bfloat16_bias_is_rounded_once() -> None:
    assert torch.equal(AlibiBias(3)(4, 600, dtype=torch.bfloat16), AlibiBias(3)(4, 600).bfloat16())


def test_a_huge_limit_costs_nothing() -> None:
    bias = AlibiBias(8, max_sequence_length=1_000_000)
    assert bias(1, 10).shape == (8, 1, 10)


def test_too_long_a_sequence_is_an_error() -> None:
    assert AlibiBias(2, max_sequence_length=8)(8, 8).shape == (2, 8, 8)
    message = (
        r"^alibi: a sequence has 9 positions, more than max_sequence_length=8. Expected at most that many; .* Shorten"
    )
    with pytest.raises(DataError, match=message):
        AlibiBias(2, max_sequence_length=8)(1, 9)


def test_too_much_memory_is_an_error_that_says_how_much() -> None:
    message = (
        r"^alibi: the bias for 1 x 8 heads x 1000000 queries x 1000000 keys in torch.float32 would take "
        r"32,000,000,000,000 bytes, more than max_bias_bytes=2,147,483,648. Expected a shorter sequence .* raise "
        r"max_bias_bytes.$"
    )
    with pytest.raises(DataError, match=message):
        AlibiBias(8)(1_000_000, 1_000_000)
    assert AlibiBias(2, max_bias_bytes=32)(2, 2).numel() == 8
    with pytest.raises(DataError, match="would take 48 bytes, more than max_bias_bytes=32"):
        AlibiBias(2, max_bias_bytes=32)(2, 3)


@pytest.mark.parametrize("name", ["max_sequence_length", "max_bias_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_impossible_limits_are_refused(name: str, value: int) -> None:
    with pytest.raises(OptionError, match=rf"^alibi.{name}: got {value!r}. Expected a whole number of at least 1.$"):
        AlibiBias(4, **{name: value})
