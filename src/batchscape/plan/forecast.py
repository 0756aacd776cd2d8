"""What a sweep will take before it runs: each run's times, then device-hours and makespan of all.

A step time comes from runs that ended, where there are any like it, else from `plan.step_time`. A
run's time is that of its optimizer steps and evaluations; start, compilation and checkpoints are
not in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, Protocol

from batchscape.geometry import BatchGeometry
from batchscape.launch.beginnings import Beginning, find_beginnings
from batchscape.launch.schedule import launch_order, makespan_s
from batchscape.plan.disk_use import evaluations
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
    """A predicted figure."""

    low: float
    high: float
    value: float | None = None
    """None where only the range is known."""

    def times(self, factor: float) -> PredictedRange:
        """Return a multiple."""
        value = None if self.value is None else self.value * factor
        return PredictedRange(self.low * factor, self.high * factor, value)

    def dividing(self, amount: float) -> PredictedRange:
        """Return an amount divided by it, such as samples by a time."""
        value = None if self.value is None else amount / self.value
        return PredictedRange(amount / self.high, amount / self.low, value)

    @classmethod
    def total(cls, figures: Sequence[PredictedRange]) -> PredictedRange:
        """Return the sum; ends add up, as all may be off to the same side."""
        values = [figure.value for figure in figures]
        numbers = [value for value in values if value is not None]
        return cls(
            math.fsum(figure.low for figure in figures),
            math.fsum(figure.high for figure in figures),
            math.fsum(numbers) if len(numbers) == len(values) else None,
        )


@dataclass(frozen=True)
class MemoryForecast:
    """What a rank of a run will hold."""

    way: str
    """How it was got, or `not known: REASON`, where there are no figures."""
    peak_allocated_gib: PredictedRange | None = None
    """Peak of its tensors."""
    peak_taken_gib: PredictedRange | None = None
    """What a limit counts: reserved by CUDA's allocator, with the context; on a CPU private."""
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
    mfu_pct: PredictedRange | None = None
    """Of a ramp's last global batch; None also on a CPU."""
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
    runs_unknown: int
    """Of those, runs whose time is not known: they are in no total."""
    device_hours: PredictedRange | None
    makespan_s: PredictedRange | None
    """From the first start to the last end, as the launcher's queue would place them."""

    def ends_at(self, begin: datetime) -> tuple[datetime, datetime] | None:
        """Return the earliest and the latest end of a sweep that begins at a time."""
        if self.makespan_s is None:
            return None
        low, high = (timedelta(seconds=s) for s in (self.makespan_s.low, self.makespan_s.high))
        return begin + low, begin + high

    def as_plain(self, begin: datetime) -> dict[str, Any]:
        """Return the totals as JSON carries them."""
        ends = self.ends_at(begin)
        return {
            "runs_left": self.runs_left,
            "runs_not_known": self.runs_unknown,
            "device_hours": None if self.device_hours is None else asdict(self.device_hours),
            "makespan_s": None if self.makespan_s is None else asdict(self.makespan_s),
            "begins_at": begin.isoformat(timespec="seconds"),
            "ends_at": ends and [end.isoformat(timespec="seconds") for end in ends],
            "ways": dict(Counter(run.way for run in self.runs.values())),
        }


class MeasuredStepTime(Protocol):
    """A step time that was predicted from runs."""

    @property
    def value(self) -> float:
        """In seconds."""

    @property
    def low(self) -> float:
        """Lower end of its interval; NaN where there is none."""

    @property
    def high(self) -> float:
        """Upper end."""

    @property
    def n(self) -> int:
        """Runs behind it."""


def forecast(
    specs: Sequence[RunSpec],
    sweep: SweepFolder,
    machine: Machine,
    measured: Callable[[RunSpec, BatchGeometry], MeasuredStepTime | None] | None = None,
    unfit: Collection[str] = (),
) -> SweepForecast:
    """Predict what runs will take."""
    before = StepTimeRanges(machine)

    def step_time(spec: RunSpec, geometry: BatchGeometry) -> tuple[PredictedRange, str] | str:
        estimate = None if measured is None else measured(spec, geometry)
        if estimate is not None:
            return PredictedRange(
                estimate.low, estimate.high, estimate.value
            ), f"measured, {estimate.n} runs"
        ends = before.of(spec, geometry)
        if isinstance(ends, str):
            return f"{NOT_KNOWN}: {ends}"
        return PredictedRange(ends.low, ends.high, ends.middle), before.way

    open_specs = [spec for spec in unsealed(specs, sweep) if spec.run_id not in unfit]
    beginnings = find_beginnings(launch_order(open_specs), sweep)
    runs = {
        spec.run_id: _run(spec, step_time, before.at_peak_s, beginnings.get(spec.run_id))
        for spec in specs
    }
    timed = [
        (spec.geometry.data_parallel_size, taken)
        for spec in open_specs
        if (taken := runs[spec.run_id].run_time_s) is not None
    ]
    # No run ends before all of its steps are trained, whoever trains the first of them.
    whole_run_times = [
        whole.run_time_s
        for spec in open_specs
        if spec.run_id in beginnings
        and (whole := _run(spec, step_time, before.at_peak_s, None)).run_time_s is not None
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
    launcher = spec.config.launcher

    def makespan(times_s: list[float]) -> float:
        runs = list(zip((ranks for ranks, _ in timed), times_s, strict=True))
        if launcher.concurrent_runs > 1:
            runs.sort(key=lambda run: -run[1])
        devices = machine.devices(spec.device_type)
        return makespan_s(runs, devices, launcher.concurrent_runs, launcher.runs_per_device)

    values = [figure.value for _, figure in timed if figure.value is not None]
    low, high = makespan([f.low for _, f in timed]), makespan([f.high for _, f in timed])
    low = max([low, *(f.low for f in whole_run_times)])
    high = max([high, *(f.high for f in whole_run_times)])
    value = None
    if len(values) == len(timed):
        value = max([makespan(values), *(f.value for f in whole_run_times if f.value is not None)])
    # A queue of longer runs may be packed better.
    return PredictedRange(min(low, high), max(low, high), value)


def _run(
    spec: RunSpec,
    step_time: Callable[[RunSpec, BatchGeometry], tuple[PredictedRange, str] | str],
    at_peak_s: Callable[[RunSpec, BatchGeometry], float | None],
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
    parts.append(_evaluations(spec, step))
    run_time = PredictedRange.total(parts)
    rate = step.dividing(geometry.global_batch_size)
    length = spec.config.sequence_length
    at_peak = at_peak_s(spec, geometry)
    return RunForecast(
        way,
        step,
        rate,
        rate.times(length) if length and spec.config.is_packed else None,
        None if at_peak is None else step.dividing(100 * at_peak),
        run_time,
        run_time.times(geometry.data_parallel_size / 3600),
    )


def _evaluations(spec: RunSpec, step: PredictedRange) -> PredictedRange:
    """Return the time of all evaluations, whose batches are dealt to the ranks."""
    geometry, config = spec.geometry, spec.config.evaluation
    batches = -(-config.samples // config.batch_size)
    dealt = -(-batches // geometry.data_parallel_size) * min(config.batch_size, config.samples)
    trained = geometry.gradient_accumulation_steps * geometry.micro_batch_size
    share = evaluations(spec) * dealt / trained
    less, more = _EVALUATION_COST
    value = None if step.value is None else step.value * share * math.sqrt(less * more)
    return PredictedRange(step.low * share * less, step.high * share * more, value)
