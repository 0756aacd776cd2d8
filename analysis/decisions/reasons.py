"""Sentences on each step of the recipe, and on what the runs do not identify."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
from batchscape.analysis.decisions.candidates import (
    DERIVED,
    MEMORY_MARGIN,
    memory_of_device,
)
from batchscape.analysis.decisions.evidence import Basis
from batchscape.analysis.estimates import FEWEST, interval_text, too_few
from batchscape.analysis.numbers import MISSING, significant
from batchscape.text import SIZES, count_text, duration_text, size_text


def reasons_for(
    evidence: Basis, candidates: pd.DataFrame, chosen: pd.Series[Any], memory_gib: float | None
) -> list[str]:
    """Explain micro-batch, devices, accumulation, learning rate and time of the chosen row."""
    memory = memory_of_device(evidence, memory_gib, chosen["data_parallel_size"])
    return [
        _micro_batch(chosen, memory),
        _devices(candidates, chosen),
        _accumulation(chosen),
        _learning_rate(evidence, chosen),
        _time(evidence, chosen),
    ]


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


def _micro_batch(chosen: pd.Series[Any], memory_gib: float) -> str:
    text = f"Micro-batch {chosen['micro_batch_size']}"
    if math.isnan(chosen["memory_gib"]):
        return f"{text}: how much memory it takes is not known, and whether it fits."
    needed = size_text(chosen["memory_gib"] * SIZES["GiB"])
    text += f": it takes {needed} ({chosen['memory_source']}, and {MEMORY_MARGIN:.0%} margin)"
    if math.isnan(memory_gib):
        return f"{text}; the memory of a device is not recorded, so give --memory-gib to check it."
    return f"{text} of {size_text(memory_gib * SIZES['GiB'])} a device."


def _devices(candidates: pd.DataFrame, chosen: pd.Series[Any]) -> str:
    """Set the cut against the fastest measured one of its batch on other devices."""
    text = f"Devices {chosen['data_parallel_size']}"
    if chosen["source"] != "measured":
        return f"{text}; the step time of this cut is {chosen['source']}, not measured."
    is_other = candidates["data_parallel_size"].ne(chosen["data_parallel_size"])
    is_other &= candidates["global_batch_size"].eq(chosen["global_batch_size"])
    timed = candidates[is_other & candidates["source"].eq("measured") & candidates["fits"]]
    if timed.empty:
        return f"{text}; no cut of this batch on another number of devices was timed."
    best = timed.iloc[int(timed["time_log"].argmin())]
    ratio = math.exp(best["time_log"] - chosen["time_log"])
    return (
        f"{text}; on another number of devices, {cut_text(best)} takes {ratio:.3g} times as long."
    )


def _accumulation(chosen: pd.Series[Any]) -> str:
    accumulation, batch = chosen["gradient_accumulation_steps"], chosen["global_batch_size"]
    if accumulation == 1:
        return f"Accumulation 1: devices x micro-batch is the global batch of {batch} already."
    return f"Accumulation {accumulation} makes the global batch {batch}."


def _learning_rate(evidence: Basis, chosen: pd.Series[Any]) -> str:
    rule, factor = ("linear", "k") if evidence.optimizer == "sgd" else ("sqrt", "the root of k")
    rate, batch = float(chosen["learning_rate"]), chosen["global_batch_size"]
    if math.isnan(rate):
        return (
            "Learning rate: not identified. When the global batch changes, start from the rule for "
            f"{evidence.optimizer or 'this optimizer'}: scaling.learning_rate={rule}, and tune."
        )
    text = f"Learning rate {significant(rate, 3)}, at which global batch {batch} was measured"
    best = "of its grid the one of the fewest steps to the target"
    if evidence.reaches is not None and "tuned" in evidence.reaches:
        rows = evidence.reaches[evidence.reaches["global_batch_size"].eq(batch)]
        if rows["tuned"].all():
            return f"{text}: {best}."
        if rows["edge"].any():
            return f"{text}, {best}, but AT ITS EDGE: a better one may lie outside."
    return (
        f"{text}; NOT TUNED for it. For a global batch k times as large, multiply it by {factor} "
        f"(scaling.learning_rate={rule}): a rule, not a measurement."
    )


def _time(evidence: Basis, chosen: pd.Series[Any]) -> str:
    if evidence.reaches is None or not chosen["n_seeds"]:
        if math.isnan(chosen["time_s"]):
            return "Time: not identified."
        return f"Time: {duration_text(chosen['time_s'])} an optimizer step; to a target: unknown."
    where = f"to a held-out loss of {significant(evidence.target_loss, 4)}"
    seeds = f"{chosen['n_reached']} of {count_text(chosen['n_seeds'], 'seed')} reached it"
    if not math.isfinite(chosen["time_s"]):
        return f"Time {where}: not identified; {seeds}."
    origin = ""
    if chosen["source"] == "measured":
        origin = f"; {DERIVED if chosen['derived'] else 'recorded by the runs'}"
    hours = significant(chosen["device_hours"], 3)
    return f"Time {where}: {time_text(chosen)}, {hours} device-hours ({seeds}{origin})."


def cut_text(row: Mapping[Any, Any] | pd.Series[Any], sign: str = " x ") -> str:
    """Write the geometry of a candidate."""
    return sign.join(str(row[name]) for name in FACTORS)


def time_text(row: Mapping[Any, Any] | pd.Series[Any]) -> str:
    """Write the time of a candidate, with its ends where it has them."""
    value, low, high = (float(row[f"time{end}_s"]) for end in ("", "_low", "_high"))
    if math.isnan(value):
        return MISSING
    ends = "" if math.isnan(high) else f" [{duration_text(low)}, {duration_text(high)}]"
    return f"{duration_text(value)}{ends}"


def slower_text(row: pd.Series[Any]) -> str:
    """Write the ratio of a candidate's time to that of the chosen one; n where it was measured."""
    value, low, high, n = (float(row[f"times_slower{end}"]) for end in ("", "_low", "_high", "_n"))
    return interval_text(value, low, high, int(n) if row["source"] == "measured" else FEWEST)
