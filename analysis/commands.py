"""Commands that a report prints: of the sweeps it speaks of, else of studies that ship with us."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from batchscape.record.commands import LaunchedRun, again, more_seeds, time_again

__all__ = [
    "SHIPPED",
    "for_cut",
    "for_more_seeds",
    "for_times",
    "part_command",
    "untimed_cells",
]

_COMMAND = re.compile(r"(?:(?<=: )|^)batchscape [a-z]+ ")
SHIPPED = "of its own model and data, to which your settings can be added"
"""What a study is that ships with the package, where no sweep of the user's fits."""
_SEED = "seed"


def part_command(sentence: str) -> tuple[str, str]:
    """Part a sentence from the command behind its colon, which is empty where there is none."""
    found = _COMMAND.search(sentence)
    at = len(sentence) if found is None else found.start()
    return sentence[:at], sentence[at:]


def for_times(runs: pd.DataFrame, everything: pd.DataFrame) -> str | None:
    """Return the command that measures again what has no times that count.

    Parameters
    ----------
    runs : DataFrame
        Rows of `Cells.runs`, as many as are to be measured; only completed ones without a valid
        time count.
    everything : DataFrame
        All runs of the same sweeps, which tell the next free `timing_repeat`.

    Returns
    -------
    str or None
        None where there are none, their command is not known, or it would not help.
    """
    repeats = pd.to_numeric(everything.reindex(columns=["timing_repeat"])["timing_repeat"])
    highest = repeats.fillna(0).groupby(everything["sweep_dir"]).max()
    taken = {str(folder): int(last) + 1 for folder, last in highest.items()}
    untimed = runs[runs["status"].eq("completed") & ~runs["timing_valid"].astype(bool)]
    return time_again(_launched(untimed), taken)


def for_cut(runs: pd.DataFrame, settings: Mapping[str, str]) -> str | None:
    """Return the command that trains another cut as some runs were trained.

    Parameters
    ----------
    runs : DataFrame
        Rows of `Cells.runs`.
    settings : mapping of str to str
        Of the cut, in Hydra's grammar.

    Returns
    -------
    str or None
        None where the command of none of these runs is known.
    """
    for run in _launched(runs):
        if run.command is not None:
            return again(run.command, run.sweep_dir, settings)
    return None


def for_more_seeds(runs: pd.DataFrame, seeds: Sequence[int]) -> str | None:
    """Return the command that adds seeds to runs.

    Parameters
    ----------
    runs : DataFrame
        Rows of `Cells.runs`.
    seeds : sequence of int
        All that there shall be.

    Returns
    -------
    str or None
        None where the command of these runs is not known, or gives their seeds in another way.
    """
    names = [name for name in ("init_seed", "data_seed") if name in runs and _SEED in runs]
    if any(runs[name].dropna().ne(runs.loc[runs[name].notna(), _SEED]).any() for name in names):
        return None
    engine = runs.reindex(columns=["engine.name"])["engine.name"]
    if engine.eq("command").any() and runs.reindex(columns=[_SEED])[_SEED].nunique() < 2:
        return None  # whether the program is told its seed is not known
    return more_seeds(_launched(runs), seeds)


def untimed_cells(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the completed runs of cells of which no run has a valid time."""
    completed = runs[runs["status"].eq("completed")]
    timed = completed["timing_valid"].astype(bool).groupby(completed["cell"]).transform("any")
    return completed[~timed]


def _launched(runs: pd.DataFrame) -> Iterator[LaunchedRun]:
    columns = runs.reindex(columns=["sweep_dir", "launch.command", "timing_note"]).astype(object)
    for sweep_dir, command, note in columns.itertuples(index=False):
        known = command if isinstance(command, str) else None
        yield LaunchedRun(str(sweep_dir), known, note if isinstance(note, str) else None)
