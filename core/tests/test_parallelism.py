"""What ``parallelism=`` means, and one clear message for each way in which processes, mesh, model and options do not fit."""

import os
import socket
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, TrainableModel, Trainer
from kernel_core.distributed.engine import DistributedEngine
from kernel_core.distributed.mesh import resolve_axes
from kernel_core.engine import ModelTransform, SingleEngine, in_order
from kernel_core.errors import (
    ConflictError,
    KernelError,
    OptionError,
    ParallelismError,
    PluginNotFoundError,
    TrainerError,
)
from kernel_core.testing.ranks import free_port, run_on_ranks
from kernel_core.train.parallelism import resolve_parallelism
from kernel_core.train.place import Place
from torch import Tensor, nn

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOUR = Place(0, 4, 0, 4)


class Net(TrainableModel):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.line = nn.Linear(3, width)

    def forward(self, batch: Any) -> Tensor:
        return self.line(batch)  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


class Noise(Algorithm):
    def __init__(self, strength: float = 0.1) -> None:
        self.strength = strength


class Halves(ModelTransform):
    """Says that it splits the model over two ranks."""

    name, axis, degree = "halves", "halves", 2

    def apply(self, model: nn.Module, mesh: Any) -> None:
        raise AssertionError("never reached")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the variables of a launcher; none of them is set at first."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_to(**values: Any) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return set_to


def make(**arguments: Any) -> Trainer:
    return Trainer(**{"model": Net(), "device": "cpu", "progress_bar": False, **arguments})


def refused(error: type[KernelError], **arguments: Any) -> str:
    with pytest.raises(error) as caught:
        make(**arguments)
    return str(caught.value)


# --- the place of a process --------------------------------------------------------------------------------------


def test_a_process_without_a_launcher_is_alone(environment: Any) -> None:
    assert Place.of_environment() == Place(0, 1, 0, 1)


def test_a_rank_that_is_no_number_is_refused(environment: Any) -> None:
    environment(RANK="first", WORLD_SIZE=2)
    assert "the environment has RANK='first'" in refused(ParallelismError)


def test_several_processes_without_a_rank_are_refused(environment: Any) -> None:
    environment(WORLD_SIZE=2)
    assert "the environment has RANK=None" in refused(ParallelismError)


@pytest.mark.parametrize(
    "values",
    [{"RANK": 2, "WORLD_SIZE": 2}, {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 3}, {"WORLD_SIZE": 0, "RANK": 0}],
)
def test_numbers_that_do_not_fit_together_are_refused(values: dict[str, int], environment: Any) -> None:
    environment(**values)
    assert "do not fit together. Expected ranks from 0 to one less than the size." in refused(ParallelismError)


@pytest.mark.parametrize(
    "values", [{}, {"MASTER_ADDR": "127.0.0.1"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}]
)
def test_several_processes_need_a_place_to_meet(values: dict[str, str], environment: Any) -> None:
    environment(RANK=0, WORLD_SIZE=2, **values)
    message = refused(ParallelismError)
    assert f"2 processes were started, and MASTER_ADDR={values.get('MASTER_ADDR')!r}" in message
    assert "Start with kernel launch or torchrun" in message


def test_a_port_that_is_taken_is_said(environment: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        message = refused(ParallelismError, dist_timeout=2)
    assert f"port {port} of 127.0.0.1 is taken" in message


def test_a_rank_0_that_cannot_be_reached_is_said(environment: Any) -> None:
    port = free_port()
    environment(RANK=1, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    message = refused(ParallelismError, dist_timeout=1)
    assert f"rank 1 cannot reach rank 0 at 127.0.0.1:{port} within 1 s" in message


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    assert f"dist_timeout: got {timeout!r}" in refused(TrainerError, dist_timeout=timeout)


# --- engines and transforms --------------------------------------------------------------------------------------


def test_one_process_needs_no_engine_and_several_get_ddp() -> None:
    assert type(resolve_parallelism(None, None, None, Place())[0]) is SingleEngine
    assert resolve_parallelism(None, None, None, FOUR)[0].name == "ddp"


def test_what_is_said_in_several_ways_is_the_same() -> None:
    for parallelism in ("fsdp", {"fsdp": {}}, ["fsdp"], {"fsdp": None}):
        engine, transforms = resolve_parallelism(parallelism, None, None, FOUR)  # type: ignore[arg-type]
        assert (engine.name, transforms) == ("fsdp", [])
    engine, _ = resolve_parallelism(None, {"sharding_strategy": "SHARD_GRAD_OP"}, None, FOUR)
    assert (engine.name, engine.sharding_strategy) == ("fsdp", "SHARD_GRAD_OP")  # type: ignore[attr-defined]
    assert resolve_parallelism(engine, None, None, FOUR)[0] is engine


def test_the_words_of_composers_parallelism_config_are_understood() -> None:
    config = {
        "fsdp": {"sharding_strategy": "NO_SHARD", "mixed_precision": "PURE"},
        "tp": {"tensor_parallel_degree": 2, "layer_plan": {"line": "column"}},
    }
    engine, transforms = resolve_parallelism(None, None, config, FOUR)
    assert (engine.name, engine.sharding_strategy) == ("fsdp", "NO_SHARD")  # type: ignore[attr-defined]
    assert [(one.name, one.axis, one.degree) for one in transforms] == [("tensor_parallel", "tensor_parallel", 2)]
    engine, transforms = resolve_parallelism(None, None, {"fsdp": {}, "tp": None}, FOUR)
    assert (engine.name, transforms) == ("fsdp", [])


def test_an_unknown_part_of_parallelism_config_is_refused() -> None:
    message = refused(OptionError, parallelism_config={"fdsp": {}})
    assert "parallelism_config.fdsp: unknown key." in message
    assert "'fsdp'" in message
    assert "Expected fsdp, fsdp2, tp." in message


def test_two_ways_of_saying_it_are_not_mixed() -> None:
    message = refused(ParallelismError, parallelism="fsdp", fsdp_config={})
    assert message.startswith("parallelism: was given together with fsdp_config.")
    message = refused(ParallelismError, fsdp_config={}, parallelism_config={"fsdp": {}})
    assert message.startswith("fsdp_config: was given together with parallelism_config.")


def test_two_engines_are_refused() -> None:
    assert "parallelism: got the engines ddp and fsdp. Expected one" in refused(
        ParallelismError, parallelism=["ddp", "fsdp"]
    )


def test_an_engine_of_one_process_is_refused_for_several(environment: Any) -> None:
    environment(RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    message = refused(ParallelismError, parallelism="single")
    assert "the engine 'single' trains in one process, and 2 were started" in message


def test_a_transform_that_splits_the_model_needs_as_many_processes() -> None:
    message = refused(ParallelismError, parallelism=Halves())
    assert "the run has 1 ranks. Expected a multiple of 2." in message
    message = refused(ParallelismError, parallelism=[SingleEngine(), Halves()])
    assert "halves: splits the model over several processes, and there is one." in message


def test_ddp_does_not_average_a_model_that_is_split(environment: Any) -> None:
    engine: Any = resolve_parallelism("ddp", None, None, FOUR)[0]

    class Run:
        transforms = (Halves(),)

    with pytest.raises(ConflictError, match="ddp: cannot average the gradients of a model that halves splits"):
        engine.check(Run())


def test_transforms_run_in_the_order_of_their_stages_and_not_twice_along_an_axis() -> None:
    class Compiles(Halves):
        name, stage, axis = "compiles", "compile", None  # type: ignore[assignment]

    class Splits(Halves):
        stage = "split"

    assert [one.name for one in in_order([Compiles(), Splits()])] == ["halves", "compiles"]
    with pytest.raises(ParallelismError, match="two transforms split the model along 'halves'"):
        in_order([Splits(), Splits()])
    wrong = Compiles()
    wrong.stage = "compiling"
    with pytest.raises(
        ParallelismError, match=r"compiles.stage: got 'compiling'. Expected one of split, recompute, compile."
    ):
        in_order([wrong])


def test_what_is_not_installed_or_no_mapping_of_options_is_said() -> None:
    with pytest.raises(PluginNotFoundError, match="fsdq"):
        make(parallelism="fsdq")
    assert "fsdp: got 3. Expected its options as a mapping" in refused(OptionError, parallelism={"fsdp": 3})
    assert "single.speed: unknown option. It takes no options." in refused(
        OptionError, parallelism={"single": {"speed": 1}}
    )


# --- the mesh ----------------------------------------------------------------------------------------------------


def test_the_open_axis_takes_the_ranks_that_are_left() -> None:
    assert resolve_axes({"a": -1, "b": 2}, 8) == {"a": 4, "b": 2}
    assert resolve_axes({"a": 1, "b": -1}, 3) == {"a": 1, "b": 3}
    assert resolve_axes({"a": 2, "b": 2}, 4) == {"a": 2, "b": 2}


@pytest.mark.parametrize(
    ("axes", "world_size", "said"),
    [
        ({"a": 2, "b": 3}, 4, "the mesh is to have a 2, b 3, and the run has 4 ranks. Expected 6."),
        ({"a": -1, "b": 3}, 4, "Expected a multiple of 3."),
        ({"a": 2}, 4, "Expected 2."),
        ({"a": -1, "b": -1}, 4, "-1, for all that is left, along one at most."),
        ({"a": 0, "b": 4}, 4, "Expected at least 1 along each axis"),
        ({"a": -2, "b": 4}, 4, "Expected at least 1 along each axis"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(axes: dict[str, int], world_size: int, said: str) -> None:
    with pytest.raises(ParallelismError) as caught:
        resolve_axes(axes, world_size)
    assert said in str(caught.value)


def test_the_degrees_of_fsdp_multiply_to_the_ranks(environment: Any) -> None:
    environment(RANK=0, WORLD_SIZE=4, MASTER_ADDR="127.0.0.1", MASTER_PORT=1)
    config = {"data_parallel_shard_degree": 3, "data_parallel_replicate_degree": 2}
    assert "shard 3, and the run has 4 ranks. Expected 6." in refused(ParallelismError, fsdp_config=config)
    config = {"data_parallel_shard_degree": -1, "data_parallel_replicate_degree": -1}
    assert "along one at most" in refused(ParallelismError, fsdp_config=config)


# --- ranks that are not of one mind ------------------------------------------------------------------------------


def error_of(**arguments: Any) -> str:
    try:
        make(dist_timeout=30, **arguments).close()
    except ParallelismError as error:
        return str(error)
    return "nothing"


def disagree() -> dict[str, str]:
    odd = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    return {
        "options": error_of(algorithms=Noise(0.2 if odd else 0.1)),
        "plugins": error_of(algorithms=[Noise()] if odd else []),
        "shapes": error_of(model=Net(4 if odd else 3)),
        "names": error_of(model=Other() if odd else Net()),
        "nothing": error_of(algorithms=Noise()),
    }


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(2))


def missing() -> str:
    try:
        make(dist_timeout=1)
    except ParallelismError as error:
        return str(error)
    return "nothing"


def fails_while_it_starts() -> dict[str, Any]:
    """Make trainers that fail in their constructors, and then one that trains."""
    found = {"option": error_of(algorithms=Noise(0.2) if os.environ["RANK"] == "1" else Noise())}
    try:
        make(optimizers=torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
    except KernelError as error:
        found["optimizer"] = type(error).__name__
    model = Net()
    with make(
        model=model,
        train_dataloader=[torch.ones(2, 3)],
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration=1,
    ) as trainer:
        trainer.fit()
        found["batches"] = trainer.state.progress.batch
    trainer.close()
    return found


def on_ranks() -> dict[str, Any]:
    return {"disagree": disagree(), "fails": fails_while_it_starts()}


@pytest.mark.ranks
def test_every_rank_says_where_they_differ() -> None:
    for result in run_on_ranks(2, __file__, "on_ranks"):
        found = result["disagree"]
        assert "plan: rank 1 has another than rank 0: plugin noise is" in found["options"]
        assert "'strength': 0.2" in found["options"]
        assert (
            "plan: rank 1 has another than rank 0: plugins is ['noise'] on rank 1 and [] on rank 0." in found["plugins"]
        )
        assert "model: rank 1 has another than rank 0: line.bias is '[4] torch.float32' on rank 1" in found["shapes"]
        assert "model: rank 1 has another than rank 0: more is '[2] torch.float32' on rank 1 and None" in found["names"]
        assert "Start all ranks with the same code, packages and options." in found["shapes"]
        assert found["nothing"] == "nothing"
        fails = result["fails"]
        assert "plugin noise" in fails["option"]
        assert (fails["optimizer"], fails["batches"]) == ("OptimizerError", 1)


@pytest.mark.ranks
def test_a_rank_that_does_not_come_is_named() -> None:
    (message,) = run_on_ranks(1, __file__, "missing", environment={"WORLD_SIZE": "2"})
    assert "2 processes were announced, and after 1 s rank 1 is missing" in message


def test_ranks_left_over_by_transforms_need_an_engine() -> None:
    engine = DistributedEngine()
    engine.world_size, engine.data_world_size = 4, 2
    with pytest.raises(ParallelismError, match=r"split the model over 2 of 4 ranks, and no engine is named.*'fsdp'"):
        engine.prepare(torch.nn.Linear(1, 1), torch.device("cpu"), lambda module: None)
