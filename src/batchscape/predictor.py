"""What runs will take, before they run: times of like runs or of datasheets, memory of a rehearsal.

`main` is a process of its own, before a launch: models are code of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from batchscape.errors import BatchscapeError
from batchscape.plan.forecast import RunForecast, SweepForecast, forecast
from batchscape.plan.machine import Machine
from batchscape.plan.memory import predict_memories
from batchscape.plan.room import memory_forecast, why_not_launched
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec

__all__ = ["main", "predict"]


def predict(
    specs: Sequence[RunSpec], sweep: SweepFolder, machine: Machine, runs: Sequence[Path] = ()
) -> SweepForecast:
    """Predict times and memory of runs.

    Parameters
    ----------
    specs : sequence of RunSpec
        All of one launcher, at least one.
    sweep : SweepFolder
        Its runs that ended tell of the others.
    machine : Machine
        Where they would run.
    runs : sequence of Path
        Further sweep folders whose runs tell of these.
    """
    measured = None
    has_ended = any(folder.parquet("steps").exists() for folder in sweep.run_folders())
    if known := [*runs, *([sweep.path] if has_ended else [])]:
        # Imports what a first launch has no use for.
        from batchscape.analysis.cost.measured import MeasuredSteps

        # Its own runs tell nothing where they cannot be read; of others that is said.
        with nullcontext() if runs else suppress(BatchscapeError):
            measured = MeasuredSteps(known, machine.is_like)
    memory = {}
    for spec, report in zip(specs, predict_memories(specs), strict=True):
        seen = None if measured is None else measured.memory_range(spec)
        memory[spec.run_id] = memory_forecast(spec, report, machine, seen)
    unfit = {spec.run_id for spec in specs if why_not_launched(spec, memory[spec.run_id])}
    found = forecast(specs, sweep, machine, measured, unfit)
    told = {run: replace(own, memory=memory[run]) for run, own in found.runs.items()}
    return replace(found, runs=told)


def main(folder: str, _rank: int) -> int:
    """Predict for the runs of which a folder holds each `config.json`, as `<run_id>.json`.

    Its file `sweep` names the sweep folder. It leaves `predictions` there: what `prediction.json`
    is to hold, by run.
    """
    place = Path(folder)
    specs = [RunSpec.read(path) for path in sorted(place.glob("*.json"))]
    sweep = SweepFolder(Path((place / "sweep").read_text(encoding="utf-8")))
    config = specs[0].config
    found = predict(specs, sweep, Machine.of(config.cluster, config.launcher))
    write_json(place / "predictions", {run: _kept(told) for run, told in found.runs.items()})
    return 0


def _kept(told: RunForecast) -> dict[str, Any]:
    """Return what `prediction.json` holds: `value`, `low`, `high` and `method` of each figure."""
    said = {
        "step_time_s": (told.step_time_s, told.way),
        "run_time_s": (told.run_time_s, told.way),
    }
    if told.memory is not None:
        said["peak_allocated_gib"] = told.memory.peak_allocated_gib, told.memory.way
    kept = {}
    for name, (figure, way) in said.items():
        if figure is not None:
            # Without the number of runs behind it: predictions of one way are summed up together.
            kept[name] = asdict(figure) | {"method": way.partition(", ")[0]}
    return kept
