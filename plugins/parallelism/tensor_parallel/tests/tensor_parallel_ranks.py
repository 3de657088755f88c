"""What each rank does. Run as ``python tensor_parallel_ranks.py rank world folder case …``; results go to a file per rank."""

from __future__ import annotations

import copy
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from kernel_core import Trainer
from kernel_core.errors import KernelError
from kernel_plugin_alibi import apply_alibi
from kernel_plugin_huggingface import HuggingFaceModel
from kernel_plugin_tensor_parallel import apply_tensor_parallel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

Result = dict[str, Any]
VOCAB = 33  # two ranks cannot share it evenly
BERT = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.attention.output.dense": "rowwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "bert.encoder.layer.*.output.dense": "rowwise",
}


class Wrapped(nn.Module):
    """Like the wrapper of transformers' models: one attribute, and a loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.model(batch, labels=batch).loss
        return loss


class MLP(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(6, width), "down": nn.Linear(width, 6)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))  # type: ignore[index]
        return x.square().mean()


def family(name: str, **options: Any) -> Wrapped:
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if name == "bert":
        config: Any = transformers.BertConfig(
            vocab_size=VOCAB, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes, pad_token_id=0
        )
        model: Any = transformers.BertForMaskedLM(config)
    else:
        sizes |= {"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32}
        config_class = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[name]
        model_class = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}[name]
        model = model_class(config_class(vocab_size=VOCAB, **sizes, **special, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5)  # the usual 0.02 makes attention nearly uniform, and wrong heads look right
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return Wrapped(model.double())


def tokens() -> Tensor:
    return torch.randint(3, VOCAB, (3, 11), generator=torch.Generator().manual_seed(1))


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(model: nn.Module, batch: Tensor, steps: int = 5) -> Result:
    """Return the first loss and its gradients, and the weights after some steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    result: Result = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        if step == 0:
            result["loss"] = loss.detach()
            result["gradients"] = {
                name: whole(parameter.grad)
                for name, parameter in model.named_parameters()
                if parameter.grad is not None
            }
        optimizer.step()
    return result | {"weights": {name: whole(parameter) for name, parameter in model.named_parameters()}}


def compare(model: nn.Module, batch: Tensor, mesh: DeviceMesh, plan: Any = None, wrong_heads: bool = False) -> Result:
    """Train a copy in this process alone, then the model in parts."""
    alone = train(copy.deepcopy(model), batch)
    paths = apply_tensor_parallel(model, mesh, plan)
    heads = {path: module.head_indices for path, module in model.named_modules() if hasattr(module, "head_indices")}
    if wrong_heads:
        for path in heads:
            model.get_submodule(path).head_indices = range(len(heads[path]))  # type: ignore[assignment]
    split = {name: tuple(p.to_local().shape) for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {"alone": alone, "parts": train(model, batch), "paths": paths, "heads": heads, "split": split}


def llama(mesh: DeviceMesh) -> Result:
    return compare(family("llama"), tokens(), mesh)


def tied_llama(mesh: DeviceMesh) -> Result:
    model = family("llama", tie_word_embeddings=True)
    result = compare(model, tokens(), mesh)
    inner: Any = model.model
    return result | {"still_tied": inner.lm_head.weight is inner.model.embed_tokens.weight}


def qwen3(mesh: DeviceMesh) -> Result:
    return compare(family("qwen3"), tokens(), mesh)


def mlp(mesh: DeviceMesh) -> Result:
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    return compare(MLP(), batch, mesh, {"layers.*.up": "colwise", "layers.*.down": "rowwise"})


def bert(mesh: DeviceMesh, wrong_heads: bool = False) -> Result:
    model = family("bert")
    apply_alibi(model.model)
    return compare(model, tokens(), mesh, BERT, wrong_heads)


def bert_with_wrong_heads(mesh: DeviceMesh) -> Result:
    return bert(mesh, wrong_heads=True)


def trained(mesh: DeviceMesh) -> Result:
    """A whole run, gradients clipped, against a loop by hand in this process alone."""
    ids = tokens()
    batches = [{"input_ids": ids.roll(shift, 0), "labels": ids.roll(shift, 0)} for shift in range(3)]
    alone = family("llama", tie_word_embeddings=True).model
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        alone(**batch).loss.backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
    model: Any = HuggingFaceModel(family("llama", tie_word_embeddings=True).model)
    with Trainer(
        model=model,
        train_dataloader=batches,
        max_duration="3ba",
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        plugins=[("gradient_clipping", {"clipping_threshold": 0.5})],
        parallelism={"tensor_parallel": {"degree": 2}, "activation_checkpointing": {}},
        device="cpu",
        precision="fp32",
        progress_bar=False,
    ) as trainer:
        trainer.fit()
        after = {name: whole(parameter) for name, parameter in model.model.named_parameters()}
    return {"alone": {name: whole(parameter) for name, parameter in alone.named_parameters()}, "parts": after}


def unlike_ranks(mesh: DeviceMesh) -> Result:
    """What is split comes from the first rank, wherever the others started."""
    model = MLP()
    with torch.no_grad():
        model.layers[0]["up"].weight.add_(dist.get_rank())  # type: ignore[index]
    apply_tensor_parallel(model, mesh, {"layers.*.up": "colwise"})
    return {"weight": whole(model.layers[0]["up"].weight)}  # type: ignore[index]


def refused(mesh: DeviceMesh) -> Result:
    """Messages by name, and whether any of the models was changed."""
    fused = nn.Module()
    fused.num_heads, fused.qkv = 2, nn.Linear(8, 24)  # type: ignore[assignment]
    attention = nn.Module()
    attention.inner = nn.MultiheadAttention(8, 2)
    mine = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    attempts: dict[str, tuple[nn.Module, Any]] = {
        "word": (MLP(), {"layers.*.up": "colwize"}),
        "glob": (MLP(), {**mine, "blocks.*.up": "colwise"}),
        "no plan": (MLP(), None),
        "features": (MLP(7), mine),
        "class": (MLP(), {"layers.*": "colwise"}),
        "heads": (family("llama"), None),
        "fused": (fused, {"qkv": "colwise"}),
        "multihead": (attention, {"inner.out_proj": "rowwise"}),
        "meta": (MLP().to("meta"), mine),
        "tied": (family("llama", tie_word_embeddings=True), {"lm_head": "colwise_gather_output"}),
    }
    inner: Any = attempts["heads"][0].model
    for layer in inner.model.layers:  # one head of keys and values for all
        for name in ("k_proj", "v_proj"):
            setattr(layer.self_attn, name, nn.Linear(24, 6, bias=False, dtype=torch.float64))
    result: Result = {}
    for name, (model, plan) in attempts.items():
        try:
            apply_tensor_parallel(model, mesh, plan)
        except KernelError as error:
            result[name] = f"{type(error).__name__} {error}"
        assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), name
    model = MLP()
    apply_tensor_parallel(model, mesh, mine)
    try:
        apply_tensor_parallel(model, mesh, mine)
    except KernelError as error:
        result["twice"] = f"{type(error).__name__} {error}"
    return result


CASES: dict[str, Callable[[DeviceMesh], Result]] = {
    case.__name__: case
    for case in (llama, tied_llama, qwen3, mlp, bert, bert_with_wrong_heads, unlike_ranks, refused, trained)
}


def main(rank: int, world_size: int, folder: Path, *names: str) -> None:
    """Run the cases."""
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor_parallel",))
    torch.save({name: CASES[name](mesh) for name in names or CASES}, folder / f"rank{rank}.pt")
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
