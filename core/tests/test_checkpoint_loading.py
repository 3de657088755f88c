"""What is loaded of a checkpoint, what is refused and with which message, and which plans may go on from it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Algorithm, Callback, State, Trainer, hookimpl
from kernel_core.checkpoint.per_rank import PerRank, value_for
from kernel_core.checkpoint.plans import check_plan, structural_plugins
from kernel_core.checkpoint.request import SaveRequest
from kernel_core.errors import (
    CheckpointMismatchError,
    CheckpointMissingError,
    HookError,
    PluginNotFoundError,
    SaveFailedError,
    TrainerError,
    UnsavableError,
)
from kernel_core.models import Classifier
from kernel_core.registry.lock import Difference, differences
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def net(width: int = 6, layers: int = 1, names: str = "body") -> Classifier:
    torch.manual_seed(5)
    body = nn.Sequential(
        *[nn.Linear(4 if layer == 0 else width, width) for layer in range(layers)], nn.Linear(width, 3)
    )
    return Classifier(nn.ModuleDict({names: body})[names], num_classes=3)


def loader(num: int = 24, size: int = 4) -> DataLoader[Any]:
    data = torch.Generator().manual_seed(7)
    return DataLoader(
        TensorDataset(torch.randn(num, 4, generator=data), torch.randint(0, 3, (num,), generator=data)),
        size,
        shuffle=True,
    )


def trainer(model: Classifier | None = None, **options: Any) -> Trainer:
    model = model or net()
    return Trainer(
        model=model,
        **{
            "train_dataloader": loader(),
            "max_duration": "2ep",
            "optimizers": torch.optim.AdamW(model.parameters(), lr=0.02),
            "progress_bar": False,
            **options,
        },
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints after 2, 4 and 6 batches of 12."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with trainer(seed=11, run_name="first") as run:
        for number, _ in enumerate(run.steps(), 1):
            if number in (2, 4, 6):
                run.save_checkpoint(folder)
            if number == 6:
                break
    return folder


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in run.state.model.state_dict().items()}


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_folder_of_checkpoints_means_its_newest_and_latest_the_same(saved: Path) -> None:
    for path in (saved, saved / "latest", str(saved) + "/", f"file://{saved}"):
        with trainer(load_path=path) as run:
            assert run.state.timestamp.batch == 6, path
    with trainer(load_path=saved / "ep0-ba4") as run:
        assert (run.state.timestamp.batch, run.state.seed, run.state.run_name != "first") == (4, 11, True)


def test_weights_only_begins_training_anew(saved: Path) -> None:
    with trainer(load_path=saved / "ep0-ba2", load_weights_only=True, seed=1) as run:
        with trainer(load_path=saved / "ep0-ba2") as whole:
            assert equal(weights(run), weights(whole))
            assert whole.state.optimizers[0].state
        assert (run.state.timestamp.batch, len(run.state.optimizers[0].state)) == (0, 0)


def test_a_checkpoint_of_weights_alone_is_loaded_as_such(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with trainer(load_path=saved, seed=11) as run:
        where = run.save_checkpoint(tmp_path, "weights", weights_only=True)
        assert run.saved_checkpoints == [where]
        expected = weights(run)
    assert not list(tmp_path.glob("weights/state*"))
    with caplog.at_level(logging.WARNING), trainer(load_path=where) as run:
        assert equal(weights(run), expected)
    assert "holds weights only; training begins at its start." in caplog.text


def test_where_there_is_none_the_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=rf"there is no checkpoint in {tmp_path}"):
        trainer(load_path=tmp_path)
    with pytest.raises(CheckpointMissingError, match="leads to no checkpoint"):
        trainer(load_path=tmp_path / "latest")


def test_names_and_shapes_that_differ_are_listed_and_refused(saved: Path) -> None:
    with pytest.raises(CheckpointMismatchError) as caught:
        trainer(net(layers=2), load_path=saved, load_weights_only=True)
    message = str(caught.value)
    assert "shapes differ: 2 missing, 0 unexpected, 2 reshaped of 6 tensors" in message
    assert "missing      module.2.weight  [3, 6]: the model has it, the checkpoint does not" in message
    assert "reshaped     module.1.weight: [3, 6] in the checkpoint, [6, 6] in the model" in message
    with pytest.raises(CheckpointMismatchError, match="shapes differ"):  # not even when not strict
        trainer(net(width=7), load_path=saved, load_weights_only=True, load_strict_model_weights=False)


class WithHead(Classifier):
    def __init__(self) -> None:
        super().__init__(net().module, num_classes=3)
        self.head = nn.Linear(2, 2)


def test_strict_is_strict_by_default_and_both_sides_are_named(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = WithHead()
    for weights_only in (True, False):  # Composer is strict only when weights alone are loaded
        with pytest.raises(CheckpointMismatchError, match="the names differ: 2 missing, 0 unexpected"):
            trainer(model, load_path=saved, load_weights_only=weights_only)
    options: dict[str, Any] = {"load_path": saved, "load_weights_only": True}
    with caplog.at_level(logging.WARNING), trainer(model, load_strict_model_weights=False, **options) as run:
        assert "2 missing" in caplog.text
        run.save_checkpoint(tmp_path, "head", weights_only=True)
    with trainer(model, load_ignore_keys=["model/head.*"], **options):
        pass
    with pytest.raises(CheckpointMismatchError, match=r"unexpected   head\.weight"):
        trainer(load_path=tmp_path / "head", load_weights_only=True)


def test_no_match_at_all_is_always_refused(saved: Path) -> None:
    class Renamed(Classifier):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(), num_classes=3)
            self.other = nn.Linear(4, 3)

    with pytest.raises(CheckpointMismatchError, match="no tensor of the model is in the checkpoint"):
        trainer(Renamed(), load_path=saved, load_weights_only=True, load_strict_model_weights=False)


def test_what_is_ignored_stays_as_it_is(saved: Path) -> None:
    with trainer(load_path=saved, load_ignore_keys=["optimizers"]) as run:
        assert (run.state.timestamp.batch, len(run.state.optimizers[0].state)) == (6, 0)
    with trainer(load_path=saved, load_ignore_keys=["state/timestamp"]) as run:  # Composer's prefix
        assert (run.state.timestamp.batch, len(run.state.optimizers[0].state)) == (0, 4)
    with trainer(load_path=saved, load_ignore_keys=["model/*"], load_strict_model_weights=False) as run:
        assert equal(weights(run), weights(trainer()))

    def forget(sections: dict[str, Any]) -> None:
        sections.pop("optimizers", None)

    with trainer(load_path=saved, load_ignore_keys=forget) as run:
        assert not run.state.optimizers[0].state


def test_what_is_ignored_when_saving_is_not_there(saved: Path, tmp_path: Path) -> None:
    with trainer(load_path=saved) as run:
        run.save_checkpoint(tmp_path, "small", ignore_keys=["optimizers", "model/module.1.*"])
    with trainer(load_path=tmp_path, load_ignore_keys=["model/module.1.*"]) as run:
        assert not run.state.optimizers[0].state
    with pytest.raises(CheckpointMismatchError, match=r"missing      module\.1\.weight"):
        trainer(load_path=tmp_path)


def test_other_optimizers_and_groups_are_refused(saved: Path) -> None:
    model = net()
    first, second = model.module[0].parameters(), model.module[1].parameters()
    two = [torch.optim.SGD(first, lr=1.0), torch.optim.SGD(second, lr=1.0)]
    with pytest.raises(CheckpointMismatchError, match="has 1 optimizers, and the run has 2"):
        trainer(model, load_path=saved, optimizers=two)
    model = net()
    groups = [{"params": list(layer.parameters())} for layer in model.module]
    with pytest.raises(CheckpointMismatchError, match=r"optimizer 0 \(AdamW\) has other parameters or groups"):
        trainer(model, load_path=saved, optimizers=torch.optim.AdamW(groups, lr=1.0))
    model = net()
    with pytest.raises(CheckpointMismatchError, match="was saved with the optimizers AdamW, and the run has SGD"):
        trainer(model, load_path=saved, optimizers=torch.optim.SGD(model.parameters(), lr=1.0))


def test_state_goes_to_the_parameter_of_its_name_whatever_the_order(saved: Path) -> None:
    model = net()
    turned = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.02)
    with trainer(model, load_path=saved, optimizers=turned) as run, trainer(load_path=saved) as straight:
        mine, theirs = (
            one.state.engine.optimizer_state(one.state.model, one.state.optimizers[0], full=True)["state"]
            for one in (run, straight)
        )
        for name in theirs:
            assert torch.equal(mine[name]["exp_avg"], theirs[name]["exp_avg"]), name


def test_optimizer_state_keeps_its_dtype() -> None:
    """torch would turn float32 moments of bfloat16 weights into bfloat16."""
    model = nn.Linear(2, 2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"weight": {"step": torch.tensor(3.0), "exp_avg": torch.full((2, 2), 1 / 3)}}
    from kernel_core.engine import SingleEngine

    groups = SingleEngine().optimizer_state(model, optimizer, full=False)["param_groups"]
    SingleEngine().load_optimizer_state(model, optimizer, {"state": state, "param_groups": groups})
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], torch.full((2, 2), 1 / 3))


def test_another_seed_is_refused_unless_allowed(saved: Path) -> None:
    with pytest.raises(CheckpointMismatchError, match="by a run with seed 11, and this one has 12"):
        trainer(load_path=saved, seed=12)
    with trainer(load_path=saved, seed=12, load_allow_changes=["seed"]) as run:
        assert run.state.seed == 12


def test_other_data_is_refused_before_the_first_step(saved: Path) -> None:
    from kernel_core.errors import DataError

    with (
        trainer(load_path=saved, train_dataloader=loader(num=20)) as run,
        pytest.raises(DataError, match="num_samples is 20"),
    ):
        run.fit()


# --- plans ------------------------------------------------------------------------------------------------------


class Tuned(Algorithm):
    """An algorithm with state and options."""

    may_change = {"talk"}

    def __init__(self, strength: float = 1.0, talk: bool = False) -> None:
        self.count = 0

    @hookimpl
    def batch_end(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


class Watcher(Callback):
    affects_training = False

    @hookimpl
    def batch_end(self) -> None: ...


@pytest.fixture
def tuned(tmp_path: Path) -> Path:
    with trainer(algorithms=[Tuned(strength=2.0)], callbacks=[Watcher()], seed=3) as run:
        next(run.steps())
        run.save_checkpoint(tmp_path / "tuned")
    return tmp_path / "tuned"


def test_plugin_state_comes_back_by_id(tuned: Path) -> None:
    plugin = Tuned(strength=2.0)
    with trainer(algorithms=[plugin], callbacks=[Watcher()], load_path=tuned):
        assert plugin.count == 1


@pytest.mark.parametrize(
    ("plugins", "text", "name"),
    [
        ([], r"tuned \(algorithms\) was in the run that was saved, and is not in this one", "tuned"),
        ([Tuned(strength=3.0)], r"tuned\.strength was 2\.0, and is 3\.0", "tuned.strength"),
        ([Tuned(strength=2.0), Tuned(id="more")], r"more \(algorithms\) is new", "more"),
    ],
)
def test_differences_in_what_trains_are_refused_unless_each_is_allowed(
    tuned: Path, plugins: list[Algorithm], text: str, name: str
) -> None:
    make: Callable[..., Trainer] = lambda **more: trainer(  # noqa: E731
        algorithms=[type(one)(**one.options, id=one.id) for one in plugins], load_path=tuned, **more
    )
    with pytest.raises(CheckpointMismatchError, match=text) as caught:
        make()
    assert f"load_allow_changes=['{name}']" in str(caught.value)
    with make(load_allow_changes=[name]):
        pass
    with pytest.raises(CheckpointMismatchError):
        make(load_allow_changes=["something.else"])


def test_observers_and_options_that_may_change_are_only_reported(tuned: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), trainer(algorithms=[Tuned(strength=2.0, talk=True)], load_path=tuned):
        assert "tuned.talk was False, and is True" in caplog.text
        assert "watcher (callbacks) was in the run that was saved" in caplog.text
    with pytest.raises(CheckpointMismatchError, match="locked=True refuses any difference"):
        trainer(algorithms=[Tuned(strength=2.0, talk=True)], load_path=tuned, load_locked=True)


def plan(*plugins: dict[str, Any], **events: list[str]) -> dict[str, Any]:
    base = {"kind": "algorithms", "distribution": "d", "version": "1", "hash": "h", "options": {}}
    return {
        "plugins": [{**base, "name": one["id"], "affects_training": True, **one} for one in plugins],
        "events": {event: [{"plugin": one} for one in ids] for event, ids in events.items()},
    }


def test_another_order_is_refused_and_another_version_reported_unless_locked() -> None:
    a, b = {"id": "a"}, {"id": "b"}
    (turned,) = differences(plan(a, b, batch_end=["a", "b"]), plan(b, a, batch_end=["b", "a"]), {})
    assert turned == Difference("order.batch_end", "the order at batch_end was a, b, and is b, a", True)
    (newer,) = differences(plan(a), plan({**a, "version": "2", "hash": "i"}), {})
    assert newer == Difference("a.version", "the version of a was 1, and is 2", False)
    (changed,) = differences(plan(a), plan({**a, "hash": "i"}), {})
    assert (changed.name, changed.refused) == ("a.hash", False)
    assert check_plan([newer], [], False, "here") == [newer]
    with pytest.raises(CheckpointMismatchError, match="the version of a"):
        check_plan([newer], [], True, "here")
    assert check_plan([newer], ["a"], True, "here") == [newer]
    (other,) = differences(plan(a), plan({**a, "distribution": "e"}), {})
    assert (other.text, other.refused) == ("a was a of d, and is a of e", True)
    observer = {"id": "o", "affects_training": False}
    assert not any(one.refused for one in differences(plan(observer, a), plan(a), {}))


def structural(name: str, **more: Any) -> dict[str, Any]:
    return plan({"id": name, "distribution": f"kernel-plugin-{name}", "structural": True, **more})


@pytest.mark.parametrize(
    ("saved_plan", "message"),
    [
        (
            structural("gradient_clipping", distribution="kernel-plugin-gradient-clipping"),
            "is not one that changes the structure",
        ),
        (structural("nowhere"), "nowhere"),
        (structural("blurpool", distribution="kernel-plugin-alibi"), "cannot be applied again"),
        (structural("blurpool", distribution=None), "belongs to no distribution"),
        (structural("blurpool", options={"x": {"$object": "os.system"}}), "is an object, which a file cannot hold"),
        (structural("blurpool", options={"no_such": 1}), "unknown option"),
        ({"plugins": [{"id": 1}], "events": {}}, "its plan is not one"),
    ],
)
def test_a_plan_that_names_what_it_should_not_is_refused(saved_plan: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointMismatchError, match=message):
        structural_plugins(saved_plan, [], [])


def test_only_structural_algorithms_are_taken_up_and_those_excluded_are_not() -> None:
    found = structural_plugins(structural("blurpool"), [], [])
    assert [(one.id, one.distribution) for one in found] == [("blurpool", "kernel-plugin-blurpool")]
    assert structural_plugins(structural("blurpool"), [], ["BlurPool".lower()]) == []
    assert structural_plugins(structural("blurpool"), found, []) == []
    assert structural_plugins(structural("blurpool", kind="callbacks"), [], []) == []
    assert structural_plugins(structural("sam", structural=False), [], []) == []


class Images(Classifier):
    def __init__(self) -> None:
        torch.manual_seed(2)
        layers = nn.Sequential(nn.Conv2d(3, 32, 3), nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(2))
        layers(torch.zeros(1, 3, 8, 8))
        super().__init__(layers, num_classes=2)


def test_a_structural_algorithm_is_applied_again_though_nobody_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images = TensorDataset(torch.randn(8, 3, 8, 8), torch.randint(0, 2, (8,)))

    def run(**options: Any) -> Trainer:
        return trainer(Images(), train_dataloader=DataLoader(images, 4), **options)

    with run(algorithms=["blurpool"]) as first:
        next(first.steps())
        where = first.save_checkpoint(tmp_path)
        expected = weights(first)
    with caplog.at_level(logging.WARNING):
        for more in ({}, {"load_weights_only": True}):
            with run(load_path=where, **more) as second:
                assert equal(weights(second), expected)
                assert [one.id for one in second.plan.plugins] == ["blurpool"]
    assert "applies blurpool again" in caplog.text
    with pytest.raises(CheckpointMismatchError, match="blurpool"):
        run(load_path=where, load_exclude_algorithms=["blurpool"])


# --- what plugins keep, and what they ask for -------------------------------------------------------------------


def test_what_cannot_be_expressed_is_refused_by_name_when_saving(tmp_path: Path) -> None:
    class Careless(Tuned):
        def state_dict(self) -> dict[str, Any]:
            return {"deep": [{"here": lambda: 0}]}

    with trainer(algorithms=[Careless()]) as run:
        with pytest.raises(UnsavableError, match=r"plugins/careless/deep/0/here: a builtins\.function cannot be saved"):
            run.save_checkpoint(tmp_path)
        assert not any(tmp_path.iterdir())


def test_values_of_ranks_follow_their_rule_on_another_number_of_ranks() -> None:
    saved = [{"a": 1, "b": torch.tensor(2.0)}, {"a": 3, "b": torch.tensor(4.0)}]
    assert value_for(1, 2, saved, "refuse", "x") is saved[1]
    assert value_for(2, 3, saved, "first", "x") is saved[0]
    assert value_for(0, 3, saved, "sum", "x") == {"a": 4, "b": torch.tensor(6.0)}
    assert value_for(1, 3, saved, "sum", "x") == {"a": 0, "b": torch.tensor(0.0)}
    with pytest.raises(CheckpointMismatchError, match="each of 2 ranks has a value of its own, and the run has 3"):
        value_for(0, 3, saved, "refuse", "x")
    with pytest.raises(ValueError, match="Expected one of first, sum, drop, refuse"):
        PerRank(1, "mean")  # type: ignore[arg-type]


def test_a_value_per_rank_survives_in_one_process(tmp_path: Path) -> None:
    class Own(Tuned):
        def state_dict(self) -> dict[str, Any]:
            return {"count": PerRank(self.count), "noise": [PerRank(torch.arange(3), "first")]}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.count, self.noise = state["count"], state["noise"]

    with trainer(algorithms=[Own()]) as run:
        next(run.steps())
        run.save_checkpoint(tmp_path)
    plugin = Own()
    with trainer(algorithms=[plugin], load_path=tmp_path):
        assert (plugin.count, plugin.noise[0].tolist()) == (1, [0, 1, 2])


def test_a_policy_is_asked_at_every_point_and_must_answer_with_a_request(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    class Policy(Callback):
        @hookimpl
        def should_save(self, state: State, event: str) -> SaveRequest | None:
            asked.append((event, int(state.timestamp.batch)))
            return SaveRequest(str(tmp_path), asynchronous=False) if event == "epoch_checkpoint" else None

        @hookimpl
        def checkpoint_saved(self, state: State, checkpoint: Any) -> None:
            asked.append((checkpoint.name, int(checkpoint.manifest.timestamp.batch)))

    with trainer(callbacks=[Policy()], max_duration="1ep") as run:
        run.fit()
    batches = [("batch_checkpoint", batch) for batch in range(1, 7)]
    assert asked == [*batches, ("epoch_checkpoint", 6), ("ep1-ba6", 6), ("fit_end", 6)]

    class Wrong(Callback):
        @hookimpl
        def should_save(self, event: str) -> Any:
            return True

    with (
        trainer(callbacks=[Wrong()]) as run,
        pytest.raises(HookError, match=r"wrong.should_save: returned True. Expected a Save"),
    ):
        run.fit()


def test_saving_needs_a_place_and_resuming_something_that_saves(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match="save_interval: says how checkpoints are saved, and not where"):
        trainer(save_interval="1ep")
    with pytest.raises(TrainerError, match="'checkpoint_saver' is among the plugins already"):
        trainer(save_folder=tmp_path, callbacks=["checkpoint_saver"])
    with pytest.raises(TrainerError, match="autoresume: nothing saves this run"):
        trainer(autoresume=True)
    with pytest.raises(TrainerError, match="the run has no name yet"):
        trainer(save_folder=str(tmp_path / "{run_name}"), autoresume=True)
    with pytest.raises(PluginNotFoundError, match="pip install kernel-plugin-nowhere"):
        trainer(load_path="nowhere://bucket/checkpoints")


def test_time_that_the_user_spends_on_saving_is_taken_out_once(tmp_path: Path) -> None:
    with trainer() as run:
        steps = run.steps()
        for _ in range(3):
            next(steps)
            run.save_checkpoint(tmp_path)
            assert run.state.progress.batch_wct >= 0
        assert run.state.progress.total_wct > 0


def test_a_name_that_is_taken_by_another_checkpoint_is_refused_and_that_one_kept(tmp_path: Path) -> None:
    with trainer() as run:
        steps = run.steps()
        next(steps)
        where = run.save_checkpoint(tmp_path, "best")
        next(steps)
        with pytest.raises(SaveFailedError, match="there is a checkpoint of that name already"):
            run.save_checkpoint(tmp_path, "best")
        with trainer(load_path=where) as old:
            assert old.state.timestamp.batch == 1
        where = run.save_checkpoint(tmp_path, "best", overwrite=True)
        with trainer(load_path=tmp_path) as new:
            assert new.state.timestamp.batch == 2
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [Path(where).name]


def test_everything_about_a_run_is_in_its_lock(saved: Path) -> None:
    lock = json.loads((saved / "ep0-ba6" / "lock.json").read_text())
    assert (lock["run_name"], lock["seed"], lock["run"]["global_batch_size"]) == ("first", 11, 4)
    count = 4 * 6 + 6 + 6 * 3 + 3
    assert lock["model"].items() >= {"class": "Classifier", "num_parameters": count, "num_tensors": 4}.items()
    assert lock["environment"]["torch"] == torch.__version__
    assert {"plan", "surgery", "config"} <= set(lock)
