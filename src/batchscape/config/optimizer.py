"""How parameters are updated, and at which learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from batchscape.config.types import STRICT, Count, Fraction, NonNegative, Positive

__all__ = [
    "AdamW",
    "Constant",
    "Cosine",
    "Muon",
    "Optimizer",
    "Scaling",
    "Schedule",
    "Sgd",
    "WarmupStableDecay",
]


@dataclass(frozen=True, config=STRICT)
class AdamW:
    """AdamW with decoupled weight decay (matrices only), PyTorch's fused kernel."""

    name: Literal["adamw"]
    learning_rate: Positive
    """Peak learning rate. Scope: trajectory."""
    beta1: Fraction = 0.9
    """Decay of the first moment, an optimizer step. Scope: trajectory."""
    beta2: Fraction = 0.95
    """Decay of the second moment, an optimizer step. Scope: trajectory."""
    epsilon: Positive = 1e-8
    """Added to the denominator. Scope: trajectory."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decoupled weight decay of matrices; vectors have none. Scope: trajectory."""
    gradient_clip_norm: Positive | None = 1.0
    """Largest norm of the whole gradient; null: no clipping. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Sgd:
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    learning_rate: Positive
    """Peak learning rate. Scope: trajectory."""
    momentum: Fraction = 0.9
    """Momentum, an optimizer step. Scope: trajectory."""
    nesterov: bool = False
    """Nesterov's variant. Scope: trajectory."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """L2 penalty on matrices; vectors have none. Scope: trajectory."""
    gradient_clip_norm: Positive | None = None
    """Largest norm of the whole gradient; null: no clipping. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Muon:
    """Muon for the matrices of hidden layers; AdamW for embeddings, last layer and vectors."""

    name: Literal["muon"]
    learning_rate: Positive
    """Peak learning rate of Muon. Scope: trajectory."""
    momentum: Fraction = 0.95
    """Momentum of Muon, an optimizer step. Scope: trajectory."""
    nesterov: bool = True
    """Nesterov's variant. Scope: trajectory."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Iterations of the orthogonalisation. Scope: trajectory."""
    adamw_learning_rate: Positive = 3e-4
    """Peak learning rate of AdamW; both follow one schedule. Scope: trajectory."""
    beta1: Fraction = 0.9
    """AdamW's decay of the first moment, an optimizer step. Scope: trajectory."""
    beta2: Fraction = 0.95
    """AdamW's decay of the second moment, an optimizer step. Scope: trajectory."""
    epsilon: Positive = 1e-8
    """Added to AdamW's denominator. Scope: trajectory."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Decoupled weight decay of matrices; vectors have none. Scope: trajectory."""
    gradient_clip_norm: Positive | None = 1.0
    """Largest norm of the whole gradient; null: no clipping. Scope: trajectory."""


Optimizer = Annotated[AdamW | Sgd | Muon, Field(discriminator="name")]


@dataclass(frozen=True, config=STRICT)
class Scaling:
    """How the optimizer's settings follow the global batch B, from a reference batch B0."""

    reference_global_batch_size: Count | None = None
    """B0, the global batch for which the optimizer's settings are written; null: no rule is
    applied. Scope: trajectory."""
    learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """Learning rate times B / B0, or its root. Scope: trajectory."""
    betas: Literal["none", "half_life"] = "none"
    """Adam's betas to the power B / B0: their half-lives in tokens are held. Scope: trajectory."""
    weight_decay: Literal["none", "timescale"] = "none"
    """Weight decay such that its timescale in tokens, B / (learning rate x weight decay), is held.
    Scope: trajectory."""

    def __post_init__(self) -> None:
        """Check the rule that no single field can state."""
        rules = {self.learning_rate, self.betas, self.weight_decay} - {"none"}
        if bool(rules) != (self.reference_global_batch_size is not None):
            msg = (
                "scaling rules need a reference_global_batch_size, and it needs a rule; given "
                f"reference_global_batch_size={self.reference_global_batch_size}, "
                f"learning_rate={self.learning_rate}, betas={self.betas}, "
                f"weight_decay={self.weight_decay}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, config=STRICT)
class Constant:
    """A linear warm-up to the peak learning rate, constant after it."""

    name: Literal["constant"]
    warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises from zero. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class Cosine:
    """A linear warm-up, then half a cosine down to `final_fraction` of the peak."""

    name: Literal["cosine"]
    warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises from zero. Scope: trajectory."""
    decay_samples: Count | None = None
    """Samples at which the decay ends; null: the end of the budget. Scope: trajectory."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Last learning rate over the peak. Scope: trajectory."""


@dataclass(frozen=True, config=STRICT)
class WarmupStableDecay:
    """A linear warm-up, a constant peak, and a decay at the end of the budget."""

    name: Literal["wsd"]
    decay_samples: Count
    """Samples of the decay, the last ones of the budget. Scope: trajectory."""
    warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises from zero. Scope: trajectory."""
    shape: Literal["linear", "sqrt"] = "linear"
    """Decay by a line, or by one minus the root of the part done. Scope: trajectory."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Last learning rate over the peak. Scope: trajectory."""


Schedule = Annotated[Constant | Cosine | WarmupStableDecay, Field(discriminator="name")]
