"""Whether a model has an embedding for every token of a tokenizer."""

from __future__ import annotations

from typing import Any

from kernel_core.errors import OptionError


def fit_embeddings(model: Any, tokenizer: Any, resize: bool) -> None:
    """Check that ``model`` has an embedding for every token of ``tokenizer``, or add those that are missing.

    Args:
        model: A transformers model. One without embeddings of tokens is left alone.
        tokenizer: With a length, or None for no check.
        resize: Add embeddings instead of refusing.

    Raises:
        OptionError: there are too few and they may not be added.
    """
    if tokenizer is None:
        return
    num_embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    num_tokens = len(tokenizer)
    if num_embeddings is None or num_tokens <= num_embeddings:
        return
    if not resize:
        raise OptionError(
            f"huggingface.tokenizer: it has {num_tokens} tokens and the model has embeddings for {num_embeddings}. "
            "Expected an embedding for every token. Give the model's own tokenizer, or set allow_embedding_resizing to "
            "add the missing ones."
        )
    model.resize_token_embeddings(num_tokens)
