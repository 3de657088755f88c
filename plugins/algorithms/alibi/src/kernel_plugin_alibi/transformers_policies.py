"""The policies for models of transformers. transformers itself is imported when the first one is asked for."""

from __future__ import annotations

import copy
from typing import Any

from kernel_core.errors import PluginLoadError, SurgeryError
from torch import nn

from kernel_plugin_alibi.policies import AlibiRequest, AttentionPolicy, Change
from kernel_plugin_alibi.positions import ZeroPositionEmbedding, ignore_position_ids


def builtin_policies() -> dict[type[nn.Module], AttentionPolicy]:
    """Return the policies for GPT-2, BERT and RoBERTa of transformers.

    Raises:
        PluginLoadError: transformers is missing or older than 5.
    """
    require_transformers()
    from transformers import BertModel, GPT2Model, RobertaModel

    return {
        GPT2Model: transformers_policy("wpe"),
        BertModel: transformers_policy("embeddings.position_embeddings", position_ids_in="embeddings"),
        RobertaModel: transformers_policy("embeddings.position_embeddings", position_ids_in="embeddings"),
    }


def require_transformers() -> None:
    """Raise ``PluginLoadError`` if transformers is missing or too old to have both registries."""
    cause: ImportError | None = None
    try:
        import transformers
    except ImportError as error:
        found, cause = "is not installed", error
    else:
        if int(transformers.__version__.split(".")[0]) >= 5:
            return
        found = f"is {transformers.__version__}"
    raise PluginLoadError(
        f"alibi: transformers {found}. Expected version 5 or newer, whose attention and mask registries it uses. "
        "Run: pip install 'transformers>=5'"
    ) from cause


def transformers_policy(position_embedding: str, *, position_ids_in: str | None = None) -> AttentionPolicy:
    """Make the policy for a transformers model class whose attention goes through the attention registry.

    Whether attention is causal is up to the mask the model asks for; the policy need not know.

    Args:
        position_embedding: Dotted path of the learned position embedding, an ``nn.Embedding``, inside the model.
        position_ids_in: Dotted path of the module that looks up positions (and token types) in buffers of the model's
            original maximum length, as BERT's embeddings do; None if only the embedding limits the length.

    Returns:
        A policy that zeroes and freezes the embedding and selects ALiBi attention.

    Example:
        >>> policy = transformers_policy("embeddings.position_embeddings", position_ids_in="embeddings")
        >>> changes = apply_alibi(model, policies={transformers.XLMRobertaModel: policy})
    """

    def policy(module: nn.Module, request: AlibiRequest) -> list[Change]:
        _refuse_cross_attention(module)
        table = _position_table(module, position_embedding)
        changes = _use_attention(module, request)
        if isinstance(table, ZeroPositionEmbedding):
            return changes
        zero = ZeroPositionEmbedding(table)
        module.set_submodule(position_embedding, zero)
        if position_ids_in is not None:
            ignore_position_ids(module.get_submodule(position_ids_in))
        return [Change(position_embedding, repr(table), repr(zero), "position embeddings zeroed and frozen"), *changes]

    return policy


def _refuse_cross_attention(module: nn.Module) -> None:
    config: Any = getattr(module, "config", None)
    for flag in ("is_encoder_decoder", "add_cross_attention"):
        if getattr(config, flag, False):
            raise SurgeryError(
                f"alibi: {type(module).__name__} has config.{flag}=True. Expected self-attention only: queries and "
                "keys of cross-attention come from two sequences, between which there is no distance. "
                "Use a decoder-only or encoder-only model."
            )


def _position_table(module: nn.Module, path: str) -> nn.Embedding:
    try:
        table = module.get_submodule(path)
    except AttributeError:
        table = None
    if type(table) not in (nn.Embedding, ZeroPositionEmbedding):
        found = "nothing" if table is None else f"a {type(table).__name__}"
        raise SurgeryError(
            f"alibi: {type(module).__name__} has {found} at {path!r}. Expected its learned position embedding, an "
            "nn.Embedding. Give the right path to transformers_policy, or write a policy of your own for this class."
        )
    assert isinstance(table, nn.Embedding)
    return table


def _use_attention(module: nn.Module, request: AlibiRequest) -> list[Change]:
    from kernel_plugin_alibi.transformers_attention import ATTENTION_NAME, SETTINGS, register_attention

    register_attention()  # also for a model that was unpickled in this process
    model: Any = module
    old = model.config._attn_implementation
    if old == ATTENTION_NAME and hasattr(model.config, SETTINGS):
        return []
    bias = request.bias(model.config.num_attention_heads)
    _own_config(model, request.root)
    model.set_attn_implementation(ATTENTION_NAME)
    if model.config._attn_implementation != ATTENTION_NAME:
        raise SurgeryError(
            f"alibi: {type(module).__name__} kept the attention {old!r}. Expected a model whose attention goes through "
            "transformers' attention registry. Write a policy of your own for this class."
        )
    limits = {"max_sequence_length": bias.max_sequence_length, "max_bias_bytes": bias.max_bias_bytes}
    setattr(model.config, SETTINGS, limits)
    return [Change("", old, ATTENTION_NAME, f"attention with linear biases for {bias.num_heads} heads")]


def _own_config(model: Any, root: nn.Module) -> None:
    # the attention is chosen in the config, and models may share a config object: only this one may change. What wraps
    # it (a language modeling head, which prepares masks when it generates) must see the same config
    shared, own, inside = model.config, copy.deepcopy(model.config), set(model.modules())
    for module in root.modules():
        names = [name for name, value in vars(module).items() if value is shared]
        if names and (module in inside or model in module.modules()):
            vars(module).update(dict.fromkeys(names, own))
