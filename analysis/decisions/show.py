"""A recommendation as a page of plain text, and as tables."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pandas as pd
from rich.console import Console

from batchscape.analysis.commands import split_command
from batchscape.analysis.decisions.answer import cut_text, time_text
from batchscape.analysis.decisions.candidates import DERIVED, is_to_target
from batchscape.analysis.decisions.recommend import Recommendation
from batchscape.analysis.numbers import MISSING, TIMES
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import GEOMETRY_HEADER
from batchscape.analysis.report.writers import show
from batchscape.outgoing import outgoing_json

_MAX_ROWS = 12


def as_json(recommendations: Sequence[Recommendation]) -> str:
    """Write recommendations as JSON: a list, one entry a group of comparable runs."""
    return json.dumps(
        outgoing_json([recommendation.as_mapping() for recommendation in recommendations]),
        allow_nan=False,
        indent=2,
    )


def show_recommendation(console: Console, recommendation: Recommendation) -> None:
    """Print one recommendation: geometry, reasons, regret, warnings, values for config files."""
    if recommendation.label:
        console.print(f"For {recommendation.label}:")
    has_geometry = recommendation.geometry is not None
    console.print(
        recommendation.headline, soft_wrap=bool(split_command(recommendation.headline)[1])
    )
    for warning in recommendation.warnings:
        console.print(f"Warning: {warning}")
    parts = {
        "Why": [f"{number}. {reason}" for number, reason in enumerate(recommendation.reasons, 1)],
        "What it would cost to be wrong": recommendation.regret,
        "What these runs do not tell": recommendation.missing,
        "What every config file must say"
        if recommendation.is_recommended
        else "What config files say for this cut, which so few runs cannot recommend": [
            f"{system}: {', '.join(f'{name}={value}' for name, value in keys.items())}"
            for system, keys in recommendation.config.items()
        ],
    }
    for title, lines in parts.items():
        if lines:
            console.print(f"\n{title}")
        for line in lines:
            console.print(f"  {line}", soft_wrap=bool(split_command(line)[1]))
    if not has_geometry:
        return
    title = "Geometries: those measured, then those predicted, the fastest first"
    table = candidates_table(recommendation.candidates, _MAX_ROWS, "time_to_target", title)
    if table.positions:
        console.print()
        show(console, table)
        for note in table.notes:
            console.print(note)


def candidates_table(candidates: pd.DataFrame, max_rows: int, name: str, title: str) -> Table:
    """Show the candidates that fit, measured ones first; extrapolated ones for want of others."""
    has_time = candidates["fits"] & candidates["time_s"].notna()
    is_near = has_time & candidates["beyond"].eq("")
    listed = candidates.assign(is_guess=candidates["source"].ne("measured"))
    listed = listed[is_near if is_near.any() else has_time]
    visible = listed.sort_values(["is_guess", "time_s"], kind="stable").head(max_rows)
    n_hidden = has_time.sum() - len(visible)
    records = candidates.to_dict("records")
    seeds = [f"{row['n_reached']:.0f} of {row['n_seeds']:.0f}" for row in records]
    to_target = is_to_target(visible)
    return Table(
        name,
        title,
        candidates,
        [
            Column(
                "geometry", GEOMETRY_HEADER, texts=list(map(geometry_text, records)), is_left=True
            ),
            Column(
                "source",
                "step time",
                texts=candidates["source"].mask(candidates["beyond"].ne(""), "beyond the range"),
                is_left=True,
            ),
            *([Column("n_reached", "seeds", texts=seeds)] if to_target else []),
            Column(
                "time_s",
                "time to target" if to_target else "time of a step",
                texts=list(map(_time, records)),
            ),
            *([Column("device_hours", "device-hours", format=3)] if to_target else []),
            Column("times_slower", "", "", 3, "times_slower_low", "times_slower_high"),
            Column("on_front", "front", words={True: "yes", False: ""}),
        ],
        visible.index.tolist(),
        notes=[
            *([_TO_TARGET] if to_target else ["Time of a step: geometric mean over runs."]),
            *([f"{DERIVED}."] if visible["derived"].any() else []),
            "In brackets: 95 % intervals; those of times slower (against the geometry "
            "recommended) hold for all pairs at once, as the data chose which are compared. front: "
            "of those measured, none is faster and cheaper.",
            *(
                [f"Not shown: {n_hidden} more, slower or beyond the measured range."]
                if n_hidden
                else []
            ),
        ],
    )


_TO_TARGET = (
    "Time to target: what an optimizer step of the cut took on the way there, as its runs recorded "
    "it, times the steps of the global batch (of the cut, where a program of others trained); "
    "geometric means. seeds: of those that trained the global batch, in any of its cuts, the ones "
    "that reached the target."
)


def geometry_text(row: Mapping[Hashable, Any]) -> str:
    """Write the geometry of a candidate as its factors and their product."""
    return f"{cut_text(row, TIMES)} = {row['global_batch_size']}"


def _time(row: Mapping[Hashable, Any]) -> str:
    text = time_text(row)
    return f"{text}, derived" if row["derived"] and text != MISSING else text
