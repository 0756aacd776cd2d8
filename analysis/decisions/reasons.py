"""Sentences on each step of the recipe, and on what the runs do not identify."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from batchscape.analysis.cells import RATE
from batchscape.analysis.commands import (
    SHIPPED,
    cut_command,
    seeds_command,
    timing_command,
    untimed_cells,
)
from batchscape.analysis.cost.memory_model import MemoryModel
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.candidates import (
    DERIVED,
    MEMORY_MARGIN,
    failures_that_count,
    largest_micro_batch,
)
from batchscape.analysis.decisions.evidence import Basis
from batchscape.analysis.estimates import FEWEST, interval_text, too_few
from batchscape.analysis.numbers import significant
from batchscape.text import SIZES, count_text, duration_text, size_text

_REACH = 4
"""Largest micro-batch to predict memory for, over the largest measured one (our choice)."""


def reasons_for(
    evidence: Basis,
    candidates: pd.DataFrame,
    chosen: pd.Series[Any],
    memory_gib: float,
) -> list[str]:
    """Explain micro-batch, devices, accumulation, learning rate and time of the chosen row."""
    return [
        _micro_batch(evidence, chosen, memory_gib),
        _devices(candidates, chosen),
        _accumulation(candidates, chosen),
        _learning_rate(evidence, chosen),
        _time(evidence, chosen),
    ]


def missing_evidence(evidence: Basis) -> list[str]:
    """Name what the runs do not identify, with a command that would settle it."""
    missing = []
    memory, times = evidence.memory, evidence.step_time
    if memory is None or not all(
        memory.phases[name].estimates["per_sample_gib"].is_identified for name in memory.limiting
    ):
        missing.append(_settle("how memory grows with the micro-batch", "vary_micro_batch"))
    if times is None:
        missing.append(f"Not identified: the time of a step. {measured_again(evidence)}")
    else:
        untimed = untimed_cells(evidence.runs) if len(evidence.runs) else evidence.runs
        if len(untimed) and timing_command(untimed, evidence.same_sweeps) is not None:
            what = f"the time of {count_text(untimed['cell'].nunique(), 'cut')}"
            missing.append(f"Not identified: {what}. {measured_again(evidence)}")
        if not times.estimates["per_sample_s"].is_identified:
            missing.append(_settle("how time grows with the micro-batch", "vary_micro_batch"))
        if not times.estimates["exchange_s"].is_identified:
            missing.append(_settle("what the exchange between devices costs", "device_scaling"))
    if evidence.critical is None or not evidence.critical.is_identified:
        missing.append(_settle("the critical batch", "vary_global_batch"))
    reaches = evidence.reaches
    if reaches is None or not reaches.get("tuned", pd.Series([False])).all():
        missing.append(_settle("the best learning rate of each global batch", "learning_rate"))
    times_of = evidence.table.groupby(list(FACTORS))["step_time_s"].count()
    n_times = 0 if times_of.empty else int(times_of.max())
    n_seeds = int(
        evidence.table["seed"].nunique() if reaches is None else reaches["seed"].nunique()
    )
    if n_seeds < FEWEST and not (reaches is None and n_times >= FEWEST):
        command = seeds_command(evidence.runs, range(FEWEST))
        varies = "times vary between runs" if reaches is None else "steps vary between seeds"
        what = f"how {varies}: {too_few(n_seeds, 'seeds')}"
        missing.append(
            _settle(what, "vary_global_batch")
            if command is None
            else f"Not identified: {what}. The same sweep with more seeds settles it: {command}"
        )
    return missing


def measured_next(evidence: Basis, compared: pd.DataFrame) -> list[str]:
    """Name the cut that is predicted to be faster than the chosen one, and its command."""
    guessed = compared["fits"] & compared["source"].ne("measured") & compared["beyond"].eq("")
    faster = compared[guessed & compared["times_slower"].lt(1)].sort_values("time_s")
    if faster.empty or evidence.runs.empty:
        return []
    row, batch = faster.iloc[0], int(faster["global_batch_size"].iloc[0])
    same_batch = evidence.runs[evidence.runs["global_batch_size"].eq(batch)]
    same_batch = evidence.runs if same_batch.empty else same_batch
    settings = {f"batch.{name}": str(int(row[name])) for name in (*FACTORS, "global_batch_size")}
    if evidence.reaches is not None:
        tuned = evidence.reaches.loc[evidence.reaches["global_batch_size"].eq(batch), "run_id"]
        rates = same_batch.loc[same_batch["run_id"].isin(tuned), RATE].dropna().unique()
        settings |= {RATE: str(rates[0])} if len(rates) == 1 else {}
    value, low, high = (float(row[f"times_slower{end}"]) for end in ("", "_low", "_high"))
    ratio = interval_text(value, low, high, FEWEST)
    also = f"; so are {len(faster) - 1} more" if len(faster) > 1 else ""
    text = (
        f"Not measured: {cut_text(row)} = {batch}, which is predicted to take {ratio} times as "
        f"long as the geometry recommended{also}."
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


def _settle(what: str, sweep: str) -> str:
    command = f"batchscape sweep sweeps={sweep}"
    return f"Not identified: {what}. A shipped study, {SHIPPED}, tells: {command}"


def _micro_batch(evidence: Basis, chosen: pd.Series[Any], memory_gib: float) -> str:
    micro, devices = int(chosen["micro_batch_size"]), int(chosen["data_parallel_size"])
    text = f"Micro-batch {micro}"
    if math.isnan(chosen["memory_gib"]):
        return f"{text}: how much memory it takes is not known, and whether it fits."
    needed = size_text(chosen["memory_gib"] * SIZES["GiB"])
    text += f": it takes {needed} ({chosen['memory_source']}, and {MEMORY_MARGIN:.0%} margin)"
    if math.isnan(memory_gib):
        return f"{text}; the memory of a device is not recorded, so give --memory-gib to check it."
    text += f" of {size_text(memory_gib * SIZES['GiB'])} a device."
    share = int(chosen["global_batch_size"]) // devices
    if evidence.memory is None or micro == share:
        return text
    largest = _largest(evidence, evidence.memory, chosen, share, memory_gib)
    return " ".join(filter(None, [text, largest]))


def _largest(
    evidence: Basis, model: MemoryModel, chosen: pd.Series[Any], share: int, memory_gib: float
) -> str:
    """Name the largest micro-batch that fits by the memory model, up to the share of a device.

    Empty where the model puts it below the micro-batch that was measured to fit.
    """
    devices, micro = int(chosen["data_parallel_size"]), int(chosen["micro_batch_size"])
    slopes = (model.phases[name].estimates["per_sample_gib"] for name in model.limiting)
    measured = model.measured["micro_batch_size"].astype(int)
    # Without an interval, which is NaN, the value alone tells.
    if not any(slope.value > 0 and not slope.low <= 0 for slope in slopes):
        return "The largest that fits is not identified: memory was not found to grow with it."
    most = min(share, _REACH * measured.max())
    largest = largest_micro_batch(model, devices, memory_gib, most)
    if largest < micro:
        return ""
    counted = failures_that_count(evidence, memory_gib, devices)
    failed = min((m for _, m, _ in counted), default=math.inf)
    if failed <= largest:
        return f"By the memory model {largest} would fit, but {failed} ran out of memory."
    return (
        f"The largest that fits, by the memory model, is {largest} (looked for up to {most}; "
        f"measured up to {measured.max()})."
    )


def _devices(candidates: pd.DataFrame, chosen: pd.Series[Any]) -> str:
    devices = int(chosen["data_parallel_size"])
    others = _timed(candidates, chosen)
    others = others[others["data_parallel_size"] != devices]
    return f"Devices {devices}{_against_fastest(others, chosen, 'on another number of devices')}"


def _against_fastest(rows: pd.DataFrame, chosen: pd.Series[Any], where: str) -> str:
    """End the sentence on the chosen cut with the fastest of the rows, and its ratio of times."""
    if chosen["source"] != "measured":
        return f"; the step time of this cut is {chosen['source']}, not measured."
    if rows.empty:
        return f"; no cut of this batch {where} was timed."
    best = rows.sort_values("time_log").iloc[0]
    ratio = math.exp(best["time_log"] - chosen["time_log"])
    return f"; {where}, {cut_text(best)} takes {ratio:.3g} times as long."


def _accumulation(candidates: pd.DataFrame, chosen: pd.Series[Any]) -> str:
    steps = int(chosen["gradient_accumulation_steps"])
    batch = int(chosen["global_batch_size"])
    text = f"Accumulation {steps}"
    if steps == 1:
        return f"{text}: devices x micro-batch is the global batch of {batch} already."
    text += f" makes the global batch {batch}"
    others = _timed(candidates, chosen)
    others = others[
        (others["data_parallel_size"] == chosen["data_parallel_size"])
        & (others["micro_batch_size"] > chosen["micro_batch_size"])
    ]
    return text + _against_fastest(others, chosen, "on as many devices with less of it")


def _timed(candidates: pd.DataFrame, chosen: pd.Series[Any]) -> pd.DataFrame:
    """Choose the measured cuts of the same global batch that fit."""
    same_batch = candidates["global_batch_size"] == chosen["global_batch_size"]
    is_timed = same_batch & (candidates["source"] == "measured") & candidates["fits"]
    timed: pd.DataFrame = candidates[is_timed]
    return timed


def _learning_rate(evidence: Basis, chosen: pd.Series[Any]) -> str:
    batch, rate = int(chosen["global_batch_size"]), float(chosen["learning_rate"])
    if math.isnan(rate):
        rule = "linear" if evidence.optimizer == "sgd" else "sqrt"
        return (
            "Learning rate: not identified. When the global batch changes, start from the rule for "
            f"{evidence.optimizer or 'this optimizer'}: scaling.learning_rate={rule}, and tune."
        )
    text = f"Learning rate {significant(rate, 3)}, at which global batch {batch} was measured"
    reaches = evidence.reaches
    if reaches is not None and "tuned" in reaches:
        rows = reaches[reaches["global_batch_size"] == batch]
        if bool(rows["tuned"].all()):
            return f"{text}: of its grid the one of the fewest steps to the target."
        if bool(rows["edge"].any()):
            return (
                f"{text}, of its grid the one of the fewest steps to the target, but AT ITS EDGE: "
                "a better one may lie outside."
            )
    rule, factor = ("linear", "k") if evidence.optimizer == "sgd" else ("sqrt", "the root of k")
    return (
        f"{text}; NOT TUNED for it. For a global batch k times as large, multiply it by {factor} "
        f"(scaling.learning_rate={rule}): a rule, not a measurement."
    )


def _time(evidence: Basis, chosen: pd.Series[Any]) -> str:
    if evidence.reaches is None or not chosen["n_seeds"]:
        if math.isnan(chosen["time_s"]):
            return "Time: not identified."
        return f"Time: {duration_text(chosen['time_s'])} an optimizer step; to a target: unknown."
    target = float(evidence.reaches["target_loss"].iloc[0])
    where = f"to a held-out loss of {significant(target, 4)}"
    reached, n = int(chosen["n_reached"]), int(chosen["n_seeds"])
    seeds = f"{reached} of {count_text(n, 'seed')} reached it"
    if not math.isfinite(chosen["time_s"]):
        return f"Time {where}: not identified; {seeds}."
    ends = ""
    if not math.isnan(chosen["time_high_s"]):
        low, high = duration_text(chosen["time_low_s"]), duration_text(chosen["time_high_s"])
        ends = f" [{low}, {high}]"
    by = DERIVED if chosen["derived"] else "recorded by the runs"
    derived = f"; {by}" if chosen["source"] == "measured" else ""
    return (
        f"Time {where}: {duration_text(chosen['time_s'])}{ends}, "
        f"{significant(chosen['device_hours'], 3)} device-hours ({seeds}{derived})."
    )


def cut_text(row: pd.Series[Any]) -> str:
    """Write the geometry of a candidate."""
    return " x ".join(str(int(row[name])) for name in FACTORS)
