"""What the recipe measures. Imported by the first model that is asked for its metrics."""

import torch
from torchmetrics import Metric

from kernel_plugin_stdlib.model import cross_entropy_bits, num_predicted


class BitsPerByte(Metric):
    """Bits that an ideal coder driven by the model would spend on each predicted byte.

    Every byte counts the same, however the bytes are batched. 8 is what knowing nothing costs.
    """

    full_state_update = False
    higher_is_better = False
    num_bits: torch.Tensor
    num_bytes: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("num_bits", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("num_bytes", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Count one batch.

        Args:
            logits: shape (batch, length, 256).
            labels: shape (batch, length).
        """
        self.num_bits += cross_entropy_bits(logits, labels, reduction="sum")
        self.num_bytes += num_predicted(labels)

    def compute(self) -> torch.Tensor:
        """Return the mean; nan before the first batch."""
        return self.num_bits / self.num_bytes
