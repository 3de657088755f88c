"""Runs that save themselves, go on, and are looked at, as a user types it."""

import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from kernel_cli.launch import RUN_NAME
from kernel_cli.main import cli
from kernel_core.recipe import CHECKED
from kernel_core.registry.discovery import installed_plugins
from safetensors.torch import load_file

MODULE = '''
import os
import signal
import torch
from kernel_core import Algorithm, Callback, Classifier, Evaluator, hookimpl
from kernel_core.recipe import Recipe, RunData
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mean:
    def reset(self): self.values = []
    def update(self, value): self.values.append(float(value))
    def compute(self): return sum(self.values) / len(self.values)


class Net(Classifier):
    def get_metrics(self, is_train): return {} if is_train else {"size": Mean()}
    def update_metric(self, batch, outputs, metric): metric.update(outputs.abs().mean())


def mlp(width: int = 4, trust_remote_code: bool = False) -> Net:
    return Net(nn.Sequential(nn.Linear(3, width), nn.Dropout(0.2), nn.ReLU(), nn.Linear(width, 2)))


def points(batch_size: int = 4, seed: int = 0) -> RunData:
    generator = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(16, 3, generator=generator), torch.arange(16) % 2)
    return RunData(DataLoader(data, batch_size, shuffle=True), [Evaluator("test", DataLoader(data, 8))])


recipe = Recipe(
    summary="A small net.",
    config={
        "model": {"name": "mlp"},
        "data": {"name": "points"},
        "optimizer": {"name": "adamw", "lr": 0.1},
        "train": {"max_duration": "3ep", "device": "cpu"},
        "logging": {"progress_bar": False},
    },
    functions={"mlp": mlp, "points": points},
)


class Ends(Callback):
    """End the run after a batch: as a signal does, or with an error."""
    affects_training = False
    def __init__(self, how: str = "SIGTERM") -> None:
        self.how = how
    @hookimpl
    def batch_end(self, state):
        if state.progress.batch != int(os.environ.get("ENDS_AT", "5")):
            return
        if self.how == "error":
            raise ZeroDivisionError("planted")
        os.kill(os.getpid(), getattr(signal, self.how))


class Noise(Algorithm):
    """Add noise.

    Source: none.
    """
    def __init__(self, scale: float = 0.01) -> None:
        self.scale = scale
    @hookimpl
    def after_train_batch(self, state): ...
'''
ENTRY_POINTS = """
[kernel.recipes]
small = checkpoint_cli_plugins:recipe
[kernel.callbacks]
ends = checkpoint_cli_plugins:Ends
[kernel.algorithms]
noise = checkpoint_cli_plugins:Noise
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("site")
    (root / "checkpoint_cli_plugins.py").write_text(MODULE)
    about = root / "checkpoint_cli_plugins-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: checkpoint-cli-plugins\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    sys.path.insert(0, str(root))
    installed_plugins.cache_clear()
    yield root
    sys.path.remove(str(root))
    installed_plugins.cache_clear()
    sys.modules.pop("checkpoint_cli_plugins", None)


@pytest.fixture(autouse=True)
def folder(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("ENDS_AT", "RANK", "LOCAL_RANK", "KERNEL_START_COUNT", RUN_NAME):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def kernel(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, list(arguments))
    assert result.exit_code == code, result.output
    return result


def document(*arguments: str, code: int = 0) -> Any:
    return json.loads(kernel(*arguments, "--json", code=code).stdout)


def weights(run: str, name: str = "ep3-ba12") -> dict[str, torch.Tensor]:
    return load_file(f"runs/{run}/checkpoints/{name}/model-00000.safetensors")


def same(a: str, b: str, name: str = "ep3-ba12") -> bool:
    one, other = weights(a, name), weights(b, name)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def logged(run: str) -> list[tuple[int, str]]:
    lines = [json.loads(line) for line in Path(f"runs/{run}/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], key) for line in lines if "step" in line for key in line if key not in ("step", "time")]


def check_log(run: str, last: int = 12) -> None:
    found = logged(run)
    assert len(found) == len(set(found))
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert [step for step, key in found if key == "loss/train/total"] == list(range(1, last + 1))


def start(name: str = "whole", *arguments: str, code: int = 0) -> Result:
    return kernel("train", "small", "--seed", "3", "--run-name", name, *arguments, code=code)


def names(run: str) -> list[str]:
    return sorted(path.name for path in Path(f"runs/{run}/checkpoints").iterdir() if path.is_dir())


# --- the page --------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
SHORT = (
    "--set data.num_train_strips=512 --set data.num_test_strips=8 --set data.test_digits=[5] --set data.batch_size=8"
)


@pytest.mark.slow
def test_every_command_of_the_page_runs(folder: Path) -> None:
    lines = [line.strip() for line in PAGE.read_text().splitlines() if line.startswith("    kernel ")]
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line.replace("ba150", "ba16").replace("700ba", "70ba"), comments=True)[1:]
        if "s3://" in line:
            continue  # the tests of that plugin save to and load from a store
        if words[0] == "train" and "--resume" not in words:
            words += [*shlex.split(SHORT), "--max-duration", "64ba"]
        result = CliRunner().invoke(cli, words)
        assert result.exit_code == 0, (line, result.output)
    assert len(load_file("digits.safetensors")) > 10


def test_the_page_names_every_key_of_the_section() -> None:
    keys = set(inspect.signature(CHECKED["checkpoint"]).parameters)
    cells = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert {word for cell in cells for word in re.findall(r"`(\w+)`", cell)} == keys


# --- saving ----------------------------------------------------------------------------------------------------------


def test_a_run_saves_itself_after_each_epoch_or_four_times_if_it_counts_otherwise(folder: Path) -> None:
    start("epochs")
    assert names("epochs") == ["ep1-ba4", "ep2-ba8", "ep3-ba12"]
    (folder / "batches.yaml").write_text("recipe: small\ntrain: {max_duration: 8ba}\n")
    kernel("train", "batches.yaml", "--run-name", "batches")
    assert names("batches") == ["ep0-ba2", "ep0-ba4", "ep1-ba6", "ep1-ba8"]
    start("shorter", "--max-duration", "6ba")  # what is on the command line changes the length, not what the run is
    assert names("shorter") == ["ep1-ba4", "ep1-ba6"]


def test_settings_say_how_it_saves(folder: Path) -> None:
    settings = ("--set", "checkpoint.save_interval=5ba", "--set", "checkpoint.save_num_checkpoints_to_keep=2")
    start("kept", *settings, "-o", "checkpoint_saver.filename=at-{batch}")
    assert names("kept") == ["at-10", "at-12"]
    start(
        "weights", "--set", "checkpoint.save_weights_only=true", "--set", "checkpoint.save_folder=elsewhere/{run_name}"
    )
    assert (folder / "elsewhere" / "weights" / "ep3-ba12" / "manifest.json").exists()
    for name, off in (("off", ["--no-checkpoints"]), ("out", ["--set", "checkpoint.enabled=false"])):
        start(name, *off)
        assert sorted(path.name for path in Path(f"runs/{name}").iterdir()) == [
            "config.yaml",
            "metrics.jsonl",
            "plan.json",
        ]
    again = document("train", "runs/kept/config.yaml", "--run-name", "again")
    assert names("again") == ["at-10", "at-12"]
    assert again["plan_digest"] == json.loads(Path("runs/kept/plan.json").read_text())["digest"]


def test_the_plan_is_that_of_kernel_plan_whatever_the_run_is_called(folder: Path) -> None:
    digest = document("plan", "small")["digest"]
    assert document("train", "small", "--run-name", "a", "--max-duration", "1ba")["plan_digest"] == digest
    assert document("train", "small", "--run-name", "b", "--max-duration", "1ep")["plan_digest"] == digest


def test_every_checkpoint_holds_the_configuration(folder: Path) -> None:
    start("whole", "--set", "optimizer.lr=0.05")
    shown = document("checkpoint", "show", "runs/whole/checkpoints/ep1-ba4")
    assert shown["config"] == yaml.safe_load(Path("runs/whole/config.yaml").read_text())
    assert (shown["config"]["recipe"], shown["config"]["optimizer"]["lr"]) == ("small", 0.05)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_an_interrupted_run_prints_the_command_that_goes_on_and_ends_as_if_nothing_had_happened(
    number: str, folder: Path
) -> None:
    start("whole")
    result = start("cut", "--plugins", "ends", "-o", f"ends.how={number}", code=75)
    last = result.stderr.rstrip().splitlines()[-1].strip()
    assert last == "kernel train --resume runs/cut"
    assert "runs/cut/checkpoints/ep1-ba5 holds the run as it was after batch 5. Go on:" in result.stderr
    made = document(*shlex.split(last)[1:])
    assert (made["run_name"], made["run_dir"]) == ("cut", "runs/cut")
    assert (made["resumed_from"], made["finished"]) == ("runs/cut/checkpoints/ep1-ba5", False)
    assert same("whole", "cut")
    check_log("cut")


def test_the_command_names_the_checkpoint_where_another_saver_keeps_it(folder: Path) -> None:
    savers = ("--no-checkpoints", "--plugins", "ends,mine=checkpoint_saver", "-o", "mine.folder=kept")
    result = start("cut", *savers, code=75)
    last = result.stderr.rstrip().splitlines()[-1].strip()
    assert last == "kernel train --resume kept/ep1-ba5"
    assert document(*shlex.split(last)[1:])["resumed_from"] == "kept/ep1-ba5"


def test_the_document_of_an_interrupted_run_names_the_command(folder: Path) -> None:
    error = document("train", "small", "--run-name", "cut", "--plugins", "ends", code=75)["error"]
    assert (error["type"], error["exit_code"], error["notes"][-1]) == (
        "Interrupted",
        75,
        "kernel train --resume runs/cut",
    )


def test_without_checkpoints_an_interruption_is_128_and_the_signal(folder: Path) -> None:
    result = start("cut", "--plugins", "ends", "--no-checkpoints", code=143)
    assert "--resume" not in result.stderr


def test_what_was_logged_after_the_checkpoint_of_a_run_that_failed_is_logged_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start("whole")
    monkeypatch.setenv("ENDS_AT", "7")
    start("cut", "--plugins", "ends", "-o", "ends.how=error", code=1)
    assert logged("cut")[-1][0] == 7
    monkeypatch.setenv("ENDS_AT", "0")
    made = document("train", "--resume", "cut")
    assert made["resumed_from"] == "runs/cut/checkpoints/ep1-ba4"
    check_log("cut")
    assert same("whole", "cut")


def test_a_resumed_run_takes_its_settings_and_the_command_line_on_top(folder: Path) -> None:
    start("run", "--set", "model.width=6", "--plugins", "noise", "-o", "noise.scale=0.5")
    made = document("train", "--resume", "runs/run", "--max-duration", "4ep")
    assert made["resumed_from"] == "runs/run/checkpoints/ep3-ba12"
    assert names("run")[-1] == "ep4-ba16"
    assert weights("run", "ep4-ba16")["module.0.weight"].shape == (6, 3)
    config = yaml.safe_load(Path("runs/run/config.yaml").read_text())
    assert (config["train"]["max_duration"], config["plugins"]["noise"]) == ("4ep", {"scale": 0.5})
    check_log("run", 16)


def test_latest_is_the_run_that_was_saved_last(folder: Path) -> None:
    start("zebra", "--max-duration", "1ep")
    start("apple", "--max-duration", "1ep")
    start("mango", "--no-checkpoints")
    assert document("train", "--resume", "latest")["run_name"] == "apple"
    kernel("train", "--resume", "zebra", "--max-duration", "2ep")
    assert document("train", "--resume", "latest")["run_name"] == "zebra"


def test_a_run_is_resumed_under_another_name_or_from_another_place(folder: Path) -> None:
    start("whole")
    made = document("train", "--resume", "runs/whole/checkpoints/ep1-ba4", "--run-name", "branch")
    assert (made["run_dir"], made["resumed_from"]) == ("runs/branch", "runs/whole/checkpoints/ep1-ba4")
    assert names("branch") == ["ep2-ba8", "ep3-ba12"]
    assert same("whole", "branch")
    assert [step for step, key in logged("branch") if key == "loss/train/total"] == list(range(5, 13))
    made = document("train", "--resume", "runs/branch/checkpoints/ep2-ba8")
    assert (made["run_dir"], made["resumed_from"]) == ("runs/branch", "runs/branch/checkpoints/ep2-ba8")
    assert [step for step, key in logged("branch") if key == "loss/train/total"] == list(range(5, 13))
    shutil.move("runs/whole", folder / "moved")
    assert document("train", "--resume", "moved", "--max-duration", "4ep")["run_dir"] == "moved"
    assert (folder / "moved" / "checkpoints" / "ep4-ba16").exists()
    assert not (folder / "runs" / "whole").exists()


def test_a_checkpoint_alone_is_enough(folder: Path) -> None:
    start("whole")
    shutil.copytree("runs/whole/checkpoints/ep2-ba8", folder / "kept" / "somewhere")
    shutil.rmtree("runs")
    made = document("train", "--resume", f"file://{folder}/kept/somewhere")
    assert (made["run_dir"], made["finished"]) == ("runs/whole", False)
    assert names("whole") == ["ep3-ba12"]
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["somewhere"]


def test_a_checkpoint_alone_does_not_say_where_to_write_or_whom_to_trust(folder: Path) -> None:
    places = ("-o", "file_logger.filename=evil/log-{run_name}", "--set", "checkpoint.save_folder=evil/{run_name}")
    start("whole", *places, "--set", "model.trust_remote_code=true", "--set", "checkpoint.save_latest_filename=newest")
    shutil.copytree("evil/whole/ep2-ba8", folder / "found")
    shutil.rmtree("evil")
    shutil.rmtree("runs")
    result = kernel("train", "--resume", "found", code=2)
    assert (
        "model.trust_remote_code=True, which lets code of others run. A checkpoint does not decide that"
        in result.stderr
    )
    result = kernel("train", "--resume", "found", "--set", "model.trust_remote_code=true")
    assert "configuration: that in the checkpoint (small; no plugins)" in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["found", "runs"]
    assert sorted(path.name for path in Path("runs/whole/checkpoints").iterdir()) == ["ep3-ba12", "latest"]


# --- autoresume ------------------------------------------------------------------------------------------------------


def test_autoresume_begins_goes_on_and_says_that_it_is_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("train", "small", "--run-name", "auto", "--autoresume")
    first = document(*command, "--plugins", "ends", code=75)
    assert first["error"]["exit_code"] == 75
    monkeypatch.setenv("ENDS_AT", "0")
    second = document(*command, "--plugins", "ends")  # no seed is given: it is that of before
    assert second["resumed_from"] == "runs/auto/checkpoints/ep1-ba5"
    assert not second["finished"]
    check_log("auto")
    before = {path: path.stat().st_mtime_ns for path in Path("runs/auto").rglob("*") if "checkpoints" in str(path)}
    result = kernel(*command, "--plugins", "ends", "--json")
    third = json.loads(result.stdout)
    assert third["finished"] is True
    assert third["resumed_from"] == "runs/auto/checkpoints/ep3-ba12"
    assert third["metrics"] == second["metrics"] != {}
    assert "run auto is finished: nothing was left to train" in result.stderr
    check_log("auto")
    assert before == {
        path: path.stat().st_mtime_ns for path in Path("runs/auto").rglob("*") if "checkpoints" in str(path)
    }


def test_autoresume_goes_back_to_the_newest_good_checkpoint(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    start("whole")
    start("auto")
    damaged = Path("runs/auto/checkpoints/ep3-ba12/model-00000.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\0")
    for flags in (("small", "--run-name", "auto", "--autoresume"), ("--resume", "auto")):
        made = document("train", *flags)
        assert made["resumed_from"] == "runs/auto/checkpoints/ep2-ba8"
        assert "model-00000.safetensors" in caplog.text
        newest = max(Path("runs/auto/checkpoints").glob("ep3-ba12*"), key=lambda path: path.stat().st_mtime)
        found = load_file(newest / "model-00000.safetensors")
        assert all(torch.equal(found[name], value) for name, value in weights("whole").items())
        for path in Path("runs/auto/checkpoints").glob("ep3-ba12*"):
            changed = path / "model-00000.safetensors"
            changed.write_bytes(changed.read_bytes()[:-1] + b"\0")


def test_a_run_that_has_no_checkpoint_yet_begins_anew_in_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENDS_AT", "2")
    command = ("train", "small", "--run-name", "auto", "--autoresume", "--plugins", "ends", "-o", "ends.how=error")
    kernel(*command, code=1)
    seed = yaml.safe_load(Path("runs/auto/config.yaml").read_text())["train"]["seed"]
    monkeypatch.setenv("ENDS_AT", "0")
    made = document(*command)
    assert "resumed_from" not in made
    assert yaml.safe_load(Path("runs/auto/config.yaml").read_text())["train"]["seed"] == seed
    check_log("auto")


def test_a_run_that_fails_alike_again_and_again_is_refused(folder: Path) -> None:
    command = ("train", "small", "--run-name", "auto", "--autoresume", "--plugins", "ends", "-o", "ends.how=error")
    for _ in range(3):
        kernel(*command, code=1)
    result = kernel(*command, code=1)
    assert "the run failed" in result.stderr
    assert "each time at batch 5 with ZeroDivisionError: planted" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_its_launcher_starts_again_goes_on_by_itself(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start("whole")
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), (RUN_NAME, "mine")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ENDS_AT", "7")
    command = ("train", "small", "--seed", "3", "--plugins", "ends", "-o", "ends.how=error")
    kernel(*command, code=1)
    monkeypatch.setenv("KERNEL_START_COUNT", "1")
    monkeypatch.setenv("ENDS_AT", "0")
    made = document(*command)
    assert (made["run_name"], made["resumed_from"]) == ("mine", "runs/mine/checkpoints/ep1-ba4")
    check_log("mine")
    assert same("whole", "mine")


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(folder: Path) -> Path:
    start("run")
    (folder / "weights.pt").write_bytes(b"x")
    (folder / "empty").mkdir()
    return folder


REFUSED = [
    (["small", "--resume", "run"], "--resume: got the configuration 'small' beside it"),
    (["--resume", "rum"], "--resume: there is no run 'rum' in runs, and no checkpoint in rum"),
    (["--resume", "runs/rum"], "there is no checkpoint in runs/rum"),
    (["--resume", "empty"], "there is no run 'empty' in runs"),
    (["--resume", "weights.pt"], "--resume: weights.pt is a file. Expected a run, or the folder of a checkpoint"),
    (["--resume", "run", "--set", "checkpoint.load_path=x"], "--resume: got checkpoint.load_path beside it"),
    (["--resume", "latest", "--set", "logging.folder=empty"], "--resume latest: no run in empty has a checkpoint"),
    (["--resume", "run", "--seed", "4"], "was saved by a run with seed 3, and this one has 4"),
    (["--resume", "run", "--plugins", "noise"], "noise (algorithms) is new"),
    (["--resume", "run", "--set", "model.width=5"], "shapes differ"),
    (["--resume", "run", "--set", "optimizer.name=sgd"], "was saved with the optimizers AdamW, and the run has SGD"),
    (["small", "--autoresume"], "--autoresume: the run has no name"),
    (["small", "--autoresume", "--run-name", "run", "--no-checkpoints"], "nothing saves this run"),
    (["small", "--run-name", "run"], "runs/run holds a run already. Choose another name"),
    (["small", "--set", "checkpoint.save_intervall=1ep"], "checkpoint.save_intervall: unknown option. Did you mean"),
    (["small", "--set", "checkpoint.save_interval=never"], "checkpoint_saver.save_interval: got 'never'"),
    (["small", "--set", "checkpoint.load_path=nowhere"], "checkpoint: there is no checkpoint in nowhere"),
    (["small", "--no-checkpoints", "-o", "checkpoint_saver.overwrite=true"], "is not among the plugins of this run"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_what_cannot_be_resumed_is_one_message(arguments: list[str], message: str, run: Path) -> None:
    before = sorted(path for path in run.rglob("*"))
    result = kernel("train", *arguments, code=2)
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert before == sorted(path for path in run.rglob("*"))


def test_a_difference_can_be_allowed(run: Path) -> None:
    made = document(
        *("train", "--resume", "run", "--seed", "4", "--plugins", "noise", "--max-duration", "4ep"),
        *("--set", "checkpoint.load_allow_changes=[seed, noise]"),
    )
    assert made["resumed_from"] == "runs/run/checkpoints/ep3-ba12"
    assert "load_allow_changes" not in Path("runs/run/config.yaml").read_text()
    assert document("train", "--resume", "run")["finished"]  # what was allowed is what the run is now


def test_parts_are_loaded(run: Path) -> None:
    arguments = ("--set", "checkpoint.load_ignore_keys=[optimizers]", "--max-duration", "4ep")
    assert document("train", "--resume", "run", *arguments)["resumed_from"] == "runs/run/checkpoints/ep3-ba12"
    made = document(
        *(
            "train",
            "small",
            "--set",
            "checkpoint.load_path=runs/run/checkpoints",
            "--set",
            "checkpoint.load_weights_only=true",
        ),
        *("--run-name", "tuned"),
    )
    assert made["resumed_from"] == "runs/run/checkpoints/ep4-ba16"
    check_log("tuned")
    assert document("train", "--resume", "tuned")["resumed_from"] == "runs/tuned/checkpoints/ep3-ba12"


def test_weights_of_others_begin_a_run(run: Path) -> None:
    torch.save({"state": {"model": {f"module.{name}": value for name, value in weights("run").items()}}}, "theirs.pt")
    made = document("train", "small", "--set", "checkpoint.load_path=theirs.pt", "--max-duration", "0ep")
    assert made["metrics"] == {}
    result = kernel("train", "small", "--set", "checkpoint.load_path=weights.pt", code=2)
    assert "weights.pt: " in result.stderr
    assert "Traceback" not in result.stderr


# --- looking ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def looked(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, with a checkpoint that is damaged and one that was not finished."""
    place, here = tmp_path_factory.mktemp("looked"), Path.cwd()
    os.chdir(place)
    try:
        start("one", "--plugins", "noise")
        start("two", "--set", "optimizer.lr=0.2", "--max-duration", "8ba")
        shutil.copytree("runs/one/checkpoints/ep1-ba4", "runs/one/checkpoints/bad")
        Path("runs/one/checkpoints/bad/state.json").unlink()
        shutil.copytree("runs/one/checkpoints/ep1-ba4", "runs/one/checkpoints/cut")
        Path("runs/one/checkpoints/cut/manifest.json").unlink()
        shutil.copytree("runs/one/checkpoints/ep1-ba4", "runs/one/checkpoints/worse")
        manifest = Path("runs/one/checkpoints/worse/manifest.json")
        manifest.write_bytes(manifest.read_bytes().replace(b'"one"', b'"two"'))
    finally:
        os.chdir(here)
    return place


@pytest.fixture
def there(looked: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(looked)
    return looked


def test_list_shows_the_newest_first_and_what_is_wrong(there: Path) -> None:
    rows = document("checkpoint", "list")
    found = [(row["name"], row["run_name"], row["batch"], row["status"]) for row in rows]
    assert found[:2] == [("ep2-ba8", "two", 8, "complete"), ("ep1-ba4", "two", 4, "complete")]
    assert ("ep3-ba12", "one", 12, "complete") in found
    assert {(name, status) for name, _, _, status in found if status != "complete"} == {
        ("bad", "damaged"),
        ("cut", "unfinished"),
        ("worse", "damaged"),
    }
    assert [row["created"] for row in rows if row["created"]] == sorted(
        (row["created"] for row in rows if row["created"]), reverse=True
    )
    (bad,) = [row for row in rows if row["name"] == "bad"]
    assert (bad["problem"], bad["path"], bad["world_size"]) == ("state.json is missing", "runs/one/checkpoints/bad", 1)
    assert bad["bytes"] > 1000
    assert bad["age_s"] >= 0
    assert [row["name"] for row in document("checkpoint", "list", "runs/two")] == ["ep2-ba8", "ep1-ba4"]
    assert [row["name"] for row in document("checkpoint", "list", "two")] == ["ep2-ba8", "ep1-ba4"]
    assert [row["name"] for row in document("checkpoint", "list", "runs/two/checkpoints")] == ["ep2-ba8", "ep1-ba4"]
    assert [row["name"] for row in document("checkpoint", "list", "runs/two/checkpoints/ep1-ba4")] == ["ep1-ba4"]
    text = kernel("checkpoint", "list").stdout
    assert text.splitlines()[0].split() == ["name", "run", "epoch", "batch", "size", "age", "ranks", "state", "path"]
    assert "runs/one/checkpoints/bad: state.json is missing" in text


def test_list_of_nothing(folder: Path) -> None:
    assert document("checkpoint", "list") == []
    assert kernel("checkpoint", "list").stdout == "no checkpoints in runs\n"
    assert "there is no folder 'nowhere'" in kernel("checkpoint", "list", "nowhere", code=2).stderr


def test_show_says_what_made_the_checkpoint(there: Path) -> None:
    shown = document("checkpoint", "show", "runs/one", "--tensors")
    assert shown["path"] == "runs/one/checkpoints/ep3-ba12"
    assert (shown["manifest"]["timestamp"]["batch"], shown["seed"], shown["run"]["world_size"]) == (12, 3, 1)
    assert (shown["num_elements"], shown["model"]["num_parameters"]) == (26, 26)
    assert {one["id"]: one["version"] for one in shown["plan"]["plugins"]}["noise"] == "1.0"
    assert {"name": "module.0.weight", "dtype": "F32", "shape": [4, 3], "pieces": 1} in shown["tensors"]
    assert shown["environment"]["torch"] == torch.__version__
    text = kernel("checkpoint", "show", "runs/one/checkpoints/latest", "--tensors").stdout
    for part in (
        "run       one, seed 3",
        "epoch 3, batch 12",
        "scale=0.01",
        "module.0.weight  F32  [4, 3]",
        "26 parameters",
    ):
        assert part in text


def test_looking_imports_no_torch(there: Path, site: Path) -> None:
    code = (
        "import sys\nfrom kernel_cli.main import cli\n"
        "for arguments in (['list'], ['show', 'runs/one', '--tensors'], ['verify', 'runs/two']):\n"
        "    try: cli.main(['checkpoint', *arguments])\n"
        "    except SystemExit as end: assert not end.code, end\n"
        "print(sorted({'torch', 'numpy', 'pickle5'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stderr.strip() == "[]"
    assert "module.0.weight" in done.stdout


def test_verify_reads_everything_and_names_the_damaged_file(there: Path, tmp_path: Path) -> None:
    (row,) = document("checkpoint", "verify", "runs/one/checkpoints/ep3-ba12")
    assert (row["status"], row["num_files"], row["problems"]) == ("intact", 5, [])
    rows = document("checkpoint", "verify", "runs/one", code=1)
    assert {row["path"].rpartition("/")[2]: row["status"] for row in rows} == {
        "ep1-ba4": "intact",
        "ep2-ba8": "intact",
        "ep3-ba12": "intact",
        "bad": "damaged",
        "worse": "damaged",
    }
    copy = tmp_path / "copy"
    shutil.copytree("runs/one/checkpoints/ep3-ba12", copy)
    data = bytearray((copy / "state-00000.safetensors").read_bytes())
    data[-3] ^= 1
    (copy / "state-00000.safetensors").write_bytes(data)
    (copy / "rank-00000.json").unlink()
    text = kernel("checkpoint", "verify", str(copy), code=1).stdout
    assert "damaged" in text
    assert "rank-00000.json is missing" in text
    assert "the content of state-00000.safetensors is not what was written" in text
    assert "there is no checkpoint in nowhere" in kernel("checkpoint", "verify", "nowhere", code=2).stderr


def test_diff_compares_plans_settings_and_weights(there: Path) -> None:
    same = document("checkpoint", "diff", "runs/one", "runs/one/checkpoints/ep3-ba12")
    assert (same["plan"], same["config"], same["run"], same["tensors"]["equal"]) == ([], {}, {}, 4)
    found = document("checkpoint", "diff", "runs/one", "runs/two")
    assert "noise (algorithms) was in the run that was saved, and is not in this one" in found["plan"]
    assert found["config"]["optimizer.lr"] == [0.1, 0.2]
    assert found["run"]["max_duration"] == ["3ep", "8ba"]
    one, two = weights("one"), weights("two", "ep2-ba8")
    largest = max(float((one[name].double() - two[name].double()).abs().max()) for name in one)
    assert found["tensors"]["largest"]["difference"] == pytest.approx(largest, rel=1e-12)
    assert len(found["tensors"]["different"]) == 4
    text = kernel("checkpoint", "diff", "runs/one", "runs/two").stdout
    for part in ("0 equal, 4 different", "optimizer.lr", "0.1  →  0.2", "largest difference"):
        assert part in text
    wide = ("--run-name", "wide", "--max-duration", "1ba", "--set", "model.width=5")
    kernel("train", "small", *wide)
    tensors = document("checkpoint", "diff", "runs/one", "runs/wide")["tensors"]
    assert {"name": "module.0.weight", "a": [4, 3], "b": [5, 3]} in tensors["reshaped"]
    assert not tensors["only_a"]
    shutil.rmtree("runs/wide")


def test_export_writes_one_file_that_others_read(there: Path, tmp_path: Path) -> None:
    made = document("checkpoint", "export", "runs/one", str(tmp_path / "one.safetensors"))
    assert (made["num_tensors"], made["bytes"]) == (4, (tmp_path / "one.safetensors").stat().st_size)
    found = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(found[name], value) for name, value in weights("one").items())
    kernel("checkpoint", "export", "runs/one", str(tmp_path / "half.safetensors"), "--dtype", "float16")
    half = load_file(tmp_path / "half.safetensors")
    assert all(torch.equal(half[name], value.half()) for name, value in weights("one").items())
    again = kernel("checkpoint", "export", "runs/one", str(tmp_path / "one.safetensors"), code=2)
    assert "is there already. Expected a new name" in again.stderr
    other = kernel("checkpoint", "export", "runs/one", str(tmp_path / "hf"), "--format", "huggingface", code=2)
    assert "does not hold how huggingface describes its model, a Net" in other.stderr
    assert not (tmp_path / "hf").exists()
    assert "got 's3://" in kernel("checkpoint", "export", "runs/one", "s3://bucket/x", code=2).stderr


@pytest.mark.parametrize("command", [["show"], ["diff", "runs/one"], ["export"]])
def test_a_damaged_checkpoint_is_one_message(command: list[str], there: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree("runs/one/checkpoints/ep3-ba12", copy)
    (copy / "lock.json").write_text("{}")
    last = [str(tmp_path / "out")] if command == ["export"] else []
    result = kernel("checkpoint", *command, str(copy), *last, code=2)
    assert "lock.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_what_a_checkpoint_says_does_not_steer_the_terminal(folder: Path) -> None:
    start("run")
    result = kernel("train", "small", "--run-name", "x\x1b[31m", "--max-duration", "1ba")
    assert result.exit_code == 0
    for command in (["list"], ["show", "runs/x\x1b[31m"]):
        text = kernel("checkpoint", *command).stdout
        assert "\x1b" not in text
        assert "\\x1b[31m" in text
