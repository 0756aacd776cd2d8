"""Loss curves of the page: every run by itself, thinned so that what is extreme stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import cycle
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label, launched_batches
from batchscape.analysis.hardware import was_started
from batchscape.analysis.joins import rows_of
from batchscape.analysis.page.chart import (
    Chart,
    Choice,
    by,
    colour,
    label_text,
    numbers,
    packed,
    scatter,
    shade,
)
from batchscape.analysis.page.settings import setting_names
from batchscape.analysis.targets.crossings import TO_TARGET
from batchscape.analysis.targets.curves import PROGRESS, only_what_counts
from batchscape.record.tables import Tables

__all__ = ["THINNING", "loss_chart", "thinned"]

_TO_TARGET = {progress: name for name, progress in TO_TARGET.items()}
_KINDS = {"eval_loss": "held-out loss", "loss": "training loss"}
_ALL_POINTS = 40_000
_MOST, _LEAST = 1000, 40
"""Points of all curves of a page, and of one. Ours: they make two megabytes of numbers."""
_MOST_RUNS = 500
"""Runs whose curves a page has room for."""
THINNING = (
    "Curves of many points are thinned: of windows of equally many measurements the lowest and the "
    "highest stay, with the first and the last of the curve; none is averaged or moved. How many "
    f"stay depends on the number of curves: all together have about {_ALL_POINTS:,} points, but "
    f"each has {_LEAST} where it has as many."
)
_CUT = (
    "The axis of the loss is cut above the first and last losses of the runs that did not diverge: "
    "peaks, and crosses, may lie outside; double click to see all. "
)
_BEST = "best"
_SOARED = 1.5
"""How much higher than the range of these losses one must be for that."""
_OF_RUNS = [
    *("sweep_dir", "run_id", "cell", "global_batch_size", "status", "stop_reason", "task"),
    "timing_valid",
]
_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star")


def thinned(rows: pd.DataFrame, value: str, points: int) -> pd.DataFrame:
    """Leave out points of long curves, but never the lowest or highest of a window.

    Parameters
    ----------
    rows : DataFrame
        With `run` and `value`; rows of one run lie together, in order.
    points : int
        Points a run may keep, at least 4; runs that have no more keep all.

    Returns
    -------
    DataFrame
        The rows that stay, in their order.
    """
    grouped = rows.groupby("run", sort=False)[value]
    counts, place = grouped.transform("size").to_numpy(), grouped.cumcount().to_numpy()
    if not (counts > points).any():
        return rows
    windows = (points - 2) // 2
    finite = np.flatnonzero(np.isfinite(rows[value]))
    losses = pd.Series(rows[value].to_numpy()[finite], index=finite)
    of_window = losses.groupby(
        [rows["run"].to_numpy()[finite], (place * windows // counts)[finite]]
    )
    kept = (counts <= points) | (place == 0) | (place == counts - 1)
    kept[of_window.idxmin()] = True
    kept[of_window.idxmax()] = True
    remaining: pd.DataFrame = rows[kept]
    return remaining


def loss_chart(
    cells: Cells, tables: Tables, reaches: pd.DataFrame | None, at_best: Collection[int] = ()
) -> Chart | None:
    """Draw the held-out and the training loss of every run.

    Parameters
    ----------
    reaches : DataFrame, optional
        As `steps_to_target` returns it: where each run met a target.
    at_best : collection of int
        Cells that are drawn and shown first, as `cells_at_best` returns them.

    Returns
    -------
    Chart or None
        None where no run measured a loss.
    """
    # Rows of the few columns that are asked for are taken in a fraction of the time.
    runs = cells.runs.reindex(columns=_OF_RUNS).reset_index(drop=True)
    launched = runs[was_started(runs)]
    drawn = _drawn(launched, geometry_label(cells.table), at_best)
    found = {
        value: rows_of(runs.loc[drawn], rows, [*PROGRESS, value]).dropna(subset=[value])
        for value, rows in (("eval_loss", tables.evals), ("loss", tables.steps))
    }
    for rows in found.values():
        rows["run"] = drawn.to_numpy()[rows["run"]]
    found = {value: rows for value, rows in found.items() if len(rows)}
    if not found:
        return None
    n_curves = sum(rows["run"].nunique() for rows in found.values())
    points = min(max(_ALL_POINTS // n_curves, _LEAST), _MOST)
    for value, rows in found.items():
        found[value] = thinned(only_what_counts(rows, runs), value, points)
    axes = {
        name: text
        for name, text in PROGRESS.items()
        if any(rows[name].notna().any() for rows in found.values())
    }
    looks = _looks(cells, runs, at_best)
    traces: list[Mapping[str, Any]] = []
    for value, rows in found.items():
        traces += _curves(value, rows, runs, axes, looks)
    marks, lines, targets = _targets(reaches, runs, axes, looks)
    choices = [Choice("axis", "Against", axes)]
    choices.append(Choice("curve", "Curve", {value: _KINDS[value] for value in found}))
    if targets:
        choices.append(Choice("target", "Target", {"": "none", **targets}))
    cut = _range(found, runs)
    few = ""
    if len(drawn) < len(launched):
        few = (
            f"Drawn are {len(drawn)} of {len(launched)} runs: one of each cell, completed if there "
            "is such a one, then another of each, as far as there is room; geometries take turns, "
            "each with cells from all over its settings. "
        )
    settings = setting_names(cells, cells.context_of())
    if len(settings) > 1:
        named = {f"s{number}": name for number, name in settings.items()}
        others = [c for c in looks if _BEST in looks[c]["settings"] and c not in at_best]
        sizes = cells.table["global_batch_size"].loc[others].unique()
        apart = "".join(f", B = {size} at all where it has none" for size in sizes)
        best = {_BEST: f"each global batch at its best learning rate{apart}"} if at_best else {}
        every = {"": "all", **best, **named}
        if len(named) > len(_DASHES):
            # More than can be told apart: the best, or that of the most geometries, comes first.
            shown = Counter(key for look in looks.values() for key in look["settings"])
            first = _BEST if best else max(named, key=lambda key: shown[key])
            every = {key: every[key] for key in [first, *every]}
        choices.append(Choice("setting", "Settings", every))
    choices.append(Choice("scale", "Scale of the loss", {"linear": "linear", "log": "logarithmic"}))
    return Chart(
        "loss",
        "Loss curves",
        "A line a run, of one colour a geometry; a cross ends a run that diverged, where "
        f"its loss was last finite. {_CUT if any(cut.values()) else ''}Triangles: "
        "where a run met the chosen target, from tables/reaches.csv. Times: of runs whose times "
        f"are valid, without evaluation, checkpoints and start-up. {few}{THINNING}",
        [*traces, *marks],
        {
            "xaxis": {"title": {"text": by("axis", axes)}, "rangemode": "tozero"},
            "yaxis": {
                "title": {"text": by("curve", {value: _KINDS[value] for value in found})},
                "type": by("scale", {"linear": "linear", "log": "log"}),
                "range": by("curve", cut),
            },
            "shapes": by("target", lines) if targets else [],
        },
        choices,
        ["tables/reaches.csv"] if targets else [],
    )


def _drawn(
    launched: pd.DataFrame, geometries: pd.Series[str], at_best: Collection[int] = ()
) -> pd.Index[int]:
    """Choose runs: of many, one of each cell, then another of each; completed ones first.

    Each time those at the best learning rate of their global batch come first.

    Where cells are more than there is room for, geometries take turns, each with its cells in the
    order of their reversed bits, which spreads any first few of them over all.
    """
    order = launched.loc[launched["status"].ne("completed").sort_values(kind="stable").index]
    cells = geometries.loc[sorted(launched["cell"].unique())]
    place = cells.groupby(cells).cumcount()
    bits = int(place.max()).bit_length() if len(place) else 0
    spread = place.map(lambda number: int(f"{number:0{bits}b}"[::-1], 2))
    keys = pd.DataFrame({"turn": order.groupby("cell").cumcount()})
    keys["of_geometry"] = order["cell"].map(spread.groupby(cells).rank())
    keys["other"] = ~order["cell"].isin(list(at_best))
    chosen = keys.sort_values(["turn", "other", "of_geometry"], kind="stable")
    return chosen.index[:_MOST_RUNS].sort_values()


def _looks(cells: Cells, runs: pd.DataFrame, at_best: Collection[int]) -> dict[int, dict[str, Any]]:
    """Give each cell of a run that was launched the colour, dash and symbol of its geometry."""
    launched: list[int] = sorted(runs.loc[was_started(runs), "cell"].unique())
    labels = geometry_label(cells.table).loc[launched]
    names = list(dict.fromkeys(labels))
    batches = cells.table["global_batch_size"].loc[launched]
    sizes = launched_batches(runs)
    group = cells.by_batch()
    tuned = set(group.loc[list(at_best)])
    # Cuts that train alike lie on top of each other: earlier ones are wider, so that they show.
    contexts = cells.context_of()
    grouped = batches.groupby([batches, contexts.loc[launched]])
    places, alike = grouped.cumcount(), grouped.transform("size").clip(upper=5)
    known = contexts.loc[launched].unique()
    dashes = dict(
        zip(known, _DASHES if len(known) <= len(_DASHES) else cycle(["solid"]), strict=False)
    )
    return {
        cell: {
            "name": label,
            "colour": shade(sizes.index(batches.loc[cell]), len(sizes))
            if len(sizes) > 1
            else colour(names.index(label), len(names)),
            "dash": dashes[contexts.loc[cell]],
            "symbol": _SYMBOLS[names.index(label) % len(_SYMBOLS)],
            "width": max(1.2 + 0.8 * (alike.loc[cell] - 1 - places.loc[cell]), 1.2),
            "settings": [
                "",
                f"s{contexts.loc[cell]}",
                *([_BEST] if cell in at_best or group[cell] not in tuned else []),
            ],
        }
        for cell, label in zip(launched, labels, strict=True)
    }


def _curves(
    value: str,
    rows: pd.DataFrame,
    runs: pd.DataFrame,
    axes: Mapping[str, str],
    looks: Mapping[int, Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    parts = {int(str(number)): own for number, own in rows.groupby("run")}
    sizes = runs["global_batch_size"]
    for position in sorted(parts, key=lambda n: (sizes.iloc[n], runs["cell"].iloc[n], n)):
        own, run = parts[position], runs.iloc[position]
        look = looks[int(run["cell"])]
        diverged = run["status"] == "diverged"
        # What is not finite cannot be drawn: the cross is where the run was last seen.
        finite = np.flatnonzero(np.isfinite(own[value]))
        size: int | list[int] = 4
        if diverged:
            size = [9 if i == finite.max(initial=-1) else 0 for i in range(len(own))]
        shown = value == "eval_loss" or diverged or len(own) == 1
        yield scatter(
            look["name"],
            by("axis", {name: packed(own[name].to_numpy()) for name in axes}),
            packed(own[value].to_numpy()),
            "%{text}<br>%{x}: %{y:.5g}",
            "lines+markers" if shown else "lines",
            legendgroup=look["name"],
            text=label_text(run["run_id"]),
            line={"color": look["colour"], "dash": look["dash"], "width": look["width"]},
            marker={"size": size, "symbol": "x" if diverged else look["symbol"]},
            meta=[position],
            when={"curve": [value], "setting": look["settings"]},
        )


def _targets(
    reaches: pd.DataFrame | None,
    runs: pd.DataFrame,
    axes: Mapping[str, str],
    looks: Mapping[int, Mapping[str, Any]],
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Mark where runs met each target; the level as a line."""
    if reaches is None or reaches.empty:
        return [], {}, {}
    positions = {
        key: i for i, key in enumerate(zip(runs["sweep_dir"], runs["run_id"], strict=True))
    }
    targets: dict[str, str] = {}
    lines: dict[str, list[dict[str, Any]]] = {"": []}
    marks = []
    for target, own in reaches.groupby("target_loss", sort=False):
        level, key = float(str(target)), repr(float(str(target)))
        targets[key] = f"{level:.7g}"
        lines[key] = [
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": level, "y1": level}
            | {"line": {"width": 1, "dash": "dot", "color": "#808080"}}
        ]
        met = own[own["outcome"].eq("reached")]
        for cell, rows in met.groupby("cell"):
            look = looks[int(str(cell))]
            keys = zip(rows["sweep_dir"], rows["run_id"], strict=True)
            marks.append(
                scatter(
                    look["name"],
                    by("axis", {name: numbers(rows[_TO_TARGET[name]]) for name in axes}),
                    [level] * len(rows),
                    f"met {targets[key]}: %{{x:.6g}}",
                    legendgroup=look["name"],
                    marker={"size": 11, "symbol": "triangle-down", "color": look["colour"]},
                    customdata=[[positions[run]] for run in keys],
                    when={
                        "curve": ["eval_loss"],
                        "target": [key],
                        "setting": look["settings"],
                    },
                )
            )
    return marks, lines, targets


def _range(found: Mapping[str, pd.DataFrame], runs: pd.DataFrame) -> dict[str, Any]:
    """Cut the axis where a loss that soared would press all others into one line."""
    lost = runs.index[runs["status"].eq("diverged")]
    limits: dict[str, Any] = {}
    for value, rows in found.items():
        finite = rows[np.isfinite(rows[value])]
        usual = finite[~finite["run"].isin(lost)]
        ends = usual.groupby("run")[value].agg(["first", "last"])
        low, high = float(usual[value].min()), float(ends.to_numpy().max(initial=-np.inf))
        limits[value] = None
        if usual.empty or finite[value].max() <= low + _SOARED * (high - low):
            continue
        margin = 0.05 * (high - low) or 0.05 * abs(high)
        linear = [low - margin, high + 2 * margin]
        logs = np.log10([max(low * 0.97, 1e-12), max(high * 1.05, 1e-12)]).tolist()
        limits[value] = by("scale", {"linear": linear, "log": logs})
    return limits
