"""Bits per byte: by hand, in closed form, and over uneven batches."""

import math
from collections.abc import Iterator

import pytest
import torch
from kernel_plugin_stdlib import ByteBatch, ByteGPT2, cross_entropy_bits, next_bytes
from kernel_plugin_stdlib.metrics import BitsPerByte
from torch.nn import functional as F


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(num_positions: int = 64) -> ByteGPT2:
    torch.manual_seed(0)
    return ByteGPT2(width=32, num_layers=2, num_heads=2, num_positions=num_positions)


def make_batch(rows: int = 3, length: int = 16, seed: int = 0) -> ByteBatch:
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))
    return ByteBatch(input_ids=ids, labels=ids)


def draw_logits(rows: int = 3, length: int = 16, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, length, 256, generator=torch.Generator().manual_seed(seed))


def test_knowing_nothing_costs_8_bits_per_byte() -> None:
    batch, metric = make_batch(), BitsPerByte()
    for constant in (0.0, -7.5):
        logits = torch.full((3, 16, 256), constant)
        metric.update(logits, batch["labels"])
        assert cross_entropy_bits(logits, batch["labels"]).item() == pytest.approx(8, rel=1e-6)
    assert metric.compute().item() == pytest.approx(8, rel=1e-6)


@pytest.mark.parametrize("num_likely", [1, 2, 16])
def test_a_choice_among_k_bytes_costs_log2_k_bits(num_likely: int) -> None:
    labels = torch.arange(16)[None] % num_likely
    logits = torch.full((1, 16, 256), -1e4)
    logits[..., :num_likely] = 0
    metric = BitsPerByte()
    metric.update(logits, labels)
    assert metric.compute().item() == pytest.approx(math.log2(num_likely), rel=1e-6)


def test_the_loss_is_the_cross_entropy_of_the_next_byte_over_ln_2() -> None:
    logits, batch = draw_logits(), make_batch()
    probabilities = logits.double().softmax(dim=-1)
    bits = [
        -math.log2(probabilities[row, place, batch["labels"][row, place + 1]])
        for row in range(3)
        for place in range(15)
    ]
    loss = make_model().loss(logits, batch)
    assert loss.item() == pytest.approx(sum(bits) / 45, rel=1e-5)
    nats = F.cross_entropy(logits[:, :-1].reshape(45, 256), batch["labels"][:, 1:].reshape(45))
    torch.testing.assert_close(loss, nats / math.log(2))


def test_labels_are_shifted_and_the_last_place_predicts_nothing() -> None:
    assert next_bytes(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, -100]]
    logits = draw_logits()
    changed = logits.clone()
    changed[:, -1] = 100 * torch.eye(256)[0]
    batch = make_batch()
    assert torch.equal(cross_entropy_bits(logits, batch["labels"]), cross_entropy_bits(changed, batch["labels"]))


@pytest.mark.parametrize(("rows", "length"), [(1, 2), (3, 16), (5, 7)])
def test_the_loss_weight_counts_predicted_bytes(rows: int, length: int) -> None:
    weight = make_model().loss_weight(make_batch(rows, length))
    assert isinstance(weight, torch.Tensor)
    assert weight.item() == rows * (length - 1)


def test_ignored_labels_count_neither_in_the_loss_nor_in_its_weight() -> None:
    logits, batch = draw_logits(), make_batch()
    padded = batch["labels"].clone()
    padded[1, 4:] = -100
    alone = [(logits[:1], batch["labels"][:1]), (logits[1:2, :4], batch["labels"][1:2, :4]), (logits[2:], padded[2:])]
    total = sum(cross_entropy_bits(*part, reduction="sum") for part in alone)
    model = make_model()
    weight = model.loss_weight(ByteBatch(input_ids=batch["input_ids"], labels=padded))
    assert weight.item() == 15 + 3 + 15
    loss = model.loss(logits, ByteBatch(input_ids=batch["input_ids"], labels=padded))
    torch.testing.assert_close(loss * weight, total)


def test_uneven_batches_measure_as_one_large_batch_does() -> None:
    logits, labels = draw_logits(7), make_batch(7)["labels"]
    whole, parts = BitsPerByte(), BitsPerByte()
    whole.update(logits, labels)
    for rows in (slice(0, 1), slice(1, 6), slice(6, 7)):
        parts.update(logits[rows], labels[rows])
    torch.testing.assert_close(parts.compute(), whole.compute())
    torch.testing.assert_close(whole.compute(), cross_entropy_bits(logits, labels))


def test_windows_of_two_lengths_measure_by_bytes_and_not_by_batches() -> None:
    metric, uniform, sure = BitsPerByte(), torch.zeros(1, 31, 256), torch.full((1, 11, 256), -1e4)
    sure[..., 0] = 0
    metric.update(uniform, torch.zeros(1, 31, dtype=torch.int64))
    metric.update(sure, torch.zeros(1, 11, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(8 * 30 / 40, rel=1e-6)


def test_no_byte_sees_a_later_one() -> None:
    model, batch = make_model(), make_batch()
    later = batch["input_ids"].clone()
    later[:, 9:] = (later[:, 9:] + 1) % 256
    before, after = model(batch), model(ByteBatch(input_ids=later, labels=later))
    assert before.shape == (3, 16, 256)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.allclose(after[:, 9], before[:, 9])


def test_a_fresh_model_knows_nearly_nothing() -> None:
    model, batch = make_model(), make_batch(8, 64)
    assert model.loss(model(batch), batch).item() == pytest.approx(8, abs=0.3)


def test_every_parameter_gets_a_gradient() -> None:
    model, batch = make_model(), make_batch()
    torch.autograd.backward(model.loss(model(batch), batch))
    assert [name for name, value in model.named_parameters() if value.grad is None] == []


def test_training_and_evaluation_give_the_same_scores() -> None:
    model, batch = make_model(), make_batch()
    trained = model.train()(batch)
    torch.testing.assert_close(model.eval().eval_forward(batch), trained)


def test_bits_per_byte_is_for_evaluation() -> None:
    model, batch = make_model(), make_batch()
    assert model.get_metrics(is_train=True) == {}
    ((name, metric),) = model.get_metrics(is_train=False).items()
    assert name == "bits_per_byte"
    outputs = model.eval_forward(batch)
    model.update_metric(batch, outputs, metric)
    torch.testing.assert_close(metric.compute(), model.loss(outputs, batch))
