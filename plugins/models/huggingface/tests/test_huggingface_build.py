"""The model function on models saved here, adapters, and every refusal; nothing asks the network."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Trainer
from kernel_core.errors import ConfigError, OptionError, PluginLoadError
from kernel_core.registry.options import bind_options
from kernel_plugin_huggingface import HuggingFaceModel, huggingface

SIZES = {
    "gpt2": {"vocab_size": 256, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "bert": {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    },
    "t5": {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SIZES["gpt2"] |= TOKENS


def tiny(kind: str, task: Any, **options: Any) -> HuggingFaceModel:
    torch.manual_seed(0)
    return huggingface(kind, task, pretrained=False, config=SIZES[kind], **options)


def tokens(vocab: int = 32) -> torch.Tensor:
    return torch.randint(3, vocab, (4, 8), generator=torch.Generator().manual_seed(1))


def fit(model: Any, batch: Any, **options: Any) -> Trainer:
    trainer = Trainer(
        model=model,
        train_dataloader=[batch],
        max_duration="2ep",
        optimizers=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0),
        device="cpu",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    trainer.close()
    return trainer


@pytest.mark.parametrize(
    ("kind", "task", "class_name", "metrics"),
    [
        ("gpt2", "causal_lm", "GPT2LMHeadModel", ["LanguageCrossEntropy", "LanguagePerplexity"]),
        ("bert", "masked_lm", "BertForMaskedLM", ["LanguageCrossEntropy", "MaskedAccuracy"]),
        ("bert", "sequence_classification", "BertForSequenceClassification", ["MulticlassAccuracy", "CrossEntropy"]),
        ("t5", "seq2seq_lm", "T5ForConditionalGeneration", ["LanguageCrossEntropy", "MaskedAccuracy"]),
    ],
)
def test_a_saved_model_is_built_again_by_the_task_of_its_architecture(
    tmp_path: Path, kind: str, task: str, class_name: str, metrics: list[str]
) -> None:
    model = tiny(kind, task)
    assert type(model.model).__name__ == class_name
    assert list(model.get_metrics(is_train=False)) == metrics
    model.save_pretrained(tmp_path)
    loaded = huggingface(str(tmp_path))
    assert type(loaded.model).__name__ == class_name
    pairs = zip(model.state_dict().items(), loaded.state_dict().values(), strict=True)
    assert all(torch.equal(ours, theirs) for (_, ours), theirs in pairs)
    fresh = huggingface(str(tmp_path), pretrained=False)
    assert type(fresh.model).__name__ == class_name
    assert not torch.equal(next(fresh.parameters()), next(model.parameters()))


def test_default_metrics_work_on_what_evaluation_gives_them() -> None:
    rows = {"input_ids": tokens(), "labels": torch.tensor([0, 1, 1, 0])}
    for options, labels in (
        ({"num_labels": 2}, rows["labels"]),
        ({"num_labels": 1}, torch.rand(4)),
    ):
        model = tiny("bert", "sequence_classification", **options).eval()
        batch = {**rows, "labels": labels}
        with Trainer(model=model, eval_dataloader=[batch], device="cpu", progress_bar=False) as trainer:
            trainer.eval()
            values = trainer.state.eval_metric_values
        scores = model.eval_forward(batch)
        if options["num_labels"] == 1:
            torch.testing.assert_close(values["eval/MeanSquaredError"], ((scores - labels) ** 2).mean())
        else:
            torch.testing.assert_close(values["eval/MulticlassAccuracy"], (scores.argmax(1) == labels).float().mean())
            torch.testing.assert_close(values["eval/CrossEntropy"], torch.nn.functional.cross_entropy(scores, labels))
    several = {**SIZES["bert"], "problem_type": "multi_label_classification"}
    model = huggingface("bert", "sequence_classification", False, config=several, num_labels=3)
    assert list(model.get_metrics(False)) == ["MultilabelAccuracy"]


def test_a_head_for_other_labels_is_drawn_anew_and_the_rest_is_kept(tmp_path: Path) -> None:
    model = tiny("bert", "sequence_classification", num_labels=2)
    model.save_pretrained(tmp_path)
    other = huggingface(str(tmp_path), num_labels=5)
    assert other.model.classifier.out_features == 5
    assert torch.equal(other.model.bert.pooler.dense.weight, model.model.bert.pooler.dense.weight)


def test_weights_are_single_precision_unless_asked_otherwise(tmp_path: Path) -> None:
    model = tiny("gpt2", "causal_lm", dtype="bfloat16")
    assert model.model.dtype is torch.bfloat16
    model.save_pretrained(tmp_path)
    assert huggingface(str(tmp_path)).model.dtype is torch.float32
    assert huggingface(str(tmp_path), dtype="auto").model.dtype is torch.bfloat16
    assert huggingface(str(tmp_path), attn_implementation="eager").config._attn_implementation == "eager"


def test_entries_of_the_configuration_are_set_and_unknown_ones_refused(tmp_path: Path) -> None:
    tiny("gpt2", "causal_lm").save_pretrained(tmp_path)
    assert huggingface(str(tmp_path), config={"resid_pdrop": 0.25}).model.transformer.h[0].mlp.dropout.p == 0.25
    for model in (str(tmp_path), "gpt2"):
        with pytest.raises(OptionError, match=r"huggingface\.config\.resid_drop: a GPT2Config has no.*'resid_pdrop'"):
            huggingface(model, "causal_lm", pretrained=False, config={"resid_drop": 0.1})


def test_a_byte_model_of_the_shape_of_stdlib_learns_from_its_batches(tmp_path: Path) -> None:
    stdlib = pytest.importorskip("kernel_plugin_stdlib")
    tiny("gpt2", "causal_lm").save_pretrained(tmp_path)
    text = torch.tensor(list(b"import torch, math\n" * 4), dtype=torch.uint8)
    batch = stdlib.collate_windows(list(text.view(2, -1)[:, :32]))
    model = huggingface(str(tmp_path))
    losses = [float(model.loss(model(batch), batch).detach())]
    trainer = fit(model, batch, device_train_microbatch_size=1)
    losses.append(float(trainer.state.loss))
    unlabelled = huggingface(str(tmp_path))
    fit(unlabelled, {"input_ids": batch["input_ids"]}, device_train_microbatch_size=1)
    assert losses[1] < losses[0]
    assert torch.equal(unlabelled.model.lm_head.weight, model.model.lm_head.weight)


def test_what_cannot_be_built_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    missing = str(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"huggingface\.model: there is no folder '.*missing'.*Check the path"):
        huggingface(missing)
    with pytest.raises(ConfigError, match=r"huggingface\.model: cannot read the configuration of 'no-such/model'"):
        huggingface("no-such/model")
    with pytest.raises(ConfigError, match=r"cannot read the configuration of '.*': Unrecognized model in"):
        huggingface(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **SIZES["gpt2"]}))
    with pytest.raises(
        OptionError, match=r"huggingface\.task: got 'auto', and the configuration names no architecture"
    ):
        huggingface(str(tmp_path))
    with pytest.raises(ConfigError, match=r"huggingface\.model: cannot make AutoModelForCausalLM of"):
        huggingface(str(tmp_path), "causal_lm")
    with pytest.raises(ConfigError, match=r"huggingface\.model: cannot make AutoModelForSeq2SeqLM of"):
        huggingface(str(tmp_path), "seq2seq_lm", pretrained=False)
    with pytest.raises(OptionError, match=r"huggingface\.task: got 'causal', expected auto,.*'causal_lm'"):
        huggingface(str(tmp_path), "causal")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"huggingface\.num_labels: got 3 for the task causal_lm"):
        huggingface(str(tmp_path), "causal_lm", num_labels=3)
    with pytest.raises(ConfigError, match=r"huggingface\.tokenizer: cannot read 'no-such/words'"):
        huggingface(str(tmp_path), "causal_lm", pretrained=False, tokenizer="no-such/words")
    with pytest.raises(ConfigError, match=r"huggingface: there is no folder '.*missing'"):
        HuggingFaceModel.from_pretrained(missing)


def test_options_are_checked_against_the_annotations() -> None:
    for options, message in (
        ({"task": "translation"}, r"model\.task: got 'translation'"),
        ({"num_labels": 0}, r"model\.num_labels: got 0"),
        ({"config": 3}, r"model\.config: got 3"),
        ({"pre_trained": True}, r"model\.pre_trained: unknown option\. Did you mean 'pretrained'"),
    ):
        with pytest.raises(OptionError, match=message):
            bind_options(huggingface, "model", (), {"model": "gpt2", **options})
    bound = bind_options(huggingface, "model", (), {"model": "gpt2", "config": {"n_layer": 1}, "num_labels": 2})
    assert bound.arguments["config"] == {"n_layer": 1}


LORA = {"r": 2, "target_modules": ["c_attn"], "init_lora_weights": True}


def test_lora_trains_its_adapters_and_nothing_else() -> None:
    pytest.importorskip("peft")
    model = tiny("gpt2", "causal_lm", peft_config=LORA)
    assert model.shift_labels
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = fit(model, {"input_ids": tokens(256)}, device_train_microbatch_size=2)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert changed == {name for name in before if "lora_" in name}
    assert changed == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    (group,) = trainer.state.optimizers[0].param_groups
    assert len(group["params"]) == len(changed)


def trained_lora(folder: Path, **options: Any) -> HuggingFaceModel:
    tiny("gpt2", "causal_lm").save_pretrained(folder)
    model = huggingface(str(folder), peft_config=LORA, **options)
    fit(model, {"input_ids": tokens(256)})
    return model.eval()


def test_adapters_are_saved_alone_and_loaded_onto_the_model_they_name(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, batch = trained_lora(tmp_path / "base"), {"input_ids": tokens(256)}
    model.save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters/model.safetensors").exists()
    assert (tmp_path / "adapters/adapter_model.safetensors").exists()
    loaded = HuggingFaceModel.from_pretrained(tmp_path / "adapters", use_logits=True).eval()
    scores = model.eval_forward(batch)
    assert torch.equal(loaded.eval_forward(batch), scores)
    assert not torch.equal(huggingface(str(tmp_path / "base")).eval().eval_forward(batch), scores)
    assert all("lora_" in name for name, parameter in loaded.named_parameters() if parameter.requires_grad)
    assert any(parameter.requires_grad for parameter in loaded.parameters())


def test_with_everything_saved_the_folder_holds_model_and_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model, batch = trained_lora(tmp_path / "base", should_save_peft_only=False), {"input_ids": tokens(256)}
    model.save_pretrained(tmp_path / "all")
    assert model.using_peft  # saving took no adapter away
    loaded = HuggingFaceModel.from_pretrained(tmp_path / "all", use_logits=True).eval()
    assert torch.equal(loaded.eval_forward(batch), model.eval_forward(batch))
    base = huggingface(str(tmp_path / "base")).eval().eval_forward(batch)
    assert torch.equal(huggingface(str(tmp_path / "all")).eval().eval_forward(batch), base)


def test_adapters_that_name_no_model_need_one(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = tiny("gpt2", "causal_lm", peft_config=LORA)
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"adapters without the name of the model.*base_model="):
        HuggingFaceModel.from_pretrained(tmp_path)
    base = tiny("gpt2", "causal_lm").model
    loaded = HuggingFaceModel.from_pretrained(tmp_path, base_model=base, use_logits=True).eval()
    batch = {"input_ids": tokens(256)}
    assert torch.equal(loaded.eval_forward(batch), model.eval().eval_forward(batch))
    with pytest.raises(ConfigError, match=r"cannot read the configuration.*HuggingFaceModel\.from_pretrained"):
        huggingface(str(tmp_path))


def test_adapters_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    for config, message in (
        ({"rank": 2}, r"huggingface\.peft_config: got \{'rank': 2\}: .*unexpected keyword"),
        ({"target_modules": ["no_such_layer"]}, r"huggingface\.peft_config: .*no_such_layer"),
        (peft.PromptTuningConfig(num_virtual_tokens=2), r"huggingface\.peft_config: .*LoRA is the only kind"),
    ):
        with pytest.raises(OptionError, match=message):
            HuggingFaceModel(tiny("gpt2", "causal_lm").model, peft_config=config)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PluginLoadError, match=r"adapters need the module 'peft'.*kernel-plugin-huggingface\[peft\]"):
        HuggingFaceModel(tiny("gpt2", "causal_lm").model, peft_config={})
