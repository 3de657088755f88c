"""Two processes against one: losses, gradients and weights; and what is refused before anything is changed."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core.errors import OptionError, ParallelismError
from kernel_plugin_tensor_parallel import STYLES, TensorParallel, resolve_plan
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

WORKER = Path(__file__).parent / "tensor_parallel_ranks.py"
ranks = pytest.mark.ranks
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of two ranks wrote, all cases in one go: starting a process takes longer than a case."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(WORKER)]
    with (folder / "log").open("w") as log:
        workers = [
            subprocess.Popen([*command, str(rank), "2", str(folder)], stdout=log, stderr=log) for rank in range(2)
        ]
        try:
            for worker in workers:
                worker.wait(timeout=120)
        finally:
            for worker in workers:
                worker.kill()
    # gloo may abort a process that is done, so the files count and not the exit codes
    assert all((folder / f"rank{rank}.pt").exists() for rank in range(2)), (folder / "log").read_text()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@ranks
@pytest.mark.parametrize(
    ("case", "tolerance"),
    # RMSNorm of transformers computes in single precision, which single roundings of double may tip
    [("llama", 1e-6), ("tied_llama", 1e-6), ("qwen3", 1e-6), ("mlp", 1e-6), ("bert", 1e-12)],
)
def test_parts_train_as_the_whole(case: str, tolerance: float, results: Results) -> None:
    for rank in results:
        alone, parts = rank[case]["alone"], rank[case]["parts"]
        assert abs(float(alone["loss"] - parts["loss"])) < tolerance
        assert largest_difference(alone["gradients"], parts["gradients"]) < tolerance
        assert largest_difference(alone["weights"], parts["weights"]) < tolerance
        assert len(rank[case]["split"]) >= 8


@ranks
def test_a_run_with_clipping_and_recomputation_ends_with_the_weights_of_one_process(results: Results) -> None:
    for rank in results:
        assert largest_difference(rank["trained"]["alone"], rank["trained"]["parts"]) < 1e-6


@ranks
def test_each_rank_holds_half_of_what_is_split(results: Results) -> None:
    split = results[1]["llama"]["split"]
    block = "model.model.layers.1"
    assert split[f"{block}.self_attn.q_proj.weight"] == (12, 24)
    assert split[f"{block}.self_attn.k_proj.weight"] == (6, 24)
    assert split[f"{block}.mlp.down_proj.weight"] == (24, 20)
    assert split["model.lm_head.weight"] == split["model.model.embed_tokens.weight"] == (16, 24)  # of 33
    assert "model.model.norm.weight" not in split


@ranks
def test_attention_knows_its_heads_and_others_have_none(results: Results) -> None:
    for rank, own in enumerate((range(0, 2), range(2, 4))):
        assert results[rank]["llama"]["heads"] == {f"model.model.layers.{i}.self_attn": own for i in range(2)}
        expected = {f"model.bert.encoder.layer.{i}.attention.self": own for i in range(2)}
        assert results[rank]["bert"]["heads"] == expected


@ranks
def test_alibi_with_the_slopes_of_other_heads_would_differ(results: Results) -> None:
    case = results[0]["bert_with_wrong_heads"]
    assert abs(float(case["alone"]["loss"] - case["parts"]["loss"])) > 1e-5
    assert largest_difference(case["alone"]["gradients"], case["parts"]["gradients"]) > 1e-4


@ranks
def test_tied_embeddings_stay_one_parameter(results: Results) -> None:
    assert all(rank["tied_llama"]["still_tied"] for rank in results)


@ranks
def test_what_is_split_comes_from_the_first_rank(results: Results) -> None:
    assert torch.equal(results[0]["unlike_ranks"]["weight"], results[1]["unlike_ranks"]["weight"])


MESSAGES = {
    "word": r"OptionError tensor_parallel\.plan: 'layers\.\*\.up' has the style 'colwize'.* Did you mean 'colwise'",
    "glob": r"OptionError tensor_parallel\.plan: 'blocks\.\*\.up' fits no module\. Expected .* example 'layers\.\*\.up'",
    "no plan": r"ParallelismError tensor_parallel: MLP has no plan\. Expected a method tensor_parallel_plan\(\)",
    "features": r"ParallelismError tensor_parallel\.degree: got 2, and layers\.0\.up has 7 output features to split",
    "class": r"ParallelismError tensor_parallel: layers\.0 is a ModuleDict, which ColwiseParallel cannot split",
    "heads": r"ParallelismError tensor_parallel\.degree: got 2, which does not divide .*k_proj: 1\. .*num_key_value_heads",
    "fused": r"ParallelismError tensor_parallel: qkv has 24 features, and Module 2 heads of 4\. Expected the queries in a",
    "multihead": r"ParallelismError tensor_parallel: inner\.out_proj is part of an MultiheadAttention",
    "meta": r"ParallelismError tensor_parallel: layers\.0\.up is on the meta device\. Expected values",
    "tied": r"ParallelismError tensor_parallel\.plan: .*embed_tokens\.weight and .*lm_head\.weight are one parameter",
    "twice": r"ParallelismError tensor_parallel: layers\.0\.up is split already",
}


@ranks
@pytest.mark.parametrize("name", MESSAGES)
def test_what_cannot_be_split_is_refused(name: str, results: Results) -> None:
    # the worker makes sure that the refused models have no parameter split
    for rank in results:
        assert re.match(MESSAGES[name], rank["refused"][name]), rank["refused"][name]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


class Planned(Net):
    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


def wrapped(model: nn.Module) -> nn.Module:
    outer = nn.Module()
    outer.module = model
    return outer


def names(model: nn.Module, plan: Any = None) -> dict[str, str]:
    return {path: type(style).__name__ for path, style in resolve_plan(model, plan).items()}


def test_a_model_may_bring_its_plan_and_wrappers_are_looked_through() -> None:
    expected = {f"layers.{i}.{name}": style for name, style in BOTH for i in range(2)}
    assert names(Planned()) == expected
    assert names(wrapped(Planned())) == {f"module.{path}": style for path, style in expected.items()}
    assert names(wrapped(Net()), Planned().tensor_parallel_plan()) == names(wrapped(Planned()))


BOTH = (("up", "ColwiseParallel"), ("down", "RowwiseParallel"))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"layers.1.up": "colwise"}, {"layers.1.up"}),
        ({"**.up": "colwise"}, {"layers.0.up", "layers.1.up"}),
        ({"layers.*.up": "colwise", "layers.0.up": "replicate"}, {"layers.1.up"}),
        ({"layers.0.*": ColwiseParallel()}, {"layers.0.up", "layers.0.down"}),
    ],
)
def test_globs(plan: dict[str, Any], expected: set[str]) -> None:
    assert set(names(Net(), plan)) == expected


def test_one_star_is_one_part_of_a_path() -> None:
    with pytest.raises(OptionError, match=r"^tensor_parallel\.plan: '\*\.up' fits no module"):
        resolve_plan(Net(), {"*.up": "colwise"})


def test_a_plan_of_the_model_that_fits_nothing_is_refused() -> None:
    model = Net()
    model._tp_plan = {"blocks.*.up": "colwise"}  # type: ignore[assignment]
    with pytest.raises(ParallelismError, match=r"^tensor_parallel: the plan of Net fits none of its modules: blocks"):
        resolve_plan(model, None)


def test_every_word_of_the_plans_of_llama_and_its_kin_is_known() -> None:
    transformers = pytest.importorskip("transformers")
    for name in (
        "LlamaConfig",
        "MistralConfig",
        "Qwen2Config",
        "Qwen3Config",
        "GemmaConfig",
        "Gemma2Config",
        "OlmoConfig",
    ):
        assert set(getattr(transformers, name).base_model_tp_plan.values()) <= set(STYLES), name


def test_degree_one_splits_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    transform, model = TensorParallel(1), Net()
    transform.apply(model, None)
    assert caplog.messages == ["tensor_parallel: degree 1 splits nothing."]
    assert (transform.stage, transform.axis, transform.degree) == ("split", "tensor_parallel", 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TensorParallel(0), r"^tensor_parallel\.degree: got 0\. Expected at least 1"),
        (lambda: TensorParallel(2).apply(Net(), None), r"^tensor_parallel\.degree: got 2 for 1 ranks along the axis"),
    ],
)
def test_wrong_degrees(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((OptionError, ParallelismError), match=message):
        make()
