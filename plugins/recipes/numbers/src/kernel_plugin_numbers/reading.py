"""From scores per column to digits."""

import torch
from torch.nn import functional as F

NUM_DIGITS = 10
BLANK = NUM_DIGITS
READING_PADDING = -1


def greedy_reading(logits: torch.Tensor, num_columns: torch.Tensor) -> torch.Tensor:
    """Read the best class of each column, joining repeats and leaving blanks out.

    Args:
        logits: shape (..., columns, 11): ten digits and the blank.
        num_columns: columns of each strip, of a shape that broadcasts to (...); those beyond are not read.

    Returns:
        Digits of shape (..., columns), left-aligned and padded with -1. Nothing here waits for the device.

    Source:
        Graves et al., Connectionist Temporal Classification (ICML 2006), section 3.2, best path decoding.
    """
    best = logits.argmax(dim=-1)
    length = best.shape[-1]
    inside = torch.arange(length, device=best.device) < num_columns[..., None]
    before = F.pad(best, (1, 0), value=BLANK)[..., :length]
    read = inside & (best != before) & (best != BLANK)
    # One spare column takes what is not read.
    place = torch.where(read, read.cumsum(dim=-1) - 1, length)
    digits = best.new_full((*best.shape[:-1], length + 1), READING_PADDING)
    return digits.scatter(-1, place, best)[..., :length]


def same_numbers(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Compare padded rows of digits.

    Args:
        one: shape (..., n), padded with -1.
        other: shape (..., m), padded with -1; leading dimensions broadcast against those of ``one``.

    Returns:
        Booleans of the leading shape: whether the rows hold the same digits.
    """
    length = max(one.shape[-1], other.shape[-1])
    one, other = (F.pad(rows, (0, length - rows.shape[-1]), value=READING_PADDING) for rows in (one, other))
    return (one == other).all(dim=-1)


def to_numbers(digits: torch.Tensor) -> list[str]:
    """Write padded rows of digits, shape (batch, n), as text."""
    return ["".join(str(digit) for digit in row if digit != READING_PADDING) for row in digits.tolist()]
