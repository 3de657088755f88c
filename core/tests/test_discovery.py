import random
import sys
from pathlib import Path

import pytest
from kernel_core.errors import PluginLoadError, PluginNotFoundError
from kernel_core.registry import discovery
from kernel_core.registry.discovery import PluginInfo, find, find_plugins, load_class, package_digest
from kernel_core.registry.plan import build_plan, resolve


def install(root: Path, distribution: str, entry_points: str, version: str = "1.0") -> Path:
    folder = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\nSummary: About {distribution}.\n\nVersion: not this\n"
    )
    (folder / "entry_points.txt").write_text(entry_points)
    return folder


def test_plugins_are_found_without_being_imported(tmp_path: Path) -> None:
    install(
        tmp_path, "kernel-plugin-a", "[kernel.algorithms]\nMix-Up = no.such.module:A\n\n[console_scripts]\nx = y:z\n"
    )
    install(tmp_path, "other", "[console_scripts]\nx = y:z\n")
    install(tmp_path, "kernel-plugin-b", "[kernel.unknown]\nb = b:B\n[kernel.loggers]\n# note = a:b\nb = b:B\n")
    assert find_plugins([str(tmp_path)]) == (
        PluginInfo("algorithms", "mix_up", "kernel-plugin-a", "1.0", "About kernel-plugin-a.", "no.such.module:A"),
        PluginInfo("loggers", "b", "kernel-plugin-b", "1.0", "About kernel-plugin-b.", "b:B"),
    )


def test_the_answer_does_not_depend_on_the_order_of_directories(tmp_path: Path) -> None:
    names = [f"kernel-plugin-{letter}" for letter in "abcdefgh"]
    for name in names:
        install(tmp_path / name, name, f"[kernel.algorithms]\n{name[-1]} = m:C\n[kernel.callbacks]\n{name[-1]} = m:D\n")
    paths = [str(tmp_path / name) for name in names]
    expected = find_plugins(paths)
    assert len(expected) == 16
    shuffle = random.Random(0)
    for _ in range(200):
        shuffle.shuffle(paths)
        assert find_plugins(paths) == expected


def test_of_a_distribution_on_the_path_twice_the_first_counts(tmp_path: Path) -> None:
    install(tmp_path / "one", "kernel-plugin-a", "[kernel.algorithms]\na = m:New\n", "2.0")
    install(tmp_path / "two", "kernel_plugin_a", "[kernel.algorithms]\na = m:Old\n", "1.0")
    (found,) = find_plugins([str(tmp_path / "one"), str(tmp_path / "two")])
    assert (found.version, found.value) == ("2.0", "m:New")


INSTALLED = (
    PluginInfo("algorithms", "alibi", "kernel-plugin-alibi", "1.0", "", "m:A"),
    PluginInfo("algorithms", "mixup", "kernel-plugin-mixup", "1.0", "", "m:A"),
    PluginInfo("algorithms", "mixup", "someone-elses-mixup", "1.0", "", "m:A"),
    PluginInfo("recipes", "numbers", "kernel-plugin-numbers", "1.0", "", "m:A"),
)


def test_names_compare_in_their_normal_form() -> None:
    assert find("ALiBi", installed=INSTALLED).name == "alibi"


def test_a_missing_plugin_is_named_with_close_matches_and_what_to_install() -> None:
    with pytest.raises(PluginNotFoundError) as caught:
        find("alibbi", installed=INSTALLED)
    assert str(caught.value) == (
        "alibbi: no algorithm or callback or logger of that name is installed. Did you mean 'alibi'? If it is published, "
        "install it: pip install kernel-plugin-alibbi. `kernel plugins list` shows what is installed."
    )


def test_one_name_from_two_distributions_names_both_and_can_be_chosen() -> None:
    with pytest.raises(PluginNotFoundError, match=r"kernel-plugin-mixup .* and someone-elses-mixup .* both provide it"):
        find("mixup", installed=INSTALLED)
    assert find("someone_elses_mixup:mixup", installed=INSTALLED).distribution == "someone-elses-mixup"


def test_a_kind_searches_only_its_own() -> None:
    with pytest.raises(PluginNotFoundError, match="no recipe of that name"):
        find("alibi", ("recipes",), INSTALLED)


def test_a_failing_import_names_plugin_distribution_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_plugin_module.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    info = PluginInfo("algorithms", "broken", "kernel-plugin-broken", "3.1", "", "broken_plugin_module:Broken")
    message = r"broken: importing broken_plugin_module:Broken of kernel-plugin-broken 3\.1 failed: ModuleNotFoundError"
    with pytest.raises(PluginLoadError, match=message) as caught:
        load_class(info)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    sys.modules.pop("broken_plugin_module", None)


def test_an_entry_point_of_another_kind_is_refused() -> None:
    info = PluginInfo("algorithms", "odd", "kernel-plugin-odd", "1.0", "", "kernel_core.registry.base:Callback")
    with pytest.raises(PluginLoadError, match=r"must be a subclass of kernel_core\.Algorithm"):
        load_class(info)


def test_the_digest_follows_the_package_s_files() -> None:
    digest = package_digest("kernel-core")
    assert digest is not None
    assert len(digest) == 64
    assert digest == package_digest("kernel_core")
    assert digest != package_digest("pluggy")
    assert package_digest("no-such-distribution") is None


PLUGIN_MODULE = """
from kernel_core import Algorithm, Callback, hookimpl

def make(name, kind=Algorithm, **attributes):
    def batch_end(self): pass
    def after_loss(self): pass
    return type(name, (kind,), {"batch_end": hookimpl(batch_end), "after_loss": hookimpl(after_loss), **attributes})

Red = make("Red", roles={"warm"})
Blue = make("Blue", before={"role:warm"})
Green = make("Green")
Grey = make("Grey", Callback)
White = make("White", Callback, after={"grey"})
"""


def test_the_order_of_installation_does_not_change_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 permutations of directories, of distributions and of the lines in their entry points."""
    (tmp_path / "permuted_plugins.py").write_text(PLUGIN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    groups = {
        "one": ["[kernel.algorithms]", "red = permuted_plugins:Red", "green = permuted_plugins:Green"],
        "two": ["[kernel.algorithms]", "blue = permuted_plugins:Blue"],
        "three": ["[kernel.callbacks]", "white = permuted_plugins:White", "grey = permuted_plugins:Grey"],
    }
    shuffle, plans, digests = random.Random(1), set(), set()
    for number in range(200):
        folders = []
        for name in shuffle.sample(sorted(groups), 3):
            header, *lines = groups[name]
            shuffle.shuffle(lines)
            install(tmp_path / str(number) / name, f"dist-{name}", "\n".join([header, *lines]))
            folders.append(str(tmp_path / str(number) / name))
        found = find_plugins(folders)
        monkeypatch.setattr(discovery, "installed_plugins", lambda found=found: found)
        plan = build_plan(resolve(["green", "white", "red", "grey", "blue"]))
        plans.add(plan.explain())
        digests.add(plan.digest)
    assert len(plans) == len(digests) == 1
    assert [call.plugin for call in plan.calls("batch_end")] == ["green", "blue", "red", "grey", "white"]
    assert [call.plugin for call in plan.calls("after_loss")] == ["red", "blue", "green", "white", "grey"]
    sys.modules.pop("permuted_plugins", None)
