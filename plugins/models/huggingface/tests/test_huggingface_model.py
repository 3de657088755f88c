"""Against losses, gradients and greedy decoding written out by hand on tiny models, in double precision where it helps."""

import copy
import importlib
import importlib.util
import subprocess
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Trainer, hookimpl
from kernel_core.errors import DataError, OptionError, PluginLoadError
from kernel_plugin_huggingface import HuggingFaceModel, count_labels, labels_of, next_token_labels
from kernel_plugin_huggingface.libraries import prepare_imports
from torch import Tensor, nn
from torch.nn import functional as F

prepare_imports()

from transformers import (  # noqa: E402 - it imports torchvision, which may need help first
    BartConfig,
    BartForCausalLM,
    BatchEncoding,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

VOCAB = 24


def gpt2(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **dropout, "bos_token_id": 0, "eos_token_id": 0, **options}))


def bert(cls: Any = BertForMaskedLM, **options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return cls(BertConfig(**{**sizes, **dropout, "intermediate_size": 16, **options}))


def t5(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(**{**sizes, "dropout_rate": 0.0, "decoder_start_token_id": 0, **options})
    )


def ragged(rows: int = 6, length: int = 8) -> dict[str, Tensor]:
    """Rows with 1, 2, 3, … labels that count; the third pair of rows has none."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (rows, length), generator=generator)
    labels = tokens.clone()
    for row in range(rows):
        labels[row, 2 + row :] = -100
    labels[4:6] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def mean_by_hand(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the labels that count, from scores computed without labels."""
    labels, inputs = batch["labels"], {key: value for key, value in batch.items() if key != "labels"}
    if isinstance(model, T5ForConditionalGeneration):
        start = torch.zeros_like(labels[:, :1])
        inputs["decoder_input_ids"] = torch.cat([start, labels[:, :-1].clamp_min(0)], dim=1)
    scores = model(**inputs).logits
    if isinstance(model, GPT2LMHeadModel):
        scores, labels = scores[:, :-1], labels[:, 1:]
    picked = scores.log_softmax(-1).gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return -picked[labels != -100].sum() / (labels != -100).sum()


def fit(model: Any, batches: list[Any], size: int | None = None, lr: float = 0.5, **options: Any) -> Trainer:
    trainer = Trainer(
        model=model,
        train_dataloader=batches,
        max_duration=f"{len(batches)}ba",
        optimizers=torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=lr),
        device_train_microbatch_size=size,
        device="cpu",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    trainer.close()
    return trainer


# GPT-2's loss rounds its scores to single precision
@pytest.mark.parametrize(("make", "tolerance"), [(gpt2, 2e-6), (bert, 1e-13), (t5, 1e-13)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_microbatches_with_ragged_labels_give_the_step_of_the_whole_batch(
    make: Any, tolerance: float, size: int
) -> None:
    by_hand, batch = make().double(), ragged()
    loss = mean_by_hand(by_hand, batch)
    loss.backward()
    torch.optim.SGD(by_hand.parameters(), lr=0.5).step()
    model = HuggingFaceModel(make().double())
    trainer = fit(model, [batch], size)
    torch.testing.assert_close(trainer.state.loss.double(), loss.detach(), rtol=0, atol=tolerance * 3)
    for (name, ours), theirs in zip(model.model.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=name)


def test_a_mean_of_microbatch_means_would_be_another_step() -> None:
    class Unweighted(HuggingFaceModel):
        def loss_weight(self, batch: Any) -> None:
            return None

    exact, wrong = HuggingFaceModel(gpt2()), Unweighted(gpt2())
    fit(exact, [ragged()], 2)
    fit(wrong, [ragged()], 2)
    assert (exact.model.lm_head.weight - wrong.model.lm_head.weight).abs().max() > 1e-3


@pytest.mark.parametrize("make", [gpt2, bert, t5])
def test_a_microbatch_without_labels_that_count_is_a_zero_with_zero_gradients(make: Any) -> None:
    model, batch = HuggingFaceModel(make()), ragged()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    if make is gpt2:
        batch["labels"][:, 0] = 5  # the first label of a row is never predicted
    outputs = model(batch)
    assert outputs["loss"].isnan()
    loss = model.loss(outputs, batch)
    assert loss == 0
    assert model.loss_weight(batch) == 0
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_a_batch_without_labels_that_count_changes_nothing() -> None:
    model, before, batch = HuggingFaceModel(gpt2()), gpt2(), ragged()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    for size in (None, 2):
        trainer = fit(model, [batch], size)
        assert trainer.state.loss == 0
        assert all(torch.equal(ours, old) for ours, old in zip(model.parameters(), before.parameters(), strict=True))


def test_labels_are_counted_where_the_loss_counts_them() -> None:
    labels = torch.tensor([[4, 5, -100], [6, -100, 7]])
    assert count_labels(labels) == 4
    assert count_labels(labels, shifted=True) == 2
    assert count_labels(torch.tensor([1, 0, 2]), shifted=True) == 3
    assert count_labels(torch.rand(3, 5)) == 3
    assert torch.equal(next_token_labels(labels), torch.tensor([[5, -100, -100], [-100, 7, -100]]))
    assert torch.equal(labels, torch.tensor([[4, 5, -100], [6, -100, 7]]))


def test_a_causal_model_learns_its_unmasked_tokens_where_labels_are_missing() -> None:
    batch = {"input_ids": torch.tensor([[3, 4, 5], [6, 7, 0]]), "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]])}
    assert torch.equal(labels_of(batch, causal=True), torch.tensor([[3, 4, 5], [6, 7, -100]]))  # type: ignore[arg-type]
    assert labels_of(batch) is None
    model = HuggingFaceModel(gpt2())
    assert model.loss_weight(batch) == 3
    expected = mean_by_hand(model.model, {**batch, "labels": torch.tensor([[3, 4, 5], [6, 7, -100]])})
    torch.testing.assert_close(model.loss(model(batch), batch), expected)
    assert "labels" not in batch


def test_whether_labels_are_shifted_follows_the_loss_of_the_class() -> None:
    assert HuggingFaceModel(gpt2()).shift_labels
    assert not HuggingFaceModel(bert()).shift_labels
    assert not HuggingFaceModel(t5()).shift_labels
    assert not HuggingFaceModel(gpt2(), shift_labels=False).shift_labels
    torch.manual_seed(0)
    bart = BartConfig(
        vocab_size=VOCAB, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8, pad_token_id=1
    )
    model, batch = HuggingFaceModel(BartForCausalLM(bart)), ragged()
    assert not model.shift_labels
    with torch.no_grad():
        model.eval()
        scores = model.model(input_ids=batch["input_ids"]).logits
        torch.testing.assert_close(
            model.loss(model(batch), batch), F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())
        )


def test_a_sequence_classifier_weighs_rows_and_gets_scores_and_classes() -> None:
    model = HuggingFaceModel(bert(BertForSequenceClassification, num_labels=3), use_logits=True)
    batch = {"input_ids": ragged()["input_ids"], "labels": torch.tensor([0, 1, 2, 0, 1, 2])}
    assert model.loss_weight(batch) == 6
    scores = model.eval_forward(batch)
    assert scores.shape == (6, 3)
    torch.testing.assert_close(model.loss(model(batch), batch), F.cross_entropy(scores, batch["labels"]))
    single = HuggingFaceModel(bert(BertForSequenceClassification, num_labels=1), use_logits=True)
    assert single.eval_forward(batch).shape == (6,)
    assert single.loss_weight({**batch, "labels": torch.rand(6)}) == 6


def test_what_the_model_does_not_take_stays_out() -> None:
    model, batch = HuggingFaceModel(gpt2()), ragged()
    extra = {**batch, "sample_id": [1, 2, 3, 4, 5, 6], "num_items_in_batch": torch.tensor(1000), "mode": "train"}
    outputs = model(extra)
    torch.testing.assert_close(model.loss(outputs, extra), mean_by_hand(model.model, batch))
    assert outputs.get("past_key_values") is None


def test_batches_of_other_types_are_refused() -> None:
    model = HuggingFaceModel(gpt2())
    with pytest.raises(DataError, match=r"huggingface: got a batch of type tuple\. Expected a mapping"):
        model((torch.zeros(1, 2), torch.zeros(1)))
    masked = HuggingFaceModel(bert())
    batch = {"input_ids": torch.tensor([[3, 4]])}
    with pytest.raises(DataError, match=r"BertForMaskedLM returned no loss for a batch of input_ids\. .*Add 'labels'"):
        masked.loss(masked(batch), batch)


@pytest.mark.parametrize("wrap", [BatchEncoding, UserDict])
def test_other_mappings_train_as_a_dict_does(wrap: Any) -> None:
    plain, wrapped = HuggingFaceModel(gpt2()), HuggingFaceModel(gpt2())
    fit(plain, [ragged()], 2)
    fit(wrapped, [wrap(ragged())], 2)
    assert torch.equal(plain.model.lm_head.weight, wrapped.model.lm_head.weight)


def test_evaluation_through_the_trainer_measures_the_mean_over_all_labels() -> None:
    from kernel_plugin_huggingface import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy

    metrics = [LanguageCrossEntropy(), LanguagePerplexity(), MaskedAccuracy()]
    for make in (gpt2, t5):
        model, batch = HuggingFaceModel(make(), use_logits=True, metrics=metrics), ragged()
        model.eval()
        before = copy.deepcopy(batch)
        batches = [
            {key: value[rows] for key, value in batch.items()} for rows in (slice(0, 4), slice(4, 5), slice(5, 6))
        ]
        with Trainer(model=model, eval_dataloader=batches, device="cpu", progress_bar=False) as trainer:
            trainer.eval()
            values = trainer.state.eval_metric_values
        with torch.no_grad():
            expected = mean_by_hand(model.model, before)
        torch.testing.assert_close(values["eval/LanguageCrossEntropy"], expected)
        torch.testing.assert_close(values["eval/LanguagePerplexity"], expected.exp())
        assert 0 <= values["eval/MaskedAccuracy"] <= 1
        assert batches[0].keys() == before.keys()
        assert all(torch.equal(batches[0][key], before[key][:4]) for key in before)


def test_metrics_of_training_see_the_same_scores_and_labels() -> None:
    from kernel_plugin_huggingface import LanguageCrossEntropy

    model = HuggingFaceModel(gpt2(), use_logits=True, metrics=[LanguageCrossEntropy()])
    expected = mean_by_hand(model.model, ragged()).detach()
    trainer = fit(model, [ragged()], 2, lr=0.0)
    torch.testing.assert_close(trainer.state.train_metric_values["LanguageCrossEntropy"], expected)


def test_without_use_logits_metrics_get_the_whole_output() -> None:
    from kernel_plugin_huggingface import LanguageCrossEntropy

    model, batch = HuggingFaceModel(gpt2(), eval_metrics={"ce": LanguageCrossEntropy()}), ragged()
    outputs = model.eval_forward(batch)
    torch.testing.assert_close(outputs["loss"], mean_by_hand(model.model, batch))
    assert model.eval_forward(batch, outputs) is outputs
    metric = model.get_metrics(is_train=False)["ce"]
    model.update_metric(batch, outputs, metric)
    torch.testing.assert_close(metric.compute(), outputs["loss"].detach())
    assert model.get_metrics(is_train=True) == {}
    asked = model.eval_forward({**batch, "mode": "icl_task"})
    torch.testing.assert_close(asked, outputs["logits"])


def test_metrics_are_named_by_class_and_one_name_is_not_given_twice() -> None:
    from kernel_plugin_huggingface import MaskedAccuracy

    model = HuggingFaceModel(gpt2(), metrics=[MaskedAccuracy()])
    assert list(model.get_metrics(True)) == list(model.get_metrics(False)) == ["MaskedAccuracy"]
    assert model.get_metrics(True)["MaskedAccuracy"] is not model.get_metrics(False)["MaskedAccuracy"]
    with pytest.raises(OptionError, match=r"huggingface\.metrics: got two metrics of one class among MaskedAccuracy"):
        HuggingFaceModel(gpt2(), metrics=[MaskedAccuracy(), MaskedAccuracy(ignore_index=0)])


def words(num: int = VOCAB) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1} | {f"w{i}": i for i in range(2, num)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")


class Texts:
    """A metric that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def update(self, outputs: list[str], labels: list[str]) -> None:
        self.seen += zip(outputs, labels, strict=True)

    def compute(self) -> float:
        return float(len(self.seen))

    def reset(self) -> None:
        self.seen = []


@pytest.mark.parametrize("make", [gpt2, t5])
def test_evaluation_in_mode_generate_gives_the_greedy_continuation_as_text(make: Any) -> None:
    model = HuggingFaceModel(make(), tokenizer=words(), eval_metrics={"texts": Texts()})
    model.model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, 16))  # tied, it says the last token for ever
    model.model.generation_config.eos_token_id = None  # three tokens, whatever they are
    prompt = torch.tensor([[5, 9, 3], [7, 2, 2]])
    batch = {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "labels": ["one", "two"],
        "mode": "generate",
        "generation_kwargs": {"max_new_tokens": 3, "do_sample": False},
    }
    with Trainer(model=model, eval_dataloader=[batch], device="cpu", progress_bar=False) as trainer:
        trainer.eval()
        seen = trainer.state.eval_metrics["eval"]["texts"].seen
    tokens = prompt if make is gpt2 else torch.zeros(2, 1, dtype=torch.long)
    with torch.no_grad():
        for _ in range(3):
            inputs = {"input_ids": tokens} if make is gpt2 else {"input_ids": prompt, "decoder_input_ids": tokens}
            tokens = torch.cat([tokens, model.model(**inputs).logits[:, -1:].argmax(-1)], dim=1)
    expected = [" ".join(f"w{i}" for i in row if i > 1) for row in tokens[:, -3:].tolist()]
    assert seen == list(zip(expected, ["one", "two"], strict=True))
    assert all(expected)


def test_generating_text_needs_a_tokenizer() -> None:
    with pytest.raises(OptionError, match=r"huggingface\.tokenizer: got None, and a batch asks for mode 'generate'"):
        HuggingFaceModel(gpt2()).eval_forward({"input_ids": torch.tensor([[3]]), "mode": "generate"})


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused_or_fitted() -> None:
    with pytest.raises(
        OptionError, match=r"it has 30 tokens and the model has embeddings for 24.*allow_embedding_resi"
    ):
        HuggingFaceModel(gpt2(), tokenizer=words(30))
    model = HuggingFaceModel(gpt2(), tokenizer=words(30), allow_embedding_resizing=True)
    assert model.model.get_input_embeddings().num_embeddings == model.config.vocab_size == 30
    assert HuggingFaceModel(gpt2(), tokenizer=words(20)).config.vocab_size == VOCAB


class Scale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class NoNorm(Algorithm):
    """Replace every layer norm."""

    name = "no_norm"

    @hookimpl
    def module_replacements(self) -> Any:
        return {nn.LayerNorm: lambda module, path: Scale()}


def test_module_surgery_reaches_into_the_wrapped_model() -> None:
    model = HuggingFaceModel(gpt2())
    trainer = fit(model, [ragged()], algorithms=[NoNorm()])
    assert isinstance(model.model.transformer.h[1].ln_2, Scale)
    assert "model.transformer.ln_f" in {change.path for change in trainer.surgery_report.changes}


def test_alibi_changes_the_wrapped_model() -> None:
    pytest.importorskip("kernel_plugin_alibi")
    model = HuggingFaceModel(gpt2())
    fit(model, [ragged()], algorithms=[("alibi", {"max_sequence_length": 64})])
    longer = torch.randint(3, VOCAB, (1, 40))
    with torch.no_grad():  # more positions than GPT-2 had embeddings for
        assert model({"input_ids": longer})["logits"].shape == (1, 40, VOCAB)


@pytest.fixture
def no_torchvision_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a torchvision that does not fit torch, and without the package that mends it."""

    def import_module(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("kernel") else object())
    monkeypatch.setattr(importlib, "import_module", import_module)


@pytest.mark.usefixtures("no_torchvision_plugin")
def test_a_torchvision_that_does_not_fit_is_named_as_the_cause() -> None:
    with pytest.raises(PluginLoadError, match=r"transformers imports torchvision.*Install kernel-plugin-torchvision"):
        prepare_imports()


def test_importing_the_package_imports_no_heavy_library() -> None:
    code = """
import sys, kernel_plugin_huggingface as package
from kernel_core import TrainableModel
assert issubclass(package.HuggingFaceModel, TrainableModel)
print(sorted({"transformers", "torchmetrics", "torchvision", "peft", "tokenizers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_saved_and_loaded_the_model_gives_equal_scores_and_keeps_its_tokenizer(tmp_path: Path) -> None:
    for make in (gpt2, bert, t5):
        model = HuggingFaceModel(make(), tokenizer=words(), use_logits=True).eval()
        model.save_pretrained(tmp_path / make.__name__)
        loaded = HuggingFaceModel.from_pretrained(tmp_path / make.__name__, use_logits=True).eval()
        assert type(loaded.model) is type(model.model)
        assert torch.equal(loaded.eval_forward(ragged()), model.eval_forward(ragged()))
        assert loaded.tokenizer.get_vocab() == model.tokenizer.get_vocab()
    assert type(model.model).from_pretrained(tmp_path / "t5").config.vocab_size == VOCAB
