"""What a sweep will take before it runs: each run's times, then device-hours and makespan of all.

A step time comes from runs that ended, where there are any like it, else from `plan.step_time`. A
run's time is that of its optimizer steps and evaluations; start, compilation and checkpoints are
not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from batchscape.geometry import BatchGeometry
from batchscape.launch.beginnings import Beginning, find_beginnings
from batchscape.launch.schedule import launch_order, makespan_s
from batchscape.plan.machine import Machine
from batchscape.plan.step_time import StepTimeRanges
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.state import unsealed

NOT_KNOWN = "not known"
_EVALUATION_COST = (0.1, 1.0)
"""Time of an evaluated sample over that of a trained one: a forward is a third of its operations,
in batches of another size."""


@dataclass(frozen=True)
class PredictedRange:
    """A predicted figure and the range that it is expected in."""

    low: float
    high: float
    value: float

    def times(self, factor: float) -> PredictedRange:
        """Return a multiple."""
        return PredictedRange(self.low * factor, self.high * factor, self.value * factor)

    def dividing(self, amount: float) -> PredictedRange:
        """Return an amount divided by it, such as samples by a time."""
        return PredictedRange(amount / self.high, amount / self.low, amount / self.value)

    @classmethod
    def total(cls, figures: Sequence[PredictedRange]) -> PredictedRange:
        """Return the sum; ends add up, as all may be off to the same side."""
        return cls(
            math.fsum(figure.low for figure in figures),
            math.fsum(figure.high for figure in figures),
            math.fsum(figure.value for figure in figures),
        )


StepTime = tuple[PredictedRange, str]
"""A step time in seconds, and how it was got."""


@dataclass(frozen=True)
class MemoryForecast:
    """What a rank of a run will hold."""

    way: str
    """How it was got, or `not known: REASON`, where there are no figures."""
    peak_allocated_gib: PredictedRange | None = None
    """Peak of its tensors."""
    room_gib: float | None = None
    """What it can have at most; None where that is not known."""
    fits: Literal["fits", "unsure", "does not fit"] | None = None


@dataclass(frozen=True)
class RunForecast:
    """What one run will take."""

    way: str
    """How its step time was got: `datasheet`, `peaks of this CPU`, `measured, N runs`, or
    `not known: REASON`, where all figures are None."""
    step_time_s: PredictedRange | None = None
    """Of an optimizer step; of a ramp's last global batch."""
    samples_per_s: PredictedRange | None = None
    tokens_per_s: PredictedRange | None = None
    """None also where samples are no full sequences."""
    run_time_s: PredictedRange | None = None
    device_hours: PredictedRange | None = None
    memory: MemoryForecast | None = None
    """Of each of its ranks; None: it was not asked for."""


@dataclass(frozen=True)
class SweepForecast:
    """What the runs of a sweep will take."""

    runs: dict[str, RunForecast]
    """By `run_id`, those that are sealed too."""
    runs_left: int
    """Runs that are not sealed yet, and are launched: the totals are theirs."""
    runs_not_known: int
    """Of those, runs whose time is not known: they are in no total."""
    device_hours: PredictedRange | None
    makespan_s: PredictedRange | None
    """From the first start to the last end, as the launcher's queue would place them."""


def forecast(
    specs: Sequence[RunSpec],
    sweep: SweepFolder,
    machine: Machine,
    measured: Callable[[RunSpec, BatchGeometry], StepTime | None] = lambda *_: None,
    unfit: Collection[str] = (),
) -> SweepForecast:
    """Predict what runs will take; `measured` returns the step times that earlier runs tell."""
    before = StepTimeRanges(machine)

    def step_time(spec: RunSpec, geometry: BatchGeometry) -> StepTime | str:
        if (earlier := measured(spec, geometry)) is not None:
            return earlier
        ends = before.of(spec, geometry)
        if isinstance(ends, str):
            return f"{NOT_KNOWN}: {ends}"
        return PredictedRange(ends.low, ends.high, ends.middle), before.way

    open_specs = [spec for spec in unsealed(specs, sweep) if spec.run_id not in unfit]
    beginnings = find_beginnings(launch_order(open_specs), sweep)
    runs = {spec.run_id: _run(spec, step_time, beginnings.get(spec.run_id)) for spec in specs}
    timed = [
        (spec.geometry.data_parallel_size, run_time)
        for spec in open_specs
        if (run_time := runs[spec.run_id].run_time_s) is not None
    ]
    # No run ends before all of its steps are trained, whoever trains the first of them.
    whole_run_times = [
        run_time
        for spec in open_specs
        if spec.run_id in beginnings
        and (run_time := _run(spec, step_time, None).run_time_s) is not None
    ]
    hours = [each for spec in open_specs if (each := runs[spec.run_id].device_hours) is not None]
    return SweepForecast(
        runs,
        len(open_specs),
        len(open_specs) - len(timed),
        PredictedRange.total(hours) if hours else None,
        _makespan(timed, whole_run_times, specs[0], machine) if timed else None,
    )


def _makespan(
    timed: list[tuple[int, PredictedRange]],
    whole_run_times: list[PredictedRange],
    spec: RunSpec,
    machine: Machine,
) -> PredictedRange:
    launcher, devices = spec.config.launcher, machine.devices(spec.device_type)

    def makespan(time_of: Callable[[PredictedRange], float]) -> float:
        runs = [(ranks, time_of(run_time)) for ranks, run_time in timed]
        if launcher.concurrent_runs > 1:
            runs.sort(key=lambda run: -run[1])
        queued = makespan_s(runs, devices, launcher.concurrent_runs, launcher.runs_per_device)
        return max([queued, *map(time_of, whole_run_times)])

    low, high = makespan(lambda run_time: run_time.low), makespan(lambda run_time: run_time.high)
    # A queue of longer runs may be packed better.
    return PredictedRange(min(low, high), max(low, high), makespan(lambda run_time: run_time.value))


def _run(
    spec: RunSpec,
    step_time: Callable[[RunSpec, BatchGeometry], StepTime | str],
    beginning: Beginning | None,
) -> RunForecast:
    parts, trained_before = [], beginning.optimizer_steps if beginning else 0
    steps_left = spec.optimizer_steps
    for stage in spec.stages:
        prediction = step_time(spec, stage.geometry)
        if isinstance(prediction, str):
            return RunForecast(prediction)
        step, way = prediction
        steps = min(stage.optimizer_steps, steps_left)
        skipped = min(trained_before, steps)
        parts.append(step.times(steps - skipped))
        steps_left, trained_before = steps_left - steps, trained_before - skipped
    geometry = spec.geometry
    run_time = PredictedRange.total([*parts, _evaluations(spec, step)])
    rate = step.dividing(geometry.global_batch_size)
    length = spec.config.sequence_length
    return RunForecast(
        way,
        step,
        rate,
        rate.times(length) if length and spec.config.is_packed else None,
        run_time,
        run_time.times(geometry.data_parallel_size / 3600),
    )


def _evaluations(spec: RunSpec, step: PredictedRange) -> PredictedRange:
    """Return the time of all evaluations, whose batches are dealt to the ranks."""
    geometry, config = spec.geometry, spec.config.evaluation
    every = spec.evaluation_every_samples
    # Before the first step, on the way, and after the last; none where steps are only timed.
    count = 2 if every is None else 2 + (spec.samples - 1) // every
    count = 0 if spec.timed_steps is not None else count
    batches = -(-config.samples // config.batch_size)
    dealt = -(-batches // geometry.data_parallel_size) * min(config.batch_size, config.samples)
    trained = geometry.gradient_accumulation_steps * geometry.micro_batch_size
    share = count * dealt / trained
    less, more = _EVALUATION_COST
    value = step.value * share * math.sqrt(less * more)
    return PredictedRange(step.low * share * less, step.high * share * more, value)
