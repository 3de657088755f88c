"""In which dtypes parameters are gathered and gradients reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from kernel_core.errors import OptionError
from torch.distributed.fsdp import MixedPrecisionPolicy

LOW: Mapping[str, torch.dtype] = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16, "amp_fp8": torch.bfloat16}
WORDS = {
    **LOW,
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


def policy(mixed_precision: str | Mapping[str, Any], precision: str) -> MixedPrecisionPolicy:
    """Return torch's policy.

    Args:
        mixed_precision: ``FULL`` keeps everything as it is, ``DEFAULT`` computes in the low precision of the run and reduces
            in fp32, ``PURE`` reduces in it too; or the dtypes by name.
        precision: Of the run. With ``fp32`` there is no low precision, and the words change nothing.

    Raises:
        OptionError: an unknown key or dtype.
    """
    if isinstance(mixed_precision, str):
        low = LOW.get(precision)
        if mixed_precision == "FULL" or low is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(low, low if mixed_precision == "PURE" else torch.float32)
    if unknown := [key for key in mixed_precision if key not in KEYS]:
        raise OptionError(f"fsdp.mixed_precision.{unknown[0]}: unknown key. Expected {', '.join(KEYS)}.")
    param, reduce = (_dtype(key, mixed_precision.get(key)) for key in KEYS[:2])
    return MixedPrecisionPolicy(param, reduce)


def _dtype(key: str, value: Any) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    if value not in WORDS:
        raise OptionError(f"fsdp.mixed_precision.{key}: got {value!r}. Expected one of {', '.join(WORDS)}.")
    return WORDS[value]
