"""How parameters are updated, and at which learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from batchscape.config.types import (
    Affects,
    Count,
    Fraction,
    NonNegative,
    Positive,
    keyword_settings,
    settings,
)


@keyword_settings
class _UpdateRule:
    """Settings of every optimizer."""

    learning_rate: Annotated[Positive, Affects.LOSS]
    """Peak learning rate; of `muon` that of its matrices."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), Affects.LOSS] = 0.1
    """Weight decay of matrices, decoupled (of `sgd` an L2 penalty); vectors have none."""
    gradient_clip_norm: Annotated[Positive | None, Affects.LOSS | Affects.TIME] = 1.0
    """Largest norm of the whole gradient; null: no clipping."""


@keyword_settings
class _Moments(_UpdateRule):
    """Settings of AdamW, alone and beside Muon."""

    beta1: Annotated[Fraction, Affects.LOSS] = 0.9
    """Decay of AdamW's first moment, an optimizer step."""
    beta2: Annotated[Fraction, Affects.LOSS] = 0.95
    """Decay of AdamW's second moment, an optimizer step."""
    epsilon: Annotated[Positive, Affects.LOSS] = 1e-8
    """Added to AdamW's denominator."""


@settings
class AdamW(_Moments):
    """AdamW with decoupled weight decay (matrices only), PyTorch's fused kernel."""

    name: Literal["adamw"]


@keyword_settings
class Sgd(_UpdateRule):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"]
    momentum: Fraction = 0.9
    """Momentum, an optimizer step."""
    nesterov: bool = False
    """Nesterov's variant."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False), Affects.LOSS] = 0.0
    gradient_clip_norm: Annotated[Positive | None, Affects.LOSS | Affects.TIME] = None


@settings
class Muon(_Moments):
    """Muon with Nesterov's momentum for the matrices of hidden layers; AdamW for the rest."""

    name: Literal["muon"]
    momentum: Fraction = 0.95
    """Momentum of Muon, an optimizer step."""
    newton_schulz_steps: Annotated[int, Field(ge=1, lt=100), Affects.LOSS | Affects.TIME] = 5
    """Iterations of the orthogonalisation."""
    adamw_learning_rate: Annotated[Positive, Affects.LOSS] = 3e-4
    """Peak learning rate of AdamW, of embeddings, last layer and vectors; both follow one
    schedule."""


Optimizer = Annotated[AdamW | Sgd | Muon, Field(discriminator="name")]


@settings
class Scaling:
    """How the optimizer's settings follow the global batch B, from a reference batch B0."""

    reference_global_batch_size: Count | None = None
    """B0, the global batch for which the optimizer's settings are written; null: no rule is
    applied."""
    learning_rate: Literal["none", "linear", "sqrt"] = "none"
    """Learning rate times B / B0, or its root."""
    betas: Literal["none", "half_life"] = "none"
    """Adam's betas to the power B / B0: their half-lives in tokens are held."""
    weight_decay: Literal["none", "timescale"] = "none"
    """Weight decay such that its timescale in tokens, B / (learning rate x weight decay), is
    held."""

    def __post_init__(self) -> None:
        """Refuse a scaling rule without its reference batch, and the reverse."""
        rules = {self.learning_rate, self.betas, self.weight_decay} - {"none"}
        if bool(rules) != (self.reference_global_batch_size is not None):
            raise ValueError(
                "a scaling rule and reference_global_batch_size go together; given "
                f"scaling.learning_rate={self.learning_rate}, scaling.betas={self.betas}, "
                f"scaling.weight_decay={self.weight_decay} and reference_global_batch_size="
                f"{self.reference_global_batch_size or 'null'}: give the global batch that the "
                "optimizer's settings are for with a rule, or null with every rule none"
            )


@keyword_settings
class _Warmup:
    """The warm-up of every schedule."""

    warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises from zero."""


@settings
class Constant(_Warmup):
    """A linear warm-up to the peak learning rate, constant after it."""

    name: Literal["constant"]


@settings
class Cosine(_Warmup):
    """A linear warm-up, then half a cosine down to `final_fraction` of the peak."""

    name: Literal["cosine"]
    decay_samples: Count | None = None
    """Samples at which the decay ends; null: the end of the budget."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Last learning rate over the peak."""


@settings
class WarmupStableDecay(_Warmup):
    """A linear warm-up, a constant peak, and a decay at the end of the budget."""

    name: Literal["wsd"]
    decay_samples: Count
    """Samples of the decay, the last ones of the budget."""
    shape: Literal["linear", "sqrt"] = "linear"
    """Decay by a line, or by one minus the root of the part done."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Last learning rate over the peak."""


Schedule = Annotated[Constant | Cosine | WarmupStableDecay, Field(discriminator="name")]
