"""``kernel launch``, and ``kernel train -n``: a job for a launcher plugin."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kernel_core.errors import LaunchError, PluginLoadError

if TYPE_CHECKING:
    from kernel_core.launcher import Launcher

DEFAULT_LAUNCHER = "torchrun"
RUN_NAME = "KERNEL_RUN_NAME"  # that of a job whose ranks are started again: it must not change
F = Callable[..., Any]

# what a job is made of: option, type, environment variable, help
_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("-n", "--nproc"), {"type": int, "envvar": "LOCAL_WORLD_SIZE", "help": "Processes on this machine."}),
    (("--nnodes",), {"default": "1", "metavar": "N|MIN:MAX", "help": "Machines."}),
    (("--node-rank",), {"type": int, "envvar": "NODE_RANK", "help": "This machine's number."}),
    (("--base-rank",), {"type": int, "envvar": "BASE_RANK", "help": "The rank of this machine's first process."}),
    (("--world-size",), {"type": int, "envvar": "WORLD_SIZE", "help": "Processes in all, to be checked."}),
    (("--master-addr",), {"envvar": "MASTER_ADDR", "help": "The first machine."}),
    (("--master-port",), {"type": int, "envvar": "MASTER_PORT", "help": "A free port of the first machine."}),
    (
        ("--rdzv-backend",),
        {"metavar": "NAME", "help": "How machines find one another; c10d if only an endpoint is given."},
    ),
    (("--rdzv-endpoint",), {"metavar": "HOST:PORT", "help": "Where machines meet, the same on all."}),
    (("--rdzv-id",), {"metavar": "NAME", "help": "Tells several jobs at one endpoint apart."}),
    (("--max-restarts",), {"type": int, "default": 0, "help": "How often all start again after a failure."}),
    (("--log-dir",), {"metavar": "FOLDER", "help": "Where the output of the ranks goes."}),
    (("--stdout",), {"metavar": "FORM", "help": "File for the output of other local ranks: out-{rank}.txt."}),
    (("--stderr",), {"metavar": "FORM", "help": "The same for their errors."}),
    (("--launcher",), {"default": DEFAULT_LAUNCHER, "metavar": "NAME", "help": "An installed launcher."}),
    (("--launcher-option",), {"multiple": True, "metavar": "KEY=VALUE", "help": "An option of it. May be repeated."}),
)


def job_options(command: F) -> F:
    """Add the options of a job; each may be written with dashes or underscores."""
    for names, settings in reversed(_OPTIONS):
        underscored = [name.replace("-", "_").replace("__", "--", 1) for name in names if "-" in name[2:]]
        name = names[-1].removeprefix("--").replace("-", "_")
        command = click.option(*names, *underscored, name, **{"show_envvar": "envvar" in settings, **settings})(command)
    return command


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of ``given`` that belong to a job, and the others."""
    names = {names[-1].removeprefix("--").replace("-", "_") for names, _ in _OPTIONS}
    return {key: value for key, value in given.items() if key in names}, {
        key: value for key, value in given.items() if key not in names
    }


def given_flags(context: click.Context) -> list[str]:
    """Return the flags of a job as the command line has them."""
    names = {names[-1].removeprefix("--").replace("-", "_") for names, _ in _OPTIONS}
    flags: list[str] = []
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            value = context.params[name]
            for one in value if parameter.multiple else (value,):
                flags += [parameter.opts[0], str(one)]
    return flags


def is_rank() -> bool:
    """Say whether this process is a rank already."""
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


def was_started_before() -> bool:
    """Say whether this process is a rank that a launcher starts again: the run of that name is its own."""
    counts = (os.environ.get(name, "0") for name in ("KERNEL_START_COUNT", "TORCHELASTIC_RESTART_COUNT"))
    return is_rank() and any(count != "0" for count in counts)


def launch(command: Sequence[str], mode: str, verbose: bool = False, **options: Any) -> int:
    """Start ``command`` by the launcher that is asked for, and return its exit code.

    Raises:
        LaunchError: it cannot be started.
        PluginNotFoundError, PluginLoadError: there is no such launcher.
    """
    from kernel_core.launcher import Job, Launcher
    from kernel_core.registry.discovery import find

    info = find(options["launcher"], ("launchers",))
    launcher_class = info.load()
    if not (isinstance(launcher_class, type) and issubclass(launcher_class, Launcher)):
        raise PluginLoadError(f"{info.name}: {info.value} of {info.distribution} is no kernel_core.launcher.Launcher.")
    job = Job(
        command=tuple(command),
        mode=mode,  # type: ignore[arg-type]
        num_processes=options["nproc"],
        num_nodes=_nodes(options["nnodes"]),
        node_rank=options["node_rank"],
        base_rank=options["base_rank"],
        world_size=options["world_size"],
        master_addr=options["master_addr"],
        master_port=options["master_port"],
        rendezvous_backend=options["rdzv_backend"],
        rendezvous_endpoint=options["rdzv_endpoint"],
        rendezvous_id=options["rdzv_id"],
        max_restarts=options["max_restarts"],
        log_folder=Path(options["log_dir"]) if options["log_dir"] else None,
        stdout=options["stdout"],
        stderr=options["stderr"],
        verbose=verbose,
    )
    return _configured(launcher_class, info.name, options["launcher_option"]).launch(job)


def _configured(launcher_class: type[Launcher], name: str, texts: Sequence[str]) -> Launcher:
    from kernel_core.registry.options import bind_options

    from kernel_cli.config import read_yaml

    given = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise LaunchError(f"--launcher-option: got {text!r}. Expected option=value.")
        given[key] = read_yaml(value, f"--launcher-option {key}")
    bound = bind_options(launcher_class, name, (), given)
    return launcher_class(*bound.args, **bound.kwargs)


def _nodes(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not least.isdigit() or (colon and not most.isdigit()):
        raise LaunchError(f"kernel launch: got --nnodes {text}. Expected a number, or the least and the most: 1:4.")
    return int(least), int(most or least)
