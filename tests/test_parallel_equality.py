"""Several ranks train as one process does on the same global batch: losses, gradient norms and weights after ten steps."""

import os
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Classifier, Trainer, hookimpl
from kernel_core.testing.ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 12
NUM_SAMPLES = 50  # the last batch of an epoch has 2 samples: with 4 ranks, two of them have none
FEATURES, HIDDEN, CLASSES = 7, 11, 5  # divided by neither 2 nor 4


class GradientNorms(Algorithm):
    """Writes down the norm of the gradients of each batch, before anybody clips them."""

    before = {"role:clips-gradients"}

    def __init__(self) -> None:
        self.norms: list[float] = []

    @hookimpl
    def after_train_batch(self, state: Any) -> None:
        gradients = [parameter.grad for parameter in state.model.parameters() if parameter.grad is not None]
        self.norms.append(float(state.engine.total_norm(gradients)))


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block(x)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """First and last modules around a list of blocks, which are sharded and recomputed in one piece."""

    def __init__(self, first: nn.Module, blocks: list[nn.Module], *last: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = first, nn.ModuleList(blocks), nn.Sequential(*last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def make(kind: str) -> tuple[Any, TensorDataset | list[Any]]:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, CLASSES, (NUM_SAMPLES,), generator=generator)
    if kind == "mlp":
        blocks = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(3)]
        net = Stack(nn.Linear(FEATURES, HIDDEN), blocks, nn.Linear(HIDDEN, CLASSES)).double()
        data = torch.randn(NUM_SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        return Classifier(net, num_classes=CLASSES), TensorDataset(data, labels)
    if kind == "resnet":
        net = Stack(nn.Conv2d(1, 6, 3), [Residual(6), Residual(6)], nn.Flatten(), nn.Linear(6 * 16, CLASSES)).double()
        data = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=generator, dtype=torch.float64)
        return Classifier(net), TensorDataset(data, labels)
    from kernel_plugin_huggingface import HuggingFaceModel
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 20, "n_layer": 2, "n_head": 4}
        net: Any = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    else:
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, **heads}
        net = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, 50, (NUM_SAMPLES, 12), generator=generator)
    lengths = torch.randint(3, 13, (NUM_SAMPLES,), generator=generator)
    rows = []
    for row, length in zip(ids, lengths, strict=True):  # ragged: ranks have different numbers of labels
        labels_of_row = row.clone()
        labels_of_row[length:] = -100
        rows.append({"input_ids": row, "labels": labels_of_row})
    return HuggingFaceModel(net), rows


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train ten steps of ``case`` on the ranks there are, and return what can be compared."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model, data = make(case["model"])
    data_ranks = max(1, world_size // case.get("parts", 1))
    loader = DataLoader(data, GLOBAL_BATCH // data_ranks, shuffle=True)  # type: ignore[arg-type]
    parameters = list(model.parameters())
    if case.get("optimizers") == 2:
        half = len(parameters) // 2
        optimizers: Any = [
            torch.optim.SGD(parameters[:half], lr=0.1, momentum=0.9),
            torch.optim.AdamW(parameters[half:], lr=0.01),
        ]
    else:
        optimizers = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)
    norms = GradientNorms()
    plugins: list[Any] = [norms, "in_memory_logger", *case.get("plugins", [])]
    with Trainer(
        model=model,
        train_dataloader=loader,
        max_duration="10ba",
        optimizers=optimizers,
        plugins=plugins,
        parallelism=case.get("parallelism") if world_size > 1 else None,
        device_train_microbatch_size=case.get("microbatch"),
        compile_config=case.get("compile"),
        progress_bar=False,
        seed=5,
        device="cpu",
    ) as trainer:
        trainer.fit()
        state = trainer.state
        weights = state.engine.model_state(state.model, full=True)
        logged = next(one.plugin for one in trainer.plan.plugins if one.id == "in_memory_logger").data  # type: ignore[attr-defined]
        return {
            "losses": [float(entry[-1]) for entry in logged.get("loss/train/total", [])],
            "norms": norms.norms,
            "weights": {name: value.double().flatten().tolist() for name, value in weights.items()},
            "sample": state.progress.sample,
        }


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [train(case) for case in cases]


ENGINES: dict[str, Any] = {
    "ddp": {"ddp": {}},
    "ddp_forced": {"ddp": {"sync_strategy": "forced_sync"}},
    "ddp_multi": {"ddp": {"sync_strategy": "multi_auto_sync"}},
    "full": {"fsdp": {"sharding_strategy": "FULL_SHARD"}},
    "grad_op": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP", "forward_prefetch": True, "backward_prefetch_limit": 2}},
    "no_shard": {"fsdp": {"sharding_strategy": "NO_SHARD"}},
    "hybrid": {"fsdp": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate_degree": 2}},
    "offload": {"fsdp": {"cpu_offload": True, "activation_checkpointing": True}},
}
TENSOR = {"tensor_parallel": {"degree": 2}}
SPLIT: dict[str, Any] = {
    "tp": TENSOR,
    "fsdp_tp": {"fsdp": {}, **TENSOR},
    "no_shard_tp": {"fsdp": {"sharding_strategy": "NO_SHARD"}, **TENSOR, "activation_checkpointing": {}},
}
ALIBI = ["alibi"]
CLIP = [["gradient_clipping", {"clipping_threshold": 0.05}]]


def cases_of(engines: list[str]) -> list[dict[str, Any]]:
    variants: list[dict[str, Any]] = [
        {"model": "mlp", "plugins": CLIP},
        {"model": "mlp", "microbatch": 2, "optimizers": 2},
        {"model": "gpt2", "plugins": [*ALIBI, *CLIP], "microbatch": 2},
    ]
    return [{**variant, "engine": name, "parallelism": ENGINES[name]} for variant in variants for name in engines]


def check_close(what: str, found: list[float], expected: list[float], rtol: float, atol: float) -> None:
    left, right = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda message: f"{what}: {message}")


def compare(cases: list[dict[str, Any]], world_size: int) -> None:
    alone = {}
    results = run_on_ranks(world_size, __file__, "train_all", cases, timeout_s=300)
    for index, case in enumerate(cases):
        key = str({name: value for name, value in case.items() if name not in ("engine", "parallelism", "parts")})
        expected = alone.setdefault(key, train({**case, "parallelism": None}))
        found = results[0][index]
        what = f"{case['engine']} on {world_size}: {case['model']}"
        # transformers computes its loss in float32
        close = {"rtol": 2e-5, "atol": 2e-6} if case["model"] in ("gpt2", "llama") else {"rtol": 1e-9, "atol": 1e-11}
        assert found["sample"] == expected["sample"], what
        assert len(found["losses"]) == 10, what
        for name in ("losses", "norms"):  # the loss that is logged is averaged in float32
            check_close(f"{what}, {name}", found[name], expected[name], max(close["rtol"], 1e-6), 1e-6)
        for name, value in expected["weights"].items():
            check_close(f"{what}, {name}", found["weights"][name], value, **close)
        for other in results[1:]:
            assert other[index]["norms"] == found["norms"], what


@pytest.mark.ranks
def test_two_ranks_train_as_one_process_does() -> None:
    compare(cases_of(["ddp", "full"]), 2)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_engine_trains_as_one_process_does(world_size: int) -> None:
    compare(cases_of([name for name in ENGINES if name != "hybrid" or world_size == 4]), world_size)


def split_cases(names: list[str]) -> list[dict[str, Any]]:
    plugins, common = CLIP, {"model": "llama", "parts": 2, "microbatch": 3}
    return [{**common, "plugins": plugins, "engine": name, "parallelism": SPLIT[name]} for name in names]


@pytest.mark.ranks
@pytest.mark.slow
def test_a_compiled_model_trains_as_one_process_does() -> None:
    cases = cases_of(["ddp", "full", "offload"])[:6]
    compare([{**case, "compile": {"backend": "aot_eager"}} for case in cases], 2)


@pytest.mark.ranks
@pytest.mark.slow
def test_a_split_model_trains_as_one_process_does() -> None:
    compare(split_cases(["tp"]), 2)
    compare(split_cases(["fsdp_tp", "no_shard_tp"]), 4)


def statistics_after_evaluation(engines: list[str]) -> list[list[float]]:
    found = []
    for name in engines:
        model, data = make("resnet")
        with Trainer(
            model=model,
            train_dataloader=DataLoader(data, 6, shuffle=True),  # type: ignore[arg-type]
            eval_dataloader=DataLoader(data, 6),  # type: ignore[arg-type]
            max_duration="3ba",
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            parallelism=ENGINES[name],
            progress_bar=False,
            device="cpu",
            seed=5,
        ) as trainer:
            trainer.fit()
        found.append([value for name, one in model.named_buffers() if "mean" in name for value in one.tolist()])
    return found


@pytest.mark.ranks
@pytest.mark.slow
def test_ranks_evaluate_with_the_statistics_of_the_first() -> None:
    first, second = run_on_ranks(2, __file__, "statistics_after_evaluation", ["ddp", "full"])
    assert first == second
    assert first[0] != [0.0] * len(first[0])


def compare_batch_norm(world_size: int, engines: list[str]) -> None:
    # Each rank normalises by its own batch, as torch does. One process that takes the batch in as many microbatches does
    # the same, up to the running statistics, of which rank 0's are kept.
    cases = [{"model": "resnet", "parallelism": ENGINES[name]} for name in engines]
    results = run_on_ranks(world_size, __file__, "train_all", cases, timeout_s=300)
    expected = train({"model": "resnet", "microbatch": GLOBAL_BATCH // world_size})
    for found in results[0]:
        # the short last batch is shared more evenly among ranks than among microbatches
        torch.testing.assert_close(
            torch.tensor(found["losses"][:4]), torch.tensor(expected["losses"][:4]), rtol=1e-6, atol=0
        )
        torch.testing.assert_close(
            torch.tensor(found["norms"][:4]), torch.tensor(expected["norms"][:4]), rtol=1e-9, atol=0
        )


@pytest.mark.ranks
def test_batch_norm_sees_the_batch_of_its_rank() -> None:
    compare_batch_norm(2, ["ddp", "full"])


@pytest.mark.ranks
@pytest.mark.slow
def test_batch_norm_sees_the_batch_of_its_rank_under_every_engine() -> None:
    compare_batch_norm(2, ["grad_op", "no_shard"])
    compare_batch_norm(4, ["ddp", "full", "grad_op", "hybrid"])
