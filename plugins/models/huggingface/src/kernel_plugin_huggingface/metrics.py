"""Metrics of scores against labels. Each counts every label once, however the labels are batched.

Importing this module imports torchmetrics; the package does it when a metric is first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_plugin_huggingface.labels import IGNORED
from kernel_plugin_huggingface.libraries import prepare_imports

prepare_imports()

from torchmetrics import Metric  # noqa: E402 - it imports torchvision, which may need help first


def scores_of(outputs: Any) -> Tensor:
    """Return the scores in what a model returned: a tensor itself, or ``logits`` of a mapping."""
    return outputs["logits"] if isinstance(outputs, Mapping) else outputs  # type: ignore[no-any-return]


class CrossEntropy(Metric):
    """The mean cross entropy over all labels that count, in nats.

    Args:
        ignore_index: The label that does not count.
    """

    full_state_update = False
    higher_is_better = False
    sum_loss: Tensor
    num_labels: Tensor

    def __init__(self, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("sum_loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_labels", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Any, labels: Tensor) -> None:
        """Count one batch.

        Args:
            outputs: Scores, shape (..., K), or a mapping that holds them as ``logits``.
            labels: Shape (...): where each label stands is where it is predicted.
        """
        scores, labels = scores_of(outputs).flatten(0, -2).float(), labels.flatten()
        self.sum_loss += F.cross_entropy(scores, labels, ignore_index=self.ignore_index, reduction="sum")
        self.num_labels += (labels != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the mean; nan before the first label."""
        return self.sum_loss / self.num_labels


class LanguageCrossEntropy(CrossEntropy):
    """The mean cross entropy per token, in nats.

    Args:
        ignore_index: The label that does not count.
    """


class LanguagePerplexity(LanguageCrossEntropy):
    """The exponential of the mean cross entropy per token.

    Args:
        ignore_index: The label that does not count.
    """

    def compute(self) -> Tensor:
        """Return the perplexity; nan before the first label."""
        return torch.exp(super().compute())


class MaskedAccuracy(Metric):
    """The share of the labels that count which have the highest score.

    Args:
        ignore_index: The label that does not count.
    """

    full_state_update = False
    higher_is_better = True
    num_correct: Tensor
    num_labels: Tensor

    def __init__(self, ignore_index: int = IGNORED) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("num_correct", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_labels", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, outputs: Any, labels: Tensor) -> None:
        """Count one batch.

        Args:
            outputs: Scores, shape (..., K), or a mapping that holds them as ``logits``.
            labels: Shape (...): where each label stands is where it is predicted.
        """
        counts = labels != self.ignore_index
        self.num_correct += ((scores_of(outputs).argmax(dim=-1) == labels) & counts).sum()
        self.num_labels += counts.sum()

    def compute(self) -> Tensor:
        """Return the share; nan before the first label."""
        return self.num_correct / self.num_labels
