"""A transformers model as one that the kernel trains."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kernel_core import TrainableModel
from kernel_core.errors import DataError, OptionError
from torch import Tensor, nn

from kernel_plugin_huggingface import adapters, saving
from kernel_plugin_huggingface.embeddings import fit_embeddings
from kernel_plugin_huggingface.initial_values import InitialValues
from kernel_plugin_huggingface.labels import check_batch, count_labels, is_causal_lm, labels_of, next_token_labels
from kernel_plugin_huggingface.libraries import prepare_imports

Metrics = Sequence[Any] | Mapping[str, Any] | None


class HuggingFaceModel(TrainableModel):
    """Wraps a transformers model; batches are mappings with the names of its inputs, ``labels`` among them.

    The wrapped model is ``model``. The loss is the one it computes from ``labels``: a mean over the labels that are not
    -100. A causal language model without labels in its batch learns its ``input_ids``, where ``attention_mask`` is not 0.

    Args:
        model: A transformers model, or a peft model of one.
        tokenizer: Needed to turn what was generated into text; saved with the model.
        use_logits: Give the metrics scores and labels instead of the model's whole output and labels.
        metrics: torchmetrics objects, a list (named by their classes) or a mapping by name, measured in training.
        eval_metrics: The same for evaluation; None takes ``metrics``.
        shift_labels: Whether the model's loss compares each position with the next label, so that metrics and weights
            must too; None finds out from its class.
        allow_embedding_resizing: Make the embeddings larger where the tokenizer has more tokens than the model.
        peft_config: A ``peft.LoraConfig``, or its arguments as a mapping: train adapters and freeze the rest.
        should_save_peft_only: ``save_pretrained`` writes the adapters without the model below them.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2)
        >>> model = HuggingFaceModel(GPT2LMHeadModel(config), use_logits=True)
        >>> model.shift_labels
        True

    Source: Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, LoRA: Low-Rank Adaptation of Large Language Models, 2021,
        section 4 (``peft_config``).
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        use_logits: bool = False,
        metrics: Metrics = None,
        eval_metrics: Metrics = None,
        shift_labels: bool | None = None,
        allow_embedding_resizing: bool = False,
        peft_config: Any = None,
        should_save_peft_only: bool = True,
    ) -> None:
        super().__init__()
        prepare_imports()
        fit_embeddings(model, tokenizer, allow_embedding_resizing)
        self.model: Any = model if peft_config is None else adapters.add_adapters(model, peft_config)
        self.using_peft = adapters.is_peft_model(self.model)
        self.tokenizer = tokenizer
        self.use_logits = use_logits
        self.train_metrics = _by_name("metrics", metrics)
        self.val_metrics = (
            copy.deepcopy(self.train_metrics) if eval_metrics is None else _by_name("eval_metrics", eval_metrics)
        )
        self.shift_labels = is_causal_lm(self.base_model) if shift_labels is None else shift_labels
        self.should_save_peft_only = should_save_peft_only
        self.model_forward_args = _arguments(self.base_model)
        self._initial_values: InitialValues | None = None

    @property
    def base_model(self) -> Any:
        """The transformers model, below the adapters if there are any."""
        return self.model.get_base_model() if self.using_peft else self.model

    @property
    def config(self) -> Any:
        """The configuration of the transformers model."""
        return self.base_model.config

    def forward(self, batch: Any) -> Any:
        """Return the model's output, with the loss if there are labels; what it does not take of the batch stays out."""
        inputs = self._inputs(batch)
        labels = labels_of(batch, self.shift_labels)
        if labels is not None and "labels" in self.model_forward_args:
            inputs["labels"] = labels
        return self.model(**inputs)

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the mean over the labels that count; zero, with zero gradients, if none of them does."""
        loss: Tensor | None = outputs.get("loss") if isinstance(outputs, Mapping) else outputs[0]
        if loss is None or loss.ndim:
            raise DataError(
                f"huggingface: {type(self.base_model).__name__} returned no loss for a batch of {', '.join(batch)}. "
                "Expected labels in the batch, from which it computes one. Add 'labels' to what the loader gives."
            )
        count = self._count(batch)
        # a mean over nothing is nan; its gradient is replaced with it
        return torch.where(count > 0, loss, 0.0) if isinstance(count, Tensor) else loss

    def loss_weight(self, batch: Any) -> Tensor | float | None:
        """Return how many labels ``loss`` averages over; None, the number of samples, if there are no labels."""
        return self._count(batch)

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        """Return what the metrics get: text in mode ``generate``, scores with ``use_logits``, else the whole output.

        Scores are computed without labels, so that no loss is; an encoder-decoder model gets its decoder's inputs made
        of them. ``batch`` stays as it is.
        """
        check_batch(batch)
        if batch.get("mode") == "generate":
            return self._generate_text(batch)
        if not self._wants_scores(batch):
            return self(batch) if outputs is None else outputs
        return _scores(self.model(**self._inputs_without_labels(batch)) if outputs is None else outputs)

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        """Return the metrics of training, or those of evaluation."""
        return self.train_metrics if is_train else self.val_metrics

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        """Give ``metric`` outputs, or scores with ``use_logits``, and the labels where they are predicted."""
        if batch.get("mode") == "generate":
            metric.update(outputs, batch.get("labels"))
            return
        if self._wants_scores(batch) and not isinstance(outputs, Tensor):
            outputs = _scores(outputs)
        labels = labels_of(batch, self.shift_labels)
        if labels is not None and (self.shift_labels or batch.get("mode") == "icl_task"):
            labels = next_token_labels(labels)
        metric.update(outputs, labels)

    def generate(self, input_ids: Tensor, **kwargs: Any) -> Tensor:
        """Return what the model's own ``generate`` makes of ``input_ids``.

        Args:
            input_ids: Shape (B, T).
            kwargs: Passed on; ``pad_token_id`` is the tokenizer's unless given.
        """
        if self.tokenizer is not None and self.tokenizer.pad_token_id is not None:
            kwargs.setdefault("pad_token_id", self.tokenizer.pad_token_id)
        tokens: Tensor = self.model.generate(input_ids=input_ids, **kwargs)
        return tokens

    def param_init_fn(self, module: nn.Module) -> None:
        """Give a module that came from the meta device the values that transformers begins with."""
        if self._initial_values is None:
            self._initial_values = InitialValues(self.base_model)
        self._initial_values(module)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write model and tokenizer in Hugging Face's format, for ``from_pretrained`` here and in transformers.

        With adapters only those are written; with ``should_save_peft_only=False`` the model is written to ``folder`` and
        the adapters to ``folder/adapter``.
        """
        saving.save(self.model, self.tokenizer, Path(folder), self.should_save_peft_only)

    def export_form(self) -> dict[str, Any] | None:
        """Return the configuration, so that a checkpoint alone can be exported; None with adapters."""
        return None if self.using_peft else saving.export_form(self.model)

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, base_model: nn.Module | None = None, **options: Any
    ) -> HuggingFaceModel:
        """Load what ``save_pretrained`` wrote, tokenizer and adapters included.

        Args:
            folder: Where it is.
            base_model: The model below the adapters, where only they were written and they do not name it.
            options: Arguments of the constructor.

        Raises:
            ConfigError: the folder does not hold such a model.
        """
        model, tokenizer = saving.load(Path(folder), base_model)
        return cls(model, **{"tokenizer": tokenizer, **options})

    def _inputs(self, batch: Any) -> dict[str, Any]:
        check_batch(batch)
        inputs = {key: batch[key] for key in self.model_forward_args if key in batch}
        if "use_cache" in self.model_forward_args:
            inputs.setdefault("use_cache", False)  # keys and values are for generation, which goes another way
        return inputs

    def _inputs_without_labels(self, batch: Any) -> dict[str, Any]:
        inputs = self._inputs(batch)
        labels = inputs.pop("labels", None)
        make = getattr(self.base_model, "prepare_decoder_input_ids_from_labels", None)
        if self.config.is_encoder_decoder and make is not None and labels is not None:
            inputs.setdefault("decoder_input_ids", make(labels=labels))
        return inputs

    def _wants_scores(self, batch: Any) -> bool:
        return self.use_logits or batch.get("mode") == "icl_task"

    def _count(self, batch: Any) -> Tensor | int | None:
        labels = labels_of(batch, self.shift_labels)
        return None if labels is None else count_labels(labels, self.shift_labels)

    def _generate_text(self, batch: Any) -> list[str]:
        if self.tokenizer is None:
            raise OptionError(
                "huggingface.tokenizer: got None, and a batch asks for mode 'generate'. Expected a tokenizer, which turns "
                "tokens into text. Give HuggingFaceModel(model, tokenizer=...)."
            )
        prompt = batch["input_ids"]
        mask = {} if batch.get("attention_mask") is None else {"attention_mask": batch["attention_mask"]}
        tokens = self.generate(prompt, **mask, **batch.get("generation_kwargs", {}))
        if not self.config.is_encoder_decoder:  # a decoder alone repeats its prompt
            tokens = tokens[:, prompt.shape[1] :]
        text: list[str] = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return text


def _scores(outputs: Any) -> Tensor:
    """Return the scores; those of a single class, shape (B, 1), as shape (B,)."""
    if isinstance(outputs, Mapping):
        scores: Tensor = outputs["logits"]
    else:
        scores = outputs[1] if outputs[0].ndim == 0 else outputs[0]  # a tuple begins with the loss, if there is one
    return scores.squeeze(1) if scores.ndim == 2 and scores.shape[1] == 1 else scores


def _arguments(model: nn.Module) -> frozenset[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in named)


def _by_name(option: str, metrics: Metrics) -> dict[str, Any]:
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        return dict(metrics)
    named = {type(metric).__name__: metric for metric in metrics}
    if len(named) != len(metrics):
        raise OptionError(
            f"huggingface.{option}: got two metrics of one class among {', '.join(sorted(named))}. Expected a name for "
            "each. Give a mapping of name to metric."
        )
    return named
