"""How a global batch is cut, and how long a run trains and is evaluated."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from batchscape.config.types import STRICT, Count, Positive

__all__ = [
    "Batch",
    "Budget",
    "Evaluation",
    "RampStage",
]


@dataclass(frozen=True, config=STRICT)
class RampStage:
    """A part of the training with a global batch of its own."""

    samples: Count
    """Samples of this stage, a multiple of its global batch. Scope: trajectory."""
    global_batch_size: Count
    """Samples per optimizer step in this stage. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Batch:
    """How one global batch is cut. What is null is derived; a remainder is refused."""

    nodes: Count | None = None
    """Machines. Scope: run."""
    devices_per_node: Count | None = None
    """Data-parallel ranks on each machine. Scope: run."""
    data_parallel_size: Count | None = None
    """Data-parallel ranks in all, `nodes` x `devices_per_node`. Scope: run."""
    micro_batch_size: Count | None = None
    """Samples per rank per forward and backward. Scope: run."""
    gradient_accumulation_steps: Count | None = None
    """Micro-steps per optimizer step, per rank. Scope: run."""
    global_batch_size: Count | None = None
    """Samples per optimizer step. Scope: trajectory."""
    global_batch_tokens: Count | None = None
    """The same in tokens, a multiple of `data.sequence_length`. Scope: trajectory."""
    ramp: tuple[RampStage, ...] = ()
    """Stages before the global batch above is reached, each cut by the same rule: what is given of
    devices, micro-batch and accumulation holds in every stage. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Budget:
    """How long to train: exactly one of the three sizes, perhaps a target, and when to give up."""

    samples: Count | None = None
    """Samples in all, a multiple of the global batch. Scope: trajectory."""
    tokens: Count | None = None
    """Tokens in all, a multiple of global batch x sequence length (packed data). Scope:
    trajectory."""
    optimizer_steps: Count | None = None
    """Parameter updates in all. Scope: trajectory."""
    target_loss: Positive | None = None
    """Stop at the first evaluation whose loss is at most this. Scope: trajectory."""
    divergence_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 10.0
    """A run is diverged once its training loss was above this many times the lowest loss of its
    first 10 optimizer steps for `divergence_steps` optimizer steps in a row; null: only once a loss
    or gradient is not finite. The rule is in `train.divergence`. Scope: trajectory."""
    divergence_steps: Count = 20
    """Optimizer steps in a row that decide it. Scope: trajectory."""

    def __post_init__(self) -> None:
        """Check the rule that no single field can state."""
        given = {
            name: getattr(self, name)
            for name in ("samples", "tokens", "optimizer_steps")
            if getattr(self, name) is not None
        }
        if len(given) != 1:
            shown = ", ".join(f"{k}={v}" for k, v in given.items()) or "none of them"
            msg = f"give exactly one of samples, tokens, optimizer_steps; got {shown}"
            raise ValueError(msg)


@dataclass(frozen=True, config=STRICT)
class Evaluation:
    """Loss on a fixed held-out set, in fixed batches that do not depend on the geometry."""

    every_samples: Count | None = None
    """Training samples between evaluations, a multiple of the global batch; null: only before
    the first and after the last step. Scope: trajectory."""
    samples: Count = 256
    """Held-out samples, the same ones at every evaluation. Scope: trajectory."""
    batch_size: Count = 64
    """Samples a forward pass. Scope: trajectory."""
    ema_half_life_tokens: Positive | None = None
    """Evaluate an exponential moving average of the weights in which a weight counts half after so
    many training tokens; null: the weights themselves. Scope: trajectory."""
