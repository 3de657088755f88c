"""The filter, against its written-out numbers and against sums over a padded array."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_plugin_blurpool import binomial_blur
from torch.nn import functional as F

STATED = torch.tensor([[1.0, 2.0, 1.0], [2.0, 4.0, 2.0], [1.0, 2.0, 1.0]]) / 16


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 2)])
def test_inside_the_map_the_blur_is_a_depthwise_convolution_with_the_stated_filter(stride: tuple[int, int]) -> None:
    maps = torch.randn(2, 5, 11, 12, generator=torch.Generator().manual_seed(0))
    plain = F.conv2d(maps, STATED.expand(5, 1, 3, 3), padding=1, stride=stride, groups=5)
    blurred = binomial_blur(maps, stride)
    assert blurred.shape == plain.shape
    torch.testing.assert_close(blurred[..., 1:-1, 1:-1], plain[..., 1:-1, 1:-1])


@pytest.mark.parametrize(("border", "numpy_mode"), [("replicate", "edge"), ("circular", "wrap")])
def test_whole_map_equals_the_weighted_sum_over_its_padded_neighbours(border: Any, numpy_mode: Any) -> None:
    maps = np.random.default_rng(0).normal(size=(6, 7))
    padded = np.pad(maps, 1, mode=numpy_mode)
    expected = sum(STATED[i, j].item() * padded[i : i + 6, j : j + 7] for i in range(3) for j in range(3))
    blurred = binomial_blur(torch.from_numpy(maps)[None], border=border)
    np.testing.assert_allclose(blurred[0].numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (2, 1), (2, 2), (5, 3)])
@pytest.mark.parametrize("border", ["replicate", "circular"])
def test_constants_stay_constant_up_to_the_edge(size: tuple[int, int], border: Any) -> None:
    maps = torch.full((1, 2, *size), 0.7, dtype=torch.float64)
    torch.testing.assert_close(binomial_blur(maps, border=border), maps)


def test_one_axis_alone_is_blurred_by_one_two_one() -> None:
    maps = torch.tensor([[[0.0, 4.0, 0.0], [0.0, 0.0, 0.0]]])
    along_width = binomial_blur(maps, axes=(False, True))
    assert along_width.tolist() == [[[1.0, 2.0, 1.0], [0.0, 0.0, 0.0]]]
    along_height = binomial_blur(maps, axes=(True, False))
    assert along_height.tolist() == [[[0.0, 3.0, 0.0], [0.0, 1.0, 0.0]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_type_of_the_maps_is_kept(dtype: torch.dtype) -> None:
    maps = torch.arange(16, dtype=dtype).reshape(1, 1, 4, 4)
    blurred = binomial_blur(maps)
    assert blurred.dtype == dtype
    # A linear ramp is its own blur, away from the edge.
    assert torch.equal(blurred[..., 1:-1, 1:-1], maps[..., 1:-1, 1:-1])


def test_gradient_is_the_transposed_blur() -> None:
    maps = torch.randn(1, 2, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: binomial_blur(x, (2, 1)), (maps,))


def test_the_highest_frequency_vanishes_instead_of_folding_back() -> None:
    checkerboard = (torch.arange(8)[:, None] + torch.arange(8)) % 2 * 2.0 - 1
    blurred = binomial_blur(checkerboard[None, None], (2, 2), border="circular")
    assert torch.equal(blurred, torch.zeros(1, 1, 4, 4))
    assert torch.equal(checkerboard[::2, ::2], -torch.ones(4, 4))  # what the stride alone makes of it
