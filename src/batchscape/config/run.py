"""All settings of one run, validated together."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from batchscape.config.batch import Batch, Budget, Evaluation
from batchscape.config.cluster import Cluster
from batchscape.config.command import Command, ExternalData, ExternalModel
from batchscape.config.data import CustomData, DataSettings, Digits, Documents, TextFiles
from batchscape.config.engine import (
    Accelerate,
    DeepSpeed,
    EngineSettings,
    Fsdp,
    InProcess,
    cuts_updates,
)
from batchscape.config.execution import (
    Checkpoint,
    Device,
    LauncherSettings,
    Loader,
    Measure,
    Tracker,
)
from batchscape.config.messages import explain
from batchscape.config.model import CustomModel, Mlp, Model, Transformers
from batchscape.config.optimizer import Muon, Optimizer, Scaling, Schedule
from batchscape.config.search import NoSearch, Search
from batchscape.config.types import OUR_LOOP, Affects, NonNegative, Seed, settings
from batchscape.errors import ConfigError


@settings
class RunConfig:
    """All settings of one run."""

    batch: Batch
    model: Model
    data: DataSettings
    optimizer: Annotated[Optimizer, OUR_LOOP]
    schedule: Annotated[Schedule, Affects.LOSS, OUR_LOOP]
    scaling: Annotated[Scaling, Affects.LOSS, OUR_LOOP]
    budget: Annotated[Budget, Affects.LOSS]
    evaluation: Annotated[Evaluation, OUR_LOOP]
    engine: EngineSettings
    loader: Annotated[Loader, OUR_LOOP]
    checkpoint: Annotated[Checkpoint, Affects.NOTHING, OUR_LOOP]
    measure: Measure
    launcher: Annotated[LauncherSettings, Affects.NOTHING]
    tracker: Annotated[Tracker, Affects.NOTHING]
    device: Device = Field(default_factory=Device)
    cluster: Annotated[Cluster, Affects.NOTHING] = Field(default_factory=Cluster)
    search: Annotated[Search, Affects.NOTHING] = Field(default_factory=NoSearch)
    seed: Annotated[Seed, Affects.LOSS, OUR_LOOP] = 0
    """Sets `init_seed` and `data_seed` where they are null."""
    init_seed: Annotated[Seed | None, Affects.LOSS, OUR_LOOP] = None
    """Seed of the initial parameters."""
    data_seed: Annotated[Seed | None, Affects.LOSS, OUR_LOOP] = None
    """Seed of the sample order."""
    timing_repeat: Annotated[NonNegative, Affects.RECORD] = 0
    """Distinguishes repeats of one and the same run, for timing."""
    sweep_name: Annotated[str | None, Affects.NOTHING] = None
    """Name of the sweep; null: from the sweep file or the swept settings."""
    sweep_dir: Annotated[str | None, Affects.NOTHING] = None
    """Folder of the sweep; null: `outputs/<sweep_name>`."""

    def __post_init__(self) -> None:
        """Check the rules between groups."""
        if problem := next(_problems(self), None):
            raise ValueError(problem)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> RunConfig:
        """Validate a nested mapping as in `conf/`; a `ConfigError` has one line a problem."""
        try:
            # Strict validation takes objects only from JSON; it refuses "8", 8.0 and true for 8.
            text = json.dumps(mapping)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"a setting is neither a number, a text, a list nor a mapping: {error}"
            ) from None
        try:
            return _ADAPTER.validate_json(text)
        except ValidationError as error:
            raise ConfigError(explain(error, cls)) from None

    def to_mapping(self, only: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return a nested dictionary that `from_mapping` accepts, of all or `only` some fields."""
        plain: dict[str, Any] = _ADAPTER.dump_python(self, mode="json", by_alias=True, include=only)
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
    def in_process(self) -> InProcess:
        """The engine of a run that our own loop trains."""
        if isinstance(self.engine, Command):
            raise AssertionError("engine=command trains by a program, not in our own loop")
        return self.engine

    @property
    def sequence_length(self) -> int | None:
        """Tokens a sample at most; None where samples are not sequences."""
        return None if isinstance(self.data, Digits) else self.data.sequence_length

    @property
    def is_packed(self) -> bool:
        """Whether every sample has `sequence_length` tokens."""
        if isinstance(self.data, TextFiles | Documents):
            return self.data.layout == "packed"
        return self.sequence_length is not None


def _problems(config: RunConfig) -> Iterator[str]:
    """Yield the rules between groups that a configuration breaks."""
    ramp, is_of_program = config.batch.ramp, isinstance(config.engine, Command)
    is_chosen = {
        "engine=command": is_of_program,
        "model=external": isinstance(config.model, ExternalModel),
        "data=external": isinstance(config.data, ExternalData),
    }
    absent_options = [option for option, chosen in is_chosen.items() if not chosen]
    if len(absent_options) not in {0, len(is_chosen)}:
        yield (
            "a program of your own has model and data of its own, so engine=command, "
            "model=external and data=external go together; add "
            f"{' '.join(absent_options)}, or choose none of them"
        )
    if option := _option_for_data(config):
        yield f"data={config.data.name} cannot feed model={config.model.name}; use {option}"
    yield from _engine_problems(config)
    if config.device.memory_limit_gib is not None and is_of_program:
        yield (
            f"device.memory_limit_gib={config.device.memory_limit_gib:g} holds for the ranks of "
            "our own loop; a program of engine=command allocates by itself: leave it null"
        )
    tokens_by_setting = {"budget": config.budget.tokens}
    tokens_by_setting |= {f"batch.ramp, stage {n}": s.tokens for n, s in enumerate(ramp, 1)}
    for setting, tokens in tokens_by_setting.items():
        if tokens is not None and not config.is_packed:
            yield (
                f"{setting}: tokens={tokens} needs packed text, where every sample has "
                "sequence_length tokens; give samples instead"
            )
    if ramp and config.batch.global_batch_size is config.batch.global_batch_tokens:
        yield "batch.ramp leads up to a global batch: give batch.global_batch_size"
    factors = [stage.learning_rate_factor for stage in ramp]
    if any(factors) and config.scaling.learning_rate != "none":
        yield (
            f"batch.ramp gives factors of the learning rate, {factors}, and scaling.learning_rate="
            f"{config.scaling.learning_rate} makes rates of the global batches: leave out one of "
            "them"
        )


def _option_for_data(config: RunConfig) -> str | None:
    """Return the model that data need; None where they have it, or where only a run shows it."""
    model, data = config.model, config.data
    if isinstance(model, CustomModel | ExternalModel) or isinstance(data, CustomData):
        return None
    if isinstance(data, Digits):
        return None if isinstance(model, Mlp) else "model=mlp"
    if isinstance(data, Documents) and data.label_field is not None:
        return None if isinstance(model, Transformers) else "model=hf (a sequence classifier)"
    return "model=gpt_nano (or another language model)" if isinstance(model, Mlp) else None


def _engine_problems(config: RunConfig) -> Iterator[str]:
    """Yield what the engine does not support."""
    engine = config.engine
    unsupported = {Fsdp: {"float16"}, DeepSpeed: {"float16", "float64"}}.get(type(engine), set())
    if engine.precision in unsupported:
        yield (
            f"engine={engine.name} has no {engine.precision}, got engine.precision="
            f"{engine.precision}; use float32 or bfloat16, or engine=ddp"
        )
    if isinstance(engine, DeepSpeed) and engine.compile:
        yield (
            "engine=deepspeed exchanges by hooks in the model, which a compiler would take in; got "
            "engine.compile=true; use engine=ddp or fsdp, or engine.compile=false"
        )
    stage = engine.zero_stage if isinstance(engine, DeepSpeed) else 0
    if isinstance(config.optimizer, Muon) and cuts_updates(engine):
        engine_text = "engine=fsdp" if stage == 0 else f"engine=deepspeed with zero_stage={stage}"
        yield (
            f"optimizer=muon needs whole matrices in every update, and {engine_text} gives each "
            "rank a part of them; use optimizer=adamw, engine=ddp, or engine=deepspeed with "
            "zero_stage=0"
        )
    if config.evaluation.ema_half_life_tokens is not None and stage == 3:
        yield (
            "evaluation.ema_half_life_tokens averages parameters where they are, and "
            "engine=deepspeed with zero_stage=3 keeps them apart from the model; set it to null, "
            "or use zero_stage of at most 2, or engine=fsdp"
        )
    if config.batch.ramp and isinstance(engine, Accelerate | DeepSpeed):
        yield (
            f"batch.ramp changes the geometry during the training, and engine={engine.name} is "
            "given one geometry when it is built; use engine=ddp, fsdp or fabric, or no ramp"
        )


_ADAPTER = TypeAdapter(RunConfig)
