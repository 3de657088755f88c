"""What early stopping goes by: which metric, what is better, and for how long to wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from kernel_core import Time
from kernel_core.errors import OptionError, TimeStringError
from kernel_core.timing import TimeUnit

Comparison = Callable[[Any, Any], Any]
COMPARISONS: dict[str, Comparison] = {"less": torch.less, "greater": torch.greater}
# a metric with one of these in its name is better when it is smaller
SMALLER_IS_BETTER = ("loss", "error", "perplexity", "entropy")


def choose_comparison(monitor: str, comp: Literal["less", "greater"] | Comparison | None = None) -> Comparison:
    """Return the function ``(value, best) -> better?`` that ``comp`` names, or the one that suits the metric's name.

    >>> choose_comparison("CrossEntropy") is torch.less, choose_comparison("MulticlassAccuracy") is torch.greater
    (True, True)
    """
    if callable(comp):
        return comp
    smaller = any(word in monitor.lower() for word in SMALLER_IS_BETTER)
    return COMPARISONS[comp or ("less" if smaller else "greater")]


def is_better(value: float, best: float, compare: Comparison, min_delta: float = 0.0) -> bool:
    """Say whether ``value`` is better than ``best`` by more than ``min_delta``; any number is better than nan.

    Args:
        value, best: The new value and the best so far.
        compare: Gets both as 0-d tensors on the CPU, as torch's comparisons want them.
        min_delta: At least 0.
    """
    if math.isnan(value) or math.isnan(best):
        return not math.isnan(value)
    better = compare(torch.tensor(value, dtype=torch.float64), torch.tensor(best, dtype=torch.float64))
    return bool(better) and abs(value - best) > min_delta


def split_monitor(monitor: str, dataloader_label: str | None = None) -> tuple[str, str]:
    """Return the metric's name and the label of its data; ``monitor`` may hold both as ``metrics/<label>/<name>``.

    Raises:
        OptionError: there is no label, or there are two.
    """
    first, *rest = monitor.split("/", 2)
    named, label = (rest[1], rest[0]) if first == "metrics" and len(rest) == 2 else (monitor, None)
    if label is None and dataloader_label is None:
        raise OptionError(
            f"early_stopper.dataloader_label: missing, and monitor={monitor!r} holds none. Expected 'train' or the label of an "
            "evaluator. Give dataloader_label, or monitor='metrics/<label>/<name>'."
        )
    if label is not None and dataloader_label not in (None, label):
        raise OptionError(
            f"early_stopper.dataloader_label: got {dataloader_label!r}, and monitor={monitor!r} says {label!r}. Expected one "
            "label. Leave dataloader_label out."
        )
    return named, label or str(dataloader_label)


def read_patience(value: int | str | Time) -> Time:
    """Return the time, epochs for a plain number.

    Raises:
        OptionError: it is not a time of at least 0 in epochs or batches.
    """
    try:
        patience = Time.from_input(value, TimeUnit.EPOCH)
    except TimeStringError as error:
        raise OptionError(f"early_stopper.patience: got {value!r}. {error}") from None
    if patience.unit not in (TimeUnit.EPOCH, TimeUnit.BATCH) or patience.value < 0:
        raise OptionError(
            f"early_stopper.patience: got {str(value)!r}. Expected epochs as a whole number, or a time of at least 0 in epochs "
            "or batches, such as '2ep' or '500ba'."
        )
    return patience
