"""Predicted times and memory of runs: from similar runs, datasheets and a rehearsal.

`main` is a process of its own before a launch, as models are code of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry
from batchscape.plan.forecast import PredictedRange, StepTime, SweepForecast, forecast
from batchscape.plan.machine import Machine
from batchscape.plan.memory import predict_memories
from batchscape.plan.room import memory_forecast, why_not_launched
from batchscape.record.files import write_json
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec


def predict(
    specs: Sequence[RunSpec], sweep: SweepFolder, machine: Machine, runs: Sequence[Path] = ()
) -> SweepForecast:
    """Predict times and memory of runs of one launcher.

    The ended runs of the sweep, and those of the folders `runs`, are used where they are similar.
    """
    measured = None
    has_rows = any(folder.parquet("steps").exists() for folder in sweep.run_folders())
    if folders := [*runs, *([sweep.path] if has_rows else [])]:
        # A first launch does not need this import.
        from batchscape.analysis.cost.measured import MeasuredSteps

        # Unreadable runs of the sweep itself are ignored; of other sweeps they are an error.
        with nullcontext() if runs else suppress(BatchscapeError):
            measured = MeasuredSteps(folders, machine.is_like)

    def step_time(spec: RunSpec, geometry: BatchGeometry) -> StepTime | None:
        estimate = None if measured is None else measured(spec, geometry)
        if estimate is None:
            return None
        ends = PredictedRange(estimate.low, estimate.high, estimate.value)
        return ends, f"measured, {estimate.n} runs"

    memory = {}
    for spec, report in zip(specs, predict_memories(specs), strict=True):
        measured_gib = None if measured is None else measured.memory_range(spec)
        memory[spec.run_id] = memory_forecast(spec, report, machine, measured_gib)
    unfit = {spec.run_id for spec in specs if why_not_launched(spec, memory[spec.run_id])}
    times = forecast(specs, sweep, machine, step_time, unfit)
    runs_with_memory = {run: replace(time, memory=memory[run]) for run, time in times.runs.items()}
    return replace(times, runs=runs_with_memory)


def main(folder: str, _rank: int) -> int:
    """Predict for the runs of which a folder holds each `config.json`, as `<run_id>.json`.

    Its file `sweep` names the sweep folder. It writes `predictions` there: by run the content of
    `prediction.json`, which has `value`, `low`, `high` and `method` of each figure.
    """
    place = Path(folder)
    specs = [RunSpec.read(path) for path in sorted(place.glob("*.json"))]
    sweep = SweepFolder(Path((place / "sweep").read_text(encoding="utf-8")))
    config = specs[0].config
    predictions = {}
    machine = Machine.of(config.cluster, config.launcher)
    for run, prediction in predict(specs, sweep, machine).runs.items():
        figures = {
            "step_time_s": (prediction.step_time_s, prediction.way),
            "run_time_s": (prediction.run_time_s, prediction.way),
        }
        if prediction.memory is not None:
            memory = prediction.memory
            figures["peak_allocated_gib"] = (memory.peak_allocated_gib, memory.way)
        # Without the number of runs behind it: predictions of one way are summed up together.
        predictions[run] = {
            name: asdict(figure) | {"method": way.partition(", ")[0]}
            for name, (figure, way) in figures.items()
            if figure is not None
        }
    write_json(place / "predictions", predictions)
    return 0
