"""A recommendation as a page of plain text, and as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pandas as pd
from rich.console import Console

from batchscape.analysis.commands import COMMAND
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.recommend import Recommendation
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.numbers import MISSING, TIMES, significant
from batchscape.analysis.report.grids import Grid, show
from batchscape.outgoing import outgoing_json
from batchscape.record.instants import duration_text

__all__ = ["as_json", "candidates_grid", "show_recommendation"]

_MAX_ROWS = 12


def as_json(found: Sequence[Recommendation]) -> str:
    """Write recommendations as JSON: a list, one entry a group of comparable runs."""
    return json.dumps(
        outgoing_json([each.as_mapping() for each in found]), allow_nan=False, indent=2
    )


def show_recommendation(console: Console, found: Recommendation) -> None:
    """Print one recommendation: geometry, reasons, regret, warnings, values for config files."""
    if found.label:
        console.print(f"For {found.label}:")
    if found.geometry is None:
        _show_what_is_known(console, found)
        return
    console.print(found.headline)
    for warning in found.warnings:
        console.print(f"Warning: {warning}")
    console.print("\nWhy")
    for number, reason in enumerate(found.reasons, start=1):
        console.print(f"  {number}. {reason}")
    console.print("\nWhat it would cost to be wrong")
    for line in found.regret:
        console.print(f"  {line}")
    if found.missing:
        console.print("\nWhat these runs do not tell")
        for line in found.missing:
            console.print(f"  {line}", soft_wrap=True)
    console.print("\nWhat every config file must say")
    for system, values in found.config.items():
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        console.print(f"  {system}: {shown}")
    grid = candidates_grid(found.candidates, _MAX_ROWS)
    if grid.rows:
        console.print()
        show(console, grid, "The geometries, measured ones first, and the fastest of those")


def _show_what_is_known(console: Console, found: Recommendation) -> None:
    console.print(f"Which geometry: {found.why_not}", soft_wrap=True)
    for warning in found.warnings:
        console.print(f"Warning: {warning}")
    for title, lines in (
        ("What is known", found.reasons),
        ("What these runs do not tell", found.missing),
    ):
        if lines:
            console.print(f"\n{title}")
        for line in lines:
            console.print(f"  {line}", soft_wrap=COMMAND in line)


def candidates_grid(candidates: pd.DataFrame, max_rows: int) -> Grid:
    """Choose what of the candidates goes on a page: those that fit, measured ones first.

    Parameters
    ----------
    candidates : DataFrame
        As `compare_with` returns it.

    Returns
    -------
    Grid
        Geometries beyond the measured range are shown only where no other is.
    """
    known = candidates[candidates["fits"] & candidates["time_s"].notna()]
    near = known[known["beyond"] == ""]
    known = near if len(near) else known
    order = known.assign(guess=known["source"] != "measured")
    order = order.sort_values(["guess", "time_s"], kind="stable").head(max_rows)
    rows = []
    for _, row in order.iterrows():
        devices, micro, accumulation = (int(row[name]) for name in FACTORS)
        cut = TIMES.join(map(str, (devices, micro, accumulation)))
        rows.append(
            [
                f"{cut} = {int(row['global_batch_size'])}",
                "beyond the range" if row["beyond"] else str(row["source"]),
                f"{int(row['n_reached'])} of {int(row['n_seeds'])}",
                _interval(
                    row["time_s"], row["time_low_s"], row["time_high_s"], row["has_interval"]
                ),
                significant(row["device_hours"], 3),
                _ratio(
                    row["times_slower"],
                    row["times_slower_low"],
                    row["times_slower_high"],
                    row["times_slower_n"],
                ),
                significant(row["probability_faster"], 2),
                "yes" if row["on_front"] else "",
            ]
        )
    return Grid(
        headers=[
            f"devices {TIMES} micro {TIMES} accumulation = global",
            "step time",
            "seeds",
            "time to target",
            "device-hours",
            "times slower",
            "P(faster)",
            "front",
        ],
        rows=rows,
        short_first="geometry",
        n_left=2,
        notes=[
            "Time to target: optimizer steps of the global batch (of the cut, where a program of "
            "others trained; geometric mean over seeds) times "
            "the time of a step; 95 % intervals. seeds: those that reached the target. Times "
            "slower and P(faster): against the geometry recommended. front: of those measured, "
            "none is faster and cheaper."
        ],
    )


def _interval(value: float, low: float, high: float, is_shown: bool) -> str:
    if not is_shown:
        return duration_text(value)
    return f"{duration_text(value)} [{duration_text(low)}, {duration_text(high)}]"


def _ratio(value: float, low: float, high: float, n: float) -> str:
    if math.isnan(value):
        return MISSING
    if math.isnan(low) or math.isnan(high) or n < FEWEST:
        return significant(value, 3)
    return f"{significant(value, 3)} [{significant(low, 3)}, {significant(high, 3)}]"
