"""The command as a user types it, with a small recipe and plugins made on the spot."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kernel_cli.main import cli
from kernel_core.registry.discovery import installed_plugins

MODULE = '''
import sys
import torch
from kernel_core import Algorithm, Callback, Evaluator, TrainableModel, hookimpl
from kernel_core.recipe import Recipe, RunData
from torch import nn


class Mean:
    def reset(self): self.values = []
    def update(self, value): self.values.append(float(value))
    def compute(self): return sum(self.values) / len(self.values)


class Line(TrainableModel):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 1))
    def forward(self, batch): return self.net(batch)
    def loss(self, outputs, batch): return outputs.square().mean()
    def get_metrics(self, is_train): return {} if is_train else {"size": Mean(), "nan": Mean()}
    def update_metric(self, batch, outputs, metric): metric.update(outputs.abs().mean())


def line(width: int = 4) -> Line:
    return Line(width)


def ones(rows: int = 4, seed: int = 0) -> RunData:
    data = [torch.ones(rows, 2)] * 3
    return RunData(train=data, evaluators=[Evaluator("test", data, metric_names=["size"])])


def wide(model: str = "8", bias: bool = True) -> Line:
    return Line(int(model))


def twos(rows: int = 5) -> RunData:
    return RunData(train=[torch.full((rows, 2), 2.0)] * 2)


recipe = Recipe(
    summary="A line.",
    config={
        "model": {"name": "line"},
        "data": {"name": "ones"},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "scheduler": {"name": "cosine_with_warmup"},
        "train": {"max_duration": "2ep", "device": "cpu"},
        "logging": {"progress_bar": False},
    },
    functions={"line": line, "ones": ones},
)


class Smooth(Algorithm):
    """Replace ReLU by GELU.

    Source: Hendrycks and Gimpel, 2016.
    """
    roles = {"replaces-modules"}
    def __init__(self, approximate: bool = False) -> None: ...
    @hookimpl
    def module_replacements(self):
        return {nn.ReLU: lambda module, path: nn.GELU()}


class Sharp(Algorithm):
    """Replace ReLU by Tanh."""
    @hookimpl
    def module_replacements(self):
        return {nn.ReLU: lambda module, path: nn.Tanh()}


class Chatty(Callback):
    def __init__(self, words: str = "hello") -> None:
        self.words = words
    @hookimpl
    def batch_end(self, state):
        print(self.words)


class Fails(Callback):
    @hookimpl
    def batch_end(self, state):
        raise ZeroDivisionError("planted")


class Refuses(Callback):
    @hookimpl
    def batch_end(self, state):
        from kernel_core.errors import DataError
        raise DataError("refuses: the batch is wrong.")


class Unmarked(Callback):
    def batch_end(self, state): ...


class Enemy(Algorithm):
    conflicts = {"smooth"}


class First(Algorithm):
    before = {"second"}


class Second(Algorithm):
    before = {"first"}
'''
ENTRY_POINTS = """
[kernel.recipes]
line = cli_test_plugins:recipe
broken-recipe = cli_test_plugins:Line
[kernel.models]
wide = cli_test_plugins:wide
[kernel.data]
twos = cli_test_plugins:twos
[kernel.algorithms]
smooth = cli_test_plugins:Smooth
sharp = cli_test_plugins:Sharp
enemy = cli_test_plugins:Enemy
first = cli_test_plugins:First
second = cli_test_plugins:Second
absent = cli_test_no_such_module:Absent
twin = cli_test_plugins:Smooth
[kernel.callbacks]
chatty = cli_test_plugins:Chatty
fails = cli_test_plugins:Fails
refuses = cli_test_plugins:Refuses
unmarked = cli_test_plugins:Unmarked
"""


def install(root: Path, name: str, entry_points: str) -> None:
    folder = root / f"{name.replace('-', '_')}-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nSummary: For tests.\n")
    (folder / "entry_points.txt").write_text(entry_points)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("site")
    (root / "cli_test_plugins.py").write_text(MODULE)
    install(root, "cli-test-plugins", ENTRY_POINTS)
    install(root, "another-package", "[kernel.algorithms]\ntwin = cli_test_plugins:Smooth\n")
    sys.path.insert(0, str(root))
    installed_plugins.cache_clear()
    yield root
    sys.path.remove(str(root))
    installed_plugins.cache_clear()
    sys.modules.pop("cli_test_plugins", None)


@pytest.fixture(autouse=True)
def folder(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kernel(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def document(result: Result) -> Any:
    return json.loads(result.stdout)


def test_train_leaves_a_run_and_prints_what_happened(folder: Path) -> None:
    result = kernel("train", "line", "--plugins", "smooth", "--seed", "3", "--run-name", "one")
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    for text in (
        "surgery: what plugins changed",
        "ReLU replaced by GELU",
        "plan ",
        "evaluation",
        "test",
        "runs/one/ holds",
    ):
        assert text in result.stderr
    run = folder / "runs" / "one"
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.yaml", "metrics.jsonl", "plan.json"]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[0]["hyperparameters"]["seed"] == 3
    losses = [record["loss/train/total"] for record in records if "loss/train/total" in record]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert any("metrics/test/size" in record for record in records)


def test_a_run_starts_again_from_its_own_config(folder: Path) -> None:
    first = document(kernel("train", "line", "--plugins", "smooth", "-o", "smooth.approximate=true", "--json"))
    second = document(kernel("train", f"{first['run_dir']}/config.yaml", "--json"))
    assert second["run_name"] != first["run_name"]
    assert second["metrics"] == first["metrics"]
    assert second["plan_digest"] == first["plan_digest"]


def test_the_result_document_has_the_names_others_rely_on() -> None:
    result = kernel("train", "line", "--plugins", "smooth,chatty", "--max-duration", "4ba", "--json")
    made = document(result)
    assert set(made) == {"run_name", "run_dir", "duration", "metrics", "surgery", "plan_digest"}
    assert made["surgery"] == [
        {"path": "net.1", "plugin": "smooth", "old": "ReLU", "new": "GELU", "what": "ReLU replaced by GELU"}
    ]
    assert isinstance(made["metrics"]["metrics/test/size"], float)
    assert made["plan_digest"] == document(kernel("plan", "line", "--plugins", "smooth,chatty", "--json"))["digest"]


def test_one_document_on_standard_output_even_if_a_plugin_or_a_child_prints(site: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "kernel_cli.main", "train", "line", "--plugins", "chatty", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "hello" in done.stderr
    assert json.loads(done.stdout)["run_name"]


def test_settings_reach_their_section_and_the_command_line_wins(folder: Path) -> None:
    (folder / "mine.yaml").write_text(
        "recipe: line\nmodel: {width: 7}\ntrain: {max_duration: 1ep, seed: 5}\nplugins: [smooth]\n"
    )
    arguments = ("train", "mine.yaml", "--set", "optimizer.lr=1e-3", "--set", "model.width=9", "--max-duration", "2ba")
    result = kernel(*arguments, "--run-name", "set", "--json")
    assert result.exit_code == 0, result.output
    config = (folder / "runs" / "set" / "config.yaml").read_text()
    for text in ("width: 9", "lr: 0.001", "max_duration: 2ba", "seed: 5", "smooth: {}"):
        assert text in config


def test_dry_run_shows_plan_and_surgery_and_trains_nothing(folder: Path) -> None:
    result = kernel("train", "line", "--plugins", "smooth,fails", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "ReLU replaced by GELU" in result.stderr
    assert "batch_end" in result.stderr
    assert not (folder / "runs").exists()
    assert "plan" in document(kernel("train", "line", "--plugins", "smooth", "--dry-run", "--json"))


def test_an_installed_model_takes_the_place_of_the_recipe_s(folder: Path) -> None:
    result = kernel("train", "line", "--model", "wide:16", "--plugins", "smooth", "--run-name", "wide")
    assert result.exit_code == 0, result.output
    assert re.search(r"parameters +float32 +4 tensors +65 entries", result.stderr)  # 2 * 16 + 16 + 16 + 1
    config = (folder / "runs" / "wide" / "config.yaml").read_text()
    assert "name: wide" in config
    assert "model: '16'" in config


def test_installed_data_is_found_by_name() -> None:
    result = kernel("train", "line", "--set", "data.name=twos", "--set", "data.rows=3", "--json")
    assert result.exit_code == 0, result.output
    assert document(result)["metrics"] == {}


def test_the_precision_and_the_timeline_of_a_run() -> None:
    result = kernel("train", "line", "--precision", "amp_bf16", "--timeline")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stderr.splitlines() if line.strip()]
    seconds = {cells[0]: float(cells[1]) for cells in rows if len(cells) > 3 and cells[3] == "%"}
    assert {"data", "forward", "loss", "backward", "step", "evaluation", "loop"} < set(seconds)
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, abs=0.001 * len(seconds))  # each is rounded to a millisecond


def test_strict_makes_warnings_errors() -> None:
    with pytest.warns(UserWarning, match="no effect"):
        assert kernel("train", "line", "--plugins", "smooth,sharp", "--dry-run").exit_code == 0
    result = kernel("train", "line", "--plugins", "smooth,sharp", "--dry-run", "--strict")
    assert result.exit_code == 2
    assert "sharp: its surgery had no effect on this model" in result.stderr


def test_a_plugin_is_used_twice_under_another_id() -> None:
    result = kernel("plan", "line", "--plugins", "chatty,loud=chatty", "-o", "loud.words=HELLO", "--json")
    plan = document(result)
    assert [call["plugin"] for call in plan["events"]["batch_end"]] == ["chatty", "loud"]
    assert [entry["options"] for entry in plan["plugins"] if entry["name"] == "chatty"] == [
        {"words": "hello"},
        {"words": "HELLO"},
    ]


WRONG = [
    (
        ["--plugins", "smoth"],
        "smoth: no algorithm or callback or logger of that name is installed. Did you mean 'smooth'?",
    ),
    (["--plugins", "twin"], "both provide it. Name the one you mean: another-package:twin or cli-test-plugins:twin"),
    (
        ["--plugins", "smooth", "-o", "smooth.aproximate=true"],
        "smooth.aproximate: unknown option. Did you mean 'approximate'?",
    ),
    (["--plugins", "smooth", "-o", "smooth.approximate=3.5"], "smooth.approximate: got 3.5, expected bool"),
    (["--plugins", "chatty", "-o", "chatty.words=[1"], "-o chatty.words: cannot be read as YAML"),
    (["--plugins", "smooth", "-o", "chatty.words=a"], "'chatty' is not among the plugins of this run"),
    (["--plugins", "smooth", "-o", "smooth"], "-o: got 'smooth'. Expected plugin.option=value"),
    (["--plugins", "smooth,enemy"], "enemy: cannot run together with smooth"),
    (["--plugins", "first,second"], "order: the plugins wait for each other: first -> second -> first"),
    (["--plugins", "unmarked"], "unmarked.batch_end: is named like a hook but not marked"),
    (["--plugins", "absent"], "absent: importing cli_test_no_such_module:Absent of cli-test-plugins 1.0 failed"),
    (["--set", "modle.width=3"], "config: unknown section 'modle'. Did you mean 'model'?"),
    (["--set", "model.widht=3"], "model.widht: unknown option. Did you mean 'width'?"),
    (["--set", "model.width=wide"], "model.width: got 'wide', expected int"),
    (["--set", "model.name=lime"], "model.name: there is no 'lime'. Did you mean 'line'?"),
    (["--set", "optimizer.name=adamm"], "optimizer.name: there is no 'adamm'"),
    (["--set", "optimizer.lrr=1"], "optimizer.lrr: unknown option. Did you mean 'lr'"),
    (["--set", "train.max_durration=1ep"], "train.max_durration: unknown option. Did you mean 'max_duration'?"),
    (["--precision", "fp23"], "precision: unknown precision 'fp23'. Did you mean 'fp32'"),
    (["--precision", "amp_fp8", "--device", "cpu"], "precision: 'amp_fp8' was asked for, and cpu has no fp8"),
    (["--model", "huggingfase:x"], "model.name: there is no 'huggingfase'. Did you mean 'huggingface'?"),
    (["--model", "wide:"], "--model: got 'wide:'. Expected a name, or name:what"),
    (["--model", "wide", "--set", "model.bais=false"], "model.bais: unknown option. Did you mean 'bias'?"),
    (["--set", "train.device_train_microbatch_size=some"], "train.device_train_microbatch_size: got 'some', expected"),
    (["--max-duration", "3parsec"], "unknown unit 'parsec'"),
    (["--max-duration", "soon"], "time: cannot read 'soon'"),
    (["--device", "cup"], "device: unknown device 'cup'"),
    (["--plugins", "smooth,smooth"], "--plugins: smooth is named twice"),
    (
        ["--plugins", "numbers"],
        "there is no algorithm or callback or logger of that name; it is installed among the recipes",
    ),
    (["--set", "train.strict=no"], "train.strict: got 'no', expected bool"),
    (["--set", "train.seed=abc"], "train.seed: got 'abc', expected int"),
    (["--set", "eval.subset_num_batches=banana"], "eval.subset_num_batches: got 'banana', expected int"),
    (["--set", "logging.progress_bar=sure"], "logging.progress_bar: got 'sure', expected bool"),
    (["--set", "plugins.smooth=3"], "plugins.smooth: got 3. Expected its options as a mapping"),
    (["--run-name", "../../escaped"], "run_name: got '../../escaped'. Expected a name for a folder"),
    (["--max-duration=-1ep"], "max_duration: got -1ep. Expected a time of at least 0"),
    (["--max-duration", "1iter"], "max_duration: 1iter counts iterations. Give Trainer iteration_length"),
    (["--set", "parallelism.dpp={}"], "dpp: no parallelism of that name is installed"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_use_is_one_message_and_exit_code_2(arguments: list[str], message: str, folder: Path) -> None:
    result = kernel("train", "line", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("lyne", None, "lyne: no recipe of that name is installed. Did you mean 'line'?"),
        (
            "broken-recipe",
            None,
            "broken_recipe: cli_test_plugins:Line of cli-test-plugins is no kernel_core.recipe.Recipe",
        ),
        ("none.yaml", None, "none.yaml: cannot be read"),
        ("bad.yaml", "model: [1", "bad.yaml: cannot be read as YAML"),
        ("list.yaml", "- a\n- b\n", "list.yaml: got list. Expected sections"),
        ("bare.yaml", "train: {max_duration: 1ep}\n", "model.name: missing. Name a function: start from a recipe"),
        ("flat.yaml", "recipe: line\nmodel: 3\n", "config.model: got 3. Expected a mapping"),
    ],
)
def test_a_source_that_cannot_be_used_is_one_message(
    source: str, content: str | None, message: str, folder: Path
) -> None:
    if content is not None:
        (folder / source).write_text(content)
    result = kernel("train", source)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_failure_is_a_document_too_and_exit_code_1_once_training_began(folder: Path) -> None:
    result = kernel("train", "line", "--plugins", "fails", "--json")
    assert result.exit_code == 1
    error = document(result)["error"]
    assert (error["type"], error["message"], error["exit_code"]) == ("ZeroDivisionError", "planted", 1)
    assert error["notes"] == ["in plugin 'fails' (cli-test-plugins 1.0), hook batch_end, rank 0, epoch 0, batch 1"]
    assert "Traceback" in result.stderr
    result = kernel("train", "line", "--plugins", "refuses")
    assert result.exit_code == 1
    assert "Error: refuses: the batch is wrong." in result.stderr
    assert "hook batch_end" in result.stderr
    assert "Traceback" not in result.stderr
    unknown = kernel("train", "line", "--plugins", "smoth", "--json")
    assert document(unknown)["error"]["type"] == "PluginNotFoundError"


def test_settings_of_plugins_evaluations_and_names(folder: Path) -> None:
    (folder / "mixed.YAML").write_text(
        "recipe: line\nplugins: [smooth, {chatty: {words: hi}}]\neval: {subset_num_batches: 1}\n"
    )
    result = kernel("train", "mixed.YAML", "--set", "plugins.chatty.words=hey", "--run-name", "mixed", "--json")
    assert result.exit_code == 0, result.output
    assert "words: hey" in (folder / "runs" / "mixed" / "config.yaml").read_text()
    again = kernel("train", "mixed.YAML", "--run-name", "mixed")
    assert again.exit_code == 2
    assert "holds a run already. Choose another name" in again.stderr
    assert "kernel train --resume runs/mixed" in again.stderr
    plan = document(kernel("plan", "line", "-o", "file_logger.flush_interval=7", "--json"))
    (logger,) = [one for one in plan["plugins"] if one["name"] == "file_logger"]
    assert logger["options"]["flush_interval"] == 7


def test_usage_errors_are_documents_too(site: Path) -> None:
    command = [sys.executable, "-m", "kernel_cli.main", "train", "line", "--seed", "abc", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "'abc' is not a valid integer" in json.loads(done.stdout)["error"]["message"]


def test_plugins_list_and_show() -> None:
    listed = document(kernel("plugins", "list", "--json"))
    (smooth,) = [one for one in listed if one["name"] == "smooth"]
    assert smooth == {
        "name": "smooth",
        "kind": "algorithms",
        "distribution": "cli-test-plugins",
        "version": "1.0",
        "summary": "For tests.",
    }
    assert listed == sorted(listed, key=lambda one: (one["kind"], one["name"], one["distribution"]))
    assert "smooth" in kernel("plugins", "list").stdout
    shown = document(kernel("plugins", "show", "smooth", "--json"))
    assert shown["options"] == [{"name": "approximate", "type": "bool", "default": "False"}]
    assert (shown["hooks"], shown["roles"]) == (["module_replacements"], ["replaces-modules"])
    text = kernel("plugins", "show", "smooth").stdout
    for part in (
        "Replace ReLU by GELU.",
        "approximate  bool  False",
        "hooks: module_replacements",
        "roles: replaces-modules",
    ):
        assert part in text
    assert kernel("plugins", "show", "single").exit_code == 0
    assert kernel("plugins", "show", "sinngle").exit_code == 2


def test_plan_says_why() -> None:
    text = kernel("plan", "line", "--plugins", "chatty,smooth").stdout
    assert "module_replacements  [forward]" in text
    assert "plan digest" in text


def test_events_shows_every_hook_in_its_place() -> None:
    result = document(kernel("events", "--json"))
    assert {hook["name"] for hook in result["hooks"]} >= {"init", "batch_end", "fit_failed", "close"}
    text = kernel("events").stdout
    order = ["* fit_start", "for each epoch:", "* batch_start", "for each microbatch:", "* after_train_batch"]
    order += ["optimizer.step()", "* batch_end", "* epoch_end", "* fit_end", "trainer.eval():", "when fit raises:"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_help_and_list_import_no_torch(site: Path) -> None:
    code = (
        "import sys\nfrom kernel_cli.main import cli\n"
        "for arguments in (['--help'], ['plugins', 'list']):\n"
        "    try: cli.main(arguments)\n"
        "    except SystemExit: pass\n"
        "print(sorted({'torch', 'pydantic', 'rich', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "Train PyTorch models with plugins." in done.stdout


@pytest.mark.parametrize(
    ("number", "saves", "code"),
    [(signal.SIGINT, False, 130), (signal.SIGTERM, False, 143), (signal.SIGTERM, True, 75), (signal.SIGINT, True, 75)],
)
def test_interrupting_closes_and_says_so(number: int, saves: bool, code: int, site: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "kernel_cli.main", "train", "line", "--max-duration", "10m", "--run-name", "long"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    held = signal.signal(signal.SIGINT, signal.default_int_handler)  # a child inherits it if it is ignored here
    process = subprocess.Popen(
        [*command, *([] if saves else ["--no-checkpoints"])], stderr=subprocess.PIPE, env=environment
    )
    signal.signal(signal.SIGINT, held)
    deadline = time.monotonic() + 60
    while not (folder / "runs" / "long" / "plan.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(number)
    error = process.communicate(timeout=60)[1].decode()
    assert process.returncode == code
    assert "Error: interrupted" in error
    assert (folder / "runs" / "long" / "metrics.jsonl").read_text().endswith("\n")
    assert (folder / "runs" / "long" / "checkpoints").exists() == saves
    assert error.endswith("\n  kernel train --resume runs/long\n") == saves
