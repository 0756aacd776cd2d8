"""The memory of a training step, known before anything runs.

The training's own code is rehearsed on tensors that have shapes and no numbers, and what it would
allocate is counted (`plan.memory_trace`): two optimizer steps of one rank, in the stage that holds
most, of at most two micro-steps each. Only the buffers of DDP and gloo follow a formula of ours.
docs/planning.md says what is exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from batchscape.config import Affects, Command, cuts_updates, that_affect
from batchscape.errors import BatchscapeError
from batchscape.geometry import BatchGeometry
from batchscape.libraries import why_missing
from batchscape.measure.memory_report import MemoryReport
from batchscape.record.spec import RunSpec
from batchscape.train.timeline import Timeline

if TYPE_CHECKING:
    from batchscape.plan.memory_trace import Trace

    _Line = Callable[[int], Trace]


_METHODS = {"cpu": "fake tensors", "cuda": "fake tensors (kernels as on a CPU)"}
_NO_PART = ("batch", "launcher", "loader", "device", "measure", "evaluation")
"""Groups of settings that do not decide it: what fits, what lies beside the training, and what
`_key_without_micro_batch` has in another form."""
_DROPOUT_PROBLEM = (
    "attention with dropout holds all scores on a CPU and not on CUDA, whose kernels are not here; "
    "memory is predicted only for dropout 0"
)
_MOST_LINGERING = 0.1
"""Share of a peak that the threads of an exchange may add in one run and not in another."""
_MOST_TRACED = 3
"""Micro-batches that are rehearsed at most; a line through them gives the others."""


def predict_memories(specs: Sequence[RunSpec]) -> list[MemoryReport]:
    """Say what the training steps of runs allocate on each rank, before anything runs.

    Runs of one `memory_key` are rehearsed once. Of many micro-batches of one training three are
    rehearsed, and one of a single sample. Where every storage grows along a line through two of
    them, and the third lies on it, the line gives the others.

    Parameters
    ----------
    specs : sequence of RunSpec
        Their data are prepared on this machine.

    Returns
    -------
    list of MemoryReport
        For each run the figures of `allocated_...` and `peak_allocated_...`, of the rank that holds
        most, without cuBLAS's workspace; or the `problem` why there are none.
    """
    keys = [(_key_without_micro_batch(spec), _heaviest(spec).micro_batch_size) for spec in specs]
    groups: dict[str, dict[int, RunSpec]] = {}
    for (settings, micro_batch_size), spec in zip(keys, specs, strict=True):
        groups.setdefault(settings, {}).setdefault(micro_batch_size, spec)
    reports = {settings: _reports(runs) for settings, runs in groups.items()}
    return [reports[settings][micro_batch_size] for settings, micro_batch_size in keys]


def memory_key(spec: RunSpec) -> str:
    """Return what decides the prediction of a run: two with the same key have the same.

    These are the settings that affect memory, without those of limits, loaders and evaluations; the
    micro-batch; whether there is accumulation; and the ranks, one or several where each holds all.
    """
    return json.dumps([_key_without_micro_batch(spec), _heaviest(spec).micro_batch_size])


def _key_without_micro_batch(spec: RunSpec) -> str:
    """Return the key without the micro-batch."""
    memory_settings = that_affect(spec.config, Affects.MEMORY)
    for group in _NO_PART:
        memory_settings.pop(group, None)
    geometry = _heaviest(spec)
    ranks = geometry.data_parallel_size
    resolved = {
        # Where every rank holds all, two stand for any number.
        "ranks": ranks if cuts_updates(spec.config.engine) else min(ranks, 2),
        "micro_steps": min(geometry.gradient_accumulation_steps, 2),
        "averages": spec.config.evaluation.ema_half_life_tokens is not None,
        "clips": spec.stages[0].optimizer.gradient_clip_norm is not None,
        "device_type": spec.device_type,
        "precision": spec.precision,
        "data": spec.data.manifest_hash,
        "source": spec.source_hash,
    }
    return json.dumps([memory_settings, resolved], sort_keys=True)


def _heaviest(spec: RunSpec) -> BatchGeometry:
    timeline = Timeline(spec.stages)
    return timeline.step(timeline.heaviest_step()).stage.geometry


def _reports(runs: dict[int, RunSpec]) -> dict[int, MemoryReport]:
    """Return the report of each micro-batch, of runs that differ in nothing else."""
    spec = next(iter(runs.values()))
    method = _METHODS[spec.device_type]
    if (reason := _refusal(spec)) is not None:
        return dict.fromkeys(runs, MemoryReport(method, problem=reason))
    try:
        # Imports torch.
        from batchscape.plan.memory_trace import sample_of, trace

        sample = sample_of(spec)
    except Exception as error:  # noqa: BLE001  (the data's code is the user's)
        return dict.fromkeys(runs, MemoryReport(method, problem=_why_not(error)))

    def traced(micro_batch_size: int) -> Trace | str:
        run = runs[micro_batch_size]
        try:
            memory_trace = trace(run, sample, _heaviest(run))
            return (
                _DROPOUT_PROBLEM
                if memory_trace.attends_by_parts and spec.device_type == "cuda"
                else memory_trace
            )
        except Exception as error:  # noqa: BLE001  (the model's code is the user's)
            return _why_not(error)

    return {
        size: MemoryReport(method, problem=outcome)
        if isinstance(outcome, str)
        else _report(method, outcome, spec.device_type)
        for size, outcome in _traces(runs, traced).items()
    }


def _why_not(error: Exception) -> str:
    """Say why a training cannot be rehearsed."""
    if isinstance(error, BatchscapeError):
        return str(error)
    first, _, _ = str(error).partition("\n")
    return why_missing(error) or (
        "the code of this training cannot be rehearsed on tensors without numbers: "
        f"{type(error).__name__}: {first}"
    )


def _report(method: str, memory_trace: Trace, device_type: str) -> MemoryReport:
    """Return the figures of a trace, or a problem where they vary between runs on a CPU."""
    report = MemoryReport.from_bytes(method, memory_trace.allocated(device_type))
    if device_type != "cpu":
        return report
    most = MemoryReport.from_bytes(method, memory_trace.allocated(device_type, lingering=True))
    peak, highest = report.peak_allocated_gib, most.peak_allocated_gib
    if peak and highest and highest > (1 + _MOST_LINGERING) * peak:
        problem = (
            "threads of gloo may hold exchanged tensors a moment longer, which moves the peak of "
            f"so small a training: {1024 * peak:.3g} to {1024 * highest:.3g} MiB from run to run"
        )
        return MemoryReport(method, problem=problem)
    return report


def _refusal(spec: RunSpec) -> str | None:
    """Return why a run cannot be predicted; None where it can."""
    engine = spec.config.engine
    if isinstance(engine, Command):
        return "engine=command trains by a program, whose memory only the program knows"
    if engine.compile:
        return (
            "engine.compile=true: what is kept for the backward is known once it is compiled; "
            "memory is predicted only with engine.compile=false"
        )
    return None


def _traces(sizes: Iterable[int], traced: Callable[[int], Trace | str]) -> dict[int, Trace | str]:
    """Return the trace of each micro-batch, or why there is none."""
    # A single sample may take other kernels, and copies that it need not make.
    several = sorted(size for size in sizes if size > 1)
    if len(several) <= _MOST_TRACED:
        return {size: traced(size) for size in sizes}
    low, middle, high = several[0], several[len(several) // 2], several[-1]
    traces = {size: traced(size) for size in {1, low, middle, high}.intersection(sizes)}
    line = _line(low, traces[low], high, traces[high])
    here = traces[middle]
    is_one = (
        line is not None
        and not isinstance(here, str)
        and here.is_like(line(middle))
        and np.array_equal(here.sizes, line(middle).sizes)
    )
    others = [size for size in several if size not in traces]
    return traces | {size: line(size) if line and is_one else traced(size) for size in others}


def _line(low: int, at_low: Trace | str, high: int, at_high: Trace | str) -> _Line | None:
    """Return the line through two traces, by the micro-batch; None where there is none."""
    if isinstance(at_low, str) or isinstance(at_high, str) or not at_low.is_like(at_high):
        return None
    slope, rest = np.divmod(at_high.sizes - at_low.sizes, high - low)
    if rest.any():
        return None
    return lambda size: at_low._replace(sizes=at_low.sizes + slope * (size - low))
