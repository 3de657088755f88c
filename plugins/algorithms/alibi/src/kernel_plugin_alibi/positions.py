"""Position embeddings that say nothing, for sequences of any length."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


class ZeroPositionEmbedding(nn.Embedding):
    """Stands in for a learned position table: zeros for every position, also beyond the end of the table.

    It keeps the table itself, zeroed and frozen, under its old name and shape, so that checkpoints fit in both
    directions. The table is never read: a checkpoint of the model before the change may be loaded into it.

    Args:
        table: The learned embedding. Its parameter object stays the same, its values are set to zero.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__(table.num_embeddings, table.embedding_dim, table.padding_idx, _weight=table.weight)
        self.weight = table.weight
        self.weight.requires_grad_(False)
        self.reset_parameters()
        self.train(table.training)

    def reset_parameters(self) -> None:
        """Set the table to zero."""
        with torch.no_grad():
            self.weight.zero_()

    def forward(self, input: Tensor) -> Tensor:
        """Return zeros of shape (*input.shape, embedding_dim) in the table's dtype, without memory of their own."""
        zero = torch.zeros((), dtype=self.weight.dtype, device=input.device)
        return zero.expand(*input.shape, self.embedding_dim)


def ignore_position_ids(embeddings: nn.Module) -> None:
    """Make ``embeddings`` see position 0 everywhere, so that tables made for its maximum length serve any length.

    BERT and its relatives look up position and token type by position id in buffers as long as the position table. With
    a zero position embedding the ids mean nothing else.

    Args:
        embeddings: A module whose forward takes ``input_ids``, ``inputs_embeds`` and ``position_ids``.
    """
    parameters = tuple(inspect.signature(embeddings.forward).parameters)
    embeddings.register_forward_pre_hook(partial(_zero_position_ids, parameters), with_kwargs=True)


def _zero_position_ids(
    parameters: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]]:
    call = dict(zip(parameters, args, strict=False)) | kwargs
    tokens = call.get("input_ids")
    if tokens is None:
        tokens = call["inputs_embeds"][..., 0]
    return (), call | {"position_ids": torch.zeros_like(tokens[:1], dtype=torch.long)}
