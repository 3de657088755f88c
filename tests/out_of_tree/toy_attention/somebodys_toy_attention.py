"""A model that transformers has never heard of, and the policy that gives it ALiBi."""

import torch
from kernel_core import Algorithm, TrainableModel, hookimpl
from kernel_core.recipe import Recipe, RunData
from torch import nn


class ToyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.bias = 2, None
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        mask = None if self.bias is None else self.bias(length, length).to(x)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)


class ToyModel(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.attention = ToyAttention()

    def forward(self, batch):
        return self.attention(batch)

    def loss(self, outputs, batch):
        return (outputs - batch).square().mean()


def toy_model() -> ToyModel:
    return ToyModel()


def noise(seed: int = 0) -> RunData:
    return RunData(train=[torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(seed))] * 3)


recipe = Recipe(
    summary="A toy.",
    config={
        "model": {"name": "toy_model"},
        "data": {"name": "noise"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "train": {"max_duration": "3ba", "device": "cpu"},
    },
    functions={"toy_model": toy_model, "noise": noise},
)


def policy(module, request):
    from kernel_plugin_alibi import Change

    module.bias = request.bias(module.num_heads)
    return [Change("", "ToyAttention", "ToyAttention with ALiBi", "adds biases to its scores")]


class ToyAttentionPolicy(Algorithm):
    """Tell ALiBi how to change a ToyAttention.

    Source: Press, Smith, Lewis, Train Short, Test Long, 2022.
    """

    @hookimpl(optional=True)
    def alibi_attention_policies(self):
        return {ToyAttention: policy}
