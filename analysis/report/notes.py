"""Notes beside the comparison: the runs that it lacks, and the limits of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import pandas as pd

from batchscape.analysis.cells import SEEDS, Cells, plain_texts
from batchscape.analysis.commands import timing_command, untimed_cells
from batchscape.analysis.cost.capacity import LIMITED
from batchscape.analysis.hardware import is_timed_alone
from batchscape.analysis.joins import column_of
from batchscape.record.noise_scale import objective_depends_on_batch
from batchscape.text import count_text

_ENDED_BADLY = ("failed", "oom", "diverged", "timeout", "pruned")
_OPEN = ("pending", "running", "interrupted")
_MAX_NAMED = 10
_FREE_PCT = 5.0
"""Share of the step time that a rank may wait for a core on a machine that counts as free. Ours:
a launcher and the threads of the exchange cost up to half of it on an idle machine of two cores."""

_HAPPENED = {
    "throttled": "Heat or the hardware's protection held the clock of a device down",
    "power_capped": "The power limit held the clock of a device down",
    "allocator_retries": "The allocator had no room left and gave cached memory back: such a run "
    "is at the end of its memory, and its steps may take longer",
    "skipped_optimizer_steps": "Updates were left out, as a gradient overflowed in float16",
}
"""Sentences on completed runs, by the column that is true or above zero."""


def find_notes(cells: Cells, damaged: Mapping[str, str]) -> list[str]:
    """Say which runs the comparison lacks and what limits its numbers; `damaged` is by folder."""
    return [
        *_excluded(damaged, cells.replaced),
        *_statuses(cells.runs),
        *_limits(cells.runs),
        *_times(cells.runs),
        *_samples(cells.runs),
        *_mixtures(cells.runs),
    ]


def notes_on_horizons(shorter: int) -> list[str]:
    """Say what is for the longest horizon alone, where so many runs are of shorter ones."""
    if not shorter:
        return []
    return [
        "Answers on losses, the recommendation and claims are for the longest horizon of each "
        f"training; {count_text(shorter, 'run')} of shorter ones count in the comparison, in what "
        "a step costs and in 'Batch and rate together'."
    ]


def _excluded(damaged: Mapping[str, str], replaced: pd.DataFrame) -> Iterator[str]:
    for folder, reason in islice(damaged.items(), _MAX_NAMED):
        yield f"Damaged, and in no table: {folder} ({reason})."
    if len(damaged) > _MAX_NAMED:
        are = count_text(len(damaged) - _MAX_NAMED, "more run folder is", "more run folders are")
        yield f"{are} damaged, and in no table."
    if len(replaced):
        first = replaced.iloc[0]
        yield (
            f"In no table: {count_text(len(replaced), 'failed run')} of which the same settings "
            f"and seeds completed later with other files of the program ({first['run_id']}: "
            f"{first['reason']})."
        )


def _statuses(runs: pd.DataFrame) -> Iterator[str]:
    open_runs = runs[runs["status"].isin(_OPEN)]
    if len(open_runs):
        counts = open_runs["status"].value_counts().sort_index()
        texts = ", ".join(f"{count} {name}" for name, count in counts.items())
        yield f"The sweep is not finished: {texts}. The table is not final."
    for status in _ENDED_BADLY:
        ended = runs[runs["status"].eq(status)]
        for run_id, reason in ended[["run_id", "reason"]].head(_MAX_NAMED).itertuples(index=False):
            yield f"{run_id} is {status}: {reason if isinstance(reason, str) else 'no reason'}."
        if len(ended) > _MAX_NAMED:
            are = count_text(len(ended) - _MAX_NAMED, "more run is", "more runs are")
            yield f"{are} {status}; tables/runs.csv has them all."
    noted = runs[runs["status"].eq("completed") & runs["reason"].notna()]
    for reason, ids in noted.groupby("reason")["run_id"]:
        yield f"Of {count_text(len(ids), 'completed run')} ({ids.iloc[0]}): {reason!s}."
    rejected = runs.loc[runs["status"].eq("rejected"), "cell"]
    if len(rejected):
        yield (
            f"Rejected, and never launched, for the reasons under the table: "
            f"{count_text(rejected.nunique(), 'cell')} ({count_text(len(rejected), 'run')})."
        )
    if not runs["status"].eq("completed").any():
        yield "No run has completed, so there is nothing to compare."


def _limits(runs: pd.DataFrame) -> Iterator[str]:
    limits = pd.to_numeric(column_of(runs, LIMITED)).dropna()
    if len(limits):
        sizes = ", ".join(f"{limit:g}" for limit in sorted(limits.unique()))
        yield (
            f"{count_text(len(limits), 'run')} had a device of less memory, emulated by a limit "
            f"(device.memory_limit_gib {sizes}): losses and memory are those of the hardware "
            "named, but a run near its limit may take longer than without."
        )


def _times(runs: pd.DataFrame) -> Iterator[str]:
    invalid = runs[runs["status"].eq("completed") & ~runs["timing_valid"]]
    for note, count in invalid["timing_note"].value_counts().items():
        yield (
            f"Times and throughput of {count_text(count, 'run')} are left out ({note}); "
            "their losses and memory are valid."
        )
    if n_begun := int(runs.get("launch.begins.trunk", pd.Series(dtype=str)).notna().sum()):
        yield (
            f"{count_text(n_begun, 'run')} began as another one and went on from its state "
            "(launch.begins.trunk in runs.csv): step times are those of their own steps, losses "
            "and times to a target those of all."
        )
    if (command := timing_command(untimed_cells(runs), runs)) is not None:
        yield (
            "On a free machine, with a core or device for each rank, this measures times where "
            f"none counts: {command}"
        )
    timed = runs[runs["status"].eq("completed") & runs["timing_valid"]]
    names = ["core_wait_pct", "gap_pct", "data_s", "step_time_s"]
    figures = timed.reindex(columns=names).apply(pd.to_numeric).astype(float)
    parts = (
        (
            "core_wait_pct",
            "the training waited for a core during",
            "their times are too long by about as much",
        ),
        ("data_s", "the training waited for samples during", "loader.workers fetches them ahead"),
        ("gap_pct", "gaps between optimizer steps take", "step times leave these out"),
    )
    figures["data_s"] *= 100 / figures["step_time_s"]
    for name, what, so in parts:
        shares = figures[name].dropna()
        source = "data_s of step_time_s" if name == "data_s" else name
        if (high := shares[shares > _FREE_PCT]).any():
            yield (
                f"In {len(high)} of {count_text(len(shares), 'run')} with valid times {what} more "
                f"than {_FREE_PCT:g} % of the time (at most {high.max():.0f} %; {source}): {so}."
            )


def _samples(runs: pd.DataFrame) -> Iterator[str]:
    completed = runs[runs["status"].eq("completed")]
    if len(completed) and completed.groupby("cell").size().max() == 1:
        yield "Every cell has one completed run, so no spread can be given."
    with_end = completed[~is_timed_alone(completed)]
    for name, label in (("final_loss", "final loss"), ("final_eval_loss", "final eval loss")):
        n_missing = with_end[name].isna().sum() if name in with_end else 0
        if n_missing:
            runs_lost = count_text(n_missing, "run")
            yield f"{runs_lost} completed without a finite {label}; figures of it leave them out."
    yield from _stopped(completed)
    for why, count in completed.get("not_invariant", pd.Series(dtype=str)).value_counts().items():
        yield (
            f"Not decomposition-invariant ({why}): {count_text(count, 'run')}. Decompositions of "
            "one global batch may train unlike one another."
        )
    barred = completed.get("not_invariant", pd.Series(dtype=str)).map(objective_depends_on_batch)
    if barred.any():
        yield (
            f"The gradient noise scale of {count_text(int(barred.sum()), 'run')} is left out: "
            "their small batches have another objective than their large ones."
        )
    names = ["schedule.warmup_samples", "samples"]
    lengths = completed.reindex(columns=names).apply(pd.to_numeric).astype(float)
    if n_in_warmup := int(lengths["schedule.warmup_samples"].ge(lengths["samples"]).sum()):
        yield (
            f"In {count_text(n_in_warmup, 'run')} the warm-up lasts as long as the training, or "
            "longer: the peak learning rate was never reached."
        )
    for name, text in _HAPPENED.items():
        if count := pd.to_numeric(column_of(completed, name)).gt(0).sum():
            yield f"In {count_text(count, 'run')}: {text}."


def _stopped(completed: pd.DataFrame) -> Iterator[str]:
    reasons = completed.get("stop_reason", pd.Series(dtype=str))
    if stopped := reasons.eq("target").sum():
        yield (
            f"{count_text(stopped, 'run')} stopped at a target loss, so final losses are those at "
            "the target, not at the end of the budget."
        )
    if timed := is_timed_alone(completed).sum():
        yield (
            f"{count_text(timed, 'run')} stopped once enough steps were timed: losses are those of "
            "another cut of the same training, which is trained whole."
        )


def _mixtures(runs: pd.DataFrame) -> Iterator[str]:
    completed = runs[runs["status"].eq("completed")]
    software = ("batchscape", "python", "packages.", "git.", "cuda.driver")
    mixed = [
        name.removeprefix("environment.")
        for name in map(str, runs)
        if name.startswith(tuple(f"environment.{part}" for part in software))
        and (texts := plain_texts(completed[name])).nunique() > 1
        and texts.where(completed[name].notna()).groupby(completed["cell"]).nunique().gt(1).any()
    ]
    if mixed:
        yield f"Some cells hold runs that differ in {', '.join(mixed)}."
    seeds = ["cell", *[name for name in SEEDS if name in runs]]
    if completed.groupby(seeds, dropna=False)["trajectory_id"].nunique().gt(1).any():
        yield (
            "Some cells hold runs with equal settings and seeds but another trajectory_id: "
            "their data or version differ."
        )
    kernels = completed.reindex(columns=["trajectory_id", "attention_kernel"]).dropna()
    differ = kernels.groupby("trajectory_id")["attention_kernel"].transform("nunique").gt(1)
    if differ.any():
        counts = kernels.loc[differ, "attention_kernel"].value_counts()
        kernel_counts = [f"{kernel} in {count_text(n, 'run')}" for kernel, n in counts.items()]
        yield (
            "Cuts of one training ran on different kernels of attention "
            f"({', '.join(kernel_counts)}): they round differently."
        )
    n_repeated = runs[["run_id", "sweep_dir"]].drop_duplicates()["run_id"].duplicated().sum()
    if n_repeated:
        repeated = count_text(n_repeated, "run")
        yield f"{repeated} of the same identity are in more than one sweep folder."
