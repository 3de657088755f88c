"""The two layers that blur before they subsample, each the drop-in twin of torch's."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernel_plugin_blurpool.blur import Axes, Border, binomial_blur


def subsampled_axes(stride: tuple[int, int]) -> Axes:
    """Say along which axes a stride skips positions: only there is something to anti-alias."""
    return stride[0] > 1, stride[1] > 1


def ceil_mode_overhang(size: int, kernel_size: int, stride: int, padding: int, dilation: int) -> int:
    """Count the positions by which a ceil-mode pooling window may reach over the padded end of one axis.

    Args:
        size: length of the input along the axis, in pixels; the others as in ``torch.nn.MaxPool2d``.

    Returns:
        0 or more pixels.
    """
    last_start = size + 2 * padding - dilation * (kernel_size - 1) - 1
    steps = -(-last_start // stride)
    # torch drops a window that starts beyond the input and its left padding.
    if steps * stride >= size + padding:
        steps -= 1
    return max(0, steps * stride - last_start)


class BlurConv2d(nn.Conv2d):
    """A strided convolution with a blur around its subsampling.

    Takes the arguments of ``torch.nn.Conv2d``, gives outputs of the same shape, and has the same parameters under the
    same names, so that checkpoints of either load into the other. It blurs only along axes with a stride above 1. At the
    border the blur repeats the edge; with ``padding_mode="circular"`` it wraps as the convolution does.

    Args:
        blur_first: True blurs the input and then convolves with the stride: cheap. False convolves densely and then
            blurs and subsamples: the paper's order, at stride[0] * stride[1] times the cost.

    Example:
        >>> layer = BlurConv2d(16, 32, 3, stride=2, padding=1)
        >>> layer(torch.zeros(1, 16, 9, 9)).shape
        torch.Size([1, 32, 5, 5])

    Source:
        Zhang, Making Convolutional Networks Shift-Invariant Again (ICML 2019), section 3.3.
    """

    blur_first: bool

    def __init__(self, *args: Any, blur_first: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.blur_first = blur_first

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve maps of shape (batch, channels, height, width) or (channels, height, width)."""
        if self.blur_first:
            return super().forward(self._blur(input, (1, 1)))
        return self._blur(self._convolve_densely(input), self._stride_pair)

    @property
    def _stride_pair(self) -> tuple[int, int]:
        return self.stride[0], self.stride[1]

    def _blur(self, maps: torch.Tensor, stride: tuple[int, int]) -> torch.Tensor:
        border: Border = "circular" if self.padding_mode == "circular" else "replicate"
        return binomial_blur(maps, stride, subsampled_axes(self._stride_pair), border)

    def _convolve_densely(self, input: torch.Tensor) -> torch.Tensor:
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = (0, 0)
        return F.conv2d(input, self.weight, self.bias, 1, padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        """Return the settings that a printed model shows."""
        settings: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{settings}, blur_first={self.blur_first}"


class BlurMaxPool2d(nn.MaxPool2d):
    """A max pool that takes the maximum at every position, blurs, and then subsamples.

    Takes the arguments of ``torch.nn.MaxPool2d`` and gives outputs of the same shape. With ``return_indices`` the
    indices are those of the plain max pool: where the unblurred maximum of each kept window lies, which is what
    ``torch.nn.MaxUnpool2d`` needs; the values are blurred, so that the input at an index need not equal its output.

    Example:
        >>> BlurMaxPool2d(3, stride=2, padding=1)(torch.zeros(1, 8, 7, 7)).shape
        torch.Size([1, 8, 4, 4])

    Source:
        Zhang, Making Convolutional Networks Shift-Invariant Again (ICML 2019), section 3.2.
    """

    def forward(self, input: torch.Tensor) -> Any:
        """Pool maps of shape (batch, channels, height, width) or (channels, height, width)."""
        stride = _pair(self.stride)
        dense = F.max_pool2d(self._extended(input), self.kernel_size, 1, self.padding, self.dilation)
        # A convolution answers autocast with its own type; a max pool keeps its input's.
        pooled = binomial_blur(dense, stride, subsampled_axes(stride)).to(input.dtype)
        return (pooled, super().forward(input)[1]) if self.return_indices else pooled

    def _extended(self, input: torch.Tensor) -> torch.Tensor:
        if not self.ceil_mode:
            return input
        layout = zip(*map(_pair, (self.kernel_size, self.stride, self.padding, self.dilation)), strict=True)
        below, right = (ceil_mode_overhang(n, *axis) for n, axis in zip(input.shape[-2:], layout, strict=True))
        return F.pad(input, (0, right, 0, below), value=-math.inf)


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])
