"""The command and its subcommands. Nothing here imports torch: each subcommand does when it runs."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import click
from kernel_core.errors import KernelError

from kernel_cli.launch import RUN_NAME, given_flags, is_rank, job_options, split
from kernel_cli.output import Document, Result, document

PLUGINS_HELP = "Plugins to use, by name, comma separated. 'id=name' uses one a second time."
OPTION_HELP = "An option of a plugin: plugin.option=value. May be repeated."
SET_HELP = "A key of the configuration: section.key=value. May be repeated."


def plan_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that `train` and `plan` share."""
    for decorate in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output."),
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help=SET_HELP),
        click.option("-o", "--option", "options", multiple=True, metavar="KEY=VALUE", help=OPTION_HELP),
        click.option("--plugins", default="", metavar="A,B", help=PLUGINS_HELP),
        click.argument("source", required=False, metavar="[RECIPE|CONFIG.yaml]"),
    ):
        command = decorate(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="kernel-cli", prog_name="kernel")
def cli() -> None:
    """Train PyTorch models with plugins."""


@cli.command()
@plan_arguments
@click.option("--max-duration", metavar="TIME", help="When to stop, such as 2ep, 500ba or 10m.")
@click.option("--seed", type=int, help="The seed of all randomness.")
@click.option("--device", metavar="NAME", help="cpu, gpu, cuda:1, mps, ...")
@click.option("--run-name", metavar="NAME", help="The name of the run and its folder.")
@click.option("--precision", metavar="NAME", help="fp32, amp_bf16, amp_fp16 or amp_fp8.")
@click.option("--model", metavar="NAME[:WHAT]", help="An installed model instead of the recipe's: huggingface:PATH.")
@click.option("--parallelism", metavar="A,B", help="The engine, and transforms beside it: ddp; fsdp,tensor_parallel.")
@click.option("--timeline", is_flag=True, help="Measure where the time goes, and print it at the end.")
@click.option("--resume", metavar="RUN|PATH|latest", help="Go on with a run, or from a checkpoint, with its settings.")
@click.option(
    "--autoresume", is_flag=True, help="Go on with the run of that name if it has a checkpoint, else begin it."
)
@click.option("--no-checkpoints", is_flag=True, help="Save no checkpoints.")
@click.option("--locked", is_flag=True, help="Refuse a run whose plugins are not those of the lock, to the last file.")
@click.option("--lock", metavar="FILE", help="The lock for --locked, if it is not the kernel.lock of this folder.")
@click.option("--dry-run", is_flag=True, help="Print plan and surgery report and train nothing.")
@click.option("--strict", is_flag=True, help="Make warnings about plan and surgery errors.")
@job_options
def train(**arguments: Any) -> None:
    """Train a recipe, or what a configuration file says.

    Without an argument the recipe 'numbers' is trained: it reads handwritten numbers. With -n the same command runs on
    several processes.
    """
    job, arguments = split(arguments)
    flags = given_flags(click.get_current_context())
    if not is_rank() and (job["nproc"] is not None or job["nnodes"] != "1"):
        from kernel_cli.start import fresh_name

        os.environ[RUN_NAME] = fresh_name()  # if nobody gives another: ranks that start again keep it
        _launch(("kernel_cli.main", *sys.argv[1:]), "module", as_json=arguments["as_json"], **job)
    from kernel_cli.train import train as run

    _run(run, **arguments, job=flags)


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@job_options
@click.option("-m", "--module-mode", "--module_mode", "module", is_flag=True, help="Start a module, as python -m does.")
@click.option("-c", "--command-mode", "--command_mode", "program", is_flag=True, help="Start a program, not Python.")
@click.option("-v", "--verbose", is_flag=True, help="Show what the launcher does.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="SCRIPT [ARGUMENTS]...")
def launch(command: tuple[str, ...], module: bool, program: bool, **options: Any) -> None:
    """Start a script on several processes, on one machine or many.

    The first rank of a machine has its terminal; the others write to files.
    """
    if module and program:
        raise click.UsageError("-m starts a module and -c a program. Give one of them.")
    _launch(command, "module" if module else "command" if program else "script", **options)


def _launch(command: tuple[str, ...], mode: str, as_json: bool = False, **options: Any) -> None:
    """Start a job and exit as it does. Standard output belongs to the first rank, unless nothing could be started."""
    from kernel_cli.launch import launch as run

    try:
        code = run(command, mode, **options)
    except BaseException as error:
        with document(as_json) as out:
            code = _report(out, error)
    sys.exit(code)


class PlanGroup(click.Group):
    """A command that takes a recipe or a configuration, and has subcommands beside: whatever is none of them is the former."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return no parameters for the usage line of a subcommand: it takes none of them."""
        return super().get_params(ctx) if ctx.command is self else []

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the first argument for the source, unless it is a subcommand."""
        if not (args and args[0] in self.commands):
            ctx.allow_interspersed_args = True
            return super().parse_args(ctx, args)
        held, self.params = self.params, []
        try:
            return super().parse_args(ctx, args)
        finally:
            self.params = held


@cli.group(cls=PlanGroup, invoke_without_command=True)
@plan_arguments
@click.pass_context
def plan(context: click.Context, /, **arguments: Any) -> None:
    """Show which plugin runs at which event, in what order, and why. `kernel plan diff A B` compares two plans."""
    name = context.invoked_subcommand or arguments["source"]
    if arguments and name in plan.commands:
        raise click.UsageError(
            f"{name} is a subcommand, and stands first: kernel plan {name}. No recipe is called that."
        )
    if context.invoked_subcommand is None:
        from kernel_cli.inspect import show_plan

        _look(show_plan, **arguments)


@plan.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def plan_diff(**arguments: Any) -> None:
    """Say in words what the plans of two runs, checkpoints or locks differ in; exit with 1 if they do."""
    from kernel_cli.lock import diff_plans

    _look(diff_plans, **arguments)


@cli.group()
def plugins() -> None:
    """Look at installed plugins."""


@plugins.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def plugins_list(as_json: bool) -> None:
    """List every installed plugin. Nothing is imported."""
    from kernel_cli.inspect import list_plugins

    _look(list_plugins, as_json=as_json)


@plugins.command("show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def plugins_show(name: str, as_json: bool) -> None:
    """Show one plugin: where it comes from, its options, hooks and order."""
    from kernel_cli.inspect import show_plugin

    _look(show_plugin, name=name, as_json=as_json)


@plugins.command("new")
@click.argument("name")
@click.option(
    "--kind", required=True, metavar="KIND", help="algorithm, callback, logger, parallelism, storage, model, ..."
)
@click.option("--out", metavar="FOLDER", help="Where to; the default is a folder named like the distribution.")
@click.option("--distribution", metavar="NAME", help="What pip calls it; the default is kernel-plugin-NAME.")
@click.option("--author", metavar="NAME", help="Who wrote it: 'Name', or 'Name <name@example.org>'.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def plugins_new(**arguments: Any) -> None:
    """Write a complete package for a plugin: module, tests, README and a workflow that publishes it."""
    from kernel_cli.scaffold import new_plugin

    _run(new_plugin, **arguments)


@plugins.command("lock")
@plan_arguments
@click.option("--output", default="kernel.lock", show_default=True, metavar="FILE", help="Where to write it.")
def plugins_lock(**arguments: Any) -> None:
    """Write down the plugins of a run, their versions, files, options and order; `kernel train --locked` allows no others."""
    from kernel_cli.lock import write_plugin_lock

    _run(write_plugin_lock, **arguments)


@plugins.command("from-checkpoint")
@click.argument("path", metavar="CHECKPOINT|RUN")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def plugins_from_checkpoint(**arguments: Any) -> None:
    """Print what to install to recreate the run that saved a checkpoint, in the form that `pip install -r` reads.

    Versions are those of an index: of torch 2.13.0+cpu the 2.13.0, and pip's --index-url chooses the build. What was no
    package, and what a checkpoint does not record, is named on standard error.
    """
    from kernel_cli.lock import requirements_of_checkpoint

    _look(requirements_of_checkpoint, **arguments)


@plugins.command("check")
@click.argument("target", metavar="NAME|PATH")
@click.option("--full", is_flag=True, help="Try all models and more points of a run: minutes instead of seconds.")
@click.option("--write", is_flag=True, help="Keep the card in the package of the plugin.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def plugins_check(**arguments: Any) -> None:
    """Run the conformance kit on a plugin and print what was proven; exit with 1 if something was refuted."""
    from kernel_cli.check import check_plugin

    _run(check_plugin, **arguments)


@cli.group()
def checkpoint() -> None:
    """Look at checkpoints, compare them, and write their weights for others."""


JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")


@checkpoint.command("list")
@click.argument("folder", default="runs", metavar="[FOLDER|RUN|URL]")
@JSON_OPTION
def checkpoint_list(**arguments: Any) -> None:
    """List the checkpoints of a run or of all runs in a folder, the newest first. Their files are not read."""
    from kernel_cli.checkpoint import list_checkpoints

    _look(list_checkpoints, **arguments)


@checkpoint.command("show")
@click.argument("path", metavar="CHECKPOINT|RUN")
@click.option("--tensors", is_flag=True, help="Show every tensor of the model with its shape.")
@JSON_OPTION
def checkpoint_show(**arguments: Any) -> None:
    """Show what a checkpoint says about itself: plan, options, surgery, environment. Of a run, the newest."""
    from kernel_cli.checkpoint import show_checkpoint

    _look(show_checkpoint, **arguments)


@checkpoint.command("verify")
@click.argument("paths", nargs=-1, required=True, metavar="CHECKPOINT|RUN...")
@JSON_OPTION
def checkpoint_verify(**arguments: Any) -> None:
    """Read every file and compare it with what was written; exit with 1 if one is damaged. Of a run, all checkpoints."""
    from kernel_cli.checkpoint import verify_checkpoints

    _look(verify_checkpoints, **arguments)


@checkpoint.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@JSON_OPTION
def checkpoint_diff(**arguments: Any) -> None:
    """Show how two checkpoints differ: plugins, settings, environment and weights."""
    from kernel_cli.compare import diff_checkpoints

    _look(diff_checkpoints, **arguments)


@checkpoint.command("export")
@click.argument("path", metavar="CHECKPOINT|RUN")
@click.argument("out", metavar="OUT")
@click.option(
    "--format",
    "form",
    default="safetensors",
    show_default=True,
    type=click.Choice(["safetensors", "huggingface"]),
    help="One file, or a folder for from_pretrained.",
)
@click.option(
    "--dtype", type=click.Choice(["float64", "float32", "float16", "bfloat16"]), help="Of the weights written."
)
@JSON_OPTION
def checkpoint_export(**arguments: Any) -> None:
    """Write the weights of a checkpoint for other programs."""
    from kernel_cli.compare import export_checkpoint

    _run(export_checkpoint, **arguments)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")
def events(as_json: bool) -> None:
    """Show the training loop with every event in its place, recorded from a small run."""
    from kernel_cli.events import show_events

    _look(show_events, as_json=as_json)


def _look(command: Callable[..., Any], **arguments: Any) -> None:
    """Run a subcommand that only prints; a reader that has seen enough, such as ``head``, is no error."""

    def look(**arguments: Any) -> Any:
        try:
            return command(**arguments)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            return None

    _run(look, **arguments)


def _run(command: Callable[..., Any], **arguments: Any) -> None:
    """Run a subcommand; print its document or its error and exit with the code of the design."""
    with document(arguments["as_json"]) as out:
        code = 0
        try:
            out.value = command(**arguments)
            if isinstance(out.value, Result):
                out.value, code = out.value.value, out.value.exit_code
        except BaseException as error:
            code = _report(out, error)
    sys.exit(code)


def _report(out: Document, error: BaseException) -> int:
    """Print an error and return the exit code: its message alone where the user can mend it, else with a traceback."""
    cause = error
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]  # what went wrong first; closing failed after it
    code = _exit_code(cause)
    notes = getattr(cause, "__notes__", [])
    if isinstance(cause, KernelError | KeyboardInterrupt | SystemExit) and cause is error:
        message = str(error) if isinstance(error, KernelError) else "interrupted"
        click.echo("\n".join([f"Error: {message}", *(f"  {note}" for note in notes)]), err=True)
    else:
        click.echo("".join(traceback.format_exception(error)).rstrip(), err=True)
    out.value = {
        "error": {"type": type(cause).__name__, "message": str(cause), "notes": list(notes), "exit_code": code}
    }
    return code


def _exit_code(error: BaseException) -> int:
    if isinstance(error, KernelError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) and error.code else 1
    return 1


def main() -> None:
    """Entry point of the ``kernel`` script."""
    # as a signal alone it would end the process without closing what plugins hold
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if not sys.warnoptions:  # Python hides such warnings from all but a script's own code
        warnings.filterwarnings("default", ".*: answers the hook ", DeprecationWarning)
    try:
        cli.main(prog_name="kernel", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        if "--json" in sys.argv:
            with document(True) as out:
                kind = type(error).__name__
                out.value = {"error": {"type": kind, "message": error.format_message(), "notes": [], "exit_code": 2}}
        sys.exit(2)
    finally:
        # whatever is printed while Python shuts down is not part of the document
        sys.stdout.flush()
        if "--json" in sys.argv:
            os.dup2(2, 1)


if __name__ == "__main__":
    main()
