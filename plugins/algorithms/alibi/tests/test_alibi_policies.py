"""What apply_alibi changes, what it leaves alone, and what it refuses."""

import copy
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from kernel_core.errors import OptionError, PluginLoadError, SurgeryError
from kernel_plugin_alibi import (
    Alibi,
    AlibiBias,
    AlibiRequest,
    Change,
    ZeroPositionEmbedding,
    apply_alibi,
    builtin_policies,
    transformers_policy,
)
from kernel_plugin_alibi.surgery import merge_policies
from torch import Tensor, nn

Make = Callable[..., Any]
Ids = Callable[..., Tensor]
TABLES = {
    "gpt2": "transformer.wpe",
    "bert": "bert.embeddings.position_embeddings",
    "roberta": "roberta.embeddings.position_embeddings",
}


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens).logits


@pytest.mark.parametrize("family", TABLES)
def test_the_position_table_is_zeroed_and_frozen_in_place(family: str, make: Make) -> None:
    model = make(family)
    names, table = list(model.state_dict()), model.get_submodule(TABLES[family])
    weight = table.weight
    changes = apply_alibi(model)
    assert list(model.state_dict()) == names
    new = model.get_submodule(TABLES[family])
    assert isinstance(new, ZeroPositionEmbedding)
    assert new.weight is weight
    assert not new.training
    assert not weight.requires_grad
    assert not weight.any()
    assert [change.path for change in changes] == [TABLES[family], TABLES[family].split(".")[0]]
    assert changes[0].what == "position embeddings zeroed and frozen"
    assert changes[1].what == "attention with linear biases for 4 heads"
    assert (changes[1].old, changes[1].new) == ("sdpa", "kernel_plugin_alibi")


@pytest.mark.parametrize("family", TABLES)
def test_a_second_time_changes_nothing(family: str, make: Make, ids: Ids) -> None:
    model = make(family)
    apply_alibi(model, max_sequence_length=40)
    before = logits(model, ids(2, 20))
    assert apply_alibi(model, max_sequence_length=10) == []
    assert torch.equal(logits(model, ids(2, 20)), before)


def test_no_match_no_change() -> None:
    assert apply_alibi(nn.Linear(2, 2)) == []
    with pytest.raises(
        OptionError, match=r"^alibi.max_sequence_length: got 0. Expected a whole number of at least 1.$"
    ):
        apply_alibi(nn.Linear(2, 2), max_sequence_length=0)


def test_models_that_share_a_config_do_not_interfere(make: Make, ids: Ids) -> None:
    first = make("gpt2")
    shared = first.config
    second, third = (transformers.GPT2LMHeadModel(shared).eval() for _ in range(2))
    for other in (second, third):
        other.load_state_dict(first.state_dict())
    plain = logits(third, ids(2, 12))
    apply_alibi(first, max_sequence_length=12)
    apply_alibi(second)
    many_heads = make("gpt2", num_heads=12)
    apply_alibi(many_heads)
    assert torch.equal(logits(third, ids(2, 12)), plain)
    assert torch.equal(logits(first, ids(2, 12)), logits(second, ids(2, 12)))
    assert logits(second, ids(2, 20)).isfinite().all()
    assert logits(many_heads, ids(2, 20)).isfinite().all()
    with pytest.raises(ValueError, match="more than max_sequence_length=12"):
        first(ids(2, 20))
    assert third.config is shared
    assert shared._attn_implementation == "sdpa"
    assert first.config is first.transformer.config is first.transformer.h[1].attn.config


def test_two_models_of_one_config_in_one_module_are_both_changed(make: Make, ids: Ids) -> None:
    first = make("gpt2")
    second = transformers.GPT2LMHeadModel(first.config).eval()
    second.load_state_dict(first.state_dict())
    changes = apply_alibi(nn.ModuleDict({"student": first, "teacher": second}))
    assert [change.path for change in changes] == [
        "student.transformer.wpe",
        "student.transformer",
        "teacher.transformer.wpe",
        "teacher.transformer",
    ]
    assert first.config is not second.config
    assert torch.equal(logits(first, ids(2, 20)), logits(second, ids(2, 20)))


@pytest.mark.parametrize("family", TABLES)
def test_copies_pickles_and_state_dicts_keep_the_function(family: str, make: Make, ids: Ids) -> None:
    model = make(family)
    apply_alibi(model)
    expected = logits(model, ids(2, 20))
    assert torch.equal(logits(copy.deepcopy(model), ids(2, 20)), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model)), ids(2, 20)), expected)
    other = make(family)
    other.load_state_dict(model.state_dict())
    apply_alibi(other)
    assert torch.equal(logits(other, ids(2, 20)), expected)


def test_a_checkpoint_from_before_the_change_may_be_loaded_after_it(make: Make, ids: Ids) -> None:
    plain, early, late = make("gpt2"), make("gpt2"), make("gpt2")
    early.load_state_dict(plain.state_dict())
    apply_alibi(early)
    apply_alibi(late)
    late.load_state_dict(plain.state_dict())
    assert late.transformer.wpe.weight.any()  # never read
    assert torch.equal(logits(late, ids(2, 20)), logits(early, ids(2, 20)))


def test_save_pretrained_and_back(make: Make, ids: Ids, tmp_path: Path) -> None:
    model = make("gpt2")
    apply_alibi(model, max_sequence_length=64)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["kernel_plugin_alibi"] == {"max_sequence_length": 64, "max_bias_bytes": 2 * 1024**3}
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    apply_alibi(loaded, max_sequence_length=64)
    assert torch.equal(logits(loaded, ids(2, 40)), logits(model, ids(2, 40)))


def test_selecting_the_attention_by_hand_says_what_to_do(make: Make, ids: Ids) -> None:
    apply_alibi(make("gpt2"))  # registers it
    model = make("gpt2")
    model.set_attn_implementation("kernel_plugin_alibi")
    with pytest.raises(SurgeryError, match=r"^alibi: a GPT2Config selects .* holds no settings .* Call apply_alibi"):
        model(ids(1, 4))


def test_training_updates_everything_but_the_table(make: Make, ids: Ids) -> None:
    model = make("gpt2").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    apply_alibi(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    model(ids(2, 20), labels=ids(2, 20)).loss.backward()
    optimizer.step()
    assert [name for name, value in model.named_parameters() if torch.equal(value, before[name])] == [
        "transformer.wpe.weight"
    ]


@pytest.mark.parametrize("flag", ["is_encoder_decoder", "add_cross_attention"])
def test_cross_attention_is_refused(flag: str, make: Make) -> None:
    model = make("gpt2")
    setattr(model.config, flag, True)
    with pytest.raises(
        SurgeryError, match=rf"^alibi: GPT2Model has config.{flag}=True. Expected self-attention only: .* Use"
    ):
        apply_alibi(model)
    assert model.transformer.wpe.weight.any()
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("path", "found"), [("wpe", "nothing"), ("drop", "a Dropout"), ("a.b", "nothing")])
def test_a_missing_position_embedding_is_refused(path: str, found: str, make: Make) -> None:
    model = make("gpt2")
    if path == "wpe":
        del model.transformer.wpe
    message = (
        rf"^alibi: GPT2Model has {found} at '{path}'. Expected its learned position embedding, an nn.Embedding. Give"
    )
    with pytest.raises(SurgeryError, match=message):
        apply_alibi(model, policies={transformers.GPT2Model: transformers_policy(path)})
    assert model.config._attn_implementation == "sdpa"


def test_attention_outside_the_registry_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt2")
    monkeypatch.setattr(type(model.transformer), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(SurgeryError, match=r"^alibi: GPT2Model kept the attention 'sdpa'. Expected .* Write a policy"):
        apply_alibi(model)


def test_another_transformers_class_by_the_ready_made_policy(make: Make, ids: Ids) -> None:
    model = transformers.XLMRobertaForMaskedLM(
        transformers.XLMRobertaConfig(**make("roberta").config.to_diff_dict())
    ).eval()
    roberta = make("roberta")
    model.load_state_dict(
        {f"roberta{name[7:]}" if name[:8] == "roberta." else name: v for name, v in roberta.state_dict().items()}
    )
    policy = transformers_policy("embeddings.position_embeddings", position_ids_in="embeddings")
    assert apply_alibi(model, policies={transformers.XLMRobertaModel: policy})
    apply_alibi(roberta)
    torch.testing.assert_close(logits(model, ids(2, 40)), logits(roberta, ids(2, 40)))


class ToyAttention(nn.Module):
    """Causal attention that has never heard of transformers."""

    def __init__(self, width: int = 12, num_heads: int = 3) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.project = nn.Linear(width, 3 * width)
        self.positions = nn.Parameter(torch.randn(8, width))
        self.bias: AlibiBias | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            x = x + self.positions[: x.shape[1]]
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in self.project(x).chunk(3, dim=2)
        )
        mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        if self.bias is not None:
            mask = mask + self.bias(x.shape[1], x.shape[1], dtype=x.dtype, device=x.device)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


class ToyVariant(ToyAttention):
    pass


def toy_policy(module: nn.Module, request: AlibiRequest) -> list[Change]:
    assert isinstance(module, ToyAttention)
    module.bias = request.bias(module.num_heads)
    module.positions.requires_grad_(False)
    return [Change("positions", "Parameter", "unused", "position table no longer read")]


@torch.no_grad()
def test_a_class_from_elsewhere_by_a_policy_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(ToyAttention(), nn.Sequential(ToyVariant()))
    changes = apply_alibi(model, 16, {ToyAttention: toy_policy})
    assert [change.path for change in changes] == ["0.positions", "1.0.positions"]
    x, attention = torch.randn(2, 12, 12), model[0]
    query, key, value = attention.project(x).chunk(3, dim=2)
    for head, slope in enumerate([1 / 16, 1 / 256, 1 / 4]):
        part = slice(4 * head, 4 * head + 4)
        for i in (0, 5, 11):
            scores = [float(query[1, i, part] @ key[1, j, part]) / 2 - slope * (i - j) for j in range(i + 1)]
            expected = torch.tensor(scores).softmax(0) @ value[1, : i + 1, part]
            torch.testing.assert_close(attention(x)[1, i, part], expected)
    with pytest.raises(ValueError, match="a sequence has 17 positions, more than max_sequence_length=16"):
        model(torch.randn(1, 17, 12))


def test_the_exact_class_beats_its_base_and_a_match_is_not_searched() -> None:
    def mark(name: str) -> Callable[[nn.Module, AlibiRequest], list[Change]]:
        return lambda module, request: [Change("", "", name, "")]

    model = nn.ModuleDict({"b": nn.Sequential(ToyVariant()), "a": ToyVariant(), "c": ToyAttention()})
    model["again"] = nn.ModuleList([model["a"]])
    policies = {ToyAttention: mark("base"), ToyVariant: mark("exact"), nn.Sequential: mark("outer")}
    found = [(change.path, change.new) for change in apply_alibi(model, policies=policies)]
    assert found == [("b", "outer"), ("a", "exact"), ("c", "base")]


def test_later_answers_win_and_clashes_are_named() -> None:
    def other(module: nn.Module, request: AlibiRequest) -> list[Change]:
        return []

    merged, clashes = merge_policies([{ToyAttention: toy_policy, transformers.BertModel: other}, {ToyAttention: other}])
    assert merged[ToyAttention] is other
    assert merged[transformers.BertModel] is other
    assert merged.keys() == builtin_policies().keys() | {ToyAttention}
    assert clashes == ["ToyAttention"]


@pytest.mark.parametrize(
    "answer", [[toy_policy], {"ToyAttention": toy_policy}, {ToyAttention: "policy"}, {int: toy_policy}]
)
def test_an_answer_that_is_no_mapping_of_policies_is_refused(answer: Any) -> None:
    with pytest.raises(SurgeryError, match=r"^alibi.alibi_attention_policies: got .* Expected a mapping .* Return"):
        merge_policies([answer])


@pytest.mark.parametrize(("version", "found"), [(None, "is not installed"), ("4.57.1", "is 4.57.1")])
def test_transformers_missing_or_too_old(version: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr(transformers, "__version__", version)
    message = rf"^alibi: transformers {found}. Expected version 5 or newer, .* Run: pip install 'transformers>=5'$"
    for call in (Alibi, builtin_policies, lambda: apply_alibi(nn.Linear(2, 2))):
        with pytest.raises(PluginLoadError, match=message):
            call()
    assert len(apply_alibi(nn.Sequential(ToyAttention()), policies={ToyAttention: toy_policy})) == 1


def test_the_package_imports_without_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; import kernel_plugin_alibi as k; print(k.alibi_slopes(2))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "0.0625" in done.stdout
