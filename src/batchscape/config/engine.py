"""Which training system executes an optimizer step, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from batchscape.config.command import Command
from batchscape.config.types import STRICT, Positive

__all__ = ["Accelerate", "Command", "Ddp", "DeepSpeed", "Engine", "Fabric", "Fsdp", "InProcess"]


@dataclass(frozen=True, config=STRICT)
class Ddp:
    """PyTorch DistributedDataParallel; one rank trains without the wrapper."""

    name: Literal["ddp"]
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Arithmetic: `bfloat16` and `float16` are autocast over float32 parameters, `float16` with a
    scaled loss; `auto` is bfloat16 where the accelerator computes it natively and float32
    elsewhere. Scope: trajectory."""
    float32_matmul: Literal["highest", "high"] = "highest"
    """Products of float32 matrices: in float32, or `high`: in TF32 where the device has it.
    Scope: trajectory."""
    compile: bool = False
    """Compile the model; the time it takes is recorded apart. Scope: trajectory."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block and compute the rest anew in the backward. Scope: run."""
    bucket_cap_mb: Positive = 25.0
    """Size of a gradient bucket, in MiB. Scope: run."""


@dataclass(frozen=True, config=STRICT)
class Fsdp:
    """PyTorch FSDP2 (`fully_shard`): parameters, gradients and optimizer state are sharded."""

    name: Literal["fsdp"]
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Arithmetic: `bfloat16` is autocast over float32 parameters. Scope: trajectory."""
    float32_matmul: Literal["highest", "high"] = "highest"
    """Products of float32 matrices, see `ddp`. Scope: trajectory."""
    compile: bool = False
    """Compile the model; the time it takes is recorded apart. Scope: trajectory."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block and compute the rest anew in the backward. Scope: run."""
    reshard_after_forward: bool = True
    """Free the gathered parameters of a block between its forward and its backward. Scope: run."""
    exchange_every_micro_step: bool = False
    """Reduce and shard the gradient in every micro-step: more exchange, and no rank ever holds a
    whole gradient. Scope: run."""


@dataclass(frozen=True, config=STRICT)
class Accelerate:
    """Hugging Face accelerate: `Accelerator.prepare`, `accumulate`, `backward`."""

    name: Literal["accelerate"]
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Arithmetic: `bfloat16` and `float16` are accelerate's mixed precision; it has no `float16` on
    a CPU. Scope: trajectory."""
    float32_matmul: Literal["highest", "high"] = "highest"
    """Products of float32 matrices, see `ddp`. Scope: trajectory."""
    compile: bool = False
    """Compile the model; the time it takes is recorded apart. Scope: trajectory."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block and compute the rest anew in the backward. Scope: run."""


@dataclass(frozen=True, config=STRICT)
class DeepSpeed:
    """DeepSpeed with ZeRO; its configuration is generated from the geometry."""

    name: Literal["deepspeed"]
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic: `bfloat16` is autocast over float32 parameters. Scope: trajectory."""
    float32_matmul: Literal["highest", "high"] = "highest"
    """Products of float32 matrices, see `ddp`. Scope: trajectory."""
    compile: Literal[False] = False
    """Never: its hooks in the model are its exchange, and a compiler would take them in. Scope:
    trajectory."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block and compute the rest anew in the backward. Scope: run."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """What is sharded: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too; 2 and 3
    exchange gradients in every micro-step. Scope: run."""


@dataclass(frozen=True, config=STRICT)
class Fabric:
    """Lightning Fabric: `Fabric.setup`, `no_backward_sync`, `backward`."""

    name: Literal["fabric"]
    precision: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Arithmetic: `bfloat16` and `float16` are Fabric's mixed precision. Scope: trajectory."""
    float32_matmul: Literal["highest", "high"] = "highest"
    """Products of float32 matrices, see `ddp`. Scope: trajectory."""
    compile: bool = False
    """Compile the model; the time it takes is recorded apart. Scope: trajectory."""
    activation_checkpointing: bool = False
    """Keep only the inputs of each block and compute the rest anew in the backward. Scope: run."""


InProcess = Ddp | Fsdp | Accelerate | DeepSpeed | Fabric
"""Engines that execute our own loop."""

Engine = Annotated[InProcess | Command, Field(discriminator="name")]
