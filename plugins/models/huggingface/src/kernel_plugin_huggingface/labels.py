"""Which labels of a batch count, and where they stand: the arithmetic of losses, weights and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_core.errors import DataError
from torch import Tensor, nn
from torch.nn import functional as F

# A label that does not count, as in torch's cross entropy.
IGNORED = -100

# In transformers' table of causal language models, but their own loss compares every position with the label at the same
# place (read in release 5.24): the labels must come shifted.
UNSHIFTED = frozenset(
    "BartForCausalLM BigBirdPegasusForCausalLM BlenderbotForCausalLM BlenderbotSmallForCausalLM CpmAntForCausalLM "
    "MBartForCausalLM MarianForCausalLM MvpForCausalLM PLBartForCausalLM PegasusForCausalLM TrOCRForCausalLM "
    "WhisperForCausalLM XLMWithLMHeadModel XLNetLMHeadModel".split()
)


def next_token_labels(labels: Tensor) -> Tensor:
    """Shift labels so that each stands where it is predicted.

    Args:
        labels: Shape (B, T).

    Returns:
        The same shape, a new tensor; the last place, which has no next token, holds -100.

    Example:
        >>> next_token_labels(torch.tensor([[5, 6, 7]])).tolist()
        [[6, 7, -100]]
    """
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def count_labels(labels: Tensor, shifted: bool = False) -> Tensor | int:
    """Return how many terms a loss averages over these labels.

    Args:
        labels: Whole numbers of any shape, of which -100 does not count; or floating-point targets, which count by row.
        shifted: The loss predicts the next label, so that the first of each row does not count.

    Returns:
        A scalar on the device of the labels, which nothing waits for; a number for floating-point targets.
    """
    if labels.is_floating_point():
        return int(labels.shape[0])
    counted = labels[..., 1:] if shifted and labels.ndim > 1 else labels
    return (counted != IGNORED).sum()


def labels_of(batch: Any, causal: bool = False) -> Tensor | None:
    """Return the labels of a batch; for a causal language model without any, its tokens where nothing masks them."""
    labels: Tensor | None = batch.get("labels")
    if labels is not None or not causal:
        return labels
    tokens: Tensor | None = batch.get("input_ids")
    mask = batch.get("attention_mask")
    if tokens is None or mask is None or mask.shape != tokens.shape:
        return tokens
    return tokens.masked_fill(mask == 0, IGNORED)


def is_causal_lm(model: nn.Module) -> bool:
    """Say whether a transformers model is a language model whose loss compares each position with the next label."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: set[str] = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        known |= {names} if isinstance(names, str) else set(names)
    for name in [cls.__name__ for cls in type(model).__mro__]:
        if name in UNSHIFTED:
            return False
        if name in known or name.endswith("ForCausalLM"):
            return True
    return False


def check_batch(batch: Any) -> None:
    """Refuse a batch without names.

    Raises:
        DataError: it is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise DataError(
            f"huggingface: got a batch of type {type(batch).__name__}. Expected a mapping such as a dict or a "
            "BatchEncoding, with the names of the model's inputs. Give the DataLoader a collate_fn that makes one."
        )
