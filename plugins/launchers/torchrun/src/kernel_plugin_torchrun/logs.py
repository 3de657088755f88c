"""Where the ranks' output goes: the first of a machine has its terminal, the others files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

NAMES = ("rank", "local_rank", "world_size", "local_world_size", "node_rank")


class RankLogs(DefaultLogsSpecs):
    """Files in a folder for every local rank but the first.

    Args:
        folder: Gets a folder for each start, with one for each rank in it.
        stdout, stderr: Names of files instead, with ``{rank}`` and the like filled in.
    """

    def __init__(self, folder: str, stdout: str | None = None, stderr: str | None = None) -> None:
        super().__init__(log_dir=folder)
        self._stdout, self._stderr = stdout, stderr

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of each local rank; an empty name is the terminal."""
        self._redirects = {local_rank: Std.ALL for local_rank in envs if local_rank}
        found = super().reify(envs)
        return replace(
            found,
            stdouts=_named(found.stdouts, self._stdout, envs),
            stderrs=_named(found.stderrs, self._stderr, envs),
        )


def _named(files: dict[int, str], form: str | None, envs: dict[int, dict[str, str]]) -> dict[int, str]:
    if form is None:
        return files
    named = {}
    for local_rank, file in files.items():
        environment = {**envs[local_rank], "NODE_RANK": envs[local_rank].get("GROUP_RANK", "0")}
        name = form.format(**{name: environment.get(name.upper(), "") for name in NAMES})
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        named[local_rank] = name if file else file
    return named
