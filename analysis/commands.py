"""Commands that a report prints: for its sweeps."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from batchscape.analysis.joins import column_of
from batchscape.record.commands import LaunchedRun, changed_command, more_seeds, time_again

_COMMAND = re.compile(r"(?:(?<=: )|^)batchscape [a-z]+ ")
_SEED = "seed"


def split_command(sentence: str) -> tuple[str, str]:
    """Split a sentence from the command after its colon, which is empty where there is none."""
    match = _COMMAND.search(sentence)
    at = len(sentence) if match is None else match.start()
    return sentence[:at], sentence[at:]


def timing_command(runs: pd.DataFrame, all_runs: pd.DataFrame) -> str | None:
    """Return the command that measures completed runs without valid times again, if it helps."""
    repeats = pd.to_numeric(column_of(all_runs, "timing_repeat"))
    highest = repeats.fillna(0).groupby(all_runs["sweep_dir"]).max()
    next_repeats = {str(folder): int(last) + 1 for folder, last in highest.items()}
    untimed = runs[runs["status"].eq("completed") & ~runs["timing_valid"].astype(bool)]
    return time_again(_launched(untimed), next_repeats)


def cut_command(runs: pd.DataFrame, settings: Mapping[str, str]) -> str | None:
    """Return the command that trains another cut like some runs, if one is recorded."""
    for run in _launched(runs):
        if run.command is not None:
            return changed_command(run.command, run.sweep_dir, settings)
    return None


def seeds_command(runs: pd.DataFrame, seeds: Sequence[int]) -> str | None:
    """Return the command that adds seeds to runs; None where it is unknown how they got theirs."""
    names = [name for name in ("init_seed", "data_seed") if name in runs and _SEED in runs]
    if any(runs[name].dropna().ne(runs.loc[runs[name].notna(), _SEED]).any() for name in names):
        return None
    engine = column_of(runs, "engine.name")
    if engine.eq("command").any() and column_of(runs, _SEED).nunique() < 2:
        return None  # the program may not take a seed
    return more_seeds(_launched(runs), seeds)


def untimed_cells(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the completed runs of cells of which no run has a valid time."""
    completed = runs[runs["status"].eq("completed")]
    timed = completed["timing_valid"].astype(bool).groupby(completed["cell"]).transform("any")
    return completed[~timed]


def _launched(runs: pd.DataFrame) -> Iterator[LaunchedRun]:
    columns = runs.reindex(columns=["sweep_dir", "launch.command", "timing_note"]).astype(object)
    for sweep_dir, command, note in columns.itertuples(index=False):
        text = command if isinstance(command, str) else None
        yield LaunchedRun(str(sweep_dir), text, note if isinstance(note, str) else None)
