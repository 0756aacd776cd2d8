"""Every setting of one run, with its unit and scope, validated once before anything launches.

`RunConfig.from_mapping` takes the plain mapping that Hydra composed (or that a test wrote) and
either returns a validated configuration or raises `ConfigError` with one line per problem.
The scope of a setting is what it changes:

* *trajectory*: it decides the loss curve, and is part of `trajectory_id`;
* *run*: it decides memory and time but not the loss curve, and is part of `run_id`;
* *display*: it changes neither, and an identical run is not repeated because of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from batchscape.config_messages import explain
from batchscape.errors import ConfigError

__all__ = [
    "AdamW",
    "Batch",
    "Budget",
    "Checkpoint",
    "Constant",
    "Cosine",
    "Ddp",
    "Digits",
    "Evaluation",
    "Gpt",
    "Local",
    "Measure",
    "Mlp",
    "NoTracker",
    "RunConfig",
    "Sgd",
    "StandardLibrary",
    "TextFiles",
    "WandbTracker",
]

_STRICT = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


@dataclass(frozen=True, config=_STRICT)
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


@dataclass(frozen=True, config=_STRICT)
class Gpt:
    """A decoder-only transformer: pre-norm, learned positions, tied embeddings, SDPA."""

    name: Literal["gpt"]
    n_layers: Count
    """Transformer blocks. Scope: trajectory."""
    n_heads: Count
    """Attention heads; must divide `d_model`. Scope: trajectory."""
    d_model: Count
    """Width of the residual stream. Scope: trajectory."""
    dropout: Fraction = 0.0
    """Dropout probability; above 0 a run is not decomposition-invariant. Scope: trajectory."""

    def __post_init__(self) -> None:
        """Check the rule that no single field can state."""
        if self.d_model % self.n_heads:
            msg = (
                f"n_heads must divide d_model: {self.d_model} % {self.n_heads} = "
                f"{self.d_model % self.n_heads}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, config=_STRICT)
class Mlp:
    """A multi-layer perceptron with GELU, for classification."""

    name: Literal["mlp"]
    hidden_sizes: list[Count]
    """Width of each hidden layer. Scope: trajectory."""
    dropout: Fraction = 0.0
    """Dropout probability; above 0 a run is not decomposition-invariant. Scope: trajectory."""


Model = Annotated[Gpt | Mlp, Field(discriminator="name")]
Layout = Literal["packed", "padded"]


@dataclass(frozen=True, config=_STRICT)
class StandardLibrary:
    """Bytes of the Python standard library's own source: real text that is always there."""

    name: Literal["stdlib"]
    sequence_length: Annotated[int, Field(ge=2)] = 64
    """Tokens (bytes) a sample. Scope: trajectory."""
    layout: Layout = "packed"
    """`packed`: every sample is full; `padded`: a sample is one block of text of its own length,
    padded to `sequence_length`, and only its real tokens count. Scope: trajectory."""
    held_out_pct: Annotated[float, Field(gt=0, lt=100)] = 5.0
    """Share of the files kept for evaluation, in percent. Scope: trajectory."""


@dataclass(frozen=True, config=_STRICT)
class TextFiles:
    """Bytes of a plain-text file, or of all text files under a folder."""

    name: Literal["text"]
    path: str
    """The file or folder. A single file is split by position. Scope: trajectory (its content)."""
    sequence_length: Annotated[int, Field(ge=2)] = 64
    """Tokens (bytes) a sample. Scope: trajectory."""
    layout: Layout = "packed"
    """As for the standard library. Scope: trajectory."""
    held_out_pct: Annotated[float, Field(gt=0, lt=100)] = 5.0
    """Share of the files (of the bytes, for a single file) kept for evaluation, in percent.
    Scope: trajectory."""


@dataclass(frozen=True, config=_STRICT)
class Digits:
    """scikit-learn's 1797 images of handwritten digits, 8 x 8 pixels, 10 classes."""

    name: Literal["digits"]
    held_out_pct: Annotated[float, Field(gt=0, lt=100)] = 20.0
    """Share of the images kept for evaluation, in percent. Scope: trajectory."""


Data = Annotated[StandardLibrary | TextFiles | Digits, Field(discriminator="name")]


@dataclass(frozen=True, config=_STRICT)
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


@dataclass(frozen=True, config=_STRICT)
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


Optimizer = Annotated[AdamW | Sgd, Field(discriminator="name")]


@dataclass(frozen=True, config=_STRICT)
class Constant:
    """A linear warm-up to the peak learning rate, constant after it."""

    name: Literal["constant"]
    warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises from zero. Scope: trajectory."""


@dataclass(frozen=True, config=_STRICT)
class Cosine:
    """A linear warm-up, then half a cosine down to `final_fraction` of the peak."""

    name: Literal["cosine"]
    warmup_samples: NonNegative = 0
    """Samples over which the learning rate rises from zero. Scope: trajectory."""
    decay_samples: Count | None = None
    """Samples at which the decay ends; null: the end of the budget. Scope: trajectory."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Last learning rate over the peak. Scope: trajectory."""


Schedule = Annotated[Constant | Cosine, Field(discriminator="name")]


@dataclass(frozen=True, config=_STRICT)
class Budget:
    """How long to train: exactly one of the three sizes, and perhaps a target."""

    samples: Count | None = None
    """Samples in all, a multiple of the global batch. Scope: trajectory."""
    tokens: Count | None = None
    """Tokens in all, a multiple of global batch x sequence length (packed data). Scope:
    trajectory."""
    optimizer_steps: Count | None = None
    """Parameter updates in all. Scope: trajectory."""
    target_loss: Positive | None = None
    """Stop at the first evaluation whose loss is at most this. Scope: trajectory."""

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


@dataclass(frozen=True, config=_STRICT)
class Evaluation:
    """Loss on a fixed held-out set, in fixed batches that do not depend on the geometry."""

    every_samples: Count | None = None
    """Training samples between evaluations, a multiple of the global batch; null: only before
    the first and after the last step. Scope: trajectory."""
    samples: Count = 256
    """Held-out samples, the same ones at every evaluation. Scope: trajectory."""
    batch_size: Count = 64
    """Samples a forward pass. Scope: trajectory."""


@dataclass(frozen=True, config=_STRICT)
class Ddp:
    """PyTorch DistributedDataParallel; one rank trains without the wrapper."""

    name: Literal["ddp"]
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Arithmetic: `bfloat16` is autocast over float32 parameters; `auto` is bfloat16 where the
    accelerator computes it natively and float32 elsewhere. Scope: trajectory."""
    compile: bool = False
    """Compile the model; the time it takes is recorded apart. Scope: trajectory."""
    bucket_cap_mb: Positive = 25.0
    """Size of a gradient bucket, in MiB. Scope: run."""


@dataclass(frozen=True, config=_STRICT)
class Checkpoint:
    """When the state of a run is written, so that it can go on after an interruption."""

    every_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 120.0
    """Least time between checkpoints, in seconds; 0: at every drain of the recorder; null: only
    when interrupted. Scope: display."""
    keep_last: Count = 2
    """Checkpoints kept. Scope: display."""


@dataclass(frozen=True, config=_STRICT)
class Measure:
    """What is measured beside the loss."""

    warmup_optimizer_steps: NonNegative = 5
    """First optimizer steps that stay out of step-time figures. Scope: display."""
    memory: bool = True
    """Measure peak memory; on CPU this is a short probe before training. Scope: run."""


@dataclass(frozen=True, config=_STRICT)
class Local:
    """Runs on this machine."""

    name: Literal["local"]
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA devices where there are any. Its outcome is part of a run. Scope: run."""
    concurrent_runs: Count = 1
    """Runs at the same time; above 1 their times stay out of comparisons. Scope: display."""
    max_ranks_per_core: Count = 2
    """CPU ranks a core at most; above 1 a run may be oversubscribed, and its times stay out of
    comparisons. Wider runs are rejected. Scope: display."""
    timeout_s: Positive | None = None
    """Longest time a run may take; null: no limit. Scope: display."""
    order_seed: Seed = 0
    """Seed of the order in which runs are launched. Scope: display."""


Launcher = Local


@dataclass(frozen=True, config=_STRICT)
class WandbTracker:
    """Weights & Biases, mirrored from the run folders by a process of its own."""

    name: Literal["wandb"]
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """`auto` is online with an API key and offline without. Scope: display."""
    project: str = "batchscape"
    """Project that the runs go to. Scope: display."""
    entity: str | None = None
    """User or team; null: the key's default. Scope: display."""
    tags: list[str] = Field(default_factory=list)
    """Tags of every run. Scope: display."""


@dataclass(frozen=True, config=_STRICT)
class NoTracker:
    """The run folders alone."""

    name: Literal["none"]


Tracker = Annotated[WandbTracker | NoTracker, Field(discriminator="name")]


@dataclass(frozen=True, config=_STRICT)
class RunConfig:
    """All settings of one run."""

    batch: Batch
    model: Model
    data: Data
    optimizer: Optimizer
    schedule: Schedule
    budget: Budget
    evaluation: Evaluation
    engine: Ddp
    checkpoint: Checkpoint
    measure: Measure
    launcher: Launcher
    tracker: Tracker
    seed: Seed = 0
    """Sets `init_seed` and `data_seed` where they are null. Scope: trajectory."""
    init_seed: Seed | None = None
    """Seed of the initial parameters. Scope: trajectory."""
    data_seed: Seed | None = None
    """Seed of the sample order. Scope: trajectory."""
    timing_repeat: NonNegative = 0
    """Distinguishes repeats of one and the same run, for timing. Scope: run."""
    sweep_name: str | None = None
    """Name of the sweep; null: from the sweep file or the swept settings. Scope: display."""
    sweep_dir: str | None = None
    """Folder of the sweep; null: `outputs/<sweep_name>`. Scope: display."""

    def __post_init__(self) -> None:
        """Check the rules between groups."""
        classifies = isinstance(self.data, Digits)
        if classifies != isinstance(self.model, Mlp):
            wanted = "model=mlp" if classifies else "model=gpt_nano (or another gpt)"
            msg = f"data={self.data.name} cannot feed model={self.model.name}; use {wanted}"
            raise ValueError(msg)
        if self.budget.tokens is not None and (
            isinstance(self.data, Digits) or self.data.layout == "padded"
        ):
            msg = (
                f"budget.tokens={self.budget.tokens} needs packed text, where every sample has "
                f"sequence_length tokens; give budget.samples instead"
            )
            raise ValueError(msg)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Validate a plain nested mapping.

        Parameters
        ----------
        mapping : mapping
            Keys and values as in `conf/`, interpolations already resolved.

        Returns
        -------
        RunConfig

        Raises
        ------
        ConfigError
            With one line a problem: where, the rule, the value, and what would work.
        """
        try:
            # Strict validation takes objects only from JSON; it refuses "8", 8.0 and true for 8.
            text = json.dumps(mapping)
        except (TypeError, ValueError) as error:
            msg = f"a setting is neither a number, a text, a list nor a mapping: {error}"
            raise ConfigError(msg) from None
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, groups=("sweeps",))) from None

    def to_mapping(self) -> dict[str, Any]:
        """Return a plain nested dictionary that `from_mapping` accepts and JSON can carry."""
        plain: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return plain

    @property
    def resolved_init_seed(self) -> int:
        """Seed of the initial parameters."""
        return self.seed if self.init_seed is None else self.init_seed

    @property
    def resolved_data_seed(self) -> int:
        """Seed of the sample order."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def sequence_length(self) -> int | None:
        """Tokens a sample; None where samples are not sequences."""
        return None if isinstance(self.data, Digits) else self.data.sequence_length


_ADAPTER = TypeAdapter(RunConfig)
