"""A transformers model that was built on the meta device begins with what transformers would have given it."""

from typing import Any

import pytest
import torch
from kernel_core.materialize import Materializer, is_meta
from kernel_plugin_huggingface import HuggingFaceModel
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
BUILDERS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=8, n_head=4, **IDS)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **IDS)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES, **IDS)),
}


def on_meta(build: Any) -> HuggingFaceModel:
    with torch.device("meta"):
        return HuggingFaceModel(build())


@pytest.mark.parametrize("name", BUILDERS)
def test_every_tensor_is_drawn_as_transformers_draws_it(name: str) -> None:
    torch.manual_seed(0)
    expected, model = HuggingFaceModel(BUILDERS[name]()), on_meta(BUILDERS[name])
    Materializer(model, torch.device("cpu"), 3)(model)
    assert not is_meta(model)
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert found.keys() == wanted.keys()  # tied weights are counted once: they stay tied
    for key, value in wanted.items():
        if value.float().std() in (0.0,) or value.dtype == torch.int64 or "inv_freq" in key:
            assert torch.equal(found[key], value), key
        else:  # a standard deviation over thousands of draws
            rtol = max(0.1, 5 / (2 * value.numel()) ** 0.5)  # a few draws tell it less exactly
            torch.testing.assert_close(found[key].std(), value.std(), rtol=rtol, atol=0, msg=key)
            assert not torch.equal(found[key], value), key


def test_the_residual_branches_of_gpt2_end_in_smaller_weights() -> None:
    model = on_meta(BUILDERS["gpt2"])
    Materializer(model, torch.device("cpu"), 3)(model)
    block = model.model.transformer.h[0]
    for branch in (block.attn, block.mlp):  # 0.02 / sqrt(2 * 8 layers)
        torch.testing.assert_close(branch.c_proj.weight.std().item(), 0.005, rtol=0.1, atol=0)
    torch.testing.assert_close(block.mlp.c_fc.weight.std().item(), 0.02, rtol=0.1, atol=0)


def test_the_order_changes_no_value() -> None:
    whole, parts = on_meta(BUILDERS["gpt2"]), on_meta(BUILDERS["gpt2"])
    Materializer(whole, torch.device("cpu"), 3)(whole)
    materialize = Materializer(parts, torch.device("cpu"), 3)
    for block in parts.model.transformer.h:
        materialize(block)
    materialize(parts)
    for key, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[key], value), key
