"""The trials of a search and the grid around their best, as tables beside the trials' runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from batchscape.errors import RecordError
from batchscape.outgoing import outgoing_cell
from batchscape.record.files import write_atomically
from batchscape.record.folder import SweepFolder

__all__ = [
    "TRIALS",
    "read_measured",
    "read_trials",
    "refuse_trials",
    "write_measured",
    "write_trials",
]

TRIALS = {
    "study": "values of the axes that have a study of their own",
    "trial": "number of the trial in its study, from 0",
    "outcome": "completed, or the status of the run that did not; empty: it is not over",
    "is_best": "whether it is the best of its study, or on the front of two objectives",
    "runs": "names of its runs in `runs/`, apart by blanks",
    "reason": "why it has no value, or an infinite one; empty: it has",
}
"""Columns of `trials.csv`, and what they hold. Between `trial` and `outcome` stand the searched
values by key, then the objectives."""


def write_trials(sweep: SweepFolder, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `trials.csv` of a search."""
    _write(sweep.trials, list(rows))


def write_measured(sweep: SweepFolder, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace `measured.csv` of a search.

    Parameters
    ----------
    sweep : SweepFolder
        Of the search.
    rows : iterable of mapping
        A row a run of the grid: `study` as in `trials.csv`; its `seed`, which no trial had; the
        searched values by key; the objectives, None where there is none, infinite where it
        diverged, ran out of memory or was rejected; `outcome`, completed or its status; `run`, its
        name in `runs/` of the grid, empty where it was rejected.
    """
    _write(sweep.measured, list(rows))


def _write(path: Path, told: list[Mapping[str, Any]]) -> None:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(told[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: outgoing_cell(v) if isinstance(v, str) else v for k, v in row.items()} for row in told
    )
    write_atomically(path, text.getvalue().encode())


def refuse_trials(sweep_dirs: Iterable[str | Path]) -> None:
    """Refuse to make estimates of the runs of a search.

    Raises
    ------
    RecordError
        If a folder holds trials: a sampler chose them for doing well.
    """
    for folder in map(Path, sweep_dirs):
        if SweepFolder(folder).space.exists():
            msg = (
                f"{folder} holds the trials of a search, which were chosen for doing well, so that "
                f"nothing is estimated of them; {folder.resolve().parent} has the grid that was "
                "measured around the best, and its report lists the trials"
            )
            raise RecordError(msg)


def read_trials(sweep: SweepFolder) -> pd.DataFrame | None:
    """Read the trials of the search that belongs to a sweep; None where there is none.

    Parameters
    ----------
    sweep : SweepFolder
        Of the grid; the search is in its `search/`.
    """
    return _read(sweep.search.trials)


def read_measured(sweep: SweepFolder) -> pd.DataFrame | None:
    """Read what `write_measured` wrote, likewise."""
    return _read(sweep.search.measured)


def _read(path: Path) -> pd.DataFrame | None:
    if not path.is_file():
        return None
    try:
        return pd.read_csv(path)
    except ValueError as error:
        msg = f"{path} is damaged ({error}); the command of the search writes it anew"
        raise RecordError(msg) from None
