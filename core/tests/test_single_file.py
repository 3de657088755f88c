"""Plugins that are a single file: what is run, what it is called, what is kept of it, and what is refused."""

import hashlib
import logging
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_core import Classifier, Trainer
from kernel_core.errors import PluginLoadError, PluginNotFoundError
from kernel_core.recipe import plugin_label, plugin_requests, with_absolute_paths
from kernel_core.registry.discovery import find
from kernel_core.registry.plan import resolve
from kernel_core.registry.single_file import PREFIX, absolute, is_file, load_file, name_of, split
from torch import nn

IDEA = '''
from kernel_core import Algorithm, State, hookimpl


class Damp(Algorithm):
    """Make gradients smaller."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        for parameter in state.model.parameters():
            parameter.grad.mul_(self.factor)
'''


@pytest.fixture
def idea(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_idea.py"
    path.write_text(IDEA)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def train(plugins: list[Any], lr: float = 0.1, **arguments: Any) -> torch.Tensor:
    torch.manual_seed(0)
    model = Classifier(nn.Linear(3, 2))
    with Trainer(
        model=model,
        train_dataloader=[(torch.ones(4, 3), torch.tensor([0, 1, 0, 1]))],
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        plugins=plugins,
        device="cpu",
        progress_bar=False,
        **{"max_duration": "2ep", **arguments},
    ) as trainer:
        trainer.fit()
    return model.module.weight.detach()


@pytest.mark.usefixtures("idea")
def test_a_trainer_takes_a_file_by_its_path_with_and_without_options() -> None:
    torch.testing.assert_close(train(["./my_idea.py"]), train([], lr=0.05))
    torch.testing.assert_close(train([("./my_idea.py", {"factor": 0.25})]), train([], lr=0.025))


def test_the_plan_keeps_that_it_has_no_distribution_and_a_hash_of_its_bytes(idea: Path) -> None:
    (active,) = resolve([("./my_idea.py", {"factor": 0.1})])
    kept = active.to_json()
    assert (kept["id"], kept["name"], kept["distribution"], kept["version"]) == ("my_idea", "my_idea", None, None)
    assert kept["options"] == {"factor": 0.1}
    assert kept["hash"] == digest(idea)


def test_the_hash_is_of_what_runs_though_the_file_changes_or_goes(idea: Path) -> None:
    (active,) = resolve(["./my_idea.py"])
    ran = digest(idea)
    idea.write_text(IDEA.replace("0.5", "0.7"))
    assert active.to_json()["hash"] == ran
    idea.unlink()
    assert active.to_json()["hash"] == ran


def test_a_file_is_imported_once_while_it_stays_as_it_is_and_anew_when_it_changes(idea: Path) -> None:
    first = load_file("./my_idea.py")
    assert load_file(str(idea)) is first
    idea.write_text(IDEA.replace("0.5", "0.7"))  # as long as before and, within a second, as old
    second = load_file("./my_idea.py")
    assert second is not first
    assert (first().factor, second().factor) == (0.5, 0.7)
    assert (resolve([first()])[0].to_json()["hash"], resolve([second()])[0].to_json()["hash"]) == (
        hashlib.sha256(IDEA.encode()).hexdigest(),
        digest(idea),
    )
    assert [one.name for one in idea.parent.iterdir()] == ["my_idea.py"]  # nothing compiled lies beside it


def test_files_of_one_name_do_not_hide_each_other_or_anything_else(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        path = tmp_path / str(number) / "json.py"
        path.parent.mkdir()
        path.write_text(IDEA.replace("0.5", f"0.{number}"))
        found.append(load_file(str(path)))
    assert [cls().factor for cls in found] == [0.1, 0.2]
    assert all(cls.__module__.startswith(f"{PREFIX}json_") for cls in found)
    assert hasattr(sys.modules["json"], "dumps")


def test_objects_of_its_classes_can_be_pickled(idea: Path) -> None:
    idea.write_text(IDEA + "\n\nclass Rows(list):\n    pass\n")
    rows = sys.modules[load_file("./my_idea.py").__module__].Rows([1, 2])
    again = pickle.loads(pickle.dumps(rows))
    assert (type(again), again) == (type(rows), [1, 2])


def test_the_file_is_compiled_as_it_is_written(idea: Path) -> None:
    # the kernel's own `from __future__ import annotations` must not be in force there
    idea.write_text(IDEA + "\n\ndef helper(x: NotDefined) -> None:\n    pass\n")
    with pytest.raises(PluginLoadError, match="NameError: name 'NotDefined' is not defined"):
        load_file("./my_idea.py")


def test_a_section_of_a_configuration_names_files_with_ids_and_options(idea: Path) -> None:
    section = {"./my_idea.py": {"factor": 0.1}, "other=./my_idea.py:Damp": None, "mixup": {}}
    kept = with_absolute_paths(section)
    assert list(kept) == [str(idea), f"other={idea}:Damp", "mixup"]
    assert [plugin_label(key) for key in kept] == ["my_idea", "other", "mixup"]
    active = resolve(plugin_requests({key: kept[key] for key in list(kept)[:2]}))
    assert [(one.id, one.plugin.name, one.plugin.options["factor"]) for one in active] == [
        ("my_idea", "my_idea", 0.1),
        ("other", "damp", 0.5),
    ]


def test_reading_what_a_file_is_called_imports_nothing(idea: Path, tmp_path: Path) -> None:
    # a configuration that a stranger wrote is read by commands that only look
    idea.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert plugin_label(str(idea)) == "my_idea"
    assert not (tmp_path / "ran").exists()


def test_a_run_that_goes_on_says_that_the_file_has_changed(idea: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(["./my_idea.py"], save_folder="saved", save_interval="1ep", max_duration="1ep", run_name="one")
    before = digest(idea)
    idea.write_text(IDEA + "\n# changed\n")
    with caplog.at_level(logging.INFO):
        train(["./my_idea.py"], load_path="saved", run_name="two")
    assert f"the hash of my_idea was {before[:12]}, and is {digest(idea)[:12]}." in caplog.text


def test_bases_with_an_underscore_and_second_names_are_no_further_plugins(idea: Path) -> None:
    idea.write_text(
        IDEA.replace("class Damp", "class _Base") + "\n\nclass Damp(_Base):\n    '''It.'''\n\n\nAlias = Damp\n"
    )
    assert load_file("./my_idea.py").__name__ == "Damp"
    assert load_file("./my_idea.py:_Base").__name__ == "_Base"


@pytest.mark.parametrize(
    ("content", "request_", "error", "message"),
    [
        (
            None,
            "./none.py",
            PluginNotFoundError,
            r"^\./none\.py: there is no such file\. Expected a Python file with a plugin class\. "
            r"Put it there, or correct the path\.$",
        ),
        (
            "class Idea:\n    pass\n",
            "./my_idea.py",
            PluginLoadError,
            r"^\./my_idea\.py: it has no plugin class, only Idea\. "
            r"Expected one class that is an Algorithm, a Callback or a LoggerDestination\.$",
        ),
        ("from kernel_core import Callback\n", "./my_idea.py", PluginLoadError, r"it has no plugin class\. Expected"),
        (
            IDEA + "\n\nclass Other(Damp):\n    '''Another.'''\n",
            "./my_idea.py",
            PluginLoadError,
            r"it has the plugin classes Damp, Other\. Expected one class .* Choose one: \./my_idea\.py:Damp\.$",
        ),
        (
            IDEA,
            "./my_idea.py:Dam",
            PluginNotFoundError,
            r"there is no plugin class Dam in it\. Did you mean 'Damp'\? It has the plugin classes Damp\.$",
        ),
    ],
)
def test_what_is_no_plugin_is_refused(
    idea: Path, content: str | None, request_: str, error: type[Exception], message: str
) -> None:
    if content is not None:
        idea.write_text(content)
    with pytest.raises(error, match=message):
        load_file(request_)


@pytest.mark.parametrize(
    ("content", "cause", "message"),
    [
        ("import nowhere_at_all\n", ModuleNotFoundError, "ModuleNotFoundError: No module named 'nowhere_at_all'. Mend"),
        ("def broken(:\n", SyntaxError, "importing it failed: SyntaxError: "),
        (
            "raise SystemExit(3)\n",
            SystemExit,
            "SystemExit: 3. A script that ends by itself is no plugin. Mend the file.",
        ),
    ],
)
def test_an_import_that_fails_chains_its_cause_and_leaves_what_was_there(
    idea: Path, content: str, cause: type[BaseException], message: str
) -> None:
    first = load_file("./my_idea.py")
    module = sys.modules[first.__module__]
    idea.write_text(content)
    with pytest.raises(PluginLoadError) as caught:
        load_file("./my_idea.py")
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{idea}: importing it failed: ")
    assert isinstance(caught.value.__cause__, cause)
    assert sys.modules[first.__module__] is module
    idea.write_text(IDEA)
    assert load_file("./my_idea.py") is first


def test_a_path_that_does_not_end_in_py_is_told_apart_from_a_name() -> None:
    with pytest.raises(
        PluginNotFoundError,
        match=r"^\./my_idea: there is no plugin of that name\. Expected a name, a kind and a name such as "
        r"algorithms/my_idea, or the path of a file that ends in \.py\.$",
    ):
        find("./my_idea")


def test_names_of_files_and_of_plugins_are_told_apart() -> None:
    assert not is_file("mixup")
    assert not is_file("kernel-plugin-mixup:mixup")
    assert is_file("./a.py")
    assert is_file("/x/a.py:Cls")
    assert split("/x/a.py:Cls") == ("/x/a.py", "Cls")
    assert (name_of("./my-idea.py"), name_of("./my-idea.py:TwoWords")) == ("my_idea", "two_words")
    assert absolute("/x/../y/a.py:Cls") == "/y/a.py:Cls"
    assert find("mixup").name == "mixup"
