"""Batches of token ids are cut; everything else is left alone or refused, never mangled."""

from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from kernel_core.errors import DataError, OptionError
from kernel_plugin_alibi import reshape_batch
from transformers import BatchEncoding


def tokens() -> dict[str, Any]:
    ids = torch.arange(16).view(2, 8)
    return {"input_ids": ids, "labels": ids + 1, "attention_mask": torch.ones(2, 8), "temperature": torch.tensor(1.0)}


def test_rows_are_cut_into_consecutive_pieces() -> None:
    batch = tokens()
    cut = reshape_batch(batch, 0.25)
    assert cut["input_ids"].tolist() == [[2 * row, 2 * row + 1] for row in range(8)]
    assert torch.equal(cut["labels"], cut["input_ids"] + 1)
    assert cut["attention_mask"].shape == (8, 2)
    assert cut["temperature"] is batch["temperature"]
    assert batch["input_ids"].shape == (2, 8)


@pytest.mark.parametrize("make", [dict, UserDict, BatchEncoding])
def test_every_changeable_mapping_keeps_its_type(make: Any) -> None:
    cut = reshape_batch(make(tokens()), 0.5)
    assert type(cut) is make
    assert cut["input_ids"].shape == cut["labels"].shape == (4, 4)


def test_a_fixed_mapping_becomes_a_dict() -> None:
    assert reshape_batch(MappingProxyType(tokens()), 0.5)["labels"].shape == (4, 4)


def test_tokens_under_another_name_are_known_if_there_is_nothing_else() -> None:
    batch = {"source": torch.zeros(2, 6, dtype=torch.long), "target": torch.zeros(2, 6, dtype=torch.long)}
    assert reshape_batch(batch, 1 / 3)["target"].shape == (6, 2)


@pytest.mark.parametrize(
    "batch",
    [
        {"images": torch.zeros(2, 1, 8, 8), "targets": torch.zeros(2, 8, dtype=torch.long), "lengths": torch.ones(2)},
        {"features": torch.zeros(2, 8)},
        {"features": torch.zeros(2, 8, dtype=torch.long), "label": torch.zeros(2, dtype=torch.long)},
        {"text": ["a", "b"]},
        {},
        (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long)),
        torch.zeros(2, 8, dtype=torch.long),
    ],
)
def test_other_batches_are_left_alone(batch: Any) -> None:
    assert reshape_batch(batch, 0.25) is batch


def test_scaling_one_does_nothing() -> None:
    batch = tokens() | {"labels": torch.zeros(2)}
    assert reshape_batch(batch, 1) is batch


@pytest.mark.parametrize(
    ("extra", "found"),
    [
        (torch.zeros(2), r"shape \(2,\)"),
        (torch.zeros(2, 3, 4), r"shape \(2, 3, 4\)"),
        (torch.zeros(2, 8, 8), r"shape \(2, 8, 8\)"),
        (torch.arange(8)[None], r"shape \(1, 8\)"),
        (["a", "b"], "2 entries"),
    ],
)
def test_what_would_not_fit_is_refused(extra: Any, found: str) -> None:
    message = (
        rf"^alibi: batch\['extra'\] has {found} beside tokens of shape \(2, 8\), so it would not fit .* cut into 4. "
        r"Expected every tensor to have the shape of the tokens. Set train_sequence_length_scaling=1 to train on whole "
        r"sequences.$"
    )
    with pytest.raises(DataError, match=message):
        reshape_batch(tokens() | {"extra": extra}, 0.25)


def test_an_indivisible_length_is_refused() -> None:
    message = (
        r"^alibi: sequences of 6 tokens cannot be cut into 4 equal pieces. Expected a length div.* by 4, .*=0.25 asks."
    )
    with pytest.raises(DataError, match=message):
        reshape_batch({"input_ids": torch.zeros(2, 6, dtype=torch.long)}, 0.25)


@pytest.mark.parametrize("scaling", [0.3, 0.75, 0.0, -0.25, 2.0])
def test_a_scaling_that_is_not_one_over_a_whole_number_is_refused(scaling: float) -> None:
    with pytest.raises(
        OptionError, match=rf"^alibi.train_sequence_length_scaling: got {scaling}. Expected 1 or one over"
    ):
        reshape_batch(tokens(), scaling)
