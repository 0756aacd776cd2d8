"""From a run to the engine of one rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from batchscape.config import CustomModel, Fsdp
from batchscape.engines.base import Engine
from batchscape.engines.declared import check_reported
from batchscape.errors import ConfigError
from batchscape.models.build import LossModule, build_model
from batchscape.models.checkpointing import checkpoint_activations
from batchscape.models.source import without_weights
from batchscape.record.spec import RunSpec

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
    draws: bool = True,
) -> Engine:
    """Build the model of a run on a device, and the engine that trains it."""
    name = spec.config.engine.name
    try:
        engine_module = importlib.import_module(f"batchscape.engines.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != _LIBRARIES.get(name):
            raise
        raise ConfigError(
            f"engine={name} needs {_LIBRARIES[name]}: pip install 'batchscape[{name}]'"
        ) from None
    in_parts = begins_in_parts(spec)
    module: nn.Module
    if draws or not in_parts:
        module = build_model(spec.config, spec.data, spec.precision)
    else:
        module = model_outline(spec)
    if device.type != "cpu" and not in_parts:
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
        **({"device": device} if isinstance(spec.config.engine, Fsdp) else {}),
    )
    check_reported(name, engine.reported(), spec.stages[0].geometry)
    return engine


def begins_in_parts(spec: RunSpec) -> bool:
    """Whether no device ever holds the whole model: ranks are given their parts of it."""
    return isinstance(spec.config.engine, Fsdp) and spec.geometry.data_parallel_size > 1


def model_outline(spec: RunSpec) -> LossModule:
    """Build the model of a run without values; one of the user's own code is built for real."""
    config = spec.config
    if isinstance(config.model, CustomModel):
        return build_model(config, spec.data, spec.precision)
    with torch.device("meta"):
        return build_model(without_weights(config), spec.data, spec.precision)
