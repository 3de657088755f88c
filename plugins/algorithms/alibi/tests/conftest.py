"""Tiny models of the three families, alike in every test of this folder."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import nn

VOCAB, WIDTH, POSITIONS = 32, 24, 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(family: str, num_heads: int = 4, positions: int = POSITIONS, **options: Any) -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        sizes = {"n_embd": WIDTH, "n_head": num_heads, "n_layer": 2, "n_positions": positions}
        config = transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=1, eos_token_id=None, **sizes, **options)
        return _with_large_weights(transformers.GPT2LMHeadModel(config))
    sizes = {"hidden_size": WIDTH, "num_attention_heads": num_heads, "num_hidden_layers": 2, "intermediate_size": 48}
    options = {"pad_token_id": 0, "max_position_embeddings": positions, "vocab_size": VOCAB} | sizes | options
    if family == "bert":
        return _with_large_weights(transformers.BertForMaskedLM(transformers.BertConfig(**options)))
    return _with_large_weights(transformers.RobertaForMaskedLM(transformers.RobertaConfig(**options)))


def _with_large_weights(model: nn.Module) -> nn.Module:
    # the usual 0.02 would make attention nearly uniform and hide a wrong bias
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    return model.eval()


@pytest.fixture
def make() -> Callable[..., Any]:
    return make_model


@pytest.fixture
def ids() -> Callable[..., torch.Tensor]:
    """Token ids of shape (rows, length), none of them a padding token."""

    def draw(rows: int, length: int) -> torch.Tensor:
        return torch.randint(2, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))

    return draw
