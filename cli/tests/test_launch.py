"""`kernel launch` and `kernel train -n`, as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kernel_cli.launch import is_rank, was_started_before
from kernel_cli.main import cli

OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "BASE_RANK", "MASTER_ADDR", "MASTER_PORT")


def kernel(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-c", "from kernel_cli.main import main; main()", *arguments]
    kept = {key: value for key, value in os.environ.items() if key not in OURS}
    return subprocess.run(call, capture_output=True, text=True, cwd=folder, timeout=170, env={**kept, **environment})


@pytest.mark.ranks
def test_options_have_two_spellings_and_environment_variables(tmp_path: Path) -> None:
    where = ("--node_rank", "0", "--master_addr", "127.0.0.1", "--world_size", "2", "--max_restarts", "0")
    done = kernel(tmp_path, "launch", *where, "-c", "sh", "-c", "echo $WORLD_SIZE $MASTER_ADDR", LOCAL_WORLD_SIZE="2")
    assert (done.stdout, done.returncode) == ("2 127.0.0.1\n", 0), done.stderr


@pytest.mark.ranks
@pytest.mark.slow
def test_train_on_two_ranks_prints_one_document_and_may_start_again_under_its_name(tmp_path: Path) -> None:
    call = ("train", "-n", "2", "--max-duration", "2ba", "--run-name", "twice", "--json", "--log_dir", "logs")
    done = kernel(tmp_path, *call)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["run_name"], Path(document["run_dir"]).name) == ("twice", "twice")
    done = kernel(tmp_path, *call)
    assert done.returncode != 0
    assert "holds a run already" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--world-size", "3"), "got --world-size 3"),
        (("--nnodes", "many"), "got --nnodes many. Expected a number, or the least and the most"),
        (("--launcher", "torchrum"), "torchrum: no launcher of that name is installed. Did you mean 'torchrun'?"),
        (("--launcher-option", "shutdown_timeout"), "got 'shutdown_timeout'. Expected option=value"),
        (
            ("--launcher-option", "shutdown_timeout=1"),
            "torchrun.shutdown_timeout: unknown option. Did you mean",
        ),
        (("--launcher-option", "shutdown_timeout_s=-1"), "torchrun.shutdown_timeout_s: got -1"),
    ],
)
def test_a_launch_that_is_refused_is_one_message_and_one_document(options: tuple[str, ...], message: str) -> None:
    environment = dict.fromkeys(OURS)
    result = CliRunner().invoke(cli, ["train", "-n", "2", *options, "--json"], env=environment)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("Error: ") == 1


def test_module_and_program_exclude_each_other() -> None:
    result = CliRunner().invoke(cli, ["launch", "-m", "-c", "x"])
    assert (result.exit_code, "Give one of them" in result.output) == (2, True)


def test_a_rank_does_not_launch_and_knows_whether_it_was_started_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*OURS, "KERNEL_START_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("KERNEL_START_COUNT", "1")
    assert not is_rank()  # a cluster sets the size for its launchers
    assert not was_started_before()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert is_rank()
    assert was_started_before()
    monkeypatch.setenv("KERNEL_START_COUNT", "0")
    assert not was_started_before()
