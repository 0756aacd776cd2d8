"""What the runs of a recommendation lack, and the commands that would add it."""

from __future__ import annotations

from typing import Any

import pandas as pd

from batchscape.analysis.cells import RATE
from batchscape.analysis.commands import (
    cut_command,
    seeds_command,
    timing_command,
    untimed_cells,
)
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.answer import cut_text, slower_text
from batchscape.analysis.decisions.evidence import Basis
from batchscape.analysis.estimates import FEWEST, too_few
from batchscape.text import count_text


def missing_evidence(basis: Basis) -> list[str]:
    """Name times and seeds that the runs lack, with the command that adds them."""
    missing = []
    untimed_runs = untimed_cells(basis.runs) if len(basis.runs) else basis.runs
    if basis.step_time is None:
        missing.append(f"Not identified: the time of a step. {measured_again(basis)}")
    elif len(untimed_runs) and timing_command(untimed_runs, basis.same_sweeps) is not None:
        cuts = count_text(untimed_runs["cell"].nunique(), "cut")
        missing.append(f"Not identified: the time of {cuts}. {measured_again(basis)}")
    n_times = basis.table.groupby(list(FACTORS))["step_time_s"].count().max()
    runs, varying_text = basis.reaches, "steps vary between seeds"
    if runs is None:
        runs, varying_text = basis.table, "times vary between runs"
    n_seeds = runs["seed"].nunique()
    if n_seeds >= FEWEST or (basis.reaches is None and n_times >= FEWEST):
        return missing
    few_text = f"Not identified: how {varying_text}: {too_few(n_seeds, 'seeds')}."
    return [*missing, f"{few_text} {_more_seeds(basis)}".rstrip()]


def settled_by(basis: Basis, chosen: pd.Series[Any], unit: str) -> str:
    """Say which command gives a geometry the units, `run` or `seed`, that it has too few of."""
    is_chosen = (basis.table[list(FACTORS)] == chosen[list(FACTORS)]).all(axis=1)
    has_seeds = basis.table.loc[is_chosen, "seed"].nunique() >= FEWEST
    remedy = measured_again(basis) if has_seeds and unit == "run" else _more_seeds(basis)
    return remedy or f"{FEWEST} seeds with valid times settle it."


def _more_seeds(basis: Basis) -> str:
    command = seeds_command(basis.runs, range(FEWEST))
    return f"The same sweep with more seeds settles it: {command}" if command else ""


def measured_next(basis: Basis, compared: pd.DataFrame, chosen: pd.Series[Any]) -> list[str]:
    """Name the cut that is predicted to be faster than the measured one, and its command."""
    is_guess = compared["fits"] & compared["source"].ne("measured") & compared["beyond"].eq("")
    faster_rows = compared[is_guess & compared["times_slower"].lt(1)].sort_values("time_s")
    if chosen["source"] != "measured" or faster_rows.empty or basis.runs.empty:
        return []
    row, runs = faster_rows.iloc[0], basis.runs
    batch = row["global_batch_size"]
    same_batch = runs[runs["global_batch_size"].eq(batch)]
    same_batch = runs if same_batch.empty else same_batch
    settings = {f"batch.{name}": str(row[name]) for name in (*FACTORS, "global_batch_size")}
    if basis.reaches is not None:
        tuned_ids = basis.reaches.loc[basis.reaches["global_batch_size"].eq(batch), "run_id"]
        rates = same_batch.loc[same_batch["run_id"].isin(tuned_ids), RATE].dropna().unique()
        settings |= {RATE: str(rates[0])} if len(rates) == 1 else {}
    more_text = f"; so are {len(faster_rows) - 1} more" if len(faster_rows) > 1 else ""
    text = (
        f"Not measured: {cut_text(row)} = {batch}, which is predicted to take {slower_text(row)} "
        f"times as long as the geometry recommended{more_text}."
    )
    command = cut_command(same_batch, settings)
    return [text if command is None else f"{text} To measure it: {command}"]


def measured_again(basis: Basis) -> str:
    """Say why completed runs have no time that counts, and which command measures them again."""
    runs = basis.runs
    completed = runs[runs["status"].eq("completed")] if len(runs) else runs
    if completed.empty:
        return "No completed run is there to be measured again."
    notes = completed["timing_note"].dropna().value_counts()
    if notes.empty:
        return "The times of all completed runs count."
    reasons_text = "; ".join(f"{note} ({count})" for note, count in notes.items())
    text = (
        f"Times of {notes.sum()} of {len(completed)} completed runs do not count: {reasons_text}."
    )
    command = timing_command(completed, basis.same_sweeps)
    if command is None:
        return f"{text} Launch these runs again where this reason does not apply."
    return (
        f"{text} On a free machine, with a core or device for each rank, the same sweep measures "
        f"them: {command}"
    )
