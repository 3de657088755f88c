"""Which modules are blocks: what the author says, what transformers keeps in one piece, else the largest list of one class."""

from typing import Any

import pytest
from kernel_core.blocks import marked_modules, path_pattern, repeated_blocks
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)


class Other(Block):
    pass


def test_the_list_with_the_most_parameters_is_the_one() -> None:
    model = nn.Module()
    model.small = nn.ModuleList([Block() for _ in range(5)])
    model.inner = nn.Module()
    model.inner.large = nn.ModuleList([Block(9), Block(9)])
    assert list(repeated_blocks(model)) == ["inner.large.0", "inner.large.1"]


def test_lists_of_several_classes_or_of_lists_are_no_blocks() -> None:
    model = nn.Module()
    model.mixed = nn.ModuleList([Block(20), Other(20)])
    model.nested = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(9), Block(9)])])
    model.empty = nn.ModuleList()
    model.tables = nn.ModuleList([nn.ModuleDict({"a": Block(30)})])
    assert list(repeated_blocks(model)) == ["nested.1.0", "nested.1.1"]
    assert repeated_blocks(nn.Sequential(Block(), Block())) == {}


def test_a_list_is_found_when_it_is_the_model() -> None:
    assert list(repeated_blocks(nn.ModuleList([Block(), Block()]))) == ["0", "1"]


def test_what_transformers_keeps_in_one_piece_comes_first() -> None:
    class Embeddings(Block):
        pass

    model = nn.Module()
    model._no_split_modules = ["Block", "Embeddings"]  # type: ignore[assignment]
    model.embeddings = Embeddings(2)
    model.layers = nn.ModuleList([Block(), Block()])
    model.more = nn.ModuleList([Other(50)])
    wrapped = nn.Sequential(model)
    assert list(repeated_blocks(wrapped)) == ["0.layers.0", "0.layers.1"]  # the embeddings are not repeated
    model.layers = nn.Identity()
    assert list(repeated_blocks(wrapped)) == ["0.embeddings"]


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_layers_of_transformers_models_are_found(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=9, n_positions=4, n_embd=4, n_layer=3, n_head=2, **ids)
        model, path = transformers.GPT2LMHeadModel(config), "transformer.h"
    else:
        sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 3, "num_attention_heads": 2}
        model, path = (
            transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=9, **sizes, **ids)),
            "bert.encoder.layer",
        )
    assert list(repeated_blocks(model)) == [f"{path}.{index}" for index in range(3)]


def test_functions_of_modules_are_asked_about_those_inside_and_inner_ones_have_the_last_word() -> None:
    model, inner = nn.Module(), nn.Module()
    inner.first, inner.second = Block(), Block()
    model.inner, model.outside = inner, Block()
    model.wrap = lambda module: isinstance(module, nn.Linear | Block)
    inner.wrap = lambda module: {"deep": True} if module is inner.first else False
    assert marked_modules(model, "wrap", "_wrap") == {
        "inner.first": {"deep": True},
        "outside": True,
        "outside.line": True,
    }


def test_an_attribute_beats_the_functions_and_the_model_is_not_asked_about_itself() -> None:
    model = nn.Sequential(Block(), Block())
    model.wrap = lambda module: isinstance(module, Block)
    model._wrap = True  # type: ignore[assignment]
    model[0]._wrap = False
    model[1].line._wrap = {"own": 1}
    assert marked_modules(model, "wrap", "_wrap") == {"1": True, "1.line": {"own": 1}}
    assert marked_modules(nn.Sequential(Block()), "wrap", "_wrap") == {}


@pytest.mark.parametrize(
    ("glob", "path", "fits"),
    [
        ("layers.*.line", "layers.3.line", True),
        ("layers.*.line", "layers.3.deep.line", False),
        ("layers.**.line", "layers.3.deep.line", True),
        ("**", "anything.at.all", True),
        ("layers.1", "layers.10", False),
        ("layers.1", "layersx1", False),
        ("a[0].*", "a[0].b", True),
    ],
)
def test_stars_stand_for_one_part_of_a_path_or_for_many(glob: str, path: str, fits: bool) -> None:
    assert bool(path_pattern(glob).fullmatch(path)) == fits
