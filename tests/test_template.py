"""What `kernel plugins new` writes, beside the packages of this repository; and the commands of the page about it, run."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest
from kernel_cli.scaffold import render
from kernel_core.registry.discovery import HOOK_KINDS, load_class
from kernel_core.registry.discovery import find as find_plugin
from kernel_core.registry.options import describe_options

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
ANSWER_HOOKS = [folder for folder in PLUGINS if folder.parent.name in HOOK_KINDS]
WORKSPACE_WIDE = {".github", ".gitignore"}  # which packages of this repository share
SETTINGS = {"pytest", "ruff", "mypy"}  # likewise


def of_template(folder: Path) -> dict[str, str]:
    """What the template makes of a package of that name and kind."""
    return render(folder.name, folder.parent.name, f"kernel-plugin-{folder.name.replace('_', '-')}")


def project_files(folder: Path) -> set[str]:
    """Every file of a package but what tools leave behind, which have a name that begins with a dot or are of Python."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    left = ("__pycache__", "dist")
    return {
        path.as_posix()
        for path in found
        if not any(part[0] == "." or part in left or part.endswith(".egg-info") for part in path.parts)
    }


def names(folder: Path) -> list[str]:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return list(project["entry-points"][f"kernel.{folder.parent.name}"])


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_package_has_the_files_that_the_template_makes(folder: Path) -> None:
    made, there = of_template(folder), project_files(folder)
    top = {path.partition("/")[0] for path in made} - WORKSPACE_WIDE
    assert {path.partition("/")[0] for path in there} == top
    shared = {path for path in made if path.startswith(f"src/kernel_plugin_{folder.name}/")}
    if names(folder) == [folder.name]:
        shared |= {path for path in made if path.endswith("_conformance.py")}
    assert shared <= there
    assert any(path.startswith("tests/test_") for path in there)


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_its_pyproject_says_what_the_template_s_does(folder: Path) -> None:
    made: dict[str, Any] = tomllib.loads(of_template(folder)["pyproject.toml"])
    theirs: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())
    assert set(theirs) == set(made) - {"dependency-groups"}
    assert set(theirs["tool"]) == set(made["tool"]) - SETTINGS
    assert theirs["tool"]["hatch"] == made["tool"]["hatch"]
    assert theirs["build-system"] == made["build-system"]
    assert set(theirs["project"]) - {"optional-dependencies"} == set(made["project"])
    for key in ("name", "readme", "license", "requires-python"):
        assert theirs["project"][key] == made["project"][key], key
    assert list(theirs["project"]["entry-points"]) == list(made["project"]["entry-points"])
    for value in theirs["project"]["entry-points"][f"kernel.{folder.parent.name}"].values():
        assert re.fullmatch(rf"kernel_plugin_{folder.name}:\w+", value)


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_its_readme_begins_as_the_template_s_and_has_a_table_of_options(folder: Path) -> None:
    made, theirs = of_template(folder)["README.md"], (folder / "README.md").read_text()
    for text in (made, theirs):
        title, blank, summary, *_ = text.splitlines()
        assert (title, blank) == (f"# {folder.name}", "")
        assert summary[:1].isupper() or summary[:1] == "`"
    kind = folder.parent.name
    options = [
        option["name"]
        for name in names(folder)
        if kind in HOOK_KINDS
        for option in describe_options(load_class(find_plugin(name, (kind,))))
    ]
    if options:
        assert re.search(r"^\| option \|(.*\|)? default \|", theirs, re.MULTILINE)
        assert not [name for name in options if f"`{name}`" not in theirs]


def test_every_plugin_that_answers_hooks_has_the_template_s_conformance_test() -> None:
    lacking = []
    for folder in ANSWER_HOOKS:
        for name in names(folder):
            expected = render(name, folder.parent.name, "any")[f"tests/test_{name}_conformance.py"]
            test = folder / "tests" / f"test_{name}_conformance.py"
            if not test.exists() or test.read_text() != expected:
                lacking.append(f"{folder.relative_to(ROOT)}: {name}")
    assert lacking == []


def test_the_workflow_publishes_as_this_repository_s_does() -> None:
    made = render("idea", "algorithms", "kernel-plugin-idea")[".github/workflows/release.yml"]
    theirs = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    for line in ("id-token: write", "environment: release", "needs: build", "packages-dir: dist/"):
        assert line in made
        assert line in theirs
    used = [set(re.findall(r"uses: (\S+)", text)) for text in (made, theirs)]
    assert used[0] == used[1]
    assert made.index("run: pytest") < made.index("pypa/gh-action-pypi-publish")


# --- the page, as it is read ---------------------------------------------------------------------------------------


PAGE = (ROOT / "docs" / "write-a-plugin.md").read_text()


def commands(language: str) -> list[str]:
    return [
        line
        for block in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
        for line in block.strip().splitlines()
    ]


def test_no_command_of_the_page_is_left_untested() -> None:
    # those of `sh` are run by test_author_docs.py, those of `bash` below; nothing is shown by indenting
    fenced = re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)
    assert not re.findall(r"^ {4}\S.*$", fenced, re.MULTILINE)
    assert set(re.findall(r"^```(\w+)", PAGE, re.MULTILINE)) == {"python", "sh", "bash"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own that sees all that is installed here, with the programs that the page names."""
    folder = tmp_path_factory.mktemp("author") / "venv"
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "here.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in here))
    for program, module in (("kernel", "kernel_cli.main"), ("pytest", "pytest"), ("twine", "twine")):
        script = folder / "bin" / program
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(str(folder / "bin" / "python"))} -m {module} "$@"\n')
        script.chmod(0o755)
    return folder / "bin"


@pytest.mark.slow
def test_the_commands_about_the_package_run_as_they_are_written(programs: Path, tmp_path: Path) -> None:
    lines = ["kernel plugins new my-idea --kind algorithm", *commands("bash")]
    assert lines[0] in commands("sh")
    assert [line.split()[0] for line in lines[1:]] == ["pip", "pytest", "kernel", "kernel", "python", "twine"]
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}  # what it needs is here
    path = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    told = {}
    for line in lines:
        if line.startswith("python -m build"):
            line += " --no-isolation"  # which would ask the index for what is here
        done = subprocess.run(
            line,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, **path, **offline},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        told[line.partition(" kernel-plugin")[0]] = done.stdout
    assert "✓ resume" in told["kernel plugins show my_idea"]
    assert [one.suffix for one in (tmp_path / "kernel-plugin-my-idea" / "dist").iterdir()] == [".whl"]
