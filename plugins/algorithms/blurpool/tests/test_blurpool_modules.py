"""The blurred layers, against the layers they replace."""

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_plugin_blurpool import BlurConv2d, BlurMaxPool2d, binomial_blur, blurred_conv, blurred_maxpool
from torch import nn
from torch.nn import functional as F

CONV_OPTIONS = [
    {"kernel_size": k, "stride": s, "padding": p, "dilation": d, "padding_mode": mode}
    for k, s, p, d, mode in itertools.product(
        [1, 3, (3, 2)],
        [2, 3, (2, 1), (1, 3)],
        [0, 1, (0, 1), "valid"],
        [1, 2],
        ["zeros", "reflect", "replicate", "circular"],
    )
]
POOL_OPTIONS = [
    {"kernel_size": k, "stride": s, "padding": p, "dilation": d, "ceil_mode": ceil}
    for k, s, p, d, ceil in itertools.product(
        [2, 3, (3, 2)], [None, 2, 4, (2, 1), (1, 3)], [0, 1], [1, 2], [False, True]
    )
]
SIZES = [(1, 1), (1, 5), (2, 2), (3, 4), (7, 6), (9, 8)]


def shape_or_refusal(layer: Callable[[torch.Tensor], Any], maps: torch.Tensor) -> torch.Size | None:
    """None when torch refuses: a window larger than the padded input, say."""
    try:
        result = layer(maps)
    except RuntimeError:
        return None
    shape: torch.Size = result.shape
    return shape


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("blur_first", [True, False])
def test_conv_has_the_shape_of_the_layer_it_replaces(blur_first: bool) -> None:
    compared = 0
    for options in CONV_OPTIONS:
        plain = nn.Conv2d(2, 2, groups=2, bias=False, **options)  # type: ignore[arg-type]
        blurred = blurred_conv(plain, blur_first, min_channels=1)
        assert blurred is not None
        for size in SIZES:
            maps = torch.zeros(1, 2, *size)
            expected = shape_or_refusal(plain, maps)
            if expected is not None:
                assert shape_or_refusal(blurred, maps) == expected, (options, size)
                compared += 1
    assert compared > 1000


def test_maxpool_has_the_shape_of_the_layer_it_replaces() -> None:
    compared = 0
    for options in POOL_OPTIONS:
        plain = nn.MaxPool2d(**options)  # type: ignore[arg-type]
        blurred = blurred_maxpool(plain)
        assert blurred is not None
        for size in SIZES:
            maps = torch.zeros(1, 2, *size)
            expected = shape_or_refusal(plain, maps)
            if expected is not None:
                assert shape_or_refusal(blurred, maps) == expected, (options, size)
                compared += 1
    assert compared > 300


def test_blur_first_convolves_the_blurred_input() -> None:
    plain = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2)
    maps = torch.randn(2, 4, 9, 8)
    blurred = blurred_conv(plain, min_channels=4)
    assert blurred is not None
    torch.testing.assert_close(blurred(maps), plain(binomial_blur(maps)))


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect", "replicate", "circular"])
def test_blur_last_subsamples_the_blurred_dense_convolution(padding_mode: Any) -> None:
    options: dict[str, Any] = {"padding": (1, 2), "dilation": (1, 2), "padding_mode": padding_mode}
    plain = nn.Conv2d(4, 6, 3, stride=(2, 3), **options)
    dense = nn.Conv2d(4, 6, 3, stride=1, **options)
    dense.load_state_dict(plain.state_dict())
    maps = torch.randn(2, 4, 9, 8)
    blurred = blurred_conv(plain, blur_first=False, min_channels=4)
    assert blurred is not None
    border: Any = "circular" if padding_mode == "circular" else "replicate"
    torch.testing.assert_close(blurred(maps), binomial_blur(dense(maps), border=border)[..., ::2, ::3])


def test_maxpool_subsamples_the_blurred_dense_pool() -> None:
    maps = torch.randn(2, 3, 9, 8)
    blurred = BlurMaxPool2d(3, stride=2, padding=1)
    torch.testing.assert_close(blurred(maps), binomial_blur(F.max_pool2d(maps, 3, 1, 1))[..., ::2, ::2])


def test_ceil_mode_pools_the_window_that_hangs_over_the_end() -> None:
    maps = torch.tensor([[[0.0, 0.0, 0.0, 0.0, 8.0]]])
    pool = BlurMaxPool2d((1, 2), stride=(1, 2), ceil_mode=True)
    # Dense maxima 0 0 0 8 and, hanging over, 8; at positions 0, 2, 4 the blur gives 0, (0+0+8)/4, (8+16+8)/4.
    assert pool(maps).tolist() == [[[0.0, 2.0, 8.0]]]


@pytest.mark.parametrize("blur_first", [True, False])
@pytest.mark.parametrize("padding_mode", ["reflect", "replicate", "circular"])
def test_constants_pass_as_through_the_plain_conv(padding_mode: Any, blur_first: bool) -> None:
    plain = nn.Conv2d(3, 5, 3, stride=2, padding=1, padding_mode=padding_mode)
    blurred = blurred_conv(plain, blur_first, min_channels=3)
    assert blurred is not None
    maps = torch.ones(1, 3, 8, 9) * torch.tensor([1.0, -2.0, 0.5]).view(1, 3, 1, 1)
    torch.testing.assert_close(blurred(maps), plain(maps))


def test_only_the_subsampled_axis_is_blurred() -> None:
    maps = torch.randn(1, 2, 6, 7)
    plain = nn.Conv2d(2, 3, 3, stride=(2, 1), padding=1)
    blurred = blurred_conv(plain, min_channels=2)
    assert blurred is not None
    torch.testing.assert_close(blurred(maps), plain(binomial_blur(maps, axes=(True, False))))


@pytest.mark.parametrize("blur_first", [True, False])
def test_periodic_maps_may_roll_by_a_stride(blur_first: bool) -> None:
    conv = BlurConv2d(2, 2, 3, stride=2, padding=1, padding_mode="circular", blur_first=blur_first)
    maps = torch.randn(1, 2, 8, 8)
    torch.testing.assert_close(conv(maps.roll(2, -1)), conv(maps).roll(1, -1))


@torch.no_grad()
def shift_error(layer: nn.Module, maps: torch.Tensor) -> float:
    """How far a shift by one pixel is from a shift by half an output pixel, over the size of the response."""
    response, shifted = layer(maps), layer(maps.roll(1, -1))
    halfway = (response + response.roll(1, -1)) / 2
    return float((shifted - halfway).norm() / response.norm())


def test_layers_answer_more_evenly_to_shifts() -> None:
    maps = torch.randn(4, 16, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 16, 3, stride=2, padding=1, padding_mode="circular", bias=False)
    for blur_first in (True, False):
        blurred = blurred_conv(conv, blur_first)
        assert blurred is not None
        assert shift_error(blurred, maps) < 0.6 * shift_error(conv, maps)
    pool = nn.MaxPool2d(2)
    blurred_pool = blurred_maxpool(pool)
    assert blurred_pool is not None
    assert shift_error(blurred_pool, maps) < 0.8 * shift_error(pool, maps)


def test_indices_are_those_of_the_plain_pool_and_unpool_takes_them() -> None:
    maps = torch.randn(2, 3, 7, 9)
    variants: list[dict[str, Any]] = [{}, {"padding": 1}, {"ceil_mode": True}, {"dilation": 2}]
    for options in variants:
        plain = nn.MaxPool2d(3, 2, return_indices=True, **options)
        blurred = blurred_maxpool(plain)
        assert blurred is not None
        values, indices = blurred(maps)
        plain_values, plain_indices = plain(maps)
        assert values.shape == plain_values.shape
        assert torch.equal(indices, plain_indices)
    unpooled = nn.MaxUnpool2d(2)(*BlurMaxPool2d(2, return_indices=True)(maps), output_size=(7, 9))
    assert unpooled.shape == maps.shape


def test_unbatched_maps_are_taken_as_torch_takes_them() -> None:
    maps = torch.randn(16, 7, 6)
    for layer in (BlurConv2d(16, 4, 3, stride=2), BlurConv2d(16, 4, 3, stride=2, blur_first=False), BlurMaxPool2d(2)):
        torch.testing.assert_close(layer(maps), layer(maps[None])[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_type_and_memory_format_are_kept(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    maps = torch.randn(2, 16, 8, 6, dtype=dtype).to(memory_format=memory_format)
    for plain in (nn.Conv2d(16, 8, 3, stride=2), nn.MaxPool2d(2)):
        plain = plain.to(dtype).to(memory_format=memory_format)  # type: ignore[call-overload]
        blurred = blurred_conv(plain) or blurred_maxpool(plain)
        assert blurred is not None
        result = blurred(maps)
        assert result.dtype == plain(maps).dtype
        assert result.is_contiguous(memory_format=memory_format)


def test_autocast_changes_no_types() -> None:
    maps = torch.randn(1, 16, 8, 8)
    conv, pool = nn.Conv2d(16, 8, 3, stride=2), nn.MaxPool2d(2)
    blurred = blurred_conv(conv), blurred_maxpool(pool)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for plain, twin in zip((conv, pool), blurred, strict=True):
            assert twin is not None
            assert twin(maps).dtype == plain(maps).dtype


def test_meta_device_layers_work_once_materialized() -> None:
    plain = nn.Conv2d(16, 8, 3, stride=2, device="meta")
    blurred = blurred_conv(plain)
    assert blurred is not None
    assert blurred(torch.zeros(1, 16, 9, 9, device="meta")).shape == (1, 8, 4, 4)
    blurred.to_empty(device="cpu")
    real = nn.Conv2d(16, 8, 3, stride=2)
    blurred.load_state_dict(real.state_dict())
    maps = torch.randn(1, 16, 9, 9)
    torch.testing.assert_close(blurred(maps), real(binomial_blur(maps)))


def test_layers_can_be_copied_and_say_what_they_are() -> None:
    conv = blurred_conv(nn.Conv2d(16, 8, 3, stride=2), blur_first=False)
    assert conv is not None
    maps = torch.randn(1, 16, 8, 8)
    torch.testing.assert_close(copy.deepcopy(conv)(maps), conv(maps))
    assert repr(conv) == "BlurConv2d(16, 8, kernel_size=(3, 3), stride=(2, 2), blur_first=False)"
