"""``kernel plugins check``, and plugins that are a single file, as a user types it."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kernel_cli.check import plugins_meant
from kernel_cli.main import cli
from kernel_cli.train import command_that_goes_on
from kernel_core.testing.conformance.checks import CHECKS

IDEA = '''
"""An idea."""

from kernel_core import Algorithm, State, hookimpl


class Damp(Algorithm):
    """Make gradients smaller.

    Args:
        factor: What they are multiplied by.
    """

    roles = {"scales-gradients"}
    neutral = {"factor": 1.0}

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    @hookimpl
    def after_train_batch(self, state: State) -> None:
        for parameter in state.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)
'''
SMALL = ("--set", "data.num_train_strips=64", "--set", "data.num_test_strips=8", "--max-duration", "2ba")


def kernel(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def idea(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "my_idea.py"
    path.write_text(IDEA)
    return path


def test_a_file_is_checked_as_a_package_is(idea: Path) -> None:
    card = json.loads(kernel("plugins", "check", "./my_idea.py", "--json").stdout)
    assert (card["plugin"], card["kind"], card["hooks"]) == ("my_idea", "algorithms", ["after_train_batch"])
    assert list(card["checks"]) == list(CHECKS)
    assert {name: found for name, found in card["checks"].items() if found.startswith("refuted")} == {}
    assert card["checks"]["neutral"] == "proven"


def test_what_is_refuted_ends_with_1_and_says_why(idea: Path) -> None:
    idea.write_text(IDEA.replace("(self.factor)", "(self.factor * 0.999)"))
    told = kernel("plugins", "check", "./my_idea.py", code=1).output
    assert re.search(r"✗ neutral +refuted: \{'factor': 1.0\}, and training differs from that without it: losses", told)
    assert "✓ resume" in told
    assert re.search(r"on this machine: after_train_batch [\d.]+ us", told)


def test_a_card_is_kept_in_a_package_only(idea: Path, tmp_path: Path) -> None:
    message = (
        "plugins check: ./my_idea.py is a single file. Expected a package, which keeps its card. Leave out --write."
    )
    assert message in kernel("plugins", "check", "./my_idea.py", "--write", code=2).output
    told = kernel("plugins", "check", "./my_idea.py", "--write", "--full", code=2).output
    assert "plugins check: got --write with --full. Expected one: a card holds what the short form finds." in told


def test_a_folder_means_the_plugins_of_the_package_in_it(idea: Path, tmp_path: Path) -> None:
    (tmp_path / "mixup").mkdir()  # which is no package: the plugin of that name is meant
    folder = Path(__file__).parent.parent.parent / "plugins" / "callbacks" / "lr_monitor"
    assert plugins_meant("mixup") == ["mixup"]
    assert plugins_meant(str(folder)) == ["callbacks/lr_monitor"]
    told = kernel("plugins", "check", "./mixup", code=2).output
    assert (
        "plugins check: ./mixup holds no plugin to check. Expected the name of a plugin, a file ending in .py, or the"
        in told
    )
    kernel("plugins", "new", "brand-new", "--kind", "callback")
    told = kernel("plugins", "check", "kernel-plugin-brand-new", code=2).output
    assert "plugins check: brand_new of kernel-plugin-brand-new is not installed." in told
    assert "Install it: pip install -e kernel-plugin-brand-new" in told


def test_the_card_is_shown_with_the_plugin() -> None:
    told = kernel("plugins", "show", "gradient_clipping").output
    assert "what the conformance kit found" in told
    assert "✓ resume" in told
    assert (
        json.loads(kernel("plugins", "show", "gradient_clipping", "--json").stdout)["card"]["checks"]["fsdp"]
        == "proven"
    )


def test_a_run_uses_a_file_by_its_path_and_keeps_the_absolute_one(idea: Path, tmp_path: Path) -> None:
    told = kernel(
        "train", *SMALL, "--plugins", "./my_idea.py", "-o", "my_idea.factor=0.25", "--run-name", "one", "--json"
    )
    assert json.loads(told.stdout)["run_name"] == "one"
    assert f"{idea}:" in (tmp_path / "runs" / "one" / "config.yaml").read_text()
    plan = json.loads((tmp_path / "runs" / "one" / "plan.json").read_text())
    (mine,) = [one for one in plan["plugins"] if one["id"] == "my_idea"]
    assert (mine["distribution"], mine["version"], mine["options"]) == (None, None, {"factor": 0.25})
    assert len(mine["hash"]) == 64
    idea.write_text(IDEA + "\n# another\n")
    again = json.loads(kernel("plan", "--plugins", "./my_idea.py", "--json").stdout)
    (changed,) = [one for one in again["plugins"] if one["id"] == "my_idea"]
    assert changed["hash"] != mine["hash"]


def test_a_run_goes_on_with_a_file_only_where_it_is_named_again(idea: Path, tmp_path: Path) -> None:
    kernel("train", *SMALL, "--plugins", "./my_idea.py", "-o", "my_idea.factor=0.25", "--run-name", "one")
    again = ("train", "--resume", "one", "--max-duration", "3ba")
    told = kernel(*again, code=2).output
    assert f"runs/one/config.yaml: its configuration uses the file {idea} as a plugin, and a file is code." in told
    assert f"add --plugins {idea}." in told
    kernel(*again, "--plugins", "my_idea.py")
    (tmp_path / "other").mkdir()
    idea.rename(tmp_path / "other" / "my_idea.py")
    assert "my_idea.py: there is no such file" in kernel(*again, "--plugins", str(idea), code=2).output
    kernel("train", "--resume", "one", "--max-duration", "4ba", "--plugins", "./other/my_idea.py")
    config = (tmp_path / "runs" / "one" / "config.yaml").read_text()
    assert f"{tmp_path / 'other' / 'my_idea.py'}:" in config
    assert "factor: 0.25" in config


@pytest.mark.parametrize("named", [(), ("--plugins", "mixup"), ("--plugins", "./other.py")])
def test_the_checkpoint_of_a_stranger_runs_no_file(named: tuple[str, ...], idea: Path, tmp_path: Path) -> None:
    """Its configuration names one that is there, even under the name of a plugin that the command line asks for."""
    idea.write_text(f"import pathlib\n\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n{IDEA}")
    (tmp_path / "other.py").write_text(IDEA)
    kernel("train", *SMALL, "--plugins", f"mixup={idea}", "--run-name", "one")
    (checkpoint,) = (tmp_path / "runs" / "one" / "checkpoints").glob("ep*-ba2")
    checkpoint.rename(tmp_path / "gift")
    (tmp_path / "ran").unlink()
    told = kernel("train", "--resume", "gift", "--max-duration", "3ba", *named, code=2).output
    assert f"its configuration uses the file {idea} as a plugin, and a file is code." in told
    assert not (tmp_path / "ran").exists()


def test_the_command_that_goes_on_names_the_files() -> None:
    assert command_that_goes_on("runs/a", (), 1, ["/x/a b.py", "two=/y.py"]) == (
        "kernel train --resume runs/a --plugins '/x/a b.py,two=/y.py'"
    )


def test_a_file_is_shown() -> None:
    path = Path(__file__).parent.parent.parent / "core" / "tests" / "faulty" / "faulty.py"
    told = kernel("plugins", "show", f"{path}:IsNotNeutral").output
    assert "is_not_neutral  (algorithms, a file)" in told
    assert "factor" in told


def test_a_file_that_cannot_be_used_is_one_message(idea: Path) -> None:
    idea.write_text("x = 1\n")
    told = kernel("plan", "--plugins", "./my_idea.py", code=2).output
    assert told.startswith(
        f"Error: {idea}: it has no plugin class. Expected one class that is an Algorithm, a Callback"
    )
