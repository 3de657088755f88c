"""The models that plugins are tried on, and the data they learn from: so small that a step takes a millisecond."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from kernel_core.models import Classifier, TrainableModel

NUM_SAMPLES, NUM_BATCHES = 24, 3  # an epoch
BATCH = NUM_SAMPLES // NUM_BATCHES  # over all ranks
FEATURES, CLASSES, WORDS, LENGTH = 7, 5, 64, 8


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        name: How cards call it.
        make: Makes the model, given a rate of dropout and whether layers may compute across the rows of a batch.
        data: The samples.
        needs: A package that must be installed, empty for none.
    """

    name: str
    make: Callable[[float, bool], TrainableModel]
    data: Callable[[torch.dtype], Dataset[Any]]
    needs: str = ""


class Labelled(Dataset[Any]):
    """Inputs (N, ...) and the class of each."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(NUM_SAMPLES, *shape, generator=generator, dtype=torch.float64).to(dtype)
        self.targets = torch.randint(0, CLASSES, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Sentences(Dataset[Any]):
    """Tokens (N, T) with labels, some of which do not count, so that rows weigh differently."""

    def __init__(self, classes: int | None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(1, WORDS, (NUM_SAMPLES, LENGTH), generator=generator)
        self.classes = None if classes is None else torch.randint(0, classes, (NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.tokens[index]
        if self.classes is not None:
            return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": self.classes[index]}
        labels = tokens.clone()
        labels[LENGTH - index % 4 :] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut, as ResNets have them.

    Args:
        before, after: Channels.
        stride: Of the first convolution and the shortcut.
        norm: Makes a normalisation of so many channels.
    """

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = norm(after)
        self.relu = nn.ReLU()
        self.downsample = None if stride == 1 and before == after else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, after, H / stride, W / stride)."""
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(x + shortcut)  # type: ignore[no-any-return]


class Language(TrainableModel):
    """A model of transformers; its loss is computed here, in the dtype of the model (there it is float32 inside)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        """Return scores: (B, T, words), or (B, classes)."""
        return self.model(**{name: value for name, value in batch.items() if name != "labels"})["logits"]

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Return the mean over the labels that count: of a causal model each predicts the next."""
        labels = batch["labels"]
        if labels.ndim == 2:
            outputs, labels = outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return nn.functional.cross_entropy(outputs, labels)

    def loss_weight(self, batch: Any) -> Any:
        """Return how many labels count."""
        labels = batch["labels"]
        return None if labels.ndim == 1 else (labels[:, 1:] != -100).sum()


def _mlp(dropout: float, across_rows: bool) -> TrainableModel:
    hidden = 11  # ranks do not share it evenly
    net = nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
    )
    return Classifier(net.extend([nn.ReLU(), nn.Linear(hidden, CLASSES)]), num_classes=CLASSES)


def _resnet(dropout: float, across_rows: bool) -> TrainableModel:
    norm: Callable[[int], nn.Module] = nn.BatchNorm2d if across_rows else lambda channels: nn.GroupNorm(4, channels)
    stem = [nn.Conv2d(1, 16, 3, 1, 1, bias=False), norm(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [ResidualBlock(16, 16, 1, norm), ResidualBlock(16, 20, 2, norm)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(20, CLASSES)]
    return Classifier(nn.Sequential(*stem, *blocks, *head), num_classes=CLASSES)


def _gpt2(dropout: float, across_rows: bool) -> TrainableModel:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return Language(transformers.GPT2LMHeadModel(config))


def _bert(dropout: float, across_rows: bool) -> TrainableModel:
    transformers: Any = importlib.import_module("transformers")
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=CLASSES,
    )  # fmt: skip
    return Language(transformers.BertForSequenceClassification(config))


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case("mlp", _mlp, lambda dtype: Labelled((FEATURES,), dtype)),
        Case("resnet", _resnet, lambda dtype: Labelled((1, 12, 12), dtype)),
        Case("gpt2", _gpt2, lambda dtype: Sentences(None), "transformers"),
        Case("bert", _bert, lambda dtype: Sentences(CLASSES), "transformers"),
    )
}
