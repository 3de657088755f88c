"""``kernel plugins new``: packages of every kind that pass at once, and what is refused."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from kernel_cli import scaffold
from kernel_cli.main import cli
from kernel_cli.scaffold import ABOUT, LONGEST, next_commands, read_kind, render
from kernel_core.registry.discovery import HOOK_KINDS, KINDS


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
        cwd=packages, env=environment,
    )  # fmt: skip
    assert " passed in " in told
    assert "failed" not in told
    assert "warning" not in told
    listed = json.loads(run(sys.executable, "-m", "kernel_cli.main", "plugins", "list", "--json", env=environment))
    for kind in KINDS:
        (one,) = [info for info in listed if info["name"] == f"try_{kind}"]
        assert (one["kind"], one["distribution"], one["version"]) == (kind, f"kernel-plugin-try-{kind}", "0.1.0")


@pytest.mark.slow
def test_a_store_begins_with_one_that_keeps_the_contract(packages: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(packages / "site"), "OMP_NUM_THREADS": "1"}
    tests = str(packages / "kernel-plugin-try-storage" / "tests")
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests, cwd=packages, env=environment)


@pytest.mark.parametrize("name", ["x", "my_idea", "w" * LONGEST, "_".join("abcdefghijklmno")])
def test_a_name_of_any_length_leaves_the_package_formatted(name: str, tmp_path: Path) -> None:
    for kind in KINDS:
        for path, text in render(name, kind, f"kernel-plugin-{name}").items():
            (tmp_path / kind / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / kind / path).write_text(text)
    for tool in (("ruff", "check"), ("ruff", "format", "--check")):
        run(sys.executable, "-m", *tool, *KINDS, cwd=tmp_path)


@pytest.mark.slow
def test_each_builds_a_wheel_that_the_index_would_take(packages: Path) -> None:
    dist = packages / "dist"
    for package in packages.glob("kernel-plugin-*"):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(package))
    built = sorted(map(str, dist.iterdir()))
    assert len(built) == 2 * len(KINDS)
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    for kind in HOOK_KINDS:
        (wheel,) = dist.glob(f"kernel_plugin_try_{kind}-*.whl")
        inside = run(sys.executable, "-m", "zipfile", "-l", str(wheel))
        for file in ("__init__.py", "py.typed", "conformance.json"):
            assert f"kernel_plugin_try_{kind}/{file}" in inside


def test_a_package_can_be_published_without_a_token(packages: Path) -> None:
    for workflow in packages.glob("kernel-plugin-*/.github/workflows/release.yml"):
        text = workflow.read_text()
        assert "id-token: write" in text
        assert "pypa/gh-action-pypi-publish" in text
        assert "password" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("My Idea!", "--kind", "callback"),
            "plugins new: got the name 'My Idea!'. Expected letters, digits and '_', beginning with a letter, such as my_idea.",
        ),
        (
            ("w" * 31, "--kind", "callback"),
            f"plugins new: got the name '{'w' * 31}' of 31 characters. Expected at most 30. Choose a shorter one.",
        ),
        (
            ("idea", "--kind", "algorythm"),
            "--kind: got 'algorythm'. Did you mean 'algorithm'? Expected one of algorithm, callback,",
        ),
        (("idea", "--kind", "data", "--out", "."), "plugins new: . is there already. Expected a new folder."),
        (
            ("idea", "--kind", "data", "--distribution", 'a"b'),
            """--distribution: got 'a"b'. Expected letters, digits, '-', '_' and '.', such as kernel-plugin-my-idea.""",
        ),
        (
            ("idea", "--kind", "data", "--author", "A <a"),
            "--author: got 'A <a'. Expected 'Name' or 'Name <name@example.org>'.",
        ),
        (("idea", "--kind", "data", "--author", "A\nB"), "--author: got 'A\\nB'. Expected 'Name' or"),
        (("idea", "--kind", "data", "--author", ""), "--author: got ''. Expected 'Name' or"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in kernel("plugins", "new", *arguments, code=2).output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind", "word"),
    [
        ("class", "data", "class"),  # of the language
        ("torch", "data", "torch"),  # which the module imports
        ("two-clouds", "data", "two_clouds"),  # which it defines
        ("model", "models", "model"),  # a variable of its test
        ("algorithm", "algorithm", "Algorithm"),  # its base
        ("any", "logger", "Any"),
        ("test-it", "model", "test_it"),  # which pytest would run
        ("testing", "callback", "Testing"),
    ],
)
def test_a_name_that_means_something_else_there_is_refused(
    name: str, kind: str, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = kernel("plugins", "new", name, "--kind", kind, code=2).output
    assert (
        f"plugins new: with the name {name.replace('-', '_')!r} the plugin would be {word} in Python, which means something "
        "else there: to the language, to the package or to pytest. Choose another name." in told
    )
    assert list(tmp_path.iterdir()) == []
    kernel("plugins", "new", name, "--kind", "recipe")  # whose object has a name of its own


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {"README.md": "# idea\n", "README.md/no": "a file is no folder\n"}
    monkeypatch.setattr(scaffold, "render", lambda name, *rest: contents if name == "idea" else render(name, *rest))
    told = kernel("plugins", "new", "idea", "--kind", "data", code=2).output
    assert "plugins new: kernel-plugin-idea cannot be written: " in told
    assert "Expected a folder to make. Give --out FOLDER." in told
    assert list(tmp_path.iterdir()) == []


def test_an_author_and_a_distribution_are_written_down(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    name = ("--distribution", "Acme.Idea", "--author", 'Zoë "Q" O\\N <z@example.org>')
    told = kernel("plugins", "new", "idea", "--kind", "data", "--out", str(folder), *name, "--json")
    assert json.loads(told.stdout)["distribution"] == "Acme.Idea"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == "Acme.Idea"
    assert project["authors"] == [{"name": 'Zoë "Q" O\\N', "email": "z@example.org"}]
    assert [one.name for one in folder.parent.iterdir()] == ["er"]
    assert folder.stat().st_mode & 0o055 == 0o055 & ~os.umask(os.umask(0o022))


@pytest.mark.parametrize("kind", KINDS)
def test_it_ends_with_the_three_commands_that_come_next(kind: str, tmp_path: Path) -> None:
    told = kernel("plugins", "new", "idea", "--kind", kind, "--out", str(tmp_path / "my idea")).output
    commands = [line.strip() for line in told.splitlines() if line.startswith("    ")]
    assert commands == next_commands(tmp_path / "my idea", "idea", kind)
    assert commands[:2] == [f"pip install -e '{tmp_path}/my idea'", f"pytest '{tmp_path}/my idea'"]
    assert commands[2].startswith("kernel plugins check idea" if kind in HOOK_KINDS else "kernel ")


def test_a_name_that_is_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = kernel("plugins", "new", "mixup", "--kind", "algorithm").output
    assert "plugins new: a plugin 'mixup' of that kind is installed; both at once have to be told apart." in told
    assert "pip install -e kernel-plugin-mixup" in told
    assert "kernel plugins check mixup --write" in told
