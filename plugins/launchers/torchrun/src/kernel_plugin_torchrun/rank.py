"""One rank: runs a script, module or program, and sees to it that the launcher learns how it ended.

Started by the launcher as ``python -P -m kernel_plugin_torchrun.rank MODE COMMAND ARGUMENTS``.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from kernel_core.errors import EXIT_INTERRUPTED, KernelError

from kernel_plugin_torchrun.leftovers import LAUNCHER_PID

# The file that says so. Torch's agent knows success and failure only, and starts failures again.
INTERRUPTED = "interrupted"
IS_OVER = "KERNEL_LAUNCH_IS_OVER"  # set by the launcher, which sees all ranks
LAUNCHER_GONE_S = 10.0  # how long a rank may take to end when its launcher is gone


def main(arguments: Sequence[str]) -> NoReturn:
    """Run ``MODE COMMAND ARGUMENTS`` and exit as it does."""
    mode, *command = arguments
    if IS_OVER in os.environ:  # the agent starts all again because others failed after an interruption, which is final
        sys.exit(0)
    threading.Thread(target=_end_with_launcher, args=(int(os.environ[LAUNCHER_PID]),), daemon=True).start()
    try:
        code = _program(command) if mode == "command" else _python(mode, command)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException as error:
        code = error.exit_code if isinstance(error, KernelError) else 1
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else code
        error = error.with_traceback(_below_this_file(error.__traceback__))
        _write_down(error)
        sys.excepthook(type(error), error, error.__traceback__)
    if code == EXIT_INTERRUPTED:
        (Path(os.environ["KERNEL_REPORT_DIR"]) / INTERRUPTED).touch()
        code = 0
    sys.exit(code)


def _python(mode: str, command: Sequence[str]) -> int:
    """Run a script or module as the main program of this process. ``-P`` has left the path to this function."""
    sys.argv[:] = command
    if mode == "module":
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")
    return 0


def _program(command: Sequence[str]) -> int:
    """Run a program. Signals of the launcher go to the whole process group: it gets them itself, and once."""
    with subprocess.Popen(command) as process:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda number, frame: None)
        code = process.wait()
    if code < 0:  # end as it did
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    return code


def _below_this_file(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of ``traceback`` that is the script's own."""
    while traceback is not None and traceback.tb_next is not None:
        file = traceback.tb_frame.f_code.co_filename
        if file != __file__ and "runpy" not in file:
            break
        traceback = traceback.tb_next
    return traceback


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)  # noqa: T201 (what Python does with such a code)
    return 1


def _write_down(error: BaseException) -> None:
    """Leave the traceback where the launcher finds it, whole or not at all, unless the trainer has done so."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not Path(file).exists():
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        os.environ["TORCHELASTIC_ERROR_FILE"] = f"{file}.part"
        get_error_handler().record_exception(error)
        os.environ["TORCHELASTIC_ERROR_FILE"] = file
        Path(f"{file}.part").replace(file)


def _end_with_launcher(launcher: int) -> None:
    """End this process, and what it has started, when its launcher is gone: in order if they can, else all the same."""
    while os.getppid() == launcher:
        time.sleep(1.0)
    environment = {name: value for name, value in os.environ.items() if name != LAUNCHER_PID}
    call = [sys.executable, "-P", "-m", "kernel_plugin_torchrun.leftovers", str(launcher), str(LAUNCHER_GONE_S)]
    # a process of its own, since this one may end before what it has started
    subprocess.Popen(call, env=environment, start_new_session=True, stdin=subprocess.DEVNULL)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(LAUNCHER_GONE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
