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
    "save_folder": Keyword("callbacks", "checkpoint_saver"),
    "several_ranks": Keyword("parallelism", "ddp"),
    "progress_bar": Keyword("loggers", "progress_bar"),
}

# keywords of the trainer that are options of the plugin behind ``save_folder``
SAVE_OPTIONS = {
    "save_folder": "folder",
    "save_filename": "filename",
    "save_latest_filename": "latest_filename",
    "save_overwrite": "overwrite",
    "save_interval": "save_interval",
    "save_weights_only": "weights_only",
    "save_ignore_keys": "ignore_keys",
    "save_num_checkpoints_to_keep": "num_checkpoints_to_keep",
}
