"""Notes beside the comparison: the runs that it lacks, and the limits of its numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from batchscape.analysis.cells import SEEDS, Cells, plain_texts, status_counts
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


_WAITS = {
    "core_wait_pct": (
        "the training waited for a core during",
        "core_wait_pct",
        "their times are too long by about as much",
    ),
    "data_s": (
        "the training waited for samples during",
        "data_s of step_time_s",
        "loader.workers fetches them ahead",
    ),
    "gap_pct": ("gaps between optimizer steps take", "gap_pct", "step times leave these out"),
}
"""By figure what takes time beside the work, where that is read from, and what follows."""


def find_notes(cells: Cells, damaged: Mapping[str, str]) -> list[str]:
    """Say which runs the comparison lacks and what limits its numbers; `damaged` is by folder."""
    runs = cells.runs
    completed = runs[runs["status"].eq("completed")]
    return [
        *_excluded(damaged, cells.replaced),
        *_statuses(runs),
        *_times(runs, completed),
        *_samples(completed),
        *_mixtures(runs, completed),
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


def _counted(sentences: Mapping[str, pd.Series[Any]]) -> Iterator[str]:
    """Write each sentence once for each value of its column but False, with its number of runs."""
    for sentence, values in sentences.items():
        for value, count in values[values.ne(False)].value_counts().items():
            yield sentence.format(runs=count_text(count, "run"), value=value)


def _first(sentences: Sequence[str], what: str, rest: str) -> Iterator[str]:
    """Yield the first sentences, and one that says of how many more `rest` is true."""
    yield from sentences[:_MAX_NAMED]
    if (n_more := len(sentences) - _MAX_NAMED) > 0:
        yield f"{count_text(n_more, f'more {what} is', f'more {what}s are')} {rest}"


def _excluded(damaged: Mapping[str, str], replaced: pd.DataFrame) -> Iterator[str]:
    sentences = [f"Damaged, and in no table: {folder} ({why})." for folder, why in damaged.items()]
    yield from _first(sentences, "run folder", "damaged, and in no table.")
    if len(replaced):
        first = replaced.iloc[0]
        yield (
            f"In no table: {count_text(len(replaced), 'failed run')} of which the same settings "
            f"and seeds completed later with other files of the program ({first['run_id']}: "
            f"{first['reason']})."
        )


def _statuses(runs: pd.DataFrame) -> Iterator[str]:
    open_runs = runs.loc[runs["status"].isin(_OPEN), "status"]
    if len(open_runs):
        yield f"The sweep is not finished: {status_counts(open_runs)}. The table is not final."
    reasons = runs["reason"].astype(object)
    for status in _ENDED_BADLY:
        ended = runs["status"].eq(status)
        reason_of_run = zip(
            runs.loc[ended, "run_id"], reasons[ended].fillna("no reason"), strict=True
        )
        sentences = [f"{run_id} is {status}: {reason}." for run_id, reason in reason_of_run]
        yield from _first(sentences, "run", f"{status}; tables/runs.csv has them all.")
    noted = runs[runs["status"].eq("completed") & runs["reason"].notna()]
    for reason, ids in noted.groupby("reason")["run_id"]:
        yield f"Of {count_text(len(ids), 'completed run')} ({ids.iloc[0]}): {reason!s}."
    rejected = runs.loc[runs["status"].eq("rejected"), "cell"]
    if len(rejected):
        yield (
            f"Rejected, and never launched, for the reasons under the table: "
            f"{count_text(rejected.nunique(), 'cell')} ({count_text(len(rejected), 'run')})."
        )
    limits = pd.to_numeric(column_of(runs, LIMITED)).dropna()
    if len(limits):
        sizes = ", ".join(f"{limit:g}" for limit in sorted(limits.unique()))
        yield (
            f"{count_text(len(limits), 'run')} had a device of less memory, emulated by a limit "
            f"(device.memory_limit_gib {sizes}): losses and memory are those of the hardware "
            "named, but a run near its limit may take longer than without."
        )


def _times(runs: pd.DataFrame, completed: pd.DataFrame) -> Iterator[str]:
    timed = completed[completed["timing_valid"]]
    yield from _counted(
        {
            "Times and throughput of {runs} are left out ({value}); their losses and memory are "
            "valid.": completed["timing_note"].drop(timed.index),
            "{runs} began as another one and went on from its state (launch.begins.trunk in "
            "runs.csv): step times are those of their own steps, losses and times to a target "
            "those of all.": column_of(runs, "launch.begins.trunk").notna(),
        }
    )
    if (command := timing_command(untimed_cells(runs), runs)) is not None:
        yield (
            "On a free machine, with a core or device for each rank, this measures times where "
            f"none counts: {command}"
        )
    figures = timed.reindex(columns=[*_WAITS, "step_time_s"]).apply(pd.to_numeric).astype(float)
    figures["data_s"] *= 100 / figures["step_time_s"]
    for name, (what, source, so) in _WAITS.items():
        shares = figures[name].dropna()
        if (high := shares[shares > _FREE_PCT]).any():
            yield (
                f"In {len(high)} of {count_text(len(shares), 'run')} with valid times {what} more "
                f"than {_FREE_PCT:g} % of the time (at most {high.max():.0f} %; {source}): {so}."
            )


def _samples(completed: pd.DataFrame) -> Iterator[str]:
    if len(completed) and completed.groupby("cell").size().max() == 1:
        yield "Every cell has one completed run, so no spread can be given."
    not_invariant = column_of(completed, "not_invariant").astype(object)
    names = ["schedule.warmup_samples", "samples", *_HAPPENED]
    numbers = completed.reindex(columns=names).apply(pd.to_numeric).astype(float)
    is_cut = is_timed_alone(completed)
    lost = "{{runs}} completed without a finite {}; figures of it leave them out."
    yield from _counted(
        {
            **{
                lost.format(name.replace("_", " ")): completed.loc[~is_cut, name].isna()
                for name in ("final_loss", "final_eval_loss")
                if name in completed
            },
            "{runs} stopped at a target loss, so final losses are those at the target, not at the "
            "end of the budget.": column_of(completed, "stop_reason").eq("target"),
            "{runs} stopped once enough steps were timed: losses are those of another cut of the "
            "same training, which is trained whole.": is_cut,
            "Not decomposition-invariant ({value}): {runs}. Decompositions of one global batch "
            "may train unlike one another.": not_invariant,
            "The gradient noise scale of {runs} is left out: their small batches have another "
            "objective than their large ones.": not_invariant.map(objective_depends_on_batch),
            "In {runs} the warm-up lasts as long as the training, or longer: the peak learning "
            "rate was never reached.": numbers[names[0]].ge(numbers["samples"]),
            **{f"In {{runs}}: {text}.": numbers[name].gt(0) for name, text in _HAPPENED.items()},
        }
    )


def _mixtures(runs: pd.DataFrame, completed: pd.DataFrame) -> Iterator[str]:
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
    runs = runs.drop_duplicates(["run_id", "sweep_dir"])
    sentence = "{runs} of the same identity are in more than one sweep folder."
    yield from _counted({sentence: runs["run_id"].duplicated()})
