"""What a run is: its identity, geometry and resolved settings (`config.json`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchscape.config import RunConfig
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.record.files import read_json, write_json
from batchscape.record.folder import FORMAT_VERSION
from batchscape.record.status import check_version

__all__ = ["DataIdentity", "RunSpec"]


@dataclass(frozen=True)
class DataIdentity:
    """The prepared data that a run reads."""

    manifest_hash: str
    """Names the content: same hash, same samples."""
    folder: str
    """Where the prepared arrays lie; may differ between machines."""
    train_samples: int
    """Samples in the training part."""
    held_out_samples: int
    """Samples in the evaluation part."""
    classes: int
    """Size of the vocabulary, or number of classes."""


@dataclass(frozen=True)
class RunSpec:
    """One run, resolved: nothing in it is left to be decided by a worker."""

    run_id: str
    trajectory_id: str
    sweep_name: str
    geometry: BatchGeometry
    device_type: str
    """`cpu` or `cuda`."""
    precision: str
    """`float32`, `bfloat16` or `float64`."""
    optimizer_steps: int
    """Budget in optimizer steps."""
    samples: int
    """Budget in samples."""
    evaluation_every_samples: int | None
    """Samples between evaluations; None: only at both ends."""
    data: DataIdentity
    config: RunConfig

    def write(self, path: Path) -> None:
        """Write `config.json`."""
        geometry = {
            **asdict(self.geometry),
            "data_parallel_size": self.geometry.data_parallel_size,
            "global_batch_size": self.geometry.global_batch_size,
        }
        write_json(
            path,
            {
                "format_version": FORMAT_VERSION,
                "run_id": self.run_id,
                "trajectory_id": self.trajectory_id,
                "sweep_name": self.sweep_name,
                "geometry": geometry,
                "resolved": {
                    "device_type": self.device_type,
                    "precision": self.precision,
                    "optimizer_steps": self.optimizer_steps,
                    "samples": self.samples,
                    "evaluation_every_samples": self.evaluation_every_samples,
                    "init_seed": self.config.resolved_init_seed,
                    "data_seed": self.config.resolved_data_seed,
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
        content = read_json(path)
        check_version(path, content)
        try:
            return cls._from_content(content)
        except (KeyError, TypeError, ValueError) as error:
            msg = f"{path} is damaged: {error}"
            raise RecordError(msg) from None

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> RunSpec:
        geometry = dict(content["geometry"])
        for derived in ("data_parallel_size", "global_batch_size"):
            geometry.pop(derived)
        resolved = content["resolved"]
        return cls(
            run_id=content["run_id"],
            trajectory_id=content["trajectory_id"],
            sweep_name=content["sweep_name"],
            geometry=BatchGeometry(**geometry),
            device_type=resolved["device_type"],
            precision=resolved["precision"],
            optimizer_steps=resolved["optimizer_steps"],
            samples=resolved["samples"],
            evaluation_every_samples=resolved["evaluation_every_samples"],
            data=DataIdentity(**content["data"]),
            config=RunConfig.from_mapping(content["config"]),
        )
