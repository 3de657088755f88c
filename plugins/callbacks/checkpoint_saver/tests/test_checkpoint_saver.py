"""When a run is saved, under which names, and what happens when it cannot be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Callback, State, Time, TrainableModel, Trainer, hookimpl
from kernel_core.checkpoint.locate import Found, checkpoints_in, locate, read_pointer
from kernel_core.errors import (
    CheckpointError,
    Interrupted,
    OptionError,
    RepeatedFailureError,
    SaveFailedError,
    TrainerError,
)
from kernel_core.storage import LocalStorage, files, open_storage
from kernel_core.testing.checkpoints import everything, named
from kernel_core.testing.crashes import Counted, Failing, Quick
from kernel_plugin_checkpoint_saver import CheckpointSaver
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "system", Quick())


class Line(TrainableModel):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, batch: Any) -> Any:
        return self.line(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return outputs.square().mean()


def make(folder: Path | None, *callbacks: Any, **options: Any) -> Trainer:
    """Return a trainer of 5 batches of 4 samples an epoch; options that begin with ``save_`` are those of the saver."""
    torch.manual_seed(1)
    model = Line()
    data = TensorDataset(torch.arange(40, dtype=torch.float32).view(20, 2) / 40)
    settings: dict[str, Any] = {
        "train_dataloader": DataLoader(data, 4, shuffle=True),
        "max_duration": "2ep",
        "run_name": "run",
        "progress_bar": False,
        "device": "cpu",
        "seed": 1,
        **({} if folder is None else {"save_folder": folder}),
        **options,
    }
    return Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        callbacks=list(callbacks),
        **settings,
    )


def fit(folder: Path | None, *callbacks: Any, **options: Any) -> Trainer:
    with make(folder, *callbacks, **options) as trainer:
        trainer.fit()
    return trainer


def found(folder: Path) -> dict[str, int]:
    """Return the batches of the checkpoints in a folder by their names, the oldest first."""
    usable = [one for one in checkpoints_in(LocalStorage(folder)) if isinstance(one, Found)]
    return {one.name: int(one.manifest.timestamp.batch) for one in reversed(usable)}


def wait_for_the_writer() -> None:
    while any(thread.name == "checkpoint writer" for thread in threading.enumerate()):
        time.sleep(0.005)


class At(Callback):
    """Calls a function at the end of a batch."""

    affects_training = False

    def __init__(self, batch: int, do: Callable[[State], Any]) -> None:
        self.batch, self.do = batch, do

    @hookimpl
    def batch_end(self, state: State) -> None:
        if state.progress.batch == self.batch:
            self.do(state)


# --- when ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "batches"),
    [
        ("3ba", [3, 6, 9, 10]),
        ("10ba", [10]),
        ("1ep", [5, 10]),
        (1, [5, 10]),
        (2, [10]),
        (Time.from_input("4ba"), [4, 8, 10]),
        ("12sp", [3, 6, 9, 10]),
        ("5sp", [2, 3, 4, 5, 7, 8, 9, 10]),  # multiples of 5 are crossed
        ("0.3dur", [3, 6, 9, 10]),
        ("0.5dur", [5, 10]),
        ("100ba", [10]),
        (0, [10]),
        ("0ba", [10]),
    ],
)
def test_a_run_is_saved_as_often_as_was_asked_and_at_its_end(tmp_path: Path, interval: Any, batches: list[int]) -> None:
    trainer = fit(tmp_path / "c", save_interval=interval)
    assert list(found(tmp_path / "c").values()) == batches
    assert trainer.saved_checkpoints == [f"{tmp_path}/c/{name}" for name in found(tmp_path / "c")]
    assert everything(tmp_path / "c") == named(LocalStorage(tmp_path / "c"), "latest")


def test_tokens_and_iterations_are_counted_too(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.ones(20, 2)), 4)
    data = {"dataloader": loader, "get_num_tokens_in_batch": lambda batch: 7}
    fit(tmp_path / "tokens", train_dataloader=data, save_interval="21tok")
    assert list(found(tmp_path / "tokens").values()) == [3, 6, 9, 10]
    fit(tmp_path / "iterations", iteration_length=1, max_duration="3ep", save_interval="2iter")
    assert list(found(tmp_path / "iterations").values()) == [10, 15]


def test_seconds_are_counted_too(tmp_path: Path) -> None:
    def pretend(state: State) -> None:  # the second batch took an hour
        state.progress.total_wct = 3700.0

    fit(tmp_path / "c", At(2, pretend), save_interval="1h")
    assert list(found(tmp_path / "c").values()) == [2, 10]


def test_a_function_is_asked_at_every_event(tmp_path: Path) -> None:
    asked: list[tuple[int, str]] = []

    def sometimes(state: State, event: str) -> bool:
        asked.append((state.progress.batch, event))
        return event == "epoch_checkpoint" or state.progress.batch == 7

    fit(tmp_path / "c", save_interval=sometimes, iteration_length=1)
    assert found(tmp_path / "c") == {"ep1-ba5": 5, "ep1-ba7": 7, "ep2-ba10": 10}
    assert [event for batch, event in asked if batch == 5] == [
        "batch_checkpoint",
        "epoch_checkpoint",
        "iteration_checkpoint",
    ]


def test_what_is_saved_already_at_the_end_is_not_saved_again(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_interval="5ba")
    assert found(tmp_path / "c") == {"ep0-ba5": 5, "ep1-ba10": 10}


def test_a_second_fit_saves_on(tmp_path: Path) -> None:
    with make(tmp_path / "c", save_interval="4ba", max_duration="6ba") as trainer:
        trainer.fit()
        trainer.fit(duration="3ba")
    assert list(found(tmp_path / "c").values()) == [4, 6, 8, 9]


def test_when_the_time_is_reset_the_end_is_saved_though_it_has_the_same_number(tmp_path: Path) -> None:
    with make(tmp_path / "c", save_interval=0, max_duration="3ba") as trainer:
        trainer.fit()
        first = load_file(tmp_path / "c" / "ep0-ba3" / "model-00000.safetensors")
        trainer.fit(reset_time=True, duration="3ba")
    (name,) = found(tmp_path / "c")
    assert name == "ep0-ba3.2"
    second = load_file(tmp_path / "c" / name / "model-00000.safetensors")
    assert not torch.equal(first["line.weight"], second["line.weight"])


def test_the_rhythm_is_that_of_the_run_when_it_is_resumed(tmp_path: Path) -> None:
    fit(tmp_path / "a", save_interval="4ba", max_duration="6ba")
    fit(tmp_path / "a", save_interval="4ba", autoresume=True)
    assert list(found(tmp_path / "a").values()) == [4, 6, 8, 10]


# --- what a signal and the end of a run do ---------------------------------------------------------------------------


def interrupt(state: State) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_saves_the_run_and_ends_it_with_75(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path / "c", At(3, interrupt), save_interval="4ba")
    assert caught.value.code == 75
    assert caught.value.checkpoint == f"{tmp_path}/c/ep0-ba3"
    assert found(tmp_path / "c") == {"ep0-ba3": 3}


def test_a_signal_at_a_batch_that_is_saved_saves_it_once(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path / "c", At(4, interrupt), save_interval="4ba")
    assert caught.value.code == 75
    assert found(tmp_path / "c") == {"ep0-ba4": 4}


def test_a_saver_of_weights_saves_nothing_at_a_signal(tmp_path: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        fit(tmp_path / "c", At(3, interrupt), save_weights_only=True)
    assert (caught.value.code, caught.value.checkpoint) == (143, None)
    assert not (tmp_path / "c").exists()


def test_a_run_that_is_finished_clears_up_when_it_is_started_again(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_interval="3ba", save_num_checkpoints_to_keep=2)
    before = everything(tmp_path / "c")
    shutil.copytree(tmp_path / "c" / "ep1-ba9", tmp_path / "c" / "ep1-ba6")
    (tmp_path / "c" / "ep1-ba6" / "manifest.json").unlink()
    (tmp_path / "c" / ".tmp-0123456789abcdef").write_text("")
    (tmp_path / "c" / "latest").write_text('{"checkpoint": "ep1-ba9", "sequence": 3, "batch": 9}')
    trainer = fit(tmp_path / "c", save_interval="3ba", save_num_checkpoints_to_keep=2, autoresume=True)
    assert trainer.saved_checkpoints == []
    assert everything(tmp_path / "c") == before
    assert read_pointer(LocalStorage(tmp_path / "c"))[0] == "ep2-ba10"


# --- options ---------------------------------------------------------------------------------------------------------


def test_names_are_filled_in(tmp_path: Path) -> None:
    name = "{run_name}_{epoch:02}_{batch}_{batch_in_epoch}_{sample}_{sample_in_epoch}_{token}_{iteration}_{world_size}"
    fit(tmp_path / "{run_name}" / "c", save_filename=name, max_duration="7ba")
    assert list(found(tmp_path / "run" / "c")) == ["run_01_5_0_20_0_0_0_1", "run_01_7_2_28_8_0_0_1"]
    assert (tmp_path / "run" / "c" / "latest").exists()


def test_clocks_are_seconds(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_filename="after-{total_wct}", max_duration="2ba")
    assert list(found(tmp_path / "c")) == ["after-0"]


def test_the_pointer_has_the_name_that_was_given(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_latest_filename="newest")
    assert json.loads((tmp_path / "c" / "newest").read_text()) == {"checkpoint": "ep2-ba10", "sequence": 2, "batch": 10}
    assert not (tmp_path / "c" / "latest").exists()


def test_there_is_no_pointer_where_none_is_wanted(tmp_path: Path) -> None:
    fit(None, CheckpointSaver(folder=tmp_path / "c", latest_filename=None))
    assert everything(tmp_path / "c") == named(LocalStorage(tmp_path / "c"))
    assert locate(str(tmp_path / "c")).name == "ep2-ba10"


def test_weights_alone_are_the_model_and_no_run_goes_on_from_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = fit(tmp_path / "c", save_weights_only=True)
    folder = tmp_path / "c" / "ep2-ba10"
    assert {path.name for path in folder.iterdir()} == {
        "lock.json",
        "manifest.json",
        "model-00000.safetensors",
        "rank-00000.json",
    }
    weights = load_file(folder / "model-00000.safetensors")
    assert torch.equal(weights["line.weight"], trainer.state.model.state_dict()["line.weight"])
    with pytest.raises(TrainerError, match="nothing saves this run"):
        make(tmp_path / "c", save_weights_only=True, autoresume=True)


def test_what_is_to_be_ignored_is_left_out(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_ignore_keys=["optimizers", "model/line.bias"])
    folder = tmp_path / "c" / "ep2-ba10"
    assert list(load_file(folder / "model-00000.safetensors")) == ["line.weight"]
    assert "optimizers" not in json.loads((folder / "state.json").read_text())


def test_as_many_stay_as_shall_be_kept_and_a_restart_counts_on(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_interval="2ba", save_num_checkpoints_to_keep=2, max_duration="6ba")
    assert list(found(tmp_path / "c").values()) == [4, 6]
    fit(tmp_path / "c", save_interval="2ba", save_num_checkpoints_to_keep=2, autoresume=True)
    assert list(found(tmp_path / "c").values()) == [8, 10]
    assert everything(tmp_path / "c") == named(LocalStorage(tmp_path / "c"), "latest")


def test_without_a_thread_every_save_is_waited_for(tmp_path: Path) -> None:
    durable = []

    def look(state: State) -> None:
        durable.append(found(tmp_path / "c"))

    fit(None, At(4, look), CheckpointSaver(folder=tmp_path / "c", save_interval="3ba", asynchronous=False))
    assert durable == [{"ep0-ba3": 3}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_checkpoints_to_keep": 0},
            "checkpoint_saver.num_checkpoints_to_keep: got 0. Expected at least 1, or -1 for all: with none there is nothing to "
            "resume from.",
        ),
        ({"num_checkpoints_to_keep": -2}, "num_checkpoints_to_keep"),
        ({"save_interval": "3xx"}, "checkpoint_saver.save_interval: got '3xx'."),
        ({"save_interval": "-1ep"}, "checkpoint_saver.save_interval: got '-1ep'."),
        ({"save_interval": -1}, "checkpoint_saver.save_interval: got '-1'. Expected a time of at least 0."),
        (
            {"folder": "c/{batch}"},
            "checkpoint_saver.folder: got 'c/{batch}'. Expected no placeholder but {run_name}: a run finds its checkpoints in "
            "one folder. Put the others into filename.",
        ),
        (
            {"filename": "a/b"},
            "checkpoint_saver.filename: got 'a/b'. Expected a plain name, without slashes.",
        ),
        ({"filename": ""}, "checkpoint_saver.filename: got ''. Expected a plain name, without slashes."),
        ({"filename": ".hidden"}, "checkpoint_saver.filename: got '.hidden'. Expected a plain name, without slashes."),
        (
            {"filename": "ep{epoch}-rank{rank}"},
            "checkpoint_saver.filename: got 'ep{epoch}-rank{rank}'. A checkpoint is one folder for all ranks, in which each has "
            "files of its own. Leave {rank} out.",
        ),
        ({"filename": "ep{epochs}"}, "There is no placeholder {epochs}. Did you mean"),
        ({"filename": "ep{epoch"}, "checkpoint_saver.filename: got 'ep{epoch'"),
        (
            {"latest_filename": "latest-{batch}"},
            "checkpoint_saver.latest_filename: got 'latest-{batch}'. Expected a plain name, without slashes.",
        ),
        ({"latest_filename": "a/latest"}, "checkpoint_saver.latest_filename: got 'a/latest'."),
        (
            {"filename": "latest"},
            "checkpoint_saver.filename: got 'latest', with the latest_filename 'latest'. Expected names of their own for both, "
            "other than 'failures.json', which lies in the same folder. Rename one.",
        ),
        ({"latest_filename": "failures.json"}, "Expected names of their own for both"),
        ({"weights_only": "perhaps"}, "weights_only"),
        ({"keep": 3}, "keep"),
    ],
)
def test_an_option_that_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        CheckpointSaver(**options)
    assert message in str(caught.value)


# --- who else saves there --------------------------------------------------------------------------------------------


def test_later_checkpoints_of_another_run_are_not_saved_beside(tmp_path: Path) -> None:
    fit(tmp_path / "c", run_name="first")
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path / "c", run_name="second")
    assert str(caught.value) == (
        f"checkpoint_saver: {tmp_path}/c holds a checkpoint of batch 10, of the run 'first', and this run begins at batch 0. "
        "Expected none that is later. Go on from it (autoresume=True), choose another folder, or give overwrite=True."
    )
    with pytest.raises(CheckpointError, match="of the run 'first'"):
        fit(tmp_path / "c", run_name="first")  # begins anew, under the same name
    fit(tmp_path / "c", run_name="second", save_overwrite=True)
    runs = [one.manifest.run_name for one in checkpoints_in(LocalStorage(tmp_path / "c")) if isinstance(one, Found)]
    assert runs == ["second", "second"]


def test_later_ones_that_are_damaged_are_in_nobodys_way(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_interval="5ba")
    (tmp_path / "c" / "ep1-ba10" / "state.json").write_text("{}")
    trainer = fit(tmp_path / "c", save_interval="5ba", autoresume=True)
    assert trainer.loaded_from == f"{tmp_path}/c/ep0-ba5"
    assert list(found(tmp_path / "c").values()) == [5, 10]


def test_an_unfinished_save_is_in_nobodys_way(tmp_path: Path) -> None:
    fit(tmp_path / "c", save_interval="5ba", max_duration="5ba")
    shutil.copytree(tmp_path / "c" / "ep0-ba5", tmp_path / "c" / "ep1-ba10")
    (tmp_path / "c" / "ep1-ba10" / "manifest.json").unlink()
    (tmp_path / "c" / "ep1-ba10" / "notes.txt").write_text("mine")
    fit(tmp_path / "c", save_interval="5ba", autoresume=True)
    assert found(tmp_path / "c") == {"ep0-ba5": 5, "ep1-ba10": 10}
    assert (tmp_path / "c" / "ep1-ba10" / "notes.txt").read_text() == "mine"


def kill(state: State) -> None:
    raise KeyboardInterrupt  # of what leaves a run at once, the one that tests survive


@pytest.mark.parametrize("folders", [("c", "c"), ("c", "w")], ids=["one folder", "a folder each"])
def test_two_savers_save_by_two_rules_and_the_run_goes_on_though_one_is_ahead(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    full, weights = (tmp_path / folder for folder in folders)

    def savers() -> list[Any]:
        light = CheckpointSaver(
            folder=weights, filename="w-{batch}", save_interval="1ba", weights_only=True, id="weights"
        )
        return [CheckpointSaver(folder=full, save_interval="4ba", num_checkpoints_to_keep=1), light]

    with pytest.raises(KeyboardInterrupt):
        fit(None, *savers(), At(7, kill))
    trainer = fit(None, *savers(), At(99, kill), autoresume=True)
    assert trainer.loaded_from == f"{full}/ep0-ba4"
    expected = {"ep2-ba10": 10} | {f"w-{batch}": batch for batch in range(1, 11)}
    assert {name.removesuffix(".2"): batch for name, batch in {**found(full), **found(weights)}.items()} == expected
    if full != weights:
        assert set(found(full)) == {"ep2-ba10"}


def test_two_savers_with_one_name_keep_both(tmp_path: Path) -> None:
    savers = [
        CheckpointSaver(folder=tmp_path / "c", save_interval="5ba"),
        CheckpointSaver(folder=tmp_path / "c", save_interval="5ba", weights_only=True, id="weights"),
    ]
    fit(None, *savers)
    usable = [one for one in checkpoints_in(LocalStorage(tmp_path / "c")) if isinstance(one, Found)]
    assert sorted((int(one.manifest.timestamp.batch), one.manifest.saver) for one in usable) == [
        (5, "checkpoint_saver"), (5, "weights"), (10, "checkpoint_saver"), (10, "weights"),
    ]  # fmt: skip


def test_a_checkpoint_the_user_saves_takes_no_place_of_the_savers(tmp_path: Path) -> None:
    with make(tmp_path / "c", save_interval="3ba", save_num_checkpoints_to_keep=1) as trainer:
        for _ in trainer.steps():
            if trainer.state.progress.batch == 3:
                trainer.save_checkpoint(tmp_path / "c", weights_only=True)
    assert found(tmp_path / "c") == {"ep0-ba3.2": 3, "ep2-ba10": 10}


# --- when it cannot be saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "Make room, or use another disk."),
        (errno.EACCES, "Ask for the right to do so, or use another folder."),
    ],
)
def test_a_save_that_fails_ends_the_run_at_the_next_step_and_leaves_the_one_before(
    tmp_path: Path, number: int, message: str
) -> None:
    def fail(state: State) -> None:
        wait_for_the_writer()
        files.system = Failing(OSError(number, os.strerror(number)), lambda _, name: name == "create")

    reference = fit(tmp_path / "reference").state.model.state_dict()
    ended: list[int] = []

    def note(state: State) -> None:
        ended.append(state.progress.batch)
        wait_for_the_writer()  # it has failed when the batch behind the save ends

    watch = [At(batch, note) for batch in range(1, 11)]
    saver = CheckpointSaver(folder=tmp_path / "c", save_interval="3ba", asynchronous=True)
    with pytest.raises(SaveFailedError) as caught:
        fit(None, saver, At(6, fail), *[called(one, f"at-{index}") for index, one in enumerate(watch)])
    assert f"checkpoint {tmp_path}/c/ep1-ba6: was not saved: " in str(caught.value)
    assert message in str(caught.value)
    assert ended[-1] == 7
    files.system = Quick()
    assert found(tmp_path / "c") == {"ep0-ba3": 3}
    assert read_pointer(LocalStorage(tmp_path / "c"))[0] == "ep0-ba3"
    assert everything(tmp_path / "c") - {"failures.json"} == named(LocalStorage(tmp_path / "c"), "latest")
    resumed = fit(tmp_path / "c", save_interval="3ba", autoresume=True)
    assert resumed.loaded_from == f"{tmp_path}/c/ep0-ba3"
    assert all(torch.equal(value, reference[name]) for name, value in resumed.state.model.state_dict().items())


def called(callback: Callback, name: str) -> Callback:
    callback.id = name
    return callback


def test_a_last_save_that_fails_fails_the_run(tmp_path: Path) -> None:
    def fail(state: State) -> None:
        wait_for_the_writer()
        files.system = Failing(OSError(errno.ENOSPC, "No space left on device"), lambda _, name: name == "fsync")

    with pytest.raises(SaveFailedError, match="ep2-ba10: was not saved"):
        fit(tmp_path / "c", At(10, fail))
    files.system = Quick()
    assert found(tmp_path / "c") == {"ep1-ba5": 5}


def test_a_folder_that_is_a_file_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file")
    batches: list[int] = []
    with pytest.raises(Exception, match="c"):
        fit(tmp_path / "c", At(1, lambda state: batches.append(1)), save_interval="1ba")
    assert len(batches) <= 1


class Held(Counted):
    """Holds every write back until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def operation(self, number: int, name: str, call: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        if name == "write":
            assert self.go.wait(60)
        return call()


def test_what_is_saved_is_the_run_as_it_was_though_it_is_written_later(tmp_path: Path) -> None:
    files.system = held = Held()
    kept: dict[str, Any] = {}
    with make(
        None, CheckpointSaver(folder=tmp_path / "c", save_interval=lambda state, event: state.progress.batch == 2)
    ) as trainer:
        steps = trainer.steps()
        next(steps)
        next(steps)  # the copy is made, and not a byte of it is written
        model, (optimizer,) = trainer.state.model, trainer.state.optimizers
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        momentum = optimizer.state[model.line.weight]["momentum_buffer"].clone()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(99.0)
            optimizer.state[model.line.weight]["momentum_buffer"].fill_(99.0)
        next(steps)
        assert not (tmp_path / "c" / "ep0-ba2" / "manifest.json").exists()
        held.go.set()
        for _ in steps:
            pass
    saved = load_file(tmp_path / "c" / "ep0-ba2" / "model-00000.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in kept.items())
    state = load_file(tmp_path / "c" / "ep0-ba2" / "state-00000.safetensors")
    assert any(torch.equal(value, momentum) for value in state.values() if value.shape == momentum.shape)
    assert not any((value == 99).any() for value in state.values() if value.is_floating_point())


def test_a_fit_that_was_left_while_it_saved_does_not_take_its_files_away_when_it_begins_again(tmp_path: Path) -> None:
    files.system = held = Held()
    with make(tmp_path / "c", save_interval="2ba") as trainer:
        steps = trainer.steps()
        next(steps)
        next(steps)
        steps.close()
        threading.Timer(0.2, held.go.set).start()
        trainer.fit()
    assert list(found(tmp_path / "c").values()) == [2, 4, 6, 8, 10]


# --- a run that fails again and again --------------------------------------------------------------------------------


def test_a_run_that_fails_twice_alike_is_not_started_a_third_time(tmp_path: Path) -> None:
    def fail(state: State) -> None:
        raise ZeroDivisionError("a bad sample")

    def start(batch: int = 7) -> Trainer:
        return fit(tmp_path / "c", At(batch, fail), save_interval="3ba", autoresume=True)

    for _ in range(3):  # once from its beginning, and twice from the checkpoint that it saved then
        with pytest.raises(ZeroDivisionError):
            start()
    with pytest.raises(RepeatedFailureError) as caught:
        start()
    assert "the run failed 2 times from checkpoint ep1-ba6, each time at batch 7 with ZeroDivisionError" in str(
        caught.value
    )
    (tmp_path / "c" / "failures.json").unlink()
    assert start(99).state.timestamp.batch == 10


def test_a_run_that_comes_further_each_time_is_started_again(tmp_path: Path) -> None:
    def fail(state: State) -> None:
        raise ZeroDivisionError("flaky")

    for batch in (4, 5, 5, 7, 7, 10):
        with pytest.raises(ZeroDivisionError):
            fit(tmp_path / "c", At(batch, fail), save_interval="1ba", autoresume=True)
    assert json.loads((tmp_path / "c" / "failures.json").read_text())["count"] == 1


# --- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
import sys, torch
from kernel_core import Trainer
from kernel_core.models import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

torch.set_num_threads(1)
model = Classifier(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), num_classes=10)
data = TensorDataset(torch.randn(40, 512), torch.randint(0, 10, (40,)))
trainer = Trainer(
    model=model, train_dataloader=DataLoader(data, 4, shuffle=True), max_duration="240ba", device="cpu", progress_bar=False,
    optimizers=torch.optim.AdamW(model.parameters()), save_folder=sys.argv[1], save_interval="1ba",
    save_num_checkpoints_to_keep=2,
)
with trainer:
    for number, _ in enumerate(trainer.steps(), start=1):
        if number == 40:
            first = resident()
    print(first, resident())
"""


@pytest.mark.slow
def test_two_hundred_saves_take_no_more_memory_than_forty(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "c")], check=True, capture_output=True, text=True, timeout=300
    )
    first, last = map(int, ran.stdout.split()[-2:])
    assert last < 1.05 * first, (first, last)
    assert len(list(open_storage(tmp_path / "c").list_folders())) == 2


LEFT_AT_ONCE = """
import sys, torch
from kernel_core import Trainer
from kernel_core.models import Classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

wide = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(1, 30_000_000), nn.AdaptiveAvgPool1d(2)), num_classes=2)
loader = DataLoader(TensorDataset(torch.ones(2, 1), torch.zeros(2, dtype=torch.long)), batch_size=2)
trainer = Trainer(
    model=wide, train_dataloader=loader, max_duration="3ep", optimizers=torch.optim.SGD(wide.parameters(), lr=0.1),
    save_folder=sys.argv[1], progress_bar=False, device="cpu",
)
steps = trainer.steps()
next(steps)  # from here on the memory is being got; the process ends in the middle of that
"""


def test_a_process_that_ends_while_memory_for_checkpoints_is_got_ends_in_order(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEFT_AT_ONCE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
