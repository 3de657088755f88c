"""GPT-2 over bytes, and its loss in bits."""

import math
from typing import TYPE_CHECKING, Any

import torch
from kernel_core import TrainableModel
from torch.nn import functional as F

from kernel_plugin_stdlib.data import ByteBatch

if TYPE_CHECKING:
    from transformers import GPT2LMHeadModel

NUM_BYTES = 256
# A label that does not count, as in torch's cross entropy.
IGNORED = -100


def next_bytes(labels: torch.Tensor) -> torch.Tensor:
    """Shift labels so that each stands where it is predicted.

    Args:
        labels: shape (batch, length).

    Returns:
        The same shape; the last place, which has no next byte, holds -100.
    """
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED)


def num_predicted(labels: torch.Tensor) -> torch.Tensor:
    """Count the bytes that are predicted: all but the first of each row, without those labelled -100.

    Args:
        labels: shape (batch, length).

    Returns:
        A scalar on the device of the labels; nothing waits for it.
    """
    return (labels[:, 1:] != IGNORED).sum()


def cross_entropy_bits(logits: torch.Tensor, labels: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Return the cross entropy of the next bytes, in bits.

    Args:
        logits: shape (batch, length, 256).
        labels: shape (batch, length), not shifted.
        reduction: ``mean`` over the predicted bytes, or their ``sum``.
    """
    # The labels move and not the logits: a slice of the logits would have to be copied.
    nats = F.cross_entropy(logits.flatten(0, 1).float(), next_bytes(labels).flatten(), reduction=reduction)
    return nats / math.log(2)


class ByteGPT2(TrainableModel):
    """Predict the next byte from those before it in the window.

    There is no dropout, so that losses do not depend on how a batch is divided.

    Args:
        width: features per byte.
        num_layers: layers.
        num_heads: attention heads per layer; divides ``width``.
        num_positions: the longest window, in bytes, as long as positions are embeddings.

    Example:
        >>> model = ByteGPT2(width=32, num_layers=1, num_heads=2)
        >>> window = torch.tensor([list(b"import this")])
        >>> model({"input_ids": window, "labels": window}).shape
        torch.Size([1, 11, 256])

    Source:
        Radford et al., Language Models are Unsupervised Multitask Learners (2019), section 2.
    """

    def __init__(self, width: int = 128, num_layers: int = 4, num_heads: int = 4, num_positions: int = 512) -> None:
        super().__init__()
        self.gpt2 = _gpt2(width, num_layers, num_heads, num_positions)

    def forward(self, batch: ByteBatch) -> torch.Tensor:
        """Score every byte as the one after each position: shape (batch, length, 256)."""
        logits: torch.Tensor = self.gpt2(input_ids=batch["input_ids"], use_cache=False).logits
        return logits

    def loss(self, outputs: torch.Tensor, batch: ByteBatch) -> torch.Tensor:
        """Average the cross entropy over the predicted bytes, in bits."""
        return cross_entropy_bits(outputs, batch["labels"])

    def loss_weight(self, batch: ByteBatch) -> torch.Tensor:
        """Count the predicted bytes, on the device."""
        return num_predicted(batch["labels"])

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Make ``bits_per_byte`` for evaluation; in training the loss says the same."""
        if is_train:
            return {}
        from kernel_plugin_stdlib.metrics import BitsPerByte

        return {"bits_per_byte": BitsPerByte()}

    def update_metric(self, batch: ByteBatch, outputs: torch.Tensor, metric: Any) -> None:
        """Give ``metric`` scores and labels."""
        metric.update(outputs, batch["labels"])


def _gpt2(width: int, num_layers: int, num_heads: int, num_positions: int) -> "GPT2LMHeadModel":
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=NUM_BYTES,
        n_positions=num_positions,
        n_embd=width,
        n_layer=num_layers,
        n_head=num_heads,
        # GPT-2's own function in one kernel of torch's instead of eight.
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        # The separator ends a file and begins the next; the defaults lie outside of 256 bytes.
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)
