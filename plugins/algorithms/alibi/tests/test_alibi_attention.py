"""Models with ALiBi against transformers' eager attention with a bias built by hand."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from kernel_core.errors import DataError, SurgeryError
from kernel_plugin_alibi import apply_alibi
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min
Make = Callable[..., Any]
Ids = Callable[..., Tensor]


def bias_by_hand(num_heads: int, length: int) -> Tensor:
    slopes = {4: [1 / 4, 1 / 16, 1 / 64, 1 / 256], 3: [1 / 16, 1 / 256, 1 / 4]}[num_heads]
    rows = [[[-slope * abs(i - j) for j in range(length)] for i in range(length)] for slope in slopes]
    return torch.tensor(rows)


def reference_logits(model: Any, ids: Tensor, causal: bool, padding: Tensor | None = None) -> Tensor:
    """Eager attention of the unchanged model, position table zeroed, with the bias as a ready-made 4-D mask."""
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    base = eager.base_model
    (base.wpe if causal else base.embeddings.position_embeddings).weight.data.zero_()
    length = ids.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool).tril() if causal else torch.ones(length, length) > 0
    allowed = allowed.expand(len(ids), 1, -1, -1)
    if padding is not None:
        allowed = allowed & padding.bool()[:, None, None]
    mask = torch.where(allowed, bias_by_hand(model.config.num_attention_heads, length), torch.tensor(LOWEST))
    with torch.no_grad():
        return eager(ids, attention_mask=mask).logits


@torch.no_grad()
def logits(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    return model(*args, **kwargs).logits


@pytest.mark.parametrize("num_heads", [4, 3])
@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
def test_output_is_eager_attention_with_the_bias_built_by_hand(
    family: str, num_heads: int, make: Make, ids: Ids
) -> None:
    model, tokens = make(family, num_heads), ids(2, 9)
    expected = reference_logits(model, tokens, causal=family == "gpt2")
    before = logits(model, tokens)
    assert apply_alibi(model)
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        logits(model, tokens, attention_mask=torch.ones_like(tokens)), expected, rtol=1e-4, atol=1e-5
    )
    assert (expected - before).abs().max() > 0.1


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(family: str, side: str, make: Make, ids: Ids) -> None:
    model, tokens = make(family), ids(2, 9)
    apply_alibi(model)
    alone = logits(model, tokens[1:, :6])
    padding, padded, kept = (
        torch.ones_like(tokens),
        tokens.clone(),
        slice(None, 6) if side == "right" else slice(3, None),
    )
    padding[1] = padded[1] = 0
    padding[1, kept], padded[1, kept] = 1, tokens[1, :6]
    out = logits(model, padded, attention_mask=padding)
    torch.testing.assert_close(out[1:, kept], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[:1], logits(model, tokens[:1]), rtol=1e-4, atol=1e-5)
    assert out.isfinite().all()


def test_rows_that_see_nothing_give_finite_gradients(make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2").train(), ids(2, 9)
    apply_alibi(model)
    padding = torch.ones_like(tokens)
    padding[1, :4] = 0
    model(tokens, attention_mask=padding, labels=tokens.masked_fill(padding == 0, -100)).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def test_keys_beyond_the_padding_mask_are_hidden(make: Make) -> None:
    model = make("bert")
    apply_alibi(model)
    mask = transformers.AttentionMaskInterface()[model.config._attn_implementation](
        1,
        3,
        5,
        q_offset=torch.tensor(0),
        mask_function=transformers.masking_utils.bidirectional_mask_function,
        attention_mask=torch.ones(1, 3, dtype=torch.bool),
        config=model.config,
    )
    torch.testing.assert_close(mask[0, :, :, :3], bias_by_hand(4, 3))
    assert (mask[..., 3:] == LOWEST).all()


def test_no_token_sees_a_later_one(make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2"), ids(2, 9)
    apply_alibi(model)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 32
    assert torch.equal(logits(model, tokens)[:, :5], logits(model, changed)[:, :5])


def test_a_bert_decoder_is_causal(make: Make, ids: Ids) -> None:
    model, tokens = make("bert", is_decoder=True), ids(2, 9)
    apply_alibi(model)
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    eager = make("bert", is_decoder=True)
    eager.set_attn_implementation("eager")
    eager.bert.embeddings.position_embeddings.weight.data.zero_()
    mask = torch.where(allowed, bias_by_hand(4, 9), torch.tensor(LOWEST)).expand(2, -1, -1, -1)
    expected = logits(eager, tokens, attention_mask=mask)
    torch.testing.assert_close(logits(model, tokens), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "bert", "roberta"])
def test_sequences_four_times_the_original_maximum(family: str, make: Make, ids: Ids) -> None:
    model, long, tokens = make(family, positions=16), make(family, positions=72), ids(2, 64)
    apply_alibi(model)
    assert apply_alibi(long)
    state = {name: value for name, value in model.state_dict().items() if value.shape == long.state_dict()[name].shape}
    long.load_state_dict(state, strict=False)
    out = logits(model, tokens)
    torch.testing.assert_close(out, logits(long, tokens))
    causal = family == "gpt2"
    expected = reference_logits(long, tokens, causal)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    types = {} if causal else {"token_type_ids": torch.zeros_like(tokens)}
    explicit = torch.arange(64)[None].expand(2, -1)
    torch.testing.assert_close(logits(model, tokens, position_ids=explicit, **types), out)
    embeds = model.get_input_embeddings()(tokens)
    torch.testing.assert_close(logits(model, inputs_embeds=embeds), out)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("left_padding", [0, 3])
def test_decoding_step_by_step_equals_one_forward(cache: str, left_padding: int, make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2"), ids(2, 24)
    apply_alibi(model)
    padding = torch.ones_like(tokens)
    padding[1, :left_padding] = 0
    whole = logits(model, tokens, attention_mask=padding)
    past: Any = transformers.DynamicCache(config=model.config)
    if cache == "static":
        past = transformers.StaticCache(config=model.config, max_cache_len=32)
    steps = [(0, 7), (7, 12), *((step, step + 1) for step in range(12, 24))]
    pieces = [
        logits(model, tokens[:, start:end], attention_mask=padding[:, :end], past_key_values=past, use_cache=True)
        for start, end in steps
    ]
    seen = padding.bool()
    torch.testing.assert_close(torch.cat(pieces, dim=1)[seen], whole[seen], rtol=1e-4, atol=1e-5)


def test_generate_gives_the_same_tokens_with_and_without_cache(make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2"), ids(2, 8)
    apply_alibi(model)
    padding = torch.ones_like(tokens)
    padding[0, :3] = 0
    settings = {"attention_mask": padding, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(tokens, use_cache=False, **settings)
    assert plain.shape == (2, 28)
    assert torch.equal(plain, model.generate(tokens, use_cache=True, **settings))
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(plain, model.generate(tokens, **static, **settings))


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_bfloat16_is_close_to_float32(family: str, make: Make, ids: Ids) -> None:
    model, tokens = make(family), ids(2, 48)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())  # what is compared is the arithmetic, not the rounding of weights
    padding = torch.ones_like(tokens)
    padding[1, 40:] = 0
    apply_alibi(model)
    expected = logits(model, tokens, attention_mask=padding)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = logits(model, tokens, attention_mask=padding)
    half = logits(copy.deepcopy(model).bfloat16(), tokens, attention_mask=padding)
    assert half.dtype == torch.bfloat16
    seen = padding.bool()
    for out in (mixed.float(), half.float()):
        assert (out - expected)[seen].abs().mean() < 0.02 * expected[seen].abs().mean()


def test_under_autocast_the_layers_share_one_mask_in_the_dtype_of_the_queries(make: Make, ids: Ids) -> None:
    model, masks = make("gpt2"), []
    apply_alibi(model)
    for block in model.transformer.h:
        block.attn.register_forward_pre_hook(
            lambda module, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
        )
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, ids(2, 9), attention_mask=torch.ones(2, 9))
    assert [mask.dtype for mask in masks] == [torch.bfloat16] * 2
    assert masks[0] is masks[1]
    assert masks[0].shape == (1, 4, 9, 9)


def test_gpt2_reordered_and_upcast_attention_is_that_of_eager_mode(make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2", reorder_and_upcast_attn=True).bfloat16(), ids(2, 9)
    expected = reference_logits(model, tokens, causal=True)  # eager takes transformers' own upcast path
    apply_alibi(model)
    out = logits(model, tokens)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected.float(), rtol=0.02, atol=0.1)


def test_reordered_and_upcast_attention_keeps_the_bias_in_float32(
    make: Make, ids: Ids, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = make("gpt2", 12, reorder_and_upcast_attn=True).bfloat16(), []
    apply_alibi(model)
    attend = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append((*args, kwargs["attn_mask"]))
        assert not torch.is_autocast_enabled("cpu")
        return attend(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    with torch.autocast("cpu", torch.bfloat16):
        logits(model, ids(2, 9))
    assert {part.dtype for part in calls[0]} == {torch.float32}
    assert calls[0][3][0, 8, 8, 5].item() == pytest.approx(-3 * 2**-0.5, rel=1e-6)


def test_packed_sequences_are_independent(make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2"), ids(1, 9)
    apply_alibi(model)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    out = logits(model, tokens, position_ids=positions, use_cache=False)  # with a cache transformers does not look
    alone = torch.cat([logits(model, tokens[:, :4]), logits(model, tokens[:, 4:])], dim=1)
    torch.testing.assert_close(out, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_gradient_checkpointing_gives_the_same_gradients(family: str, make: Make, ids: Ids) -> None:
    model, tokens = make(family), ids(2, 9)
    apply_alibi(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.train()
    gradients = []
    for use_reentrant in (None, True, False):
        model.zero_grad()
        if use_reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(tokens, labels=tokens).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    frozen = [name for name, p in model.named_parameters() if p.grad is None]
    assert len(frozen) == 1
    assert "wpe" in frozen[0] or "position_embeddings" in frozen[0]
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


@pytest.mark.filterwarnings("error")
def test_compiles_into_one_graph(make: Make, ids: Ids) -> None:
    model, tokens = make("bert"), ids(2, 40)
    apply_alibi(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    padding = torch.ones_like(tokens)
    padding[1, 30:] = 0
    torch.testing.assert_close(
        logits(compiled, tokens, attention_mask=padding), logits(model, tokens, attention_mask=padding)
    )


def test_a_part_of_the_heads_must_say_which(make: Make, ids: Ids) -> None:
    model, tokens = make("gpt2"), ids(2, 9)
    apply_alibi(model)
    attention, embeds = model.transformer.h[0].attn, model.transformer.wte(tokens)
    mask = transformers.masking_utils.create_causal_mask(model.config, embeds, None, None)
    whole = {}
    attention.c_proj.register_forward_pre_hook(lambda module, args: whole.setdefault("heads", args[0]))
    attention(embeds, attention_mask=mask)
    query, key, value = (
        part.view(2, 9, 4, 6).transpose(1, 2)[:, 2:] for part in attention.c_attn(embeds).split(24, dim=2)
    )
    attend = transformers.AttentionInterface()[model.config._attn_implementation]
    message = (
        r"^alibi: GPT2Attention has 2 heads, but the model has slopes for 4. Expected all heads, .* range\(0, 4\).$"
    )
    with pytest.raises(SurgeryError, match=message):
        attend(attention, query, key, value, mask)
    for indices in (range(2, 4), [2, 3]):
        attention.head_indices = indices
        out, _ = attend(attention, query, key, value, mask, scaling=attention.scaling)
        torch.testing.assert_close(out.reshape(2, 9, -1), whole["heads"][..., 12:])
    for wrong in (range(3), [2, 4], [-1, 0]):
        attention.head_indices = wrong
        with pytest.raises(SurgeryError, match=r"head_indices is .* for 2 heads .* Expected 2 indices from 0 to 3."):
            attend(attention, query, key, value, mask)


@pytest.mark.parametrize(
    ("mask", "got"),
    [
        (torch.ones(1, 1, 9, 9, dtype=torch.bool), r"a torch.bool mask of shape \(1, 1, 9, 9\)"),
        (torch.ones(1, 4, 9, 9, dtype=torch.bool), r"a torch.bool mask of shape \(1, 4, 9, 9\)"),
        (torch.zeros(1, 1, 9, 9), r"a torch.float32 mask of shape \(1, 1, 9, 9\)"),
    ],
)
def test_a_ready_made_mask_without_bias_is_refused(mask: Tensor, got: str, make: Make, ids: Ids) -> None:
    model = make("gpt2")
    apply_alibi(model)
    with pytest.raises(
        DataError, match=rf"^alibi: attention got {got}, which holds no bias. Expected .* Pass such a mask"
    ):
        model(ids(2, 9), attention_mask=mask)


def test_a_missing_mask_and_wrong_lengths_are_refused(make: Make, ids: Ids) -> None:
    model = make("gpt2")
    apply_alibi(model)
    with pytest.raises(DataError, match=r"^alibi: attention got no mask, which holds no bias."):
        model.transformer.h[0].attn(torch.zeros(1, 3, 24))
    with pytest.raises(
        DataError, match=r"^alibi: the bias is for 9 queries and 12 keys, but attention got 9 and 9. Expected"
    ):
        model(ids(2, 9), attention_mask=torch.ones(2, 12), use_cache=False)
    model = make("bert")
    apply_alibi(model)
    with pytest.raises(
        DataError, match=r"^alibi: 9 queries from position 0 attend to 12 keys in both directions. Expected"
    ):
        model(ids(2, 9), attention_mask=torch.ones(2, 12))


def test_limits_hold_in_the_forward_pass(make: Make, ids: Ids) -> None:
    model = make("bert")
    apply_alibi(model, max_sequence_length=20, max_bias_bytes=4 * 4 * 20 * 20)
    assert logits(model, ids(8, 20)).isfinite().all()
    with pytest.raises(DataError, match=r"^alibi: a sequence has 21 positions, more than max_sequence_length=20."):
        model(ids(1, 21))
    padding = torch.ones(8, 20)
    padding[0, -1] = 0
    with pytest.raises(
        DataError, match=r"^alibi: the bias for 8 x 4 heads x 20 queries x 20 keys in torch.float32 would take"
    ):
        model(ids(8, 20), attention_mask=padding)
