"""FSDP: Composer's keys, which modules are units, in which dtypes they compute; and what of it torch has in the end."""

import logging
import os
from typing import Any

import pytest
import torch
from kernel_core import TrainableModel, Trainer
from kernel_core.errors import KernelError, OptionError, ParallelismError
from kernel_core.testing.ranks import run_on_ranks
from kernel_core.train.parallelism import resolve_parallelism
from kernel_core.train.place import Place
from kernel_plugin_fsdp import FSDPEngine
from kernel_plugin_fsdp.composer_keys import NOT_NEEDED, remarks
from kernel_plugin_fsdp.mixed_precision import policy
from kernel_plugin_fsdp.units import find_units
from torch import Tensor, nn

FOUR = Place(0, 4, 0, 2)
WIDTH = 5
# Composer's FSDPConfig: each key with its default there, and a value that asks for something else
COMPOSER: dict[str, tuple[Any, Any]] = {
    "activation_checkpointing": (False, True),
    "activation_checkpointing_reentrant": (True, False),
    "activation_cpu_offload": (False, True),
    "auto_wrap": (True, False),
    "te_checkpoint_wrapper": (False, True),
    "te_shard_fp8_weight": (False, True),
    "backward_prefetch": ("BACKWARD_POST", "NONE"),
    "backward_prefetch_limit": (1, 2),
    "cpu_offload": (False, True),
    "data_parallel_shard_degree": (-1, 2),
    "data_parallel_replicate_degree": (None, 2),
    "forward_prefetch": (False, True),
    "forward_prefetch_limit": (1, 2),
    "ignored_modules": (None, ()),
    "keep_low_precision_grads": (False, True),
    "limit_all_gathers": (True, False),
    "load_monolith_rank0_only": (False, True),
    "load_planner": (None, "planner"),
    "mixed_precision": ("DEFAULT", "PURE"),
    "save_planner": (None, "planner"),
    "sharded_ckpt_prefix_dir": ("ep{epoch}-ba{batch}", "batch{batch}"),
    "sharding_strategy": ("FULL_SHARD", "SHARD_GRAD_OP"),
    "state_dict_type": ("full", "sharded"),
    "sync_module_states": (False, True),
    "use_orig_params": (True, False),
    "verbose": (False, True),
    "reshard_after_forward": (True, False),
}


def make(options: dict[str, Any], place: Place = FOUR) -> Any:
    return resolve_parallelism(None, options, None, place)[0]


def refused(options: dict[str, Any]) -> str:
    with pytest.raises(OptionError) as caught:
        make(options)
    return str(caught.value)


# --- keys --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", COMPOSER)
def test_every_key_of_composer_is_accepted(key: str) -> None:
    for value in COMPOSER[key]:
        engine = make({key: value})
        assert isinstance(engine, FSDPEngine)
        lines = [line for line in engine._remarks if line.startswith(f"fsdp.{key}: {value!r} changes nothing: ")]
        says = key in NOT_NEEDED and value is not None and value not in NOT_NEEDED[key][0]
        assert len(engine._remarks) == len(lines) == says


def test_composers_defaults_together_are_accepted() -> None:
    assert make({key: default for key, (default, _) in COMPOSER.items()}).sharding_strategy == "FULL_SHARD"


def test_a_key_that_changes_nothing_gets_a_line_that_says_why() -> None:
    assert remarks({"limit_all_gathers": False}) == [
        "fsdp.limit_all_gathers: False changes nothing: memory is freed in the order of the streams, so that gathers need no "
        "limit."
    ]
    assert remarks({"limit_all_gathers": None, "use_orig_params": True}) == []


def test_an_unknown_key_is_refused_with_the_one_that_was_meant() -> None:
    message = refused({"sharding_stratgy": "FULL_SHARD"})
    assert "fsdp.sharding_stratgy" in message
    assert "'sharding_strategy'" in message
    assert "fsdp.sharding_strategy" in refused({"sharding_strategy": "SHARD"})


@pytest.mark.parametrize("key", ["process_group", "device_mesh"])
def test_the_layout_of_ranks_is_left_to_the_kernel(key: str) -> None:
    assert f"fsdp.{key}: got 'node'. Expected None" in refused({key: "node"})


def test_activation_checkpointing_is_a_transform_beside_it() -> None:
    _, transforms = resolve_parallelism({"fsdp": {"activation_checkpointing": True}}, None, None, FOUR)
    assert [one.name for one in transforms] == ["activation_checkpointing"]
    named = {"fsdp": {"activation_checkpointing": True}, "activation_checkpointing": {}}
    assert len(resolve_parallelism(named, None, None, FOUR)[1]) == 1  # named by hand, it stays one


@pytest.mark.parametrize(
    ("options", "axes"),
    [
        ({}, {"data_parallel_shard": -1}),
        (
            {"data_parallel_shard_degree": 2, "data_parallel_replicate_degree": 2},
            {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        ),
        ({"sharding_strategy": "NO_SHARD"}, {"data_parallel_replicate": -1, "data_parallel_shard": 1}),
        ({"sharding_strategy": "HYBRID_SHARD"}, {"data_parallel_replicate": -1, "data_parallel_shard": 2}),
        (
            {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "data_parallel_replicate_degree": 4},
            {"data_parallel_replicate": 4, "data_parallel_shard": -1},
        ),
    ],
)
def test_strategies_and_degrees_say_the_mesh(options: dict[str, Any], axes: dict[str, int]) -> None:
    engine = make(options)
    engine._local_world_size = FOUR.local_world_size
    assert engine.data_axes() == axes


# --- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "precision", "dtypes"),
    [
        ("DEFAULT", "amp_bf16", (torch.bfloat16, torch.float32)),
        ("PURE", "amp_bf16", (torch.bfloat16, torch.bfloat16)),
        ("FULL", "amp_bf16", (None, None)),
        ("DEFAULT", "amp_fp16", (torch.float16, torch.float32)),
        ("DEFAULT", "amp_fp8", (torch.bfloat16, torch.float32)),
        ("PURE", "fp32", (None, None)),
        (
            {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "bf16"},
            "fp32",
            (torch.bfloat16, torch.float32),
        ),
        ({"param_dtype": torch.float16}, "amp_bf16", (torch.float16, None)),
        ({}, "amp_bf16", (None, None)),
    ],
)
def test_words_and_precision_say_the_dtypes(words: Any, precision: str, dtypes: Any) -> None:
    found = policy(words, precision)
    assert (found.param_dtype, found.reduce_dtype) == dtypes


def test_dtypes_that_there_are_not_are_refused() -> None:
    assert "fsdp.mixed_precision.parm_dtype: unknown key." in refused({"mixed_precision": {"parm_dtype": "bf16"}})
    assert "fsdp.mixed_precision.param_dtype: got 'int9'." in refused({"mixed_precision": {"param_dtype": "int9"}})
    assert "fsdp.mixed_precision" in refused({"mixed_precision": "HALF"})


# --- units -------------------------------------------------------------------------------------------------------


class Net(TrainableModel):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, batch: Any) -> Tensor:
        x = self.words(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs.float(), batch[1])


def wrap_all(module: nn.Module) -> Any:
    """Make the blocks units of their own kind, and the head one."""
    if isinstance(module, nn.Sequential):
        return {"reshard_after_forward": False, "mixed_precision": "FULL"}
    return isinstance(module, nn.Linear) and module.out_features == 7


def test_blocks_are_the_units_if_the_model_does_not_say() -> None:
    assert {path: options for path, (_, options) in find_units(Net()).items()} == {f"blocks.{i}": {} for i in range(3)}
    assert find_units(nn.Linear(2, 2)) == {}


def test_the_model_says_which_units_there_are() -> None:
    model = Net()
    model.fsdp_wrap_fn = wrap_all
    model.blocks[1]._fsdp_wrap = False
    model.blocks[0][0]._fsdp_wrap = True  # type: ignore[index]
    own = {"reshard_after_forward": False, "mixed_precision": "FULL"}
    found = {path: options for path, (_, options) in find_units(model).items()}
    assert found == {"blocks.0.0": {}, "blocks.0": own, "blocks.2": own, "head": {}}
    assert next(iter(found)) == "blocks.0.0"  # inner ones are sharded first


def test_an_option_that_units_do_not_have_is_refused() -> None:
    model = Net()
    model.fsdp_wrap_fn = lambda module: {"backward_prefetch": "NONE"} if isinstance(module, nn.Embedding) else False
    with pytest.raises(OptionError, match=r"fsdp_wrap_fn: asks for 'backward_prefetch' for words\. Expected resh"):
        find_units(model)


def test_ties_across_units_are_refused_and_within_one_are_not() -> None:
    assert len(find_units(Net(tied=True))) == 3
    model = Net(tied=True)
    model.fsdp_wrap_fn = wrap_all
    with pytest.raises(
        ParallelismError, match=r"words.weight and head.weight are one parameter in two units, the root and head"
    ):
        find_units(model)


# --- what torch has in the end -----------------------------------------------------------------------------------


class ZeroDimensional(Net):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))


class Own(Net):
    """Evaluates in a way of its own, with parameters of the root."""

    def eval_forward(self, batch: Any, outputs: Any | None = None) -> Any:
        return self.head(self.words(batch[0])) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        from torchmetrics import SumMetric

        return {"sum": SumMetric()}

    def update_metric(self, batch: Any, outputs: Any, metric: Any) -> None:
        metric.update(outputs.sum())


def batches(rank: int | None = None) -> list[Any]:
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")) if rank is None else rank)
    return [
        (torch.randint(0, 7, (4,), generator=generator), torch.randint(0, 7, (4,), generator=generator))
        for _ in range(2)
    ]


def trainer_of(model: Any, options: dict[str, Any], **more: Any) -> Trainer:
    arguments = {
        "train_dataloader": batches(),
        "max_duration": 1,
        "optimizers": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "parallelism": {"fsdp": options} if "WORLD_SIZE" in os.environ else "single",
        "seed": 0,
        "device": "cpu",
        "progress_bar": False,
    }
    return Trainer(model=model, **{**arguments, **more})


def live(options: dict[str, Any], wraps: Any = None, precision: str = "amp_bf16") -> dict[str, Any]:
    """Return what torch's objects say of each unit after a training step."""
    model = Net()
    if wraps is not None:
        model.fsdp_wrap_fn = wraps
    with trainer_of(model, options, precision=precision) as trainer:
        trainer.fit()
        found = {}
        for path, module in trainer.state.model.named_modules():
            if not hasattr(module, "_get_fsdp_state"):
                continue
            state = module._get_fsdp_state()
            group = state._fsdp_param_group
            found[path or "root"] = {
                "param": str(state._mp_policy.param_dtype),
                "reduce": str(state._mp_policy.reduce_dtype),
                "frees": group is not None and group.post_forward_mesh_info is not None,
            }
        kinds = {f"{type(one).__name__} {one.dtype}" for one in trainer.state.model.parameters()}
        found["parameters"] = sorted(kinds)  # type: ignore[assignment]
    return found


def error_of(model: Any, options: dict[str, Any], **more: Any) -> str:
    try:
        with trainer_of(model, options, **more) as trainer:
            trainer.fit()
    except Exception as error:
        return f"{type(error).__name__} {isinstance(error, KernelError)}: {error}"
    return "trains"


def meta_gpt2() -> dict[str, list[float]]:
    """Return the first values of each tensor of a GPT-2 from the meta device."""
    from kernel_plugin_huggingface import HuggingFaceModel
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    with torch.device("meta"):
        net = GPT2LMHeadModel(GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2, **ids))
    data = [{"input_ids": torch.arange(6).reshape(1, 6)}]
    with trainer_of(HuggingFaceModel(net), {}, train_dataloader=data) as trainer:
        whole = trainer.state.engine.model_state(trainer.state.model, full=True)
        found = {name: value.flatten().tolist() for name, value in whole.items()}
        trainer.fit()
    return found


def ignored() -> dict[str, str]:
    model = Net()
    with trainer_of(model, {"ignored_modules": [model.words]}) as trainer:
        trainer.fit()
        return {name: type(one).__name__ for name, one in trainer.state.model.named_parameters()}


def evaluated() -> float:
    """Return what evaluation sees after training that changes nothing."""
    with trainer_of(Own(), {}, optimizers=lambda parameters: torch.optim.SGD(parameters, lr=0.0)) as trainer:
        trainer.fit()
        return float(trainer.eval([batches()[0]])["eval/sum"])


def on_ranks() -> dict[str, Any]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("kernel_plugin_fsdp").addHandler(handler)
    return {
        "default": live({}),
        "pure": live({"mixed_precision": "PURE", "sharding_strategy": "SHARD_GRAD_OP"}),
        "fp32": live({"reshard_after_forward": False, "verbose": True, "limit_all_gathers": False}, precision="fp32"),
        "wrapped": live({}, wrap_all),
        "zero": error_of(ZeroDimensional(), {}),
        "lbfgs": error_of(Net(), {}, optimizers=lambda parameters: torch.optim.LBFGS(parameters)),
        "gpt2": meta_gpt2(),
        "ignored": ignored(),
        "evaluated": evaluated(),
        "lines": lines,
    }


def check(world_size: int) -> None:
    results, gpt2 = run_on_ranks(world_size, __file__, "on_ranks"), meta_gpt2()
    blocks, sharded = [f"blocks.{index}" for index in range(3)], ["DTensor torch.float32"]
    bf16, fp32, none = "torch.bfloat16", "torch.float32", "None"
    seen = sum(Own().eval_forward(batches(rank)[0]).sum().item() for rank in range(world_size))
    for rank, found in enumerate(results):
        unit = {"param": bf16, "reduce": fp32, "frees": True}
        assert found["default"] == {
            "root": {**unit, "frees": False},
            **dict.fromkeys(blocks, unit),
            "parameters": sharded,
        }
        unit = {"param": bf16, "reduce": bf16, "frees": False}
        assert found["pure"] == {"root": unit, **dict.fromkeys(blocks, unit), "parameters": sharded}
        unit = {"param": none, "reduce": none, "frees": False}
        assert found["fp32"] == {"root": unit, **dict.fromkeys(blocks, unit), "parameters": sharded}
        root, head = {"param": bf16, "reduce": fp32, "frees": False}, {"param": bf16, "reduce": fp32, "frees": True}
        assert found["wrapped"] == {"root": root, **dict.fromkeys(blocks, unit), "head": head, "parameters": sharded}
        assert found["gpt2"] == ({} if rank else gpt2)
        kinds = {name: "Parameter" if name.startswith("words") else "DTensor" for name, _ in Net().named_parameters()}
        assert found["ignored"] == kinds
        assert found["evaluated"] == pytest.approx(seen, rel=1e-4)
        assert found["zero"].startswith(
            "ParallelismError True: fsdp: temperature is a single number without a dimension"
        )
        assert found["lbfgs"].startswith("ConflictError True: fsdp: LBFGS needs all gradients in one vector")
        said = [line for line in found["lines"] if "changes nothing" in line or "sharded in one piece" in line]
        assert len(said) == (0 if rank else 2)
    assert "blocks.0, blocks.1, blocks.2, and the rest" in results[0]["lines"][1]


@pytest.mark.ranks
def test_torch_does_what_the_options_say() -> None:
    check(2)


@pytest.mark.ranks
@pytest.mark.slow
def test_torch_does_what_the_options_say_on_four_ranks() -> None:
    check(4)
