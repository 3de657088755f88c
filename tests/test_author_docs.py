"""What the pages for plugin authors say is so: each command and each plugin in them is run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernel_cli.main import cli
from kernel_core.testing.conformance.checks import CHECKS
from kernel_core.testing.conformance.kit import Kit
from kernel_core.testing.conformance.subject import Subject

DOCS = Path(__file__).resolve().parent.parent / "docs"
SMALL = ["--set", "data.num_train_strips=64", "--set", "data.num_test_strips=8", "--max-duration", "2ba"]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


RECIPES = blocks("plugin-recipes.md", "python")
NAMES = [re.findall(r"^class (\w+)\(", text, re.MULTILINE)[0] for text in RECIPES]


def test_there_are_five_recipes_none_longer_than_a_screen() -> None:
    assert len(RECIPES) == 5
    assert all(len(text.strip().splitlines()) <= 30 for text in RECIPES)


@pytest.fixture(scope="module", params=RECIPES, ids=NAMES)
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    path = tmp_path_factory.mktemp("recipe") / "my_plugin.py"
    path.write_text(request.param)
    made = Kit(Subject.of(str(path)))
    yield made
    made.close()


def test_nothing_in_a_recipe_is_refuted(kit: Kit) -> None:
    results = [kit.perform(check) for check in CHECKS.values()]
    assert not [str(one) for one in results if one.verdict == "refuted"]
    assert "resume" in [one.check for one in results if one.verdict == "proven"]


def test_the_commands_of_the_tutorial_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (idea,) = blocks("write-a-plugin.md", "python")
    (tmp_path / "my_idea.py").write_text(idea)
    lines = [line for block in blocks("write-a-plugin.md", "sh") for line in block.splitlines()]
    assert len(lines) == 6
    for line in lines:
        program, *arguments = shlex.split(line)
        assert program == "kernel"
        small = SMALL if arguments[0] == "train" else []
        result = CliRunner().invoke(cli, [*arguments, *small])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    assert (tmp_path / "kernel-plugin-my-idea" / "pyproject.toml").exists()
    made = (tmp_path / "kernel-plugin-my-idea" / "src" / "kernel_plugin_my_idea" / "__init__.py").read_text()
    assert "class MyIdea(Algorithm):" in made


def test_the_pages_link_to_what_is_there() -> None:
    for page in ("write-a-plugin.md", "plugin-recipes.md", "from-composer.md", "hook-api.md", "conformance.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", (DOCS / page).read_text()):
            assert (DOCS / target).exists(), (page, target)
