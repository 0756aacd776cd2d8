"""Charts of equivalence: paired differences with the margin, and differences over steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.equivalence.tost import ALPHA
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, INK, looks, loss_axis

_MAX_ROWS = 40
"""Decompositions in one figure; those with the largest intervals are drawn."""

_SEEDS = "sd between seeds"
_VERDICTS = {
    "equivalent": Look("#009E73"),
    "different": Look("#D55E00"),
    "not identified": Look("#56B4E9"),
    _SEEDS: Look(GREY.colour, GREY.dark, "diamond", hollow=True),
    "margin": Look(INK.colour, INK.dark, "M0,-.7L0,.7"),
}


def equivalence_chart(cells: Cells, table: pd.DataFrame, pairs: pd.DataFrame) -> Chart | None:
    """Draw paired differences of one quantity with the margin; None where none is finite."""
    kind = "held-out" if table["quantity"].eq("final_eval_loss").any() else "training"
    caption = (
        f"Paired differences of the final {kind} loss between a decomposition and the first one of "
        f"its trajectory: a dot a seed, and a line that ends where the {1 - 2 * ALPHA:.0%} "
        "interval does; equivalent where it ends before the margin. Dots on the left edge are "
        "differences of exactly 0."
    )
    if len(table) > _MAX_ROWS:
        caption += f" The {_MAX_ROWS} with the largest intervals are drawn."
    table = table.nlargest(_MAX_ROWS, "smallest_margin", keep="first").sort_values("cell")
    pairs = pairs[pairs["cell"].isin(table["cell"]) & np.isfinite(pairs["difference"])]
    if pairs.empty:
        return None
    size = pairs["difference"].abs()
    sizes = pd.concat([size, table["margin"], table["seed_sd"]])
    # The axis begins here, and differences of exactly zero are drawn here.
    floor = float(sizes[sizes > 0].min()) / 3
    rows = table.set_index("cell", drop=False).rename(columns={"verdict": "series"})
    rows = rows.assign(name=cells.labels()[rows.index], value=floor, value_low=floor)
    bars = rows.assign(value_high=rows["smallest_margin"].clip(lower=floor))
    points = rows.loc[pairs["cell"], ["name", "series", "cell"]]
    points = points.assign(value=size.clip(lower=floor).to_numpy())
    is_zero = size.eq(0).to_numpy()
    margins, spread = (
        rows[["name"]].assign(value=rows[name]).dropna() for name in ("margin", "seed_sd")
    )
    drawn = {*rows["series"], "margin", *([_SEEDS] if len(spread) else [])}
    return Chart(
        "equivalence",
        "Final losses of cuts against the margin",
        caption,
        Axis({"value": loss_axis("|difference| of the final loss", cells.runs)}, kind="log"),
        Axis({"name": ""}, kind="names"),
        [
            Marks("interval", bars[np.isfinite(bars["smallest_margin"])]),
            Marks("point", margins, "margin", size=60),
            Marks("point", spread, _SEEDS, size=20),
            Marks("point", points[~is_zero]),
            Marks("point", points[is_zero], placed="x"),
        ],
        {name: look for name, look in _VERDICTS.items() if name in drawn},
        tables=["tables/equivalence.csv"],
    )


def divergence_chart(
    cells: Cells, pairs: pd.DataFrame, spread: pd.DataFrame, margin: float
) -> Chart | None:
    """Draw differences of training losses over the steps; None where all losses are equal."""
    drawn = pairs[pairs["difference"].abs().gt(0) & np.isfinite(pairs["difference"])]
    if drawn.empty:
        return None
    keys = ["reference", "cell", "optimizer_step"]
    rms = drawn.assign(rms=drawn["difference"] ** 2).groupby(keys)["rms"].mean() ** 0.5
    rows = rms.reset_index().rename(columns={"reference": "family"})
    rows["series"] = geometry_label(cells.table)[rows["cell"]].to_numpy()
    seeds = spread.rename(columns={"reference": "family", "sd": "rms"})
    seeds = seeds.loc[seeds["family"].isin(rows["family"]) & seeds["rms"].gt(0)]
    labels = cells.labels()
    names = {str(family): labels[family] for family in sorted(rows["family"].unique())}
    rows, seeds = (table.astype({"family": str}) for table in (rows, seeds))
    series = set(rows["series"])
    strokes = {_SEEDS: Look(GREY.colour, GREY.dark, "stroke")} if len(seeds) else {}
    return Chart(
        "divergence",
        "Training losses of cuts over the steps",
        "Root mean square, over seeds, of the difference of the training loss between a "
        "decomposition and the first one of its trajectory, at the same optimizer step; "
        "differences of exactly 0 are left out.",
        Axis({"optimizer_step": "optimizer step"}),
        Axis({"rms": loss_axis("rms Δ training loss", cells.runs)}, kind="log"),
        [
            Marks("rule", pd.DataFrame({"rms": [margin]}), "margin"),
            Marks("line", seeds, _SEEDS),
            Marks("line", rows),
        ],
        {
            **{
                n: replace(look, symbol="stroke") for n, look in looks(cells).items() if n in series
            },
            **strokes,
            "margin": Look(INK.colour, INK.dark, "stroke", (4, 3)),
        },
        choices=[Choice("family", "Trajectory", names)] if len(names) > 1 else [],
        panels="family" if len(names) > 1 else "",
    )
