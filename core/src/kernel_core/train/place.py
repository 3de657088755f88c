"""Which of the processes of a run this one is, from the environment that launchers set. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kernel_core.errors import ParallelismError


@dataclass(frozen=True)
class Place:
    """This process among all.

    Attributes:
        rank, world_size: Among all processes.
        local_rank, local_world_size: Among those of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def of_environment(cls) -> Place:
        """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``; a process without them is alone.

        Raises:
            ParallelismError: one is no number, or they do not fit together.
        """
        world_size = _number("WORLD_SIZE", 1)
        rank = _number("RANK", 0 if world_size == 1 else None)
        local_rank = _number("LOCAL_RANK", rank)
        local_world_size = _number("LOCAL_WORLD_SIZE", world_size)
        if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
            raise ParallelismError(
                f"parallelism: RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} and "
                f"LOCAL_WORLD_SIZE={local_world_size} do not fit together. Expected ranks from 0 to one less than the size. "
                "Start with kernel launch or torchrun, which set them."
            )
        return cls(rank, world_size, local_rank, local_world_size)


def _number(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ParallelismError(
            f"parallelism: the environment has {name}={text!r}. Expected a whole number, as torchrun and kernel launch set it."
        )
    return int(text)
