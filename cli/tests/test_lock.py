"""The plugin lock, as a user types it: written, held, compared, and turned into requirements."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kernel_cli.main import cli
from kernel_core.checkpoint.locate import checkpoints_in
from kernel_core.storage import open_storage
from packaging.requirements import Requirement

SMALL = ("--set", "data.num_train_strips=64", "--set", "data.num_test_strips=8", "--max-duration", "2ba")
PLUGINS = ("--plugins", "ema,gradient_clipping", "-o", "ema.half_life=4ba")


def kernel(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock, and two runs: one by it, one with other plugins."""
    path = tmp_path_factory.mktemp("lock")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        kernel("plugins", "lock", *PLUGINS)
        kernel("train", *SMALL, *PLUGINS, "--locked", "--run-name", "one")
        kernel("train", *SMALL, "--plugins", "ema", "-o", "ema.half_life=5ba", "--run-name", "two")
    return path


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def test_a_lock_holds_versions_hashes_options_and_order_and_is_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    text = (folder / "kernel.lock").read_text()
    lock = json.loads(text)
    by_name = {one["name"]: one for one in lock["plugins"]}
    assert by_name["ema"]["options"]["half_life"] == "4ba"
    assert {len(one["hash"]) for one in by_name.values()} == {64}
    assert {one["version"] for one in by_name.values()} == {"0.1.0"}
    assert [call["plugin"] for call in lock["events"]["after_train_batch"]] == ["gradient_clipping"]
    assert set(lock["code"]) == {"kernel-core", "torch"}
    kernel("plugins", "lock", *PLUGINS, "--output", str(tmp_path / "again"))
    assert (tmp_path / "again").read_text() == text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--plugins", "ema,gradient_clipping", "-o", "ema.half_life=5ba"), "ema.half_life was '4ba', and is '5ba'"),
        (
            ("--plugins", "ema", "-o", "ema.half_life=4ba"),
            "gradient_clipping (algorithms) is missing",
        ),
        ((*PLUGINS[:1], "ema,gradient_clipping,lr_monitor", *PLUGINS[2:]), "lr_monitor (callbacks) is new"),
        ((*PLUGINS, "--no-checkpoints"), "checkpoint_saver (callbacks) is missing"),
    ],
)
def test_a_locked_run_is_refused_for_any_difference(arguments: tuple[str, ...], told: str, folder: Path) -> None:
    output = kernel("train", *SMALL, *arguments, "--locked", "--run-name", "never", code=2).output
    assert told in output
    assert "kernel.lock: the plugins of this run are not those of the lock." in output
    assert "write the lock anew with the same arguments: kernel plugins lock." in output
    assert not (folder / "runs" / "never").exists()


def changed(folder: Path, tmp_path: Path, change: Any) -> str:
    lock = json.loads((folder / "kernel.lock").read_text())
    change(lock, next(one for one in lock["plugins"] if one["name"] == "ema"))
    path = tmp_path / "other.lock"
    path.write_text(json.dumps(lock))
    return str(path)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda lock, ema: ema.update(version="0.0.9"), "the version of ema was 0.0.9, and is 0.1.0"),
        (lambda lock, ema: ema.update(hash="f" * 64), "the hash of ema was ffffffffffff, and is"),
        (
            lambda lock, ema: ema.update(distribution="somebodys-ema"),
            "ema was ema of somebodys-ema, and is ema of kernel-plugin-ema",
        ),
        (lambda lock, ema: lock["code"].update(torch="1.0"), "torch was 1.0, and is "),
        (lambda lock, ema: lock.update(hook_api=7), "the level of the hook interface was 7, and is "),
        (
            lambda lock, ema: lock["events"]["close"].reverse(),
            "the order at close was progress_bar, file_logger, and is",
        ),
    ],
)
def test_another_version_file_owner_or_order_is_told(change: Any, told: str, folder: Path, tmp_path: Path) -> None:
    assert told in kernel("train", *SMALL, *PLUGINS, "--lock", changed(folder, tmp_path, change), code=2).output


def test_names_are_compared_in_their_normal_form(folder: Path, tmp_path: Path) -> None:
    path = changed(folder, tmp_path, lambda lock, ema: ema.update(distribution="Kernel_Plugin.EMA"))
    assert kernel("plan", "diff", path, "kernel.lock").output == "the plans are the same\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "none.lock: there is no such file. Expected a lock. Write one: kernel plugins lock."),
        ("{", "none.lock: is no lock: "),
        ("[]", "none.lock: is no lock of format 1."),
        ('{"format": 2}', "none.lock: is no lock of format 1."),
        ('{"plugins": 5, "events": {}}', "none.lock: its plan is not one"),
    ],
)
def test_what_is_no_lock_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "none.lock"
    if text is not None:
        path.write_text(text)
    assert message in kernel("train", *SMALL, *PLUGINS, "--lock", str(path), code=2).output


def test_the_lock_beside_a_configuration_counts_where_there_is_none_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "with" / "kernel.lock").write_text("[]")
    (tmp_path / "with" / "config.yaml").write_text("recipe: numbers\n")
    monkeypatch.chdir(tmp_path)
    told = kernel("train", "with/config.yaml", *SMALL, "--locked", code=2).output
    assert "with/kernel.lock: is no lock of format 1." in told


def test_two_runs_checkpoints_and_locks_are_compared_in_words(folder: Path) -> None:
    assert kernel("plan", "diff", "kernel.lock", "one").output == "the plans are the same\n"
    saved, *_ = checkpoints_in(open_storage(folder / "runs" / "one" / "checkpoints"))
    assert kernel("plan", "diff", "kernel.lock", saved.url).output == "the plans are the same\n"
    result = json.loads(kernel("plan", "diff", "one", "runs/two", "--json", code=1).stdout)
    assert result["differences"] == [
        "ema.half_life was '4ba', and is '5ba'",
        "gradient_clipping (algorithms) is missing",
    ]
    assert (
        "plan diff: nowhere is no run, checkpoint or lock." in kernel("plan", "diff", "nowhere", "one", code=2).output
    )


def test_a_checkpoint_tells_what_to_install(folder: Path) -> None:
    lines = kernel("plugins", "from-checkpoint", "one").stdout.splitlines()
    assert lines == sorted(lines)
    wanted = {one.name: str(one.specifier) for one in map(Requirement, lines)}
    assert wanted["kernel-plugin-ema"] == wanted["kernel-core"] == wanted["kernel-cli"] == "==0.1.0"
    assert "+" not in wanted["torch"]
    assert set(wanted) == {
        "kernel-core", "kernel-cli", "torch", "kernel-plugin-ema", "kernel-plugin-gradient-clipping",
        "kernel-plugin-file-logger", "kernel-plugin-progress-bar", "kernel-plugin-checkpoint-saver",
    }  # fmt: skip


def test_what_cannot_be_told_of_a_run_is_named_on_standard_error() -> None:
    told = kernel("plugins", "from-checkpoint", "one").stderr
    assert "recipe numbers: a checkpoint does not tell of which distribution. Install that too." in told


def test_two_versions_of_one_distribution_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_cli.lock

    def stranger(found: Any) -> Any:
        rows = [
            {"id": f"x{v}", "name": "x", "kind": "algorithms", "options": {}, "distribution": "x", "version": v}
            for v in "12"
        ]
        return {"plan": {"plugins": rows, "events": {}}}

    monkeypatch.setattr(kernel_cli.lock, "read_lock", stranger)
    assert (
        "asks for x==1 and for x==2. Expected one version of each"
        in kernel("plugins", "from-checkpoint", "one", code=2).output
    )


def test_a_subcommand_after_the_options_of_plan_is_wrong_use() -> None:
    assert (
        "diff is a subcommand, and stands first: kernel plan diff."
        in kernel("plan", "--plugins", "ema", "diff", code=2).output
    )


def test_what_a_file_of_a_stranger_tells_to_install_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    import kernel_cli.lock

    def stranger(found: Any) -> Any:
        plugin = {"id": "x", "name": "x", "kind": "algorithms", "options": {}, "version": "1"}
        return {"plan": {"plugins": [{**plugin, "distribution": "x @ http://evil/x.whl"}], "events": {}}}

    monkeypatch.setattr(kernel_cli.lock, "read_lock", stranger)
    told = kernel("plugins", "from-checkpoint", "one", code=2).output
    assert "names the distribution 'x @ http://evil/x.whl' of version '1'." in told
    assert "Do not trust the file." in told


def test_a_locked_run_that_goes_on_refuses_a_checkpoint_of_other_plugins(folder: Path) -> None:
    saved, *_ = checkpoints_in(open_storage(folder / "runs" / "two" / "checkpoints"))
    arguments = (*SMALL, *PLUGINS, "--locked", "--set", f"checkpoint.load_path={saved.url}", "--run-name", "mixed")
    assert "locked=True refuses any difference" in kernel("train", *arguments, code=2).output
