"""The training system that executes an optimizer step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchscape.config.command import Command
from batchscape.config.types import Affects, keyword_settings, settings


@keyword_settings
class InProcess:
    """Settings of every engine that executes our own loop."""

    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Arithmetic: `bfloat16` and `float16` are mixed precision (autocast) over float32 parameters,
    `float16` with a scaled loss; `auto` is bfloat16 where the accelerator computes it natively and
    float32 elsewhere. `fsdp` has no `float16`, `accelerate` none on a CPU, `deepspeed` neither that
    nor `float64`."""
    float32_matmul: Annotated[Literal["highest", "high"], Affects.LOSS | Affects.TIME] = "highest"
    """Products of float32 matrices: in float32, or `high`: in TF32 where the device has it."""
    compile: bool = False
    """Compile the model; the time it takes is recorded apart. `deepspeed` is never compiled."""
    activation_checkpointing: Annotated[bool, Affects.COST] = False
    """Keep only the inputs of each block and compute the rest anew in the backward."""


@settings
class Ddp(InProcess):
    """PyTorch DistributedDataParallel; one rank trains without the wrapper."""

    name: Literal["ddp"]


@settings
class Fsdp(InProcess):
    """PyTorch FSDP2 (`fully_shard`): parameters, gradients and optimizer state are sharded."""

    name: Literal["fsdp"]
    reshard_after_forward: Annotated[bool, Affects.COST] = True
    """Free the gathered parameters of a block between its forward and its backward."""


@settings
class Accelerate(InProcess):
    """Hugging Face accelerate: `Accelerator.prepare`, `accumulate`, `backward`."""

    name: Literal["accelerate"]


@settings
class DeepSpeed(InProcess):
    """DeepSpeed with ZeRO; its configuration is generated from the geometry."""

    name: Literal["deepspeed"]
    zero_stage: Annotated[Literal[0, 1, 2, 3], Affects.COST] = 1
    """What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too; 2 and 3
    exchange gradients in every micro-step."""


@settings
class Fabric(InProcess):
    """Lightning Fabric: `Fabric.setup`, `no_backward_sync`, `backward`."""

    name: Literal["fabric"]


EngineSettings = Annotated[
    Ddp | Fsdp | Accelerate | DeepSpeed | Fabric | Command, Field(discriminator="name")
]


def cuts_updates(engine: EngineSettings) -> bool:
    """Return whether each rank updates a part of the parameters, and keeps their moments alone."""
    return isinstance(engine, Fsdp) or (isinstance(engine, DeepSpeed) and engine.zero_stage > 0)
