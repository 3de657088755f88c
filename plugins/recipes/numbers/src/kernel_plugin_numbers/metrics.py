"""What the recipe measures. Imported by the first model that is asked for its metrics."""

import torch
from torchmetrics import Metric

from kernel_plugin_numbers.reading import same_numbers


class ExactMatch(Metric):
    """The share of strips whose every digit is read right."""

    full_state_update = False
    higher_is_better = True
    num_exact: torch.Tensor
    num_strips: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_exact", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_strips", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, readings: torch.Tensor, labels: torch.Tensor) -> None:
        """Count one batch.

        Args:
            readings: shape (batch, n), padded with -1.
            labels: shape (batch, m), padded with -1.
        """
        self.num_exact += same_numbers(readings, labels).sum()
        self.num_strips += len(labels)

    def compute(self) -> torch.Tensor:
        """Return the share; nan before the first batch."""
        return self.num_exact / self.num_strips


class ShiftConsistency(Metric):
    """The share of shifted strips that are read as the unshifted strip is, rightly or wrongly.

    Source:
        Zhang, Making Convolutional Networks Shift-Invariant Again (ICML 2019), section 4.1: classification consistency.
    """

    full_state_update = False
    higher_is_better = True
    num_same: torch.Tensor
    num_shifted: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_same", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("num_shifted", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, readings: torch.Tensor, shifted_readings: torch.Tensor) -> None:
        """Count one batch.

        Args:
            readings: shape (batch, n), padded with -1.
            shifted_readings: shape (batch, shifts, n), padded with -1.
        """
        same = same_numbers(readings[:, None], shifted_readings)
        self.num_same += same.sum()
        self.num_shifted += same.numel()

    def compute(self) -> torch.Tensor:
        """Return the share; nan before the first batch."""
        return self.num_same / self.num_shifted
