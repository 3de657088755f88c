"""What holds for every package of the workspace, found by glob."""

import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from kernel_core.hooks import HOOK_API
from kernel_core.naming import normalize
from kernel_core.registry.base import Algorithm, Callback, LoggerDestination
from kernel_core.registry.discovery import KINDS, installed_plugins
from kernel_core.registry.hookmanager import HookManager
from kernel_core.registry.roles import ROLES

ROOT = Path(__file__).resolve().parent.parent
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/pyproject.toml"))
PACKAGES = [ROOT, ROOT / "core", ROOT / "cli", *PLUGINS]
BASES = {"algorithms": Algorithm, "callbacks": Callback, "loggers": LoggerDestination}
NEEDED_BY_KERNEL_TRAIN = {"numbers", "progress_bar", "file_logger", "torchrun", "checkpoint_saver"}


def project(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return document


def entries(folder: Path) -> list[tuple[str, str, str]]:
    groups = project(folder).get("entry-points", {})
    return [
        (group.removeprefix("kernel."), name, value)
        for group, items in groups.items()
        if group.startswith("kernel.")
        for name, value in items.items()
    ]


def hook_classes() -> list[Any]:
    return [
        pytest.param(kind, name, value, id=name)
        for folder in PLUGINS
        for kind, name, value in entries(folder)
        if kind in BASES
    ]


def load(value: str) -> Any:
    module, _, attribute = value.partition(":")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("folder", PACKAGES, ids=lambda folder: folder.name)
def test_a_package_has_what_every_package_has(folder: Path) -> None:
    about = project(folder)
    assert about["license"] == "Apache-2.0"
    assert about["requires-python"] == ">=3.11"
    assert 20 <= len(about["description"]) <= 130
    assert (folder / "README.md").stat().st_size > 100
    assert (folder / "tests").is_dir()
    for requirement in about["dependencies"]:
        assert not re.search(r"[<~!]|==", requirement), f"{requirement}: lower bounds only"


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_folder_distribution_module_and_entry_point_agree(folder: Path) -> None:
    name = folder.name
    assert project(folder)["name"] == f"kernel-plugin-{name.replace('_', '-')}"
    module = folder / "src" / f"kernel_plugin_{name}"
    assert (module / "py.typed").exists()
    assert list(folder.glob("tests/test_*.py"))
    found = entries(folder)
    assert found
    for kind, entry, value in found:
        assert kind == folder.parent.name
        assert kind in KINDS
        assert value.startswith(f"kernel_plugin_{name}:")
        assert entry == normalize(entry)
    if len(found) == 1:
        assert found[0][1] == name


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_plugins_depend_on_kernel_train_and_what_it_needs_on_the_core(folder: Path) -> None:
    wanted = (
        "kernel-core" if folder.name in NEEDED_BY_KERNEL_TRAIN or folder.parent.name == "recipes" else "kernel-train"
    )
    assert any(requirement.startswith(wanted) for requirement in project(folder)["dependencies"])


def test_every_package_is_installed_and_found() -> None:
    expected = {(kind, name) for folder in PACKAGES for kind, name, _ in entries(folder)}
    assert expected <= {(info.kind, info.name) for info in installed_plugins()}


@pytest.mark.parametrize(("kind", "name", "value"), hook_classes())
def test_a_plugin_class_is_of_its_kind_documented_and_fits_the_hooks(kind: str, name: str, value: str) -> None:
    cls = load(value)
    assert issubclass(cls, BASES[kind])
    assert cls.hook_api == HOOK_API
    documentation = inspect.getdoc(cls) or ""
    assert len(documentation) > 40
    if kind == "algorithms":
        assert "Source:" in documentation
    for parameter in list(inspect.signature(cls.__init__).parameters)[1:]:
        if cls.__init__ is not object.__init__:
            assert f"{parameter}:" in documentation, f"{name}.{parameter} is not documented"
    required = [p for p in list(inspect.signature(cls.__init__).parameters.values())[1:] if p.default is p.empty]
    words = {p.name: "metrics/eval/loss" for p in required if p.kind is p.POSITIONAL_OR_KEYWORD}
    HookManager().check_plugin(cls(**words))


def test_the_page_on_order_documents_the_roles_that_the_kernel_knows() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", (ROOT / "docs" / "order.md").read_text(), re.MULTILINE)
    assert dict(rows) == ROLES


@pytest.mark.parametrize("folder", [one for one in PLUGINS if one.parent.name in BASES], ids=lambda folder: folder.name)
def test_a_plugin_that_answers_hooks_has_the_conformance_kit_run_on_it(folder: Path) -> None:
    for _, name, _ in entries(folder):
        text = (folder / "tests" / f"test_{name}_conformance.py").read_text()
        assert f'@pytest.mark.conformance("{name}")\ndef test_it_conforms(conformance_check):' in text
        cards = json.loads((folder / "src" / f"kernel_plugin_{folder.name}" / "conformance.json").read_text())
        assert name in cards


def test_the_kernel_names_no_plugin_and_imports_no_optional_package() -> None:
    names = {name for folder in PLUGINS for _, name, _ in entries(folder)}
    table = ROOT / "core/src/kernel_core/train/composer_keywords.py"
    kit = ROOT / "core/src/kernel_core/testing"  # which names the engines it trains on
    for path in (path for path in (ROOT / "core/src").rglob("*.py") if not path.is_relative_to(kit)):
        text = path.read_text()
        assert not re.search(
            r"^\s*(import|from) (transformers|torchvision|wandb|sklearn|rich|yaml|click)\b", text, re.MULTILINE
        )
        if path != table:
            code = re.sub(r'"""(.|\n)*?"""|#.*', "", text)  # prose may give examples
            code = code.replace('"progress_bar": progress_bar', "")  # the argument of that name
            quoted = set(re.findall(r"[\"']([a-z_]+)[\"']", code))
            assert not quoted & names, f"{path.name} names {quoted & names}"


def test_importing_the_kernel_has_no_side_effect() -> None:
    code = """
import os, signal, sys, warnings
import torch

def world():
    return dict(os.environ), signal.getsignal(2), signal.getsignal(15), list(warnings.filters), torch.get_rng_state().tolist()

before = world()
from kernel_core import Algorithm, DataSpec, Evaluator, State, Trainer
assert world() == before
heavy = {"pydantic", "rich", "torchmetrics", "torch.distributed.checkpoint", "torch.distributed.fsdp", "transformers"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ci_runs_the_commands_of_the_readme() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci/run").read_text()
    assert "make train" in readme
    assert "make test" in readme
    assert [line for line in ci.splitlines() if line.startswith("make")] == ["make check", "make test"]


def test_the_release_workflow_publishes_what_the_workspace_builds() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    for part in ("make wheels", "id-token: write", "pypa/gh-action-pypi-publish", "packages-dir: dist"):
        assert part in workflow
    assert "password" not in workflow  # trusted publishing holds no token
