"""The reader: its loss against an enumeration, its masks, and that it learns."""

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from kernel_core import TrainableModel
from kernel_core.errors import DataError
from kernel_plugin_numbers import DigitReader, DigitStrips, ReaderOutputs, StripBatch, StripCollator
from kernel_plugin_numbers.data import canvas_width
from torch import nn


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_reader() -> DigitReader:
    torch.manual_seed(0)
    return DigitReader(width=32, num_layers=1, num_heads=2, intermediate_size=32, num_channels=16)


def make_batch(num_strips: int = 8, with_shifts: bool = False) -> StripBatch:
    strips = DigitStrips("train", num_strips)
    return StripCollator(canvas_width(6), with_shifts)([strips[index] for index in range(num_strips)])


def collapse(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label != 10]


def test_loss_is_the_likelihood_of_all_alignments_per_digit_averaged_over_strips() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels, num_columns = [[4], [7, 7]], [2, 3]
    expected = 0.0
    for row, label in enumerate(labels):
        probabilities = logits[row].softmax(dim=-1)
        likelihood = sum(
            math.prod(float(probabilities[column, class_]) for column, class_ in enumerate(path))
            for path in itertools.product(range(11), repeat=num_columns[row])
            if collapse(path) == label
        )
        expected -= math.log(likelihood) / len(label) / len(labels)
    batch = StripBatch(labels=torch.tensor([[4, -1], [7, 7]]), label_lengths=torch.tensor([1, 2]))
    outputs = ReaderOutputs(logits=logits, num_columns=torch.tensor(num_columns))
    assert make_reader().loss(outputs, batch).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("width_px", range(40, 49))
def test_there_is_a_column_for_every_four_pixels_begun(width_px: int) -> None:
    batch = StripBatch(pixel_values=torch.zeros(1, 1, 12, width_px), widths=torch.tensor([width_px]))
    outputs = make_reader()(batch)
    assert outputs["logits"].shape == (1, math.ceil(width_px / 4), 11)
    assert outputs["num_columns"].tolist() == [math.ceil(width_px / 4)]


def test_what_lies_beyond_a_strip_does_not_change_its_scores() -> None:
    reader, batch = make_reader(), make_batch(1)
    batch["widths"] = torch.tensor([40])
    clean = reader(batch)["logits"][:, :10]
    # The stem sees 5 pixels to the right of its 10th column's first; beyond those only attention could look.
    batch["pixel_values"][..., 48:] = 1
    torch.testing.assert_close(reader(batch)["logits"][:, :10], clean)
    batch["pixel_values"][..., 20:24] = 1
    assert not torch.allclose(reader(batch)["logits"][:, :10], clean)


def test_a_strip_is_scored_alike_whatever_it_is_batched_with() -> None:
    reader, batch = make_reader(), make_batch(8)
    alone = StripBatch(pixel_values=batch["pixel_values"][3:4], widths=batch["widths"][3:4])
    torch.testing.assert_close(reader(alone)["logits"], reader(batch)["logits"][3:4])


def test_every_trainable_parameter_gets_a_gradient() -> None:
    reader, batch = make_reader(), make_batch()
    torch.autograd.backward(reader.loss(reader(batch), batch))
    without = [name for name, value in reader.named_parameters() if value.requires_grad and value.grad is None]
    assert without == []


def test_surgery_finds_what_it_looks_for() -> None:
    modules = list(DigitReader().modules())
    convs = [module for module in modules if isinstance(module, nn.Conv2d) and max(module.stride) > 1]
    assert [conv.in_channels >= 16 for conv in convs] == [True]
    assert [module.stride for module in modules if isinstance(module, nn.MaxPool2d)] == [2]
    assert "BertEmbeddings" in [type(module).__name__ for module in modules]


def test_position_embeddings_reach_to_24_digits() -> None:
    positions = DigitReader().encoder.embeddings.position_embeddings
    assert positions.num_embeddings >= math.ceil(canvas_width(24) / 4)


def test_shifted_strips_are_scored_in_evaluation_as_if_they_were_strips() -> None:
    reader, batch = make_reader(), make_batch(4, with_shifts=True)
    outputs = reader.eval_forward(batch)
    assert outputs["shifted_logits"].shape == (4, 3, *outputs["logits"].shape[1:])
    second = StripBatch(pixel_values=batch["shifted_pixel_values"][:, 1], widths=batch["widths"])
    torch.testing.assert_close(outputs["shifted_logits"][:, 1], reader(second)["logits"])


def test_metrics_get_the_readings() -> None:
    reader, batch = make_reader(), make_batch(4, with_shifts=True)
    metrics = reader.get_metrics(is_train=False)
    assert list(metrics) == ["exact_match", "shift_consistency"]
    assert list(reader.get_metrics(is_train=True)) == ["exact_match"]
    perfect = torch.full((4, 20, 11), -1.0)
    perfect[..., 10] = 0
    for row, length in enumerate(batch["label_lengths"].tolist()):
        # Every second column, so that a blank divides repeats.
        perfect[row, torch.arange(length) * 2, batch["labels"][row, :length]] = 1
    shifted = perfect[:, None].repeat(1, 3, 1, 1)
    shifted[:, 2] = 0
    outputs = ReaderOutputs(logits=perfect, num_columns=torch.full((4,), 20), shifted_logits=shifted)
    for metric in metrics.values():
        reader.update_metric(batch, outputs, metric)
    assert metrics["exact_match"].compute().item() == 1
    assert metrics["shift_consistency"].compute().item() == pytest.approx(2 / 3)


def test_shift_consistency_without_shifted_strips_says_what_to_do() -> None:
    reader, batch = make_reader(), make_batch(2)
    metric = reader.get_metrics(is_train=False)["shift_consistency"]
    with pytest.raises(DataError) as error:
        reader.update_metric(batch, reader.eval_forward(batch), metric)
    assert str(error.value) == (
        "numbers: shift_consistency needs shifted strips and the batch has no 'shifted_pixel_values'. Collate with "
        "StripCollator(width_px, with_shifts=True), or evaluate with metric_names=['exact_match']."
    )


def test_a_few_steps_lower_the_loss() -> None:
    reader: TrainableModel = make_reader()
    batch = make_batch(32)
    optimizer = torch.optim.AdamW([value for value in reader.parameters() if value.requires_grad], lr=3e-3)
    losses = []
    for _ in range(30):
        loss = reader.loss(reader(batch), batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0]
