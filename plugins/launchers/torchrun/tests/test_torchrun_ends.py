"""How jobs end, and what is left of them; what happens before they begin."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kernel_core.errors import LaunchError
from kernel_core.launcher import Job
from kernel_plugin_torchrun import TorchrunLauncher, failure
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

# whoever runs the tests in the background has SIGINT ignored, which children inherit
RESTORE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
COMMAND = [sys.executable, "-c", RESTORE + "from kernel_cli.main import main; main()", "launch"]
HEAD = "import json, os, pathlib, signal, subprocess, sys, time\nrank = os.environ['RANK']\n"
READY = "pathlib.Path(f'pid-{rank}').write_text(str(os.getpid()))\n"
CHILD = "pathlib.Path(f'child-{rank}').write_text(str(subprocess.Popen(['sleep', '60']).pid))\n" + READY

pytestmark = pytest.mark.ranks


def start(folder: Path, text: str, *options: Any, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(HEAD + text)
    ours = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "KERNEL_MICROBATCH_SIZE")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    call = [*COMMAND, "--log-dir", str(folder / "logs"), *map(str, options), "script.py", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(call, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=environment)


def run(folder: Path, text: str, *options: Any, arguments: tuple[str, ...] = ()) -> tuple[int, str, str]:
    process = start(folder, text, *options, arguments=arguments)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def pids(folder: Path, kind: str) -> list[int]:
    return [int(path.read_text()) for path in folder.glob(f"{kind}-*") if path.read_text()]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("end", ["success", "a rank is killed", "the launcher is killed"])
def test_what_ranks_have_started_does_not_outlive_the_job(tmp_path: Path, end: str) -> None:
    process = start(tmp_path, CHILD + ("" if end == "success" else "time.sleep(60)\n"), "-n", 2)
    wait_for(lambda: len(pids(tmp_path, "pid")) == 2)
    if end == "a rank is killed":
        os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)
    elif end == "the launcher is killed":
        process.kill()
    code = process.wait(timeout=60)
    assert code == {"success": 0, "a rank is killed": 137, "the launcher is killed": -9}[end]
    started = pids(tmp_path, "pid") + pids(tmp_path, "child")
    assert len(started) == 4
    wait_for(lambda: not any(map(is_alive, started)), 20)


def test_a_signal_to_the_launcher_of_ranks_that_save_and_exit_with_75_gives_75(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" + READY + "time.sleep(60)\n"
    process = start(tmp_path, text, "-n", 2, "--max-restarts", 2)
    wait_for(lambda: len(pids(tmp_path, "pid")) == 2)
    process.terminate()
    assert process.wait(timeout=60) == 75


@pytest.mark.slow
def test_an_exit_with_75_because_another_rank_failed_does_not_hide_the_failure(tmp_path: Path) -> None:
    text = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n" + READY
    text += "while len(list(pathlib.Path().glob('pid-*'))) < 2: time.sleep(0.05)\n"
    text += "if rank == '1': raise ValueError('unwell')\ntime.sleep(60)\n"
    code, _, told = run(tmp_path, text, "-n", 2)
    assert (code, "ValueError: unwell" in told) == (1, True)
    for path in tmp_path.glob("pid-*"):
        path.unlink()
    code, _, told = run(
        tmp_path,
        text.replace("if rank", "if not os.environ['KERNEL_START_COUNT'] == '1' and rank").replace(
            "time.sleep(60)", "time.sleep(0 if os.environ['KERNEL_START_COUNT'] == '1' else 60)"
        ),
        "-n",
        2,
        "--max-restarts",
        1,
    )
    assert (code, "all start again (1 of 1)" in told) == (0, True)


def test_after_an_interruption_nothing_starts_again_though_others_fail(tmp_path: Path) -> None:
    text = "pathlib.Path(f'start-{rank}-{time.time()}').touch()\n"
    text += "if rank == '0': sys.exit(75)\ntime.sleep(1.5); sys.exit(1)\n"
    code, _, _ = run(tmp_path, text, "-n", 2, "--max-restarts", 3)
    assert (code, len(list(tmp_path.glob("start-*")))) == (75, 2)


@pytest.mark.slow
def test_starts_for_memory_do_not_count_as_restarts_and_are_told_the_size(tmp_path: Path) -> None:
    text = """
size, fails = int(os.environ.get("KERNEL_MICROBATCH_SIZE", 32)), pathlib.Path("fails-" + rank)
print(os.environ["KERNEL_START_COUNT"], size, flush=True)
if size > 8:
    if rank == "1":
        (pathlib.Path(os.environ["KERNEL_REPORT_DIR"]) / "microbatch_size").write_text(str(size // 2)); sys.exit(76)
    time.sleep(30)
number = int(fails.read_text()) if fails.exists() else 0
fails.write_text(str(number + 1))
sys.exit(5 if rank == "0" and number < int(sys.argv[1]) else 0)
"""
    code, told, _ = run(tmp_path, text, "-n", 2, "--max-restarts", 1, arguments=("1",))
    assert (code, told.split("\n")) == (0, ["0 32", "1 16", "2 8", "3 8", ""])
    for path in tmp_path.glob("fails-*"):
        path.unlink()
    assert run(tmp_path, text, "-n", 2, "--max-restarts", 1, arguments=("2",))[0] == 5


def test_arguments_arrive_as_they_are_and_the_path_is_that_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "signal.py").write_text("raise SystemExit('the standard library is shadowed')")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "inner.py").write_text("import json, sys; print(json.dumps([sys.argv[1:], sys.path[0]]))")
    call = [*COMMAND, "-n", "1", "elsewhere/inner.py", "a$$b", "${local_rank}", "$HOME"]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the command itself is started with -c
    done = subprocess.run(call, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [["a$$b", "${local_rank}", "$HOME"], str(tmp_path / "elsewhere")]


def test_only_the_launchers_own_files_are_removed_from_the_log_folder(tmp_path: Path) -> None:
    kept = tmp_path / "logs" / "reports" / "thesis" / "chapter.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    (tmp_path / "logs" / "reports" / "interrupted").touch()  # of an earlier job
    assert run(tmp_path, "", "-n", 1)[0] == 0
    assert kept.read_text() == "mine"


def test_the_end_of_a_log_with_a_name_of_its_own_is_quoted(tmp_path: Path) -> None:
    text = "if rank == '1':\n    print('disk is full', file=sys.stderr); os._exit(7)\ntime.sleep(60)"
    code, _, told = run(tmp_path, text, "-n", 2, "--stderr", "err-{rank}.txt")
    assert (code, "exit code 7\ndisk is full\n" in told) == (7, True)


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_ends_a_launcher_that_waits_for_other_machines(tmp_path: Path, node: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = ("--nnodes", 2, "--node-rank", node, "--master-addr", "127.0.0.1", "--master-port", port)
    process = start(tmp_path, READY, "-n", 1, *where)
    listens = f":{port:04X} 00000000000000000000000000000000:0000 0A"
    if node == 0:
        wait_for(lambda: listens in Path("/proc/net/tcp6").read_text())
    else:
        wait_for(lambda: (tmp_path / "logs").exists())
        time.sleep(4)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 130
    assert pids(tmp_path, "pid") == []


def failed(folder: Path, rank: int, exitcode: int, message: str = "", at: float = 0.0) -> ProcessFailure:
    file = folder / f"error-{rank}.json"
    if message:
        extra = {"timestamp": str(int(at)), "py_callstack": f"Traceback ...\n{message}"}
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        os.utime(file, (at, at))
    found = ProcessFailure(rank, 1, exitcode, str(file))
    found.timestamp = int(at)
    return found


def test_a_rank_that_died_of_another_one_is_not_the_first(tmp_path: Path) -> None:
    lost = "RuntimeError: [gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:1234"
    cases = [
        {0: failed(tmp_path, 0, 1, lost, 100.1), 1: failed(tmp_path, 1, 1, "ValueError: cause", 100.3)},
        {0: failed(tmp_path, 0, 143, at=100.0), 1: failed(tmp_path, 1, -9, at=101.0)},
        {0: failed(tmp_path, 0, 1, "KeyError: later", 200.9), 1: failed(tmp_path, 1, 1, "ValueError: 1st", 200.2)},
    ]
    for failures in cases:
        assert failure.first(ChildFailedError("job", failures), tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (Job((__file__,), master_port=99999), r"got --master-port 99999\. Expected 1 to 65535"),
        (
            Job((__file__,), stdout="out-{nope}.txt"),
            r"got --stdout out-\{nope\}\.txt\. Expected a file name; it may hold",
        ),
        (Job((__file__,), log_folder=Path(__file__)), r"--log-dir .* cannot be used \(Not a directory\)"),
        (
            Job((__file__,), num_processes=1, rendezvous_backend="nosuch", rendezvous_endpoint="h:1"),
            r"torch's agent refuses the job: The rendezvous backend 'nosuch' is not registered",
        ),
        (
            Job((__file__,), num_processes=1, num_nodes=(2, 2), node_rank=5, master_addr="h", master_port=1),
            r"got machine number 5 of 2\. Expected --node-rank 0 to 1",
        ),
    ],
)
def test_what_cannot_be_started_is_refused(job: Job, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        TorchrunLauncher().launch(job)


@pytest.mark.parametrize("endpoint", ["nosuchhost.invalid:29400", "127.0.0.1:9"])
def test_a_rendezvous_that_does_not_come_about_says_what_to_check(tmp_path: Path, endpoint: str) -> None:
    backend = "static" if endpoint.endswith(":9") else None
    job = Job((__file__,), num_processes=1, num_nodes=(2, 2), node_rank=1, log_folder=tmp_path)
    job = Job(**{**vars(job), "rendezvous_endpoint": endpoint, "rendezvous_backend": backend})
    with pytest.raises(LaunchError, match=rf"could not join the other machines at {endpoint} .*Check that the first"):
        TorchrunLauncher(join_timeout_s=1).launch(job)


def test_the_process_of_the_launcher_is_as_before(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")

    def surroundings() -> Any:
        return dict(os.environ), [signal.getsignal(number) for number in (2, 15, 1, 3)]

    before = surroundings()
    assert TorchrunLauncher().launch(Job((str(tmp_path / "empty.py"),), num_processes=1, log_folder=tmp_path)) == 0
    assert surroundings() == before
