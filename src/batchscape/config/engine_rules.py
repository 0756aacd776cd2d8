"""What an engine cannot do together with other settings."""

from __future__ import annotations

from batchscape.config.batch import Batch, Evaluation
from batchscape.config.engine import Accelerate, DeepSpeed, Engine, Fsdp, cuts_updates
from batchscape.config.optimizer import Muon, Optimizer


def engine_cannot(
    engine: Engine, optimizer: Optimizer, batch: Batch, evaluation: Evaluation
) -> str | None:
    """Say what an engine is asked for and cannot do; None where it can do all.

    Parameters
    ----------
    engine : Engine
    optimizer : Optimizer
    batch : Batch
    evaluation : Evaluation
    """
    lacks = {Fsdp: {"float16"}, DeepSpeed: {"float16", "float64"}}.get(type(engine), set())
    if engine.precision in lacks:
        return (
            f"engine={engine.name} has no {engine.precision}, got engine.precision="
            f"{engine.precision}; use float32 or bfloat16, or engine=ddp"
        )
    if isinstance(engine, DeepSpeed) and engine.compile:
        return (
            "engine=deepspeed exchanges by hooks in the model, which a compiler would take in; got "
            "engine.compile=true; use engine=ddp or fsdp, or engine.compile=false"
        )
    stage = engine.zero_stage if isinstance(engine, DeepSpeed) else 0
    if isinstance(optimizer, Muon) and cuts_updates(engine):
        cuts = "engine=fsdp" if stage == 0 else f"engine=deepspeed with zero_stage={stage}"
        return (
            f"optimizer=muon needs whole matrices in every update, and {cuts} gives each rank a "
            "part of them; use optimizer=adamw, engine=ddp, or engine=deepspeed with zero_stage=0"
        )
    if evaluation.ema_half_life_tokens is not None and stage == 3:
        return (
            "evaluation.ema_half_life_tokens averages parameters where they are, and "
            "engine=deepspeed with zero_stage=3 keeps them apart from the model; set it to null, "
            "or use zero_stage of at most 2, or engine=fsdp"
        )
    if batch.ramp and isinstance(engine, Accelerate | DeepSpeed):
        return (
            f"batch.ramp changes the geometry during the training, and engine={engine.name} is "
            "given one geometry when it is built; use engine=ddp, fsdp or fabric, or no ramp"
        )
    return None
