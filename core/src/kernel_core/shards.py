"""This rank's part of a tensor, without an import of the distributed tensors that are asked about."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def local(tensor: Any) -> Tensor:
    """Return the part of ``tensor`` that this rank holds, which shares its memory; a plain tensor is its own part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]
