"""Moving a batch to where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from batchscape.device import is_accelerator
from batchscape.record.status import OUT_OF_MEMORY


@contextmanager
def pinning() -> Iterator[None]:
    """Turn CUDA's error for exhausted pinned memory, which is the host's, into a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        if OUT_OF_MEMORY.search(str(error)) is None:
            raise
        raise MemoryError(
            "the host has no memory left to pin, or its limit is reached (ulimit -l)"
        ) from error


def to_device(
    batch: tuple[Tensor, Tensor], device: torch.device, precision: str
) -> tuple[Tensor, Tensor]:
    """Move inputs and labels to a device; real-valued inputs take the model's precision."""
    inputs, labels = batch
    if inputs.is_floating_point() and precision == "float64":
        inputs = inputs.double()
    if is_accelerator(device):
        with pinning():
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        return inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    return inputs, labels
