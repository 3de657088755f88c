"""Strips of handwritten digits: composed on the fly, each a function of its seed and index alone."""

from collections.abc import Sequence
from functools import cache
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset

Split = Literal["train", "test"]
Pixels = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]

DIGIT_PX = 8
STRIP_HEIGHT_PX = 12
MAX_GAP_PX = 4
MAX_SHIFT_PX = 3
# Beyond what a test shift moves, so that a shifted strip loses blank pixels only.
MIN_RIGHT_MARGIN_PX = MAX_SHIFT_PX + 1
MAX_LEFT_MARGIN_PX = 2 * MAX_SHIFT_PX
LABEL_PADDING = -1
TEST_FRACTION = 0.2
SPLIT_SEED = 20190


class Strip(TypedDict):
    """One composed strip.

    Attributes:
        pixels: shape (12, width in pixels), ink from 0 (paper) to 1.
        digits: shape (number of digits,), left to right.
    """

    pixels: Pixels
    digits: Labels


class StripBatch(TypedDict, total=False):
    """Strips on one canvas.

    Attributes:
        pixel_values: shape (batch, 1, 12, canvas width), float32 in [0, 1], blank to the right of each strip.
        widths: shape (batch,), pixels of each strip.
        labels: shape (batch, most digits), padded with -1.
        label_lengths: shape (batch,), digits of each strip.
        shifted_pixel_values: shape (batch, 3, 1, 12, canvas width), the strips moved right by 1, 2 and 3 pixels;
            present where the consistency of the reading is measured.
    """

    pixel_values: torch.Tensor
    widths: torch.Tensor
    labels: torch.Tensor
    label_lengths: torch.Tensor
    shifted_pixel_values: torch.Tensor


@cache
def split_indices() -> dict[Split, Labels]:
    """Divide scikit-learn's 1797 digit images, the same way every time.

    Returns:
        Image numbers per split, sorted; each digit gives the same fraction of its images to the test split.
    """
    from sklearn.datasets import load_digits

    target = load_digits().target
    generator = np.random.default_rng(SPLIT_SEED)
    test = []
    for digit in range(10):
        images = generator.permutation(np.flatnonzero(target == digit))
        test.append(images[: round(TEST_FRACTION * len(images))])
    in_test = np.sort(np.concatenate(test))
    return {"train": np.setdiff1d(np.arange(len(target)), in_test), "test": in_test}


@cache
def digit_images(split: Split) -> tuple[Pixels, Labels]:
    """Read the images of one split.

    Args:
        split: which side of the fixed division.

    Returns:
        Images of shape (count, 8, 8) in [0, 1] and their digits of shape (count,).

    Source:
        Alpaydin and Kaynak, Optical Recognition of Handwritten Digits (UCI, 1998), as scikit-learn ships it.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = split_indices()[split]
    # The stored values count ink in 4 x 4 cells: 0 to 16.
    return (digits.images[chosen] / 16).astype(np.float32), digits.target[chosen].astype(np.int64)


def compose_strip(images: Pixels, generator: np.random.Generator) -> Pixels:
    """Place digit images in a row with drawn margins, gaps and heights.

    Args:
        images: shape (digits, 8, 8).
        generator: decides the left margin (0 to 6 pixels), the gaps (0 to 4) and each digit's height on the strip.

    Returns:
        Shape (12, width); at least 4 blank columns close the strip.
    """
    gaps = generator.integers(0, MAX_GAP_PX, len(images), endpoint=True)
    gaps[0] = generator.integers(0, MAX_LEFT_MARGIN_PX, endpoint=True)
    tops = generator.integers(0, STRIP_HEIGHT_PX - DIGIT_PX, len(images), endpoint=True)
    lefts = np.cumsum(gaps) + DIGIT_PX * np.arange(len(images))
    strip = np.zeros((STRIP_HEIGHT_PX, int(lefts[-1]) + DIGIT_PX + MIN_RIGHT_MARGIN_PX), dtype=np.float32)
    for image, top, left in zip(images, tops, lefts, strict=True):
        strip[top : top + DIGIT_PX, left : left + DIGIT_PX] = image
    return strip


def canvas_width(num_digits: int) -> int:
    """Give the width in pixels that holds every strip of ``num_digits`` digits."""
    return MAX_LEFT_MARGIN_PX + DIGIT_PX * num_digits + MAX_GAP_PX * (num_digits - 1) + MIN_RIGHT_MARGIN_PX


class DigitStrips(Dataset[Strip]):
    """Strips that exist only when asked for: strip ``i`` depends on the seed and ``i`` and on nothing else.

    Args:
        split: whose images to use.
        num_strips: length of the dataset.
        num_digits: fewest and most digits of a strip.
        seed: another seed gives other strips of the same images.
    """

    def __init__(self, split: Split, num_strips: int, num_digits: tuple[int, int] = (3, 6), seed: int = 0) -> None:
        self.split: Split = split
        self.num_strips = num_strips
        self.num_digits = num_digits
        self.seed = seed

    def __len__(self) -> int:
        return self.num_strips

    def __getitem__(self, index: int) -> Strip:
        if not 0 <= index < self.num_strips:
            raise IndexError(f"numbers: there is no strip {index}. Expected 0 to {self.num_strips - 1}.")
        images, labels = digit_images(self.split)
        generator = np.random.default_rng((self.seed, index))
        fewest, most = self.num_digits
        chosen = generator.integers(0, len(images), generator.integers(fewest, most, endpoint=True))
        return Strip(pixels=compose_strip(images[chosen], generator), digits=labels[chosen])


def shift_right(pixel_values: torch.Tensor, shift_px: int) -> torch.Tensor:
    """Move strips to the right on their canvas, blank pixels following.

    Args:
        pixel_values: shape (..., width).
        shift_px: 0 or more pixels.

    Returns:
        The same shape; what left the canvas on the right is lost.
    """
    return F.pad(pixel_values, (shift_px, 0))[..., : pixel_values.shape[-1]]


class StripCollator:
    """Lay strips on a canvas of one fixed width.

    The width is not that of the batch's widest strip, so that a strip is read (and learned from) alike whatever it is
    batched with: no result depends on the batch size or the number of ranks.

    Args:
        width_px: width of the canvas.
        with_shifts: whether to add the strips moved by 1, 2 and 3 pixels.
    """

    def __init__(self, width_px: int, with_shifts: bool = False) -> None:
        self.width_px = width_px
        self.with_shifts = with_shifts

    def __call__(self, strips: Sequence[Strip]) -> StripBatch:
        """Put the strips at the left of blank canvases."""
        label_lengths = [len(strip["digits"]) for strip in strips]
        pixel_values = np.zeros((len(strips), 1, STRIP_HEIGHT_PX, self.width_px), dtype=np.float32)
        labels = np.full((len(strips), max(label_lengths)), LABEL_PADDING, dtype=np.int64)
        for row, strip in enumerate(strips):
            pixel_values[row, 0, :, : strip["pixels"].shape[1]] = strip["pixels"]
            labels[row, : label_lengths[row]] = strip["digits"]
        batch = StripBatch(
            pixel_values=torch.from_numpy(pixel_values),
            widths=torch.tensor([strip["pixels"].shape[1] for strip in strips]),
            labels=torch.from_numpy(labels),
            label_lengths=torch.tensor(label_lengths),
        )
        if self.with_shifts:
            shifts = [shift_right(batch["pixel_values"], px) for px in range(1, MAX_SHIFT_PX + 1)]
            batch["shifted_pixel_values"] = torch.stack(shifts, dim=1)
        return batch
