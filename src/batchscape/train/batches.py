"""Moving a batch to where it is used."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["to_device"]


def to_device(
    batch: tuple[Tensor, Tensor], device: torch.device, precision: str
) -> tuple[Tensor, Tensor]:
    """Move inputs and labels to a device; real-valued inputs take the model's precision."""
    inputs, labels = batch
    if inputs.is_floating_point() and precision == "float64":
        inputs = inputs.double()
    if device.type == "cuda":
        return (
            inputs.pin_memory().to(device, non_blocking=True),
            labels.pin_memory().to(device, non_blocking=True),
        )
    return inputs, labels
