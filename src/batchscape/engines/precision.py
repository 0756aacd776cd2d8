"""The arithmetic of forward passes, in training and in evaluation."""

from __future__ import annotations

import torch

__all__ = ["autocast"]

_LOWER = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def autocast(device_type: str, precision: str) -> torch.autocast:
    """Return a context in which operations that bear it are computed in a lower precision.

    Parameters
    ----------
    device_type : str
        `cpu` or `cuda`.
    precision : str
        `bfloat16` or `float16`; in others nothing is lowered.
    """
    lower = _LOWER.get(precision)
    return torch.autocast(device_type, lower, enabled=lower is not None)
