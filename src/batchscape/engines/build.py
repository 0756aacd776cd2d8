"""From a run to the engine of one rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from batchscape.engines.base import Engine
from batchscape.engines.declared import check_reported
from batchscape.errors import ConfigError
from batchscape.models.build import build_model
from batchscape.models.checkpointing import checkpoint_activations
from batchscape.record.spec import RunSpec

__all__ = ["build_engine"]

_ENGINES = {
    "ddp": "DdpEngine",
    "fsdp": "fsdp_engine",
    "accelerate": "AccelerateEngine",
    "deepspeed": "DeepSpeedEngine",
    "fabric": "FabricEngine",
}
"""Class of each engine, or what returns an instance, in the module of its name."""
_LIBRARIES = {"accelerate": "accelerate", "deepspeed": "deepspeed", "fabric": "lightning_fabric"}
"""What an engine imports that not everyone has; the extra to install has the engine's name."""


def build_engine(
    spec: RunSpec,
    device: torch.device,
    examine: Callable[[nn.Module], None] | None = None,
) -> Engine:
    """Build the model of a run on a device, and the engine that trains it.

    Parameters
    ----------
    spec : RunSpec
    device : torch.device
        Of this rank.
    examine : callable, optional
        Shown the model as it was written, whole and on the device, before anything wraps it.

    Raises
    ------
    ConfigError
        If the model does not fit the data, cannot be built, has no blocks to recompute, or the
        engine's library is not installed.
    BatchscapeError
        If the engine's library has another geometry than the run.
    """
    name = spec.config.engine.name
    try:
        engine_module = importlib.import_module(f"batchscape.engines.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _LIBRARIES.get(name):
            raise
        msg = f"engine={name} needs {_LIBRARIES[name]}: pip install 'batchscape[{name}]'"
        raise ConfigError(msg) from None
    module: nn.Module = build_model(spec.config, spec.data, spec.precision)
    if device.type != "cpu":
        module = module.to(device)
    if examine is not None:
        examine(module)
    if spec.config.in_process.activation_checkpointing:
        checkpoint_activations(module)
    engine: Engine = getattr(engine_module, _ENGINES[name])(
        module,
        spec.config.engine,
        spec.stages[0].optimizer,
        spec.precision,
        spec.stages[0].geometry,
    )
    check_reported(name, engine.reported(), spec.stages[0].geometry)
    return engine
