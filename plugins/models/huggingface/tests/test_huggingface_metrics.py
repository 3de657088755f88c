"""The metrics against scikit-learn and closed forms, on batches of uneven size."""

import math
from typing import Any

import pytest
import torch
from kernel_plugin_huggingface import CrossEntropy, LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from sklearn.metrics import accuracy_score, log_loss


def scores_and_labels(ignored: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(5, (7, 6), generator=generator)
    labels[torch.rand(7, 6, generator=generator) < 0.4] = ignored
    labels[3] = ignored
    return torch.randn(7, 6, 5, generator=generator), labels


def measured(metric: Any, scores: torch.Tensor, labels: torch.Tensor) -> float:
    for rows in (slice(0, 3), slice(3, 4), slice(4, 7)):
        metric.update(scores[rows], labels[rows])
    return float(metric.compute())


@pytest.mark.parametrize("cls", [CrossEntropy, LanguageCrossEntropy])
@pytest.mark.parametrize("ignored", [-100, 0])
def test_cross_entropy_is_scikit_learns_log_loss_of_all_labels_that_count(cls: Any, ignored: int) -> None:
    scores, labels = scores_and_labels(ignored)
    counts = labels != ignored
    expected = log_loss(labels[counts].numpy(), scores[counts].double().softmax(-1).numpy(), labels=range(5))
    assert measured(cls(ignore_index=ignored), scores, labels) == pytest.approx(expected, rel=1e-6)
    assert measured(LanguagePerplexity(ignored), scores, labels) == pytest.approx(math.exp(expected), rel=1e-6)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_masked_accuracy_is_scikit_learns_of_all_labels_that_count(ignored: int) -> None:
    scores, labels = scores_and_labels(ignored)
    counts = labels != ignored
    expected = accuracy_score(labels[counts].numpy(), scores[counts].argmax(-1).numpy())
    assert measured(MaskedAccuracy(ignore_index=ignored), scores, labels) == pytest.approx(expected)


def test_scores_that_know_nothing_have_the_number_of_classes_as_perplexity() -> None:
    metric = LanguagePerplexity()
    metric.update({"logits": torch.zeros(2, 3, 8), "loss": None}, torch.tensor([[1, 2, -100], [7, -100, -100]]))
    assert metric.compute() == pytest.approx(8.0)
    nothing = LanguageCrossEntropy()
    nothing.update(torch.zeros(1, 2, 8), torch.full((1, 2), -100))
    assert nothing.compute().isnan()


def test_a_mean_of_batch_means_would_be_another_number() -> None:
    scores, labels = scores_and_labels()
    exact = measured(LanguageCrossEntropy(), scores, labels)
    parts = []
    for rows in (slice(0, 3), slice(4, 7)):
        metric = LanguageCrossEntropy()
        metric.update(scores[rows], labels[rows])
        parts.append(float(metric.compute()))
    assert abs(sum(parts) / 2 - exact) > 1e-3


def test_half_precision_scores_are_summed_in_single_precision() -> None:
    scores, labels = torch.zeros(64, 64, 2, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.long)
    metric = LanguageCrossEntropy()
    metric.update(scores, labels)
    assert metric.compute() == pytest.approx(math.log(2), rel=1e-6)
