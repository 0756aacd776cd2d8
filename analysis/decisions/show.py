"""A recommendation as a page of plain text, and as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from batchscape.analysis.commands import part_command
from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.decisions.candidates import DERIVED, is_to_target
from batchscape.analysis.decisions.recommend import Recommendation
from batchscape.analysis.numbers import TIMES, significant
from batchscape.analysis.report.grids import GEOMETRY_HEADER, Grid, columns_grid, show
from batchscape.outgoing import outgoing_json
from batchscape.text import count_text, duration_text

__all__ = [
    "as_json",
    "candidates_grid",
    "candidates_shown",
    "geometry_text",
    "held_against",
    "show_recommendation",
]

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
    named = found.geometry is not None
    headline = found.headline if named else f"Which geometry: {found.why_not}"
    console.print(headline, soft_wrap=not named)
    for warning in found.warnings:
        console.print(f"Warning: {warning}")
    numbered = [f"{number}. {reason}" for number, reason in enumerate(found.reasons, start=1)]
    values = {
        system: ", ".join(f"{name}={value}" for name, value in keys.items())
        for system, keys in found.config.items()
    }
    for title, lines in (
        ("Why" if named else "What is known", numbered if named else found.reasons),
        ("What it would cost to be wrong", found.regret),
        ("What these runs do not tell", found.missing),
        ("What every config file must say", [f"{name}: {said}" for name, said in values.items()]),
    ):
        if lines:
            console.print(f"\n{title}")
        for line in lines:
            console.print(f"  {line}", soft_wrap=bool(part_command(line)[1]))
    if not named:
        return
    grid = candidates_grid(found.candidates, _MAX_ROWS)
    if grid.rows:
        console.print()
        show(console, grid, "Geometries: those measured, then those predicted, the fastest first")
        for note in grid.notes:
            console.print(note)


def candidates_shown(candidates: pd.DataFrame, max_rows: int) -> pd.DataFrame:
    """Choose the candidates that go on a page: those that fit, measured ones first.

    Parameters
    ----------
    candidates : DataFrame
        As `compare_with` returns it.

    Returns
    -------
    DataFrame
        Its rows under their index; those beyond the measured range only where no other is.
    """
    known = _worth_showing(candidates)
    order = known.assign(guess=known["source"] != "measured")
    return order.sort_values(["guess", "time_s"], kind="stable").head(max_rows)


def _worth_showing(candidates: pd.DataFrame) -> pd.DataFrame:
    known = candidates[candidates["fits"] & candidates["time_s"].notna()]
    near = known[known["beyond"] == ""]
    return near if len(near) else known


def candidates_grid(candidates: pd.DataFrame, max_rows: int) -> Grid:
    """Write what `candidates_shown` chooses as texts; the parameters are the same."""
    order = candidates_shown(candidates, max_rows)
    records = order.to_dict("records")
    more = int((candidates["fits"] & candidates["time_s"].notna()).sum()) - len(order)
    to_target = is_to_target(order)
    return columns_grid(
        [
            (GEOMETRY_HEADER, map(geometry_text, records)),
            ("step time", order["source"].mask(order["beyond"].ne(""), "beyond the range")),
        ],
        [
            *(
                [("seeds", [f"{row['n_reached']:.0f} of {row['n_seeds']:.0f}" for row in records])]
                if to_target
                else []
            ),
            ("time to target" if to_target else "time of a step", map(_time, records)),
            *(
                [("device-hours", [significant(row["device_hours"], 3) for row in records])]
                if to_target
                else []
            ),
            ("times slower", map(_ratio, records)),
            ("front", order["on_front"].map({True: "yes", False: ""})),
        ],
        notes=[
            *([_TO_TARGET] if to_target else ["Time of a step: geometric mean over runs."]),
            *([f"{DERIVED}."] if order["derived"].any() else []),
            *held_against(order),
            "In brackets: 95 % intervals; those of times slower (against the geometry "
            "recommended) hold for all pairs at once, as the data chose which are compared. front: "
            "of those measured, none is faster and cheaper.",
            *([f"Not shown: {more} more, slower or beyond the measured range."] if more else []),
        ],
    )


_TO_TARGET = (
    "Time to target: what an optimizer step of the cut took on the way there, as its runs recorded "
    "it, times the steps of the global batch (of the cut, where a program of others trained); "
    "geometric means. seeds: of those that trained the global batch, in any of its cuts, the ones "
    "that reached the target."
)


def held_against(candidates: pd.DataFrame) -> list[str]:
    """Say how far times made of mean steps are from those that were recorded; empty without any."""
    recorded = candidates[candidates["source"].eq("measured") & ~candidates["derived"]]
    share = (recorded["derived_time_s"] / recorded["time_s"]).dropna()
    share = share[share.map(math.isfinite)]
    if share.empty:
        return []
    low, high = significant(share.min(), 3), significant(share.max(), 3)
    ends = low if low == high else f"{low} to {high}"
    return [
        f"Recorded times held against derived ones: steps times the mean time of a step is {ends} "
        f"times what was recorded ({count_text(len(share), 'cut')})."
    ]


def geometry_text(row: Mapping[Hashable, Any]) -> str:
    """Write the geometry of a candidate as its factors and their product."""
    cut = TIMES.join(str(int(row[name])) for name in FACTORS)
    return f"{cut} = {int(row['global_batch_size'])}"


def _time(row: Mapping[Hashable, Any]) -> str:
    value, low, high = (duration_text(row[f"time{end}_s"]) for end in ("", "_low", "_high"))
    text = f"{value} [{low}, {high}]" if not math.isnan(row["time_high_s"]) else value
    return f"{text}, derived" if row["derived"] else text


def _ratio(row: Mapping[Hashable, Any]) -> str:
    value, low, high = (row[f"times_slower{end}"] for end in ("", "_low", "_high"))
    text = significant(value, 3)
    if math.isnan(low) or math.isnan(high):
        return text
    return f"{text} [{significant(low, 3)}, {significant(high, 3)}]"
