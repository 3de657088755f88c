"""ALiBi in transformers' public registries of attention functions and attention masks.

A model builds its mask once per forward pass and hands it to every layer. The bias goes into that mask: all layers
share one tensor, and cache lengths and offsets, padding, packed sequences and windows are as transformers worked them
out. The attention function only checks that the mask fits.

What belongs to one model is in its config, a plain dict under ``SETTINGS``: the registries are global, models are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from kernel_core.errors import DataError, SurgeryError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from kernel_plugin_alibi.bias import AlibiBias

# both the name in the registries and the key in the config: plain "alibi" is a field of some model configs already
ATTENTION_NAME = SETTINGS = "kernel_plugin_alibi"


def register_attention() -> None:
    """Add ALiBi to the registries. Doing it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, alibi_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, alibi_mask)


def alibi_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor:
    """Build the mask of one forward pass: the bias where attention is allowed, the lowest number where it is not.

    Called by transformers, with its arguments.

    Args:
        batch_size: Rows of the batch.
        q_length: Number of queries.
        kv_length: Number of keys.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: Which query may attend to which key, by index.
        attention_mask: Padding, shape (batch_size, keys seen so far), True for tokens; None without padding.
        config: Of the model; it holds the settings that ``apply_alibi`` left there.
        dtype: Of the hidden states.
        device: Of the mask.
        **kwargs: For transformers' own mask function.

    Returns:
        Shape (rows, num_heads, q_length, kv_length), where rows is 1 if all rows of the batch are alike. Not -inf but
        the lowest finite number: a row that may attend to nothing, as left padding makes them, stays finite.

    Raises:
        DataError: the sequence is longer, or the mask larger, than the settings allow, or queries and keys are not
            one sequence.
        SurgeryError: the model has not been through ``apply_alibi``.
    """
    bias = _bias_of(config)
    if mask_function is bidirectional_mask_function and isinstance(q_offset, int):
        _check_one_sequence(q_length, kv_length, q_offset)
    if attention_mask is not None and _is_all_tokens(attention_mask, kv_offset + kv_length):
        attention_mask = None
    alike = attention_mask is None and mask_function in (causal_mask_function, bidirectional_mask_function)
    rows = 1 if alike else batch_size
    dtype = _dtype_of_scores(config, dtype, torch.device(device).type)
    bias.check(rows, q_length, kv_length, kv_offset, dtype)
    # a skipped mask means "sdpa can be told in one word", which is never so here
    kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "device": device}
    allowed = _sdpa(AttentionMaskInterface)(
        rows, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **kwargs
    )
    values = bias(q_length, kv_length, q_offset=q_offset, kv_offset=kv_offset, dtype=dtype, device=device)
    return torch.where(allowed, values, torch.finfo(dtype).min)


def alibi_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run transformers' sdpa attention with the mask that ``alibi_mask`` built.

    Slopes belong to global head indices. A module that holds only some heads of its layer, as under tensor parallelism,
    says which in its attribute ``head_indices``: a range (which costs no copy) or a list.

    Args:
        module: The attention module.
        query: Shape (batch, heads, q_length, head_dim).
        key: Shape (batch, key heads, kv_length, head_dim).
        value: Like ``key``.
        attention_mask: From ``alibi_mask``.
        dropout: Probability of dropping an attention weight.
        scaling: Factor of the scores; None for one over the root of head_dim.
        **kwargs: For transformers' own attention function.

    Returns:
        Shape (batch, q_length, heads, head_dim), and None for the attention weights, which sdpa does not give.

    Raises:
        SurgeryError: the module has other heads than the mask and does not say which.
        DataError: the mask is missing, has no head dimension or other lengths.
    """
    mask = _mask_of_heads(module, query.shape[1], _checked_mask(query, key, attention_mask))
    attend = _sdpa(AttentionInterface)
    arguments = kwargs | {"dropout": dropout, "scaling": scaling, "is_causal": False}
    if not getattr(module, "reorder_and_upcast_attn", False):
        output, _ = attend(module, query, key, value, mask.to(query.dtype), **arguments)
        return output, None
    # GPT-2's option for half precision: scores and softmax in float32. transformers itself knows it in eager mode only
    with torch.autocast(query.device.type, enabled=False):
        output, _ = attend(module, query.float(), key.float(), value.float(), mask.float(), **arguments)
    return output.to(value.dtype), None


def _sdpa(registry: Any) -> Any:
    return registry()["sdpa"]


def _bias_of(config: PreTrainedConfig) -> AlibiBias:
    settings = getattr(config, SETTINGS, None)
    if settings is None:
        raise SurgeryError(
            f"alibi: a {type(config).__name__} selects the attention {ATTENTION_NAME!r} but holds no settings for it. "
            "Expected a model changed by apply_alibi. Call apply_alibi(model) on the loaded model."
        )
    return AlibiBias(config.num_attention_heads, **settings)


def _check_one_sequence(q_length: int, kv_length: int, q_offset: int) -> None:
    if q_offset + q_length >= kv_length:
        return
    raise DataError(
        f"alibi: {q_length} queries from position {q_offset} attend to {kv_length} keys in both directions. Expected "
        "the queries to be the last of the keys: elsewhere, as in cross-attention or behind a prefix, their distance "
        "is unknown. Pass a padding mask as long as the tokens, and no encoder states or prefix."
    )


def _is_all_tokens(attention_mask: Tensor, length: int) -> bool:
    # looked at on the CPU only: elsewhere it would stop the host once a step to save memory
    if attention_mask.device.type != "cpu" or attention_mask.shape[-1] != length or torch.compiler.is_compiling():
        return False
    return bool(attention_mask.all())


def _dtype_of_scores(config: PreTrainedConfig, hidden: torch.dtype, device_type: str) -> torch.dtype:
    if getattr(config, "reorder_and_upcast_attn", False):
        return torch.float32
    # under autocast hidden states are float32 and queries are not: cast here once, else every layer keeps its own copy
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden


def _checked_mask(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    lengths = (query.shape[2], key.shape[2])
    if mask is None or not mask.is_floating_point() or (mask.shape[1] == 1 and query.shape[1] > 1):
        got = "no mask" if mask is None else f"a {mask.dtype} mask of shape {tuple(mask.shape)}"
        raise DataError(
            f"alibi: attention got {got}, which holds no bias. Expected the mask that the model builds from a padding "
            "mask of shape (batch, keys). Pass such a mask, or none, to the model; a ready-made 4-D mask must contain "
            "AlibiBias(...) and have a head dimension."
        )
    if tuple(mask.shape[2:]) != lengths:
        raise DataError(
            f"alibi: the bias is for {mask.shape[2]} queries and {mask.shape[3]} keys, but attention got {lengths[0]} "
            f"and {lengths[1]}. Expected equal lengths. Pass a padding mask that covers the cached tokens too."
        )
    return mask


def _mask_of_heads(module: nn.Module, num_heads: int, mask: Tensor) -> Tensor:
    indices: range | Sequence[int] | None = getattr(module, "head_indices", None)
    if indices is None:
        if num_heads == mask.shape[1]:
            return mask
        raise SurgeryError(
            f"alibi: {type(module).__name__} has {num_heads} heads, but the model has slopes for {mask.shape[1]}. "
            "Expected all heads, or to be told which these are, since part of them alone would get other slopes. "
            "Set module.head_indices to their global indices, for example range(0, 4)."
        )
    if len(indices) != num_heads or not all(0 <= index < mask.shape[1] for index in indices):
        raise SurgeryError(
            f"alibi: {type(module).__name__}.head_indices is {indices!r} for {num_heads} heads of a layer with "
            f"{mask.shape[1]}. Expected {num_heads} indices from 0 to {mask.shape[1] - 1}. Set one for each head held."
        )
    if isinstance(indices, range) and indices.step == 1:
        return mask[:, indices.start : indices.stop]
    return mask[:, list(indices)]
