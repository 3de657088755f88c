"""The launcher, by its command, on scripts that do not import torch."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kernel_core.errors import LaunchError
from kernel_core.launcher import Job
from kernel_plugin_torchrun import TorchrunLauncher

COMMAND = [sys.executable, "-c", "from kernel_cli.main import main; main()", "launch"]
# whoever runs the tests in the background has SIGINT ignored, which children inherit
RESTORE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMMAND_BY_HAND = [sys.executable, "-c", RESTORE + "from kernel_cli.main import main; main()", "launch"]

pytestmark = pytest.mark.ranks


# `meet`: the ranks of one start wait for each other, since the first to fail has the others killed, who may not have begun
PRELUDE = """\
import json, os, pathlib, signal, sys, time
rank = int(os.environ.get("RANK", 0))
def meet():
    count = os.environ["KERNEL_START_COUNT"] + os.environ["TORCHELASTIC_RESTART_COUNT"]
    start = pathlib.Path(os.environ["KERNEL_REPORT_DIR"]) / ("met-" + count)
    start.mkdir(exist_ok=True); (start / str(rank)).touch()
    while len(list(start.iterdir())) < int(os.environ["WORLD_SIZE"]): time.sleep(0.01)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(PRELUDE + text)
    return path


def launch(folder: Path, *arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    call = [*COMMAND, "--log-dir", str(folder / "logs"), *map(str, arguments)]
    return subprocess.run(call, capture_output=True, text=True, cwd=folder, timeout=60, env=environment, **options)


def start(folder: Path, *arguments: Any) -> subprocess.Popen[str]:
    call = [*COMMAND_BY_HAND, "--log-dir", str(folder / "logs"), *map(str, arguments)]
    return subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids(folder: Path) -> list[int]:
    return [int(path.read_text()) for path in folder.glob("pid-*") if path.read_text()]


SLEEPER = "pathlib.Path(f'pid-{rank}').write_text(str(os.getpid()))\ntime.sleep(60)\n"


def test_each_rank_knows_its_place_and_one_has_the_terminal(tmp_path: Path) -> None:
    body = "keys = ['RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'KERNEL_REPORT_DIR', 'OMP_NUM_THREADS']\n"
    body += "print(json.dumps([sys.argv[1:], {key: os.environ[key] for key in keys}, __name__]))\nprint('told', file=sys.stderr)"
    done = launch(tmp_path, "-n", 2, script(tmp_path, body), "--lr", "0.1", "-n", "5")
    assert done.returncode == 0, done.stderr
    arguments, environment, name = json.loads(done.stdout)
    assert (arguments, name) == (["--lr", "0.1", "-n", "5"], "__main__")
    assert [environment[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == [
        "0",
        "2",
        "0",
        "2",
    ]
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert done.stderr == "told\n"
    (other,) = tmp_path.glob("logs/*/attempt_0/1/stdout.log")
    assert json.loads(other.read_text())[1]["RANK"] == "1"
    assert (other.parent / "stderr.log").read_text() == "told\n"


def test_modules_and_programs_run_too_and_files_may_be_named(tmp_path: Path) -> None:
    script(tmp_path, "print('module', rank, sys.argv[1:])")
    done = launch(tmp_path, "-n", 2, "--stdout", "out-{rank}-{world_size}.txt", "-m", "script", "x")
    assert done.stdout == "module 0 ['x']\n"
    assert (tmp_path / "out-1-2.txt").read_text() == "module 1 ['x']\n"
    done = launch(tmp_path, "-n", 1, "--command_mode", "--", "sh", "-c", "echo program $RANK; exit 3")
    assert (done.stdout, done.returncode) == ("program 0\n", 3)


def test_the_traceback_of_the_rank_that_failed_first_is_last(tmp_path: Path) -> None:
    body = "if rank == 1:\n    raise ValueError('rank one is unwell')\n" + SLEEPER
    done = launch(tmp_path, "-n", 2, script(tmp_path, body))
    assert done.returncode == 1
    assert re.search(
        r"  rank 0: killed by SIGTERM\nrank 1 failed first, at \d\d:\d\d:\d\d: exit code 1\nTraceback", done.stderr
    )
    tail = done.stderr[done.stderr.index("rank 1 failed first") :]
    assert re.search(r'script.py", line \d+, in <module>', tail)
    assert "ValueError: rank one is unwell" in tail
    assert "kernel_plugin_torchrun" not in tail
    assert "torch/distributed" not in done.stderr


def test_a_rank_that_only_writes_to_its_log_is_quoted(tmp_path: Path) -> None:
    body = "if rank == 1:\n    print('disk is full', file=sys.stderr); os._exit(7)\n" + SLEEPER
    done = launch(tmp_path, "-n", 2, script(tmp_path, body))
    assert done.returncode == 7
    assert re.search(r"rank 1 failed first, at [\d:]+: exit code 7\ndisk is full\n", done.stderr)


def test_restarts_are_counted_and_an_interrupted_run_has_none(tmp_path: Path) -> None:
    count = "path = pathlib.Path(f'starts-{rank}'); path.write_text(path.read_text() + 'x' if path.exists() else 'x'); meet()\n"
    body = count + "sys.exit(4 if len(path.read_text()) < 3 else 0)"
    assert launch(tmp_path, "-n", 2, "--max-restarts", 1, script(tmp_path, body)).returncode == 4
    assert (tmp_path / "starts-0").read_text() == "xx"
    assert launch(tmp_path, "-n", 2, "--max-restarts", 1, script(tmp_path, body)).returncode == 0
    for path in tmp_path.glob("starts-*"):
        path.unlink()
    done = launch(tmp_path, "-n", 2, "--max-restarts", 3, script(tmp_path, count + "sys.exit(75)"))
    assert (done.returncode, (tmp_path / "starts-1").read_text()) == (75, "x")


def test_ranks_that_ask_for_smaller_microbatches_start_again(tmp_path: Path) -> None:
    body = """
file = pathlib.Path(os.environ["KERNEL_REPORT_DIR"]) / "microbatch_size"
size = int(file.read_text()) if file.exists() else 32
print("start with", size, flush=True); meet()
if size > 8 and rank == 1:
    file.write_text(str(size // 2)); sys.exit(76)
time.sleep(0.5 if size <= 8 else 30)
"""
    done = launch(tmp_path, "-n", 2, script(tmp_path, body))
    assert (done.returncode, done.stdout) == (0, "start with 32\nstart with 16\nstart with 8\n")
    assert re.findall(r"microbatches of (\d+) rows", done.stderr) == ["16", "8"]
    stuck = body.replace("size // 2", "size")
    assert launch(tmp_path, "-n", 2, script(tmp_path, stuck)).returncode == 76


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_ends_every_rank(tmp_path: Path, number: int, code: int) -> None:
    process = start(tmp_path, "-n", 2, script(tmp_path, SLEEPER))
    wait_for(lambda: len(pids(tmp_path)) == 2)
    ranks, began = pids(tmp_path), time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=40) == code
    assert time.monotonic() - began < 20
    assert not any(map(is_alive, ranks))


def test_a_killed_rank_ends_the_others_and_a_restart_has_new_ones(tmp_path: Path) -> None:
    once = "if not pathlib.Path('again').exists():\n    " + SLEEPER.replace("\n", "\n    ").rstrip() + "\n"
    for restarts, code in ((0, 128 + signal.SIGKILL), (1, 0)):
        process = start(tmp_path, "-n", 2, "--max-restarts", restarts, script(tmp_path, once))
        wait_for(lambda: len(pids(tmp_path)) == 2)
        ranks = pids(tmp_path)
        if restarts:
            (tmp_path / "again").touch()
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
        assert process.wait(timeout=40) == code
        wait_for(lambda ranks=ranks: not any(map(is_alive, ranks)), 5)
        told = process.communicate()[1]
        assert restarts or "rank 1 failed first" in told
        assert restarts or "killed by SIGKILL" in told
        for path in tmp_path.glob("pid-*"):
            path.unlink()


def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    process = start(tmp_path, "-n", 2, script(tmp_path, SLEEPER))
    wait_for(lambda: len(pids(tmp_path)) == 2)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, pids(tmp_path))), 15)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch(tmp_path, "-n", 1, "--master-port", port, script(tmp_path, ""))
    assert done.returncode == 2
    assert re.fullmatch(
        rf"Error: kernel launch: port {port} of this machine is taken\. Expected a free one.*\n", done.stderr
    )


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job(("nowhere.py",)), r"there is no file 'nowhere\.py'\. Expected a Python script"),
        (Job(("no-such-program",), "command"), r"there is no program 'no-such-program'"),
        (Job((__file__,), num_processes=0), r"got -n 0\. Expected at least one"),
        (Job((__file__,), num_nodes=(2, 1)), r"got --nnodes 2:1\."),
        (Job((__file__,), num_nodes=(1, 4)), r"may change needs a rendezvous\. Give --rdzv-endpoint"),
        (Job((__file__,), num_nodes=(2, 2)), r"2 machines need to find one another\. Expected --node-rank"),
        (Job((__file__,), num_processes=2, world_size=3), r"got --world-size 3, and 1 machines with 2 processes"),
        (Job((__file__,), max_restarts=-1), r"got --max-restarts -1"),
        (
            Job((__file__,), num_processes=2, num_nodes=(2, 2), base_rank=3, master_addr="h", master_port=1),
            r"got --base-rank 3 with --node-rank None and -n 2",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(job: Job, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        TorchrunLauncher().launch(job)


def test_a_machine_that_cannot_reach_the_first_says_what_to_check(tmp_path: Path) -> None:
    job = Job(
        (__file__,),
        num_processes=1,
        num_nodes=(2, 2),
        node_rank=1,
        master_addr="127.0.0.1",
        master_port=9,
        log_folder=tmp_path,
    )
    with pytest.raises(
        LaunchError, match=r"could not join the other machines at 127\.0\.0\.1:9 .*Check that the first machine"
    ):
        TorchrunLauncher(join_timeout_s=2).launch(job)
