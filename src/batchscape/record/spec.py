"""The specification of a run: identity, geometry and resolved settings (`config.json`)."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from batchscape.config import Affects, Command, Optimizer, RunConfig, that_affect
from batchscape.errors import DamageError, RecordError
from batchscape.geometry import BatchGeometry
from batchscape.record.files import read_json, read_record, write_json
from batchscape.record.folder import FORMAT_VERSION, SweepFolder
from batchscape.record.placeholders import unpassed_settings


@dataclass(frozen=True)
class DataIdentity:
    """The prepared data that a run reads."""

    manifest_hash: str
    """Hash of the content: equal hashes mean equal samples."""
    folder: str
    """Folder of the prepared arrays; may differ between machines; empty for custom data."""
    train_samples: int
    """Samples in the training part."""
    held_out_samples: int
    """Samples in the evaluation part."""
    classes: int
    """Number of different labels: size of the vocabulary, or number of classes; 0 where custom data
    do not say."""
    task: str
    """Kind of the labels: `next_token`, or `class` (one a sample); custom data may say `other`."""
    features: int | None = None
    """Length of a sample that is a vector; None for sequences of tokens."""
    vocabulary: int | None = None
    """Number of different input tokens, where labels are no tokens (a text with a class); None:
    `classes` counts them, or inputs are no tokens."""


@dataclass(frozen=True)
class Stage:
    """A part of a training with one global batch; most trainings have one stage."""

    samples: int
    """Samples of this stage, whole optimizer steps."""
    geometry: BatchGeometry
    optimizer: Optimizer
    """Settings of the optimizer, with scaling rules applied for this global batch."""

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of this stage."""
        return self.samples // self.geometry.global_batch_size


@dataclass(frozen=True)
class RunSpec:
    """One run with all values resolved, so that a worker decides nothing."""

    run_id: str
    trajectory_id: str
    sweep_name: str
    stages: tuple[Stage, ...]
    """Stages in their order; all have the same data-parallel ranks."""
    device_type: str
    """`cpu` or `cuda`."""
    precision: str
    """`float32`, `bfloat16`, `float16` or `float64`."""
    evaluation_every_samples: int | None
    """Samples between evaluations; None: only at both ends."""
    data: DataIdentity
    config: RunConfig
    source_hash: str | None = None
    """Hash of model code and weights that are not part of this package."""
    timed_steps: int | None = None
    """Optimizer steps after which it ends, where only its times and its memory count; None: it
    trains its budget."""

    @property
    def geometry(self) -> BatchGeometry:
        """Geometry of the last stage, which names the run."""
        return self.stages[-1].geometry

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps that it trains: its budget, or those that are timed."""
        return self.timed_steps or sum(stage.optimizer_steps for stage in self.stages)

    @property
    def samples(self) -> int:
        """Budget in samples."""
        return sum(stage.samples for stage in self.stages)

    @property
    def trained_samples(self) -> int:
        """Samples of the optimizer steps that it trains."""
        timed_samples = (self.timed_steps or 0) * self.geometry.global_batch_size
        return timed_samples or self.samples

    def steps_of(self, samples: int) -> int | None:
        """Return the optimizer steps that take so many samples; None where there are no such."""
        steps = 0
        for stage in self.stages:
            if samples <= stage.samples:
                more_steps, rest = divmod(samples, stage.geometry.global_batch_size)
                return None if rest else steps + more_steps
            steps, samples = steps + stage.optimizer_steps, samples - stage.samples
        return None

    @property
    def is_program(self) -> bool:
        """Whether it is a program of the user's own."""
        return isinstance(self.config.engine, Command)

    @property
    def processes(self) -> int:
        """Processes that leave an outcome each: the ranks, or the one that watches a program."""
        return 1 if self.is_program else self.geometry.data_parallel_size

    @cached_property
    def time_key(self) -> str:
        """Key of all that decides the time of a training step, without its cut, for cost models.

        The number of nodes is a part of it: exchange between machines is slower.
        """
        settings = that_affect(self.config, Affects.TIME)
        del settings["batch"], settings["launcher"]
        where = self.precision, self.device_type, self.geometry.nodes
        return json.dumps([settings, *where], sort_keys=True)

    @property
    def is_resumable_program(self) -> bool:
        """Whether it is a program that goes on when it is started again."""
        engine = self.config.engine
        return isinstance(engine, Command) and engine.resumable

    def write(self, path: Path) -> None:
        """Write `config.json`."""
        write_json(
            path,
            {
                "format_version": FORMAT_VERSION,
                "run_id": self.run_id,
                "trajectory_id": self.trajectory_id,
                "sweep_name": self.sweep_name,
                "geometry": plain_geometry(self.geometry),
                "resolved": {
                    "device_type": self.device_type,
                    "precision": self.precision,
                    "optimizer_steps": self.optimizer_steps,
                    "samples": self.samples,
                    "evaluation_every_samples": self.evaluation_every_samples,
                    "init_seed": self.config.resolved_init_seed,
                    "data_seed": self.config.resolved_data_seed,
                    "source_hash": self.source_hash,
                    **({"not_passed": unpassed_settings(self.config)} if self.is_program else {}),
                    **({} if self.timed_steps is None else {"timed_steps": self.timed_steps}),
                    "stages": [
                        {
                            "samples": stage.samples,
                            "geometry": plain_geometry(stage.geometry),
                            "optimizer": _OPTIMIZER.dump_python(stage.optimizer, mode="json"),
                        }
                        for stage in self.stages
                    ],
                },
                "data": asdict(self.data),
                "config": self.config.to_mapping(),
            },
        )

    @classmethod
    def read(cls, path: Path) -> RunSpec:
        """Read a `config.json`.

        Raises
        ------
        RecordError
            If the file is missing, damaged, of another format version, or of a rejected cell.
        """
        content = read_record(path)
        try:
            resolved = content["resolved"]
            return cls(
                run_id=content["run_id"],
                trajectory_id=content["trajectory_id"],
                sweep_name=content["sweep_name"],
                stages=tuple(
                    Stage(
                        samples=stage["samples"],
                        geometry=BatchGeometry(
                            **{k: n for k, n in stage["geometry"].items() if k not in _DERIVED}
                        ),
                        optimizer=_OPTIMIZER.validate_json(json.dumps(stage["optimizer"])),
                    )
                    for stage in resolved["stages"]
                ),
                device_type=resolved["device_type"],
                precision=resolved["precision"],
                evaluation_every_samples=resolved["evaluation_every_samples"],
                data=DataIdentity(**content["data"]),
                config=RunConfig.from_mapping(content["config"]),
                source_hash=resolved["source_hash"],
                timed_steps=resolved.get("timed_steps"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamageError(f"{path} is damaged: {error}") from None


def next_timing_repeat(sweep: SweepFolder) -> int:
    """Return the first `timing_repeat` above those of all runs of a sweep."""
    highest = -1
    for folder in sweep.run_folders():
        with suppress(RecordError, KeyError, TypeError, ValueError):
            highest = max(highest, int(read_json(folder.config)["config"]["timing_repeat"]))
    return highest + 1


_OPTIMIZER: TypeAdapter[Optimizer] = TypeAdapter(Optimizer)

_DERIVED = ("data_parallel_size", "global_batch_size")


def plain_geometry(geometry: BatchGeometry) -> dict[str, int]:
    """Return a geometry for JSON, with its derived values."""
    return {**asdict(geometry), **{name: getattr(geometry, name) for name in _DERIVED}}
