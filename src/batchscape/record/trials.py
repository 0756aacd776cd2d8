"""The trials of a search, as a table beside their runs, and the grid around their best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from batchscape.errors import DamageError, RecordError
from batchscape.outgoing import outgoing_cell
from batchscape.record.files import read_json, write_atomically, write_json
from batchscape.record.folder import FORMAT_VERSION, SweepFolder

TRIALS = {
    "study": "values of the axes that have a study of their own",
    "trial": "number of the trial in its study, from 0",
    "outcome": "completed, or the status of the run that did not; empty: it is not over",
    "is_best": "whether it is the best of its study",
    "runs": "names of its runs in `runs/`, separated by blanks",
    "reason": "why it has no value, or an infinite one; empty: it has",
}
"""Columns of `trials.csv` and their meanings. The searched values by key, then the objective, are
between `trial` and `outcome`."""


def write_trials(sweep: SweepFolder, studies: Iterable[pd.DataFrame]) -> None:
    """Replace `trials.csv` of a search by the trials of its studies, at least one."""
    texts = [
        trials.map(lambda value: outgoing_cell(value) if isinstance(value, str) else value).to_csv(
            index=False, header=number == 0
        )
        for number, trials in enumerate(studies)
    ]
    write_atomically(sweep.trials, "".join(texts).encode())


def write_grid_results(
    sweep: SweepFolder, objective: str, studies: Sequence[Mapping[str, Any]]
) -> None:
    """Replace `measured.json` of a search.

    Parameters
    ----------
    sweep : SweepFolder
        Of the search.
    objective : str
    studies : sequence of mapping
        `study`; `values` of its axes; number of `trials`; `points` of the grid, the centre first,
        none where the grid is not complete, each with `point`, the searched values, `seeds`, the
        value of the objective by seed (None: it diverged, ran out of memory or was rejected), and
        `runs`; `brackets`, for each interval the `key`, the `best` value with all others as in the
        centre, and its neighbours `low` and `high` (None: there is none).
    """
    content = {"objective": objective, "studies": list(studies)}
    write_json(sweep.grid_results, {"format_version": FORMAT_VERSION, **content})


def refuse_trials(sweep_dirs: Iterable[str | Path]) -> None:
    """Refuse estimates from the trials of a search.

    Raises
    ------
    RecordError
        If a folder holds trials, which a sampler has chosen for their results.
    """
    for folder in map(Path, sweep_dirs):
        if SweepFolder(folder).space.exists():
            raise RecordError(
                f"{folder} holds the trials of a search. They were chosen for good results, so "
                "estimates from them would be biased. Report "
                f"{folder.resolve().parent} instead: it has the grid around the best trials"
            )


def read_trials(sweep: SweepFolder) -> pd.DataFrame | None:
    """Read the trials of the search that belongs to a sweep; None where there is none.

    Parameters
    ----------
    sweep : SweepFolder
        Of the grid, which holds the search in its folder `search`.
    """
    path = sweep.search.trials
    try:
        return pd.read_csv(path) if path.is_file() else None
    except ValueError as error:
        raise RecordError(
            f"{path} is damaged ({error}); the command of the search writes it anew"
        ) from None


def read_grid_results(sweep: SweepFolder) -> list[dict[str, Any]]:
    """Read the studies that `write_grid_results` wrote; none before the grid is over."""
    path = sweep.search.grid_results
    content = read_json(path) if path.is_file() else {"studies": []}
    if "studies" not in content:
        raise DamageError(f"{path} is damaged: it lacks studies")
    studies: list[dict[str, Any]] = content["studies"]
    return studies
