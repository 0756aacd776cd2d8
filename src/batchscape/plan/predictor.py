"""The process that predicts, before a launch, what its runs take: models are code of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batchscape.measure.memory_report import MemoryReport
from batchscape.plan.memory import predict_memories
from batchscape.record.files import write_json
from batchscape.record.spec import RunSpec

__all__ = ["main", "predicted_memory"]

_SURE = {"cpu": 0.03, "cuda": 0.10}
"""Share that the peak of tensors may be off, either way; docs/planning.md has the measurements."""


def predicted_memory(spec: RunSpec, report: MemoryReport) -> dict[str, Any] | None:
    """Return the predicted peak of a run as records and plans carry it.

    Parameters
    ----------
    spec : RunSpec
    report : MemoryReport
        As `predict_memories` returns it.

    Returns
    -------
    dict or None
        `value`, `low`, `high` in GiB, and `method`; None where it is not predicted.
    """
    value = report.peak_allocated_gib
    if value is None:
        return None
    off = _SURE[spec.device_type]
    return {
        "value": value,
        "low": value * (1 - off),
        "high": value * (1 + off),
        "method": report.method,
    }


def main(folder: str, _rank: int) -> int:
    """Predict for the runs of which a folder holds each `config.json`, as `<run_id>.json`.

    Leaves `predictions` there: what `prediction.json` is to hold, by run.
    """
    place = Path(folder)
    specs = [RunSpec.read(path) for path in sorted(place.glob("*.json"))]
    said = {}
    for spec, report in zip(specs, predict_memories(specs), strict=True):
        if (memory := predicted_memory(spec, report)) is not None:
            said[spec.run_id] = {"peak_allocated_gib": memory}
    write_json(place / "predictions", said)
    return 0
