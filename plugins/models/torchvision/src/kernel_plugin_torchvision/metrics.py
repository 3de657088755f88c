"""What a classifier is measured by, besides torchmetrics' accuracy. Imported by the first model that is made."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric


class CrossEntropy(Metric):
    """The mean cross entropy over all images, however they are batched.

    Args:
        ignore_index: Images with this target do not count.
    """

    full_state_update = False
    higher_is_better = False
    sum_loss: Tensor
    num_targets: Tensor

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.add_state("sum_loss", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_targets", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, scores: Tensor, targets: Tensor) -> None:
        """Count one batch.

        Args:
            scores: Shape (B, K).
            targets: Class indices, shape (B,), or a distribution for each image, shape (B, K).
        """
        self.sum_loss += F.cross_entropy(scores.float(), targets, ignore_index=self.ignore_index, reduction="sum")
        dense = targets.shape == scores.shape
        self.num_targets += targets.shape[0] if dense else (targets != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the mean; nan before the first image."""
        return self.sum_loss / self.num_targets
