"""Keyword arguments that Composer's users write, as the plugins that do the work here. A table, nothing else.

The one place where the kernel knows names of plugins.
"""

from __future__ import annotations

from typing import NamedTuple


class Keyword(NamedTuple):
    """A keyword, or a value or key of one, stands for this plugin; a logger that is not installed is left out."""

    kind: str
    plugin: str


KEYWORDS = {
    "amp_fp8": Keyword("algorithms", "fp8"),
    "fsdp_config": Keyword("parallelism", "fsdp"),
    "parallelism_config.fsdp": Keyword("parallelism", "fsdp"),
    "parallelism_config.fsdp2": Keyword("parallelism", "fsdp"),
    "parallelism_config.tp": Keyword("parallelism", "tensor_parallel"),
    "several_ranks": Keyword("parallelism", "ddp"),
    "progress_bar": Keyword("loggers", "progress_bar"),
}
