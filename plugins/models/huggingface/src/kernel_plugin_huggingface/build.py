"""The model function: a transformers model by name, with the metrics of its task."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from kernel_plugin_huggingface.labels import is_causal_lm
from kernel_plugin_huggingface.libraries import prepare_imports
from kernel_plugin_huggingface.loading import Dtype, Task, load_model, load_tokenizer, saved_tokenizer
from kernel_plugin_huggingface.model import HuggingFaceModel


def huggingface(
    model: str,
    task: Task = "auto",
    pretrained: bool = True,
    tokenizer: str | None = None,
    use_logits: bool = True,
    config: dict[str, Any] | None = None,
    num_labels: Annotated[int, Field(gt=0)] | None = None,
    dtype: Dtype = "float32",
    attn_implementation: str | None = None,
    allow_embedding_resizing: bool = False,
    peft_config: dict[str, Any] | None = None,
    should_save_peft_only: bool = True,
    trust_remote_code: bool = False,
) -> HuggingFaceModel:
    """Build a model of transformers, with the metrics of its task for evaluation.

    Args:
        model: A folder, or a name on the Hugging Face hub; with ``pretrained=False`` also a model type, such as ``gpt2``
            or ``bert``, whose default configuration is then used without asking the hub.
        task: What it is for; ``auto`` takes the task of the architecture that its configuration names.
        pretrained: Load its weights; False draws them anew.
        tokenizer: A folder or a name on the hub; None takes the one in the folder ``model``, if there is one.
        use_logits: Give the metrics scores and labels. Without it there are no metrics unless you set some.
        config: Entries of the configuration to set otherwise, such as ``{"resid_pdrop": 0.0}``.
        num_labels: Classes, or 1 for regression, of a sequence classifier. A head for another number is drawn anew.
        dtype: Of the weights; ``auto`` takes the one they were saved in.
        attn_implementation: ``sdpa``, ``eager``, …; None is transformers' choice.
        allow_embedding_resizing: Add embeddings where the tokenizer has more tokens than the model.
        peft_config: Arguments of ``peft.LoraConfig``: train adapters and freeze the rest.
        should_save_peft_only: ``save_pretrained`` writes the adapters without the model below them.
        trust_remote_code: Run Python code that the hub holds for this model.

    Raises:
        OptionError: an option does not fit the model.
        ConfigError: there is no such folder, or the hub has no such model or cannot be reached.
    """
    prepare_imports()
    network = load_model(
        model, task, pretrained, config, num_labels, dtype, attn_implementation, trust_remote_code=trust_remote_code
    )
    words = (
        saved_tokenizer(model, trust_remote_code) if tokenizer is None else load_tokenizer(tokenizer, trust_remote_code)
    )
    return HuggingFaceModel(
        network,
        tokenizer=words,
        use_logits=use_logits,
        eval_metrics=default_metrics(network) if use_logits else None,
        allow_embedding_resizing=allow_embedding_resizing,
        peft_config=peft_config,
        should_save_peft_only=should_save_peft_only,
    )


def default_metrics(model: Any) -> dict[str, Any]:
    """Return the metrics by which a model of its class is judged, by name.

    Args:
        model: A transformers model. A language model gets the cross entropy per token, and its perplexity if it predicts
            the next one, else the share of tokens it guesses; a classifier accuracy and cross entropy; a regression the
            mean squared error.
    """
    from kernel_plugin_huggingface import metrics

    if not type(model).__name__.endswith("ForSequenceClassification"):
        second = metrics.LanguagePerplexity if is_causal_lm(model) else metrics.MaskedAccuracy
        return _by_class(metrics.LanguageCrossEntropy(), second())
    from torchmetrics import MeanSquaredError
    from torchmetrics.classification import MulticlassAccuracy, MultilabelAccuracy

    num_labels, problem = model.config.num_labels, model.config.problem_type
    if problem == "regression" or num_labels == 1:
        return _by_class(MeanSquaredError())
    if problem == "multi_label_classification":
        return _by_class(MultilabelAccuracy(num_labels))
    return _by_class(MulticlassAccuracy(num_labels, average="micro"), metrics.CrossEntropy())


def _by_class(*metrics: Any) -> dict[str, Any]:
    return {type(metric).__name__: metric for metric in metrics}
