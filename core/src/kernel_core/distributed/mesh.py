"""The mesh: how the ranks are laid out along named axes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kernel_core.errors import ParallelismError


def resolve_axes(axes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Return the number of ranks along each axis, with the one that is -1 filled in.

    Args:
        axes: In the order of the mesh; neighbouring ranks differ in the last one.
        world_size: All ranks.

    Raises:
        ParallelismError: the numbers do not multiply to ``world_size``, or several are -1.
    """
    shape = ", ".join(f"{axis} {degree}" for axis, degree in axes.items())
    open_axes = [axis for axis, degree in axes.items() if degree == -1]
    wrong = [axis for axis, degree in axes.items() if degree != -1 and degree < 1]
    if wrong or len(open_axes) > 1:
        raise ParallelismError(
            f"parallelism: the mesh is to have {shape}. Expected at least 1 along each axis, and -1, for all that is left, "
            "along one at most."
        )
    fixed = math.prod(degree for degree in axes.values() if degree != -1)
    if world_size % fixed or (not open_axes and fixed != world_size):
        some = "a multiple of " if open_axes else ""
        raise ParallelismError(
            f"parallelism: the mesh is to have {shape}, and the run has {world_size} ranks. Expected {some}{fixed}. "
            "Start as many processes, or change the degrees."
        )
    return {axis: world_size // fixed if degree == -1 else degree for axis, degree in axes.items()}
