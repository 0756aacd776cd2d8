"""Code on a CUDA device that must not make the host wait."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["no_waiting"]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let PyTorch raise at every operation for which the host waits for the device.

    PyTorch warns once that this is a prototype, where warnings are errors before it is switched on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
