"""From a run to the engine of one rank."""

from __future__ import annotations

import torch

from batchscape.engines.base import Engine
from batchscape.engines.ddp import DdpEngine
from batchscape.models import build_model
from batchscape.models.checkpointing import checkpoint_activations
from batchscape.record.spec import RunSpec

__all__ = ["build_engine"]


def build_engine(spec: RunSpec, device: torch.device) -> Engine:
    """Build the model of a run on a device, and the engine that trains it.

    Parameters
    ----------
    spec : RunSpec
    device : torch.device
        Of this rank.

    Raises
    ------
    ConfigError
        If the model does not fit the data, cannot be built, or has no blocks to recompute.
    """
    module = build_model(spec.config, spec.data, spec.precision).to(device)
    if spec.config.engine.activation_checkpointing:
        checkpoint_activations(module)
    return DdpEngine(
        module,
        spec.config.engine,
        spec.stages[0].optimizer,
        spec.precision,
        spec.geometry.data_parallel_size,
    )
