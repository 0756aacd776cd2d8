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


def missing_evidence(evidence: Basis) -> list[str]:
    """Name times and seeds that the runs lack, with the command that adds them."""
    missing = []
    untimed = untimed_cells(evidence.runs) if len(evidence.runs) else evidence.runs
    if evidence.step_time is None:
        missing.append(f"Not identified: the time of a step. {measured_again(evidence)}")
    elif len(untimed) and timing_command(untimed, evidence.same_sweeps) is not None:
        cuts = count_text(untimed["cell"].nunique(), "cut")
        missing.append(f"Not identified: the time of {cuts}. {measured_again(evidence)}")
    n_times = evidence.table.groupby(list(FACTORS))["step_time_s"].count().max()
    runs, varies = evidence.reaches, "steps vary between seeds"
    if runs is None:
        runs, varies = evidence.table, "times vary between runs"
    n_seeds = runs["seed"].nunique()
    if n_seeds >= FEWEST or (evidence.reaches is None and n_times >= FEWEST):
        return missing
    command = seeds_command(evidence.runs, range(FEWEST))
    how = f" The same sweep with more seeds settles it: {command}" if command else ""
    return [*missing, f"Not identified: how {varies}: {too_few(n_seeds, 'seeds')}.{how}"]


def measured_next(evidence: Basis, compared: pd.DataFrame, chosen: pd.Series[Any]) -> list[str]:
    """Name the cut that is predicted to be faster than the measured one, and its command."""
    guessed = compared["fits"] & compared["source"].ne("measured") & compared["beyond"].eq("")
    faster = compared[guessed & compared["times_slower"].lt(1)].sort_values("time_s")
    if chosen["source"] != "measured" or faster.empty or evidence.runs.empty:
        return []
    row, runs = faster.iloc[0], evidence.runs
    batch = row["global_batch_size"]
    same_batch = runs[runs["global_batch_size"].eq(batch)]
    same_batch = runs if same_batch.empty else same_batch
    settings = {f"batch.{name}": str(row[name]) for name in (*FACTORS, "global_batch_size")}
    if evidence.reaches is not None:
        tuned = evidence.reaches.loc[evidence.reaches["global_batch_size"].eq(batch), "run_id"]
        rates = same_batch.loc[same_batch["run_id"].isin(tuned), RATE].dropna().unique()
        settings |= {RATE: str(rates[0])} if len(rates) == 1 else {}
    also = f"; so are {len(faster) - 1} more" if len(faster) > 1 else ""
    text = (
        f"Not measured: {cut_text(row)} = {batch}, which is predicted to take {slower_text(row)} "
        f"times as long as the geometry recommended{also}."
    )
    command = cut_command(same_batch, settings)
    return [text if command is None else f"{text} To measure it: {command}"]


def measured_again(evidence: Basis) -> str:
    """Say why completed runs have no time that counts, and which command measures them again."""
    runs = evidence.runs
    completed = runs[runs["status"].eq("completed")] if len(runs) else runs
    if completed.empty:
        return "No completed run is there to be measured again."
    notes = completed["timing_note"].dropna().value_counts()
    if notes.empty:
        return "The times of all completed runs count."
    why = "; ".join(f"{note} ({count})" for note, count in notes.items())
    text = f"Times of {notes.sum()} of {len(completed)} completed runs do not count: {why}."
    command = timing_command(completed, evidence.same_sweeps)
    if command is None:
        return f"{text} Launch them again where that does not hold."
    return (
        f"{text} On a free machine, with a core or device for each rank, the same sweep measures "
        f"them: {command}"
    )
