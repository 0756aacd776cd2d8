"""What every engine keeps, as checks of finished runs: each raises an AssertionError that says why.

A run is trained with the entry `engine_witness:watched`, which counts what reaches
torch.distributed. References are runs of plain DDP.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import pytest

from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.record.tables import read_table
from counted import count_parameters

WITNESS = "engine_witness:watched"
GEOMETRIES = [(1, 32, 1), (1, 8, 4), (2, 16, 1), (2, 4, 4)]
"""Data parallel sizes 1 and 2, accumulation 1 and 4, of one global batch."""
OPTIMIZER_STEPS = 5
CURVE = ["loss", "gradient_norm"]
EXACT = 1e-9
"""Largest relative difference in float64, of other orders of sums; faults are above 1e-3."""


@dataclass(frozen=True)
class Case:
    """An engine with settings, and what it can be asked for."""

    label: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    precision: str = "float64"
    """`float64` where the engine computes in it throughout, else `float32`."""
    marks: tuple[pytest.MarkDecorator, ...] = ()

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of the group `engine`."""
        return {"name": self.name, "precision": self.precision, **self.settings}


SYSTEMS = (pytest.mark.systems,)
CASES = [
    Case("ddp", "ddp"),
    Case("fsdp", "fsdp"),
    Case("accelerate", "accelerate", marks=SYSTEMS),
    Case("fabric", "fabric", marks=SYSTEMS),
    *(
        Case(f"deepspeed-{stage}", "deepspeed", {"zero_stage": stage}, "float32", SYSTEMS)
        for stage in range(4)
    ),
]
PADDED = {"name": "stdlib", "sequence_length": 32, "layout": "padded"}
"""Samples of unlike length: batches are weighted by their labels, or the curves differ."""


def overrides(case: Case, **more: Any) -> dict[str, Any]:
    """Return settings of a run of an engine, of all that the contract has runs of."""
    return {
        "engine": case.engine,
        "data": PADDED,
        "budget__optimizer_steps": OPTIMIZER_STEPS,
        **more,
    }


def check_completed(folder: RunFolder) -> None:
    """The run has ended as it should."""
    ended = json.loads(folder.outcome(0).read_text())
    assert ended["status"] == "completed", ended["reason"]


def check_geometry(spec: RunSpec, folder: RunFolder) -> None:
    """The geometry is the run's, by the library's word and by what was seen."""
    ranks, steps, geometry = read_table(folder, "ranks"), read_table(folder, "steps"), spec.geometry
    assert sorted(ranks["rank"]) == list(range(geometry.data_parallel_size))
    assert (ranks["reported_data_parallel_size"] == geometry.data_parallel_size).all()
    for word in ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size"):
        assert (ranks[f"reported_{word}"].dropna() == getattr(geometry, word)).all(), word
    assert [witness["world_size"] for witness in witnesses(spec, folder)] == [
        geometry.data_parallel_size
    ] * geometry.data_parallel_size
    assert (steps["samples"].diff().dropna() == geometry.global_batch_size).all()
    # The whole model's, however it is sharded.
    assert ranks["parameters"].max() == count_parameters(spec.config, spec.data)
    # Those of a billion parameters take many seconds to draw; the first rank always draws.
    drawn = [witness["models_drawn"] for witness in witnesses(spec, folder)]
    assert drawn[0] == 1
    assert max(drawn) == 1


def check_start(spec: RunSpec, folder: RunFolder) -> None:
    """No rank takes seconds to import what it does not use."""
    assert not any(witness["compiler_imported"] for witness in witnesses(spec, folder))


def check_exchange(spec: RunSpec, folder: RunFolder, parameter_bytes: int) -> None:
    """The bytes that an engine declares are those it counts, and those that were exchanged."""
    geometry = spec.geometry
    ranks, steps = read_table(folder, "ranks"), read_table(folder, "steps")
    every = bool(ranks["exchanges_every_micro_step"].iloc[0])
    exchanges = geometry.gradient_accumulation_steps if every else 1
    declared = int(ranks["declared_exchange_bytes"].iloc[0]) * exchanges
    assert (steps["exchanged_bytes"] == declared).all(), "counted otherwise than declared"
    for witness in witnesses(spec, folder):
        assert witness["bytes"] == [declared] * len(steps), "exchanged otherwise than declared"
    if geometry.data_parallel_size == 1:
        assert declared == 0, "a rank alone has nobody to exchange with"
    else:
        # Of padding at most a tenth: the models of these runs have few rows that do not divide.
        assert 1 <= declared / exchanges / parameter_bytes < 1.1, "not every gradient is exchanged"


def check_curve(table: pd.DataFrame, reference: pd.DataFrame, tolerance: pd.Series) -> None:
    """Loss and gradient norm follow the reference; progress is the very same."""
    for column in ("optimizer_step", "samples", "tokens", "learning_rate"):
        assert table[column].tolist() == reference[column].tolist(), column
    for column in CURVE:
        far = relative(table, reference)[column].max()
        assert far <= tolerance[column], f"{column} is {far:.1e} from the reference's"


def check_resumed(table: pd.DataFrame, undisturbed: pd.DataFrame, tolerance: pd.Series) -> None:
    """A run in two attempts is the run in one."""
    assert table["attempt"].nunique() == 2
    check_curve(table, undisturbed, tolerance)


def check_clipped(table: pd.DataFrame, reference: pd.DataFrame, tolerance: pd.Series) -> None:
    """Every gradient was cut, by the norm of the whole of it."""
    assert (reference["gradient_norm"] > 2 * CLIP).all(), "nothing was clipped"
    check_curve(table, reference, tolerance)


CLIP = 0.05
CLIPPED = {
    "optimizer": {"name": "sgd", "learning_rate": 1.0, "gradient_clip_norm": CLIP},
    "schedule": {"name": "constant"},
}
"""Of SGD, as AdamW hardly sees the length of a gradient."""


def relative(table: pd.DataFrame, reference: pd.DataFrame) -> pd.DataFrame:
    """Return the relative differences of two curves, step by step."""
    return (table[CURVE].astype(float) / reference[CURVE].astype(float) - 1).abs()


def witnesses(spec: RunSpec, folder: RunFolder) -> list[dict[str, Any]]:
    """Return what each rank's witness has seen."""
    ranks = range(spec.geometry.data_parallel_size)
    return [json.loads((folder.path / f"witness-{rank}.json").read_text()) for rank in ranks]


def tolerance_of(differences: list[pd.DataFrame]) -> pd.Series:
    """Return what float32 is granted: ten times what other orders of the same sums make differ.

    Parameters
    ----------
    differences : list of DataFrame
        Of runs of one geometry whose samples were shuffled within the global batch. An engine
        changes the order of sums in several places at once, hence the factor.
    """
    return 10 * pd.concat(differences).max()


def exact() -> pd.Series:
    """Return what float64 is granted."""
    return pd.Series(EXACT, index=CURVE)
