"""How a global batch is cut, and how long a run trains and is evaluated."""

from __future__ import annotations

from typing import Annotated

from batchscape.config.types import Affects, Count, Positive, keyword_settings, settings


def give_one(**sizes: int | None) -> None:
    """Refuse a length that is given in several sizes, or in none."""
    lengths = [f"{name}={size}" for name, size in sizes.items() if size is not None]
    if len(lengths) != 1:
        text = ", ".join(lengths) or "none of them"
        raise ValueError(f"give exactly one of {', '.join(sizes)}; got {text}")


@keyword_settings
class RampStage:
    """A part of the training with a global batch of its own."""

    samples: Count | None = None
    """Samples of this stage, a multiple of its global batch."""
    tokens: Count | None = None
    """The same in tokens (packed data)."""
    global_batch_size: Count
    """Samples per optimizer step in this stage."""
    learning_rate_factor: Positive | None = None
    """Learning rate of this stage over `optimizer.learning_rate`; null: as `scaling` says."""

    def __post_init__(self) -> None:
        """Refuse a stage whose length is given twice, or not at all."""
        give_one(samples=self.samples, tokens=self.tokens)


@settings
class Batch:
    """How one global batch is cut. What is null is derived; a remainder is refused."""

    nodes: Annotated[Count | None, Affects.COST] = None
    """Machines."""
    data_parallel_size: Annotated[Count | None, Affects.COST] = None
    """Data-parallel ranks in all, as many on each of the nodes."""
    micro_batch_size: Annotated[Count | None, Affects.COST] = None
    """Samples per rank per forward and backward."""
    gradient_accumulation_steps: Annotated[Count | None, Affects.COST] = None
    """Micro-steps per optimizer step, per rank."""
    global_batch_size: Annotated[Count | None, Affects.LOSS | Affects.TIME] = None
    """Samples per optimizer step."""
    global_batch_tokens: Annotated[Count | None, Affects.LOSS | Affects.TIME] = None
    """The same in tokens, a multiple of `data.sequence_length`."""
    ramp: tuple[RampStage, ...] = ()
    """Stages before the global batch above is reached, or all of them, where they fill the budget.
    Each is cut by the same rule: what is given of devices, micro-batch and accumulation holds in
    every stage. A stage has its samples or tokens, its global batch, and perhaps a learning rate as
    a factor of that of the optimizer, which is that of the last stage."""


@settings
class Budget:
    """How long to train: exactly one of the three sizes, perhaps a target, and when to give up."""

    samples: Count | None = None
    """Samples in all, a multiple of the global batch."""
    tokens: Count | None = None
    """Tokens in all, a multiple of global batch x sequence length (packed data)."""
    optimizer_steps: Count | None = None
    """Parameter updates in all."""
    target_loss: Positive | None = None
    """Stop at the first evaluation whose loss is at most this."""

    def __post_init__(self) -> None:
        """Refuse a budget with several sizes, or none."""
        steps = self.optimizer_steps
        give_one(samples=self.samples, tokens=self.tokens, optimizer_steps=steps)


@settings
class Evaluation:
    """Loss on a fixed held-out set, in fixed batches that do not depend on the geometry."""

    every_samples: Annotated[Count | None, Affects.LOSS] = None
    """Training samples between evaluations, a multiple of the global batch; null: only before
    the first and after the last step."""
    samples: Annotated[Count, Affects.LOSS] = 256
    """Held-out samples, the same ones at every evaluation."""
    batch_size: Annotated[Count, Affects.LOSS | Affects.MEMORY] = 64
    """Samples of a batch, which passes through the model in slices of a micro-batch at most."""
    ema_half_life_tokens: Positive | None = None
    """Evaluate an exponential moving average of the weights in which a weight counts half after so
    many training tokens; null: the weights themselves."""
