"""Values as plain data in which nothing is rounded, to compare runs across processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def exact(value: Any) -> Any:
    """Return ``value`` as plain data in which nothing is rounded; tensors as kind and checksum."""
    if isinstance(value, torch.Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        if value.ndim == 0:
            return exact(value.item())
        data = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return f"{str(value.dtype)[6:]}{list(value.shape)} {hashlib.sha1(data).hexdigest()[:12]}"
    if isinstance(value, np.ndarray):
        return exact(torch.from_numpy(value.copy()))
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): exact(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [exact(one) for one in value]
    return value if isinstance(value, int | str | bool | None) else repr(value)
