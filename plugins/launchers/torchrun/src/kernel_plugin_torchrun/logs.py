"""Where the ranks' output goes: the first of a machine has its terminal, the others files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

from kernel_plugin_torchrun.configuration import NAMES


class RankLogs(DefaultLogsSpecs):
    """Files in a folder for every local rank but the first.

    Args:
        folder: Gets a folder for each start, with one for each rank in it.
        stdout, stderr: Names of files instead, with ``{rank}`` and the like filled in.
        before_start: Is called with 0 before the ranks start, with 1, 2, ... before they start again, and with ``files``.

    Attributes:
        files: What the ranks wrote last: standard errors and torch's error files, by local rank.
    """

    def __init__(
        self,
        folder: str,
        stdout: str | None = None,
        stderr: str | None = None,
        *,
        before_start: Callable[[int, LogsDest], None],
    ) -> None:
        super().__init__(log_dir=folder)
        self._stdout, self._stderr, self._before_start = stdout, stderr, before_start
        self.files = LogsDest()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of each local rank; an empty name is the terminal."""
        self._before_start(int(envs[0]["TORCHELASTIC_RESTART_COUNT"]), self.files)
        self._redirects = {local_rank: Std.ALL for local_rank in envs if local_rank}
        found = super().reify(envs)
        self.files = replace(
            found,
            stdouts=_named(found.stdouts, self._stdout, envs),
            stderrs=_named(found.stderrs, self._stderr, envs),
        )
        return self.files


def _named(files: dict[int, str], form: str | None, envs: dict[int, dict[str, str]]) -> dict[int, str]:
    if form is None:
        return files
    named = {}
    for local_rank, file in files.items():
        environment = {**envs[local_rank], "NODE_RANK": envs[local_rank].get("GROUP_RANK", "0")}
        name = form.format(**{name: environment.get(name.upper(), "") for name in NAMES})
        if file:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
        named[local_rank] = name if file else file
    return named
