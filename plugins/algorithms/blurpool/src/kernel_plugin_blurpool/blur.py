"""The low-pass filter."""

from typing import Literal

import torch
from torch.nn import functional as F

Border = Literal["replicate", "circular"]
Axes = tuple[bool, bool]


def binomial_filter(maps: torch.Tensor, axes: Axes) -> torch.Tensor:
    """Build the filter [1 2 1]/4 along each chosen axis, one copy per channel.

    Args:
        maps: shape (..., channels, height, width); says channels, dtype and device.
        axes: whether to filter along height and along width.

    Returns:
        Shape (channels, 1, 3 or 1, 3 or 1). Every weight is a power of two: exact in any floating-point type.
    """
    taps = [3 if chosen else 1 for chosen in axes]
    # Filled on the device: a copied constant would make the host wait, a buffer would be lost by `to_empty`.
    weight = maps.new_full((maps.shape[-3], 1, *taps), 0.25 ** sum(axes))
    for dim, chosen in zip((2, 3), axes, strict=True):
        if chosen:
            weight.narrow(dim, 1, 1).mul_(2)
    return weight


def binomial_blur(
    maps: torch.Tensor, stride: tuple[int, int] = (1, 1), axes: Axes = (True, True), border: Border = "replicate"
) -> torch.Tensor:
    """Blur feature maps and keep every ``stride``-th position, the first included.

    Args:
        maps: shape (batch, channels, height, width) or (channels, height, width); one pixel is enough.
        stride: step along height and width.
        axes: whether to blur along height and along width.
        border: ``replicate`` repeats the edge, so that constants stay constant up to the edge and one-pixel maps are
            kept; ``circular`` takes the map as periodic.

    Returns:
        ceil(height / stride[0]) by ceil(width / stride[1]) maps.

    Source:
        Zhang, Making Convolutional Networks Shift-Invariant Again (ICML 2019), section 3: the filter Triangle-3.
    """
    along_height, along_width = (int(chosen) for chosen in axes)
    extended = F.pad(maps, (along_width, along_width, along_height, along_height), mode=border)
    return F.conv2d(extended, binomial_filter(maps, axes), stride=stride, groups=maps.shape[-3])
