"""``kernel plugins new``: packages of every kind that pass at once, and what is refused."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kernel_cli.main import cli
from kernel_cli.scaffold import ABOUT, read_kind
from kernel_core.registry.discovery import HOOK_KINDS, KINDS

ROOT = Path(__file__).resolve().parent.parent.parent


def kernel(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result


def run(*command: str, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def test_every_kind_has_a_template_and_is_known_in_the_singular_and_the_plural() -> None:
    assert set(ABOUT) == set(KINDS)
    for kind in KINDS:
        assert read_kind(kind) == read_kind(kind.removesuffix("s")) == kind


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One package of each kind, installed beside this environment."""
    folder = tmp_path_factory.mktemp("new")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for kind in KINDS:
            kernel("plugins", "new", f"Try-{kind}", "--kind", kind)
    site = folder / "site"
    made = [str(one) for one in sorted(folder.glob("kernel-plugin-*"))]
    assert len(made) == len(KINDS)
    pip = ("-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site))
    run(sys.executable, *pip, *made)
    return folder


def test_they_pass_the_linter_the_formatter_and_the_type_checker(packages: Path) -> None:
    for package in packages.glob("kernel-plugin-*"):
        for tool in (("ruff", "check"), ("ruff", "format", "--check")):
            run(sys.executable, "-m", *tool, ".", cwd=package)
    sources = [str(one) for one in sorted(packages.glob("kernel-plugin-*/src/*"))]
    run(sys.executable, "-m", "mypy", "--strict", *sources, cwd=packages)


def test_their_own_tests_pass_and_they_are_found(packages: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(packages / "site"), "OMP_NUM_THREADS": "1"}
    plain = [str(one) for one in packages.glob("kernel-plugin-*/tests") if "storage" not in str(one)]
    told = run(
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *plain,
        "-k", "not card", cwd=packages, env=environment,
    )  # fmt: skip
    assert "passed" in told
    listed = json.loads(run(sys.executable, "-m", "kernel_cli.main", "plugins", "list", "--json", env=environment))
    for kind in KINDS:
        (one,) = [info for info in listed if info["name"] == f"try_{kind}"]
        assert (one["kind"], one["distribution"], one["version"]) == (kind, f"kernel-plugin-try-{kind}", "0.1.0")


@pytest.mark.slow
def test_a_store_begins_with_one_that_keeps_the_contract(packages: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(packages / "site"), "OMP_NUM_THREADS": "1"}
    tests = str(packages / "kernel-plugin-try-storage" / "tests")
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=packages, env=environment)


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_looks_as_those_of_this_repository_do(packages: Path, kind: str) -> None:
    new = packages / f"kernel-plugin-try-{kind}"
    project = tomllib.loads((new / "pyproject.toml").read_text())
    for folder in sorted((ROOT / "plugins" / kind).glob("*")) if kind != "data" else []:
        theirs = tomllib.loads((folder / "pyproject.toml").read_text())
        assert set(theirs["project"]) - {"optional-dependencies"} <= set(project["project"]), folder.name
        assert set(project["project"]) <= set(theirs["project"]), folder.name
        assert theirs["build-system"] == project["build-system"]
        assert list(theirs["project"]["entry-points"]) == list(project["project"]["entry-points"])
        package = f"kernel_plugin_{folder.name}"
        assert theirs["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == [f"src/{package}"]
        assert (folder / "src" / package / "py.typed").exists()
        first, *_ = (folder / "README.md").read_text().splitlines()
        assert first == f"# {folder.name}"
        if kind in HOOK_KINDS:
            mine = (new / "tests" / f"test_try_{kind}_conformance.py").read_text()
            for name in theirs["project"]["entry-points"][f"kernel.{kind}"]:
                kit = (folder / "tests" / f"test_{name}_conformance.py").read_text()
                assert kit == mine.replace(f"try_{kind}", name)


def test_a_package_can_be_published_without_a_token(packages: Path) -> None:
    for workflow in packages.glob("kernel-plugin-*/.github/workflows/release.yml"):
        text = workflow.read_text()
        assert "id-token: write" in text
        assert "pypa/gh-action-pypi-publish" in text
        assert "password" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("My Idea!", "--kind", "callback"), "plugins new: got the name 'My Idea!'. Expected letters, digits and '_'"),
        (
            ("idea", "--kind", "algorythm"),
            "--kind: got 'algorythm'. Did you mean 'algorithm'? Expected one of algorithm, callback,",
        ),
        (("idea", "--kind", "data", "--out", "."), "plugins new: . is there already. Expected a new folder."),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in kernel("plugins", "new", *arguments, code=2).output
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = kernel("plugins", "new", "mixup", "--kind", "algorithm").output
    assert "plugins new: a plugin 'mixup' of that kind is installed; both at once have to be told apart." in told
    assert "pip install -e kernel-plugin-mixup" in told
    assert "kernel plugins check mixup --write" in told
