"""Which device to train on, by the names people use."""

from __future__ import annotations

import torch

from kernel_core.errors import TrainerError
from kernel_core.naming import did_you_mean

KNOWN = ("cpu", "cuda", "gpu", "mps", "xpu")


def resolve_device(device: str | torch.device | None) -> torch.device:
    """Return the device for ``device``; None means the accelerator if there is one, else the CPU; ``gpu`` means cuda.

    Raises:
        TrainerError: the name is unknown, or this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return accelerator or torch.device("cpu")
    name = str(device)
    kind, _, index = name.partition(":")
    if kind == "gpu":
        kind, name = "cuda", "cuda" + (f":{index}" if index else "")
    try:
        resolved = torch.device(name)
    except RuntimeError:
        raise TrainerError(
            f"device: unknown device {name!r}.{did_you_mean(kind, KNOWN)} Expected one of {', '.join(KNOWN)}."
        ) from None
    if resolved.type not in ("cpu", "meta") and (accelerator is None or accelerator.type != resolved.type):
        present = f"an accelerator of type {accelerator.type}" if accelerator else "no accelerator"
        raise TrainerError(f"device: {str(device)!r} was asked for, and this machine has {present}. Use device='cpu'.")
    return resolved
