"""Numbers that tests hold others against."""

from __future__ import annotations

import torch

from batchscape.config import RunConfig
from batchscape.models.build import build_model
from batchscape.record.spec import DataIdentity

__all__ = ["count_parameters"]


def count_parameters(config: RunConfig, data: DataIdentity) -> int:
    """Count the parameters of the plain model, built without values."""
    with torch.device("meta"):
        module = build_model(config, data, "float32")
    return sum(parameter.numel() for parameter in module.parameters())
