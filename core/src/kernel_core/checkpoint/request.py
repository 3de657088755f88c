"""What a policy asks for when a run should be saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

from kernel_core.errors import CheckpointError
from kernel_core.naming import did_you_mean

if TYPE_CHECKING:
    from kernel_core.train.state import State

COUNTS = "epoch batch batch_in_epoch sample sample_in_epoch token token_in_epoch iteration".split()
CLOCKS = "total_wct epoch_wct batch_wct".split()
AGAIN_PATTERN = r"(?:\.\d+)?"  # a number behind a name that was taken


@dataclass(frozen=True)
class SaveRequest:
    """A checkpoint to be saved now. Every rank must ask for the same.

    Args:
        folder: A path or URL; the folder in which checkpoints are. Placeholders as in ``name``.
        name: The checkpoint's own folder in it: ``{run_name}``, ``{epoch}``, ``{batch}``, ``{batch_in_epoch}``,
            ``{sample}``, ``{token}``, ``{iteration}``, ``{total_wct}``, … are filled in, clocks as seconds.
        weights_only: The model alone.
        ignore: Names or globs of what is left out, such as ``optimizers`` or ``model/head.*``; or a function.
        overwrite: Replace a checkpoint of that name, once the new one is there.
        keep: How many checkpoints of this run and policy stay; -1 for all.
        latest: The name of the file that tells the newest checkpoint, None for no such file.
        asynchronous: Train on while it is written; else wait until it is durable.
    """

    folder: str
    name: str = "ep{epoch}-ba{batch}"
    weights_only: bool = False
    ignore: Sequence[str] | Callable[[dict[str, Any]], None] | None = None
    overwrite: bool = False
    keep: int = -1
    latest: str | None = "latest"
    asynchronous: bool = True


def check_placeholders(text: str, what: str) -> None:
    """Refuse placeholders that are not known.

    Raises:
        CheckpointError: one is not, or the braces do not match.
    """
    known = ("run_name", *COUNTS, *CLOCKS, "rank", "local_rank", "world_size")
    try:
        names = [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise CheckpointError(f"{what}: got {text!r}: {error}. Expected placeholders such as {{batch}}.") from None
    for name in names:
        if name in ("rank", "local_rank"):
            raise CheckpointError(
                f"{what}: got {text!r}. A checkpoint is one folder for all ranks, in which each has files of its own. "
                f"Leave {{{name}}} out."
            )
        if name not in known:
            raise CheckpointError(
                f"{what}: got {text!r}. There is no placeholder {{{name}}}.{did_you_mean(name, known)} "
                f"They are {', '.join(known[:-3])}."
            )


def name_fits(template: str, run_name: str, name: str) -> bool:
    """Say whether ``name`` can be ``template`` filled in for that run, or what it was called where that name was taken."""
    pattern = ""
    for literal, field, _, _ in Formatter().parse(template):
        pattern += re.escape(literal)
        if field is not None:
            pattern += re.escape(run_name) if field == "run_name" else r"\w+"
    return re.fullmatch(pattern + AGAIN_PATTERN, name) is not None


def fill_in(text: str, state: State) -> str:
    """Return ``text`` with its placeholders filled in."""
    progress = state.progress
    values: dict[str, Any] = {name: getattr(progress, name) for name in COUNTS}
    values |= {name: int(getattr(progress, name)) for name in CLOCKS}
    return text.format(run_name=state.run_name, world_size=state.world_size, **values)
