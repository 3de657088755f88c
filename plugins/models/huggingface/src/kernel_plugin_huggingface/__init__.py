"""Models of Hugging Face transformers, with metrics, tokenizer, generation and LoRA.

Importing this package needs torch and kernel_core; transformers, torchmetrics and peft are imported where they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_plugin_huggingface.build import huggingface
from kernel_plugin_huggingface.labels import count_labels, is_causal_lm, labels_of, next_token_labels
from kernel_plugin_huggingface.model import HuggingFaceModel

if TYPE_CHECKING:
    from kernel_plugin_huggingface.metrics import CrossEntropy as CrossEntropy
    from kernel_plugin_huggingface.metrics import LanguageCrossEntropy as LanguageCrossEntropy
    from kernel_plugin_huggingface.metrics import LanguagePerplexity as LanguagePerplexity
    from kernel_plugin_huggingface.metrics import MaskedAccuracy as MaskedAccuracy

__all__ = [
    "HuggingFaceModel",
    "huggingface",
    "count_labels",
    "is_causal_lm",
    "labels_of",
    "next_token_labels",
    "CrossEntropy",
    "LanguageCrossEntropy",
    "LanguagePerplexity",
    "MaskedAccuracy",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'kernel_plugin_huggingface' has no attribute {name!r}")
    from kernel_plugin_huggingface import metrics  # torchmetrics takes a second

    return getattr(metrics, name)
