"""The recipe: which model, data and settings, and why these."""

from collections.abc import Sequence

import torch
from kernel_core import Evaluator
from kernel_core.recipe import Recipe, RunData
from torch.utils.data import DataLoader

from kernel_plugin_stdlib.data import ByteWindows, collate_windows, read_corpus, spread_windows, windows_of
from kernel_plugin_stdlib.model import ByteGPT2


def byte_gpt2(width: int = 128, num_layers: int = 4, num_heads: int = 4, num_positions: int = 512) -> ByteGPT2:
    """Make the model of the recipe.

    Args:
        width: features per byte.
        num_layers: layers.
        num_heads: attention heads per layer; divides ``width``.
        num_positions: the longest window, in bytes, as long as positions are embeddings.
    """
    return ByteGPT2(width, num_layers, num_heads, num_positions)


def stdlib_bytes(
    batch_size: int = 8,
    seed: int = 0,
    length: int = 128,
    eval_lengths: Sequence[int] = (128, 512),
    max_bytes: int | None = None,
    eval_bytes: int = 131_072,
) -> RunData:
    """Make the windows of the recipe: short ones to train on, short and long ones of other files to test with.

    Args:
        batch_size: training windows per batch and rank; test batches have as many bytes.
        seed: decides the order of the training windows; the windows themselves are always the same.
        length: bytes per training window.
        eval_lengths: bytes per test window, an evaluator ``ctx<n>`` for each; all read the same bytes.
        max_bytes: train on so many bytes only; None for all files that are not held out.
        eval_bytes: about how many bytes each evaluator reads, spread over the held-out files.
    """
    train: DataLoader[torch.Tensor] = DataLoader(
        ByteWindows(windows_of(read_corpus("train", max_bytes), length)),
        batch_size,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(seed),
        collate_fn=collate_windows,
    )
    longest = max(eval_lengths, default=length)
    blocks = spread_windows(read_corpus("heldout"), max(1, eval_bytes // longest), longest)
    evaluators = [_evaluator(blocks, one, batch_size * length) for one in eval_lengths]
    return RunData(train=train, evaluators=evaluators)


def _evaluator(blocks: torch.Tensor, length: int, num_bytes_per_batch: int) -> Evaluator:
    windows = torch.cat([windows_of(block, length) for block in blocks])
    loader = DataLoader(ByteWindows(windows), max(1, num_bytes_per_batch // length), collate_fn=collate_windows)
    return Evaluator(f"ctx{length}", loader)


recipe = Recipe(
    summary="A byte-level GPT-2 on Python's standard library; trains at 128 bytes and is tested at 128 and 512.",
    config={
        "model": {"name": "byte_gpt2"},
        "data": {"name": "stdlib_bytes"},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.1},
        "scheduler": {"name": "cosine_with_warmup", "t_warmup": "0.1dur"},
        # Many small steps: as many bytes in batches of 32 learn half a bit less.
        "train": {"max_duration": "1000ba"},
        "eval": {"interval": "1dur"},
    },
    functions={"byte_gpt2": byte_gpt2, "stdlib_bytes": stdlib_bytes},
)
