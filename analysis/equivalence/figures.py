"""Charts of equivalence: paired differences with the margin, and differences over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label, setting_label, setting_texts
from batchscape.analysis.equivalence.tost import ALPHA
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, INK, looks, loss_axis

_MAX_ROWS = 40
"""Decompositions in one figure; those with the largest intervals are drawn."""

_VERDICTS = {
    "equivalent": Look("#009E73"),
    "different": Look("#D55E00"),
    "not identified": Look("#56B4E9"),
}
_SEEDS = "sd between seeds"


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
    if pairs.empty or table.empty:
        return None
    names = pd.Series(_labels(cells, table["cell"]), index=table["cell"])
    repeat = names.groupby(names).cumcount()
    names = names.where(repeat.eq(0), names + " (" + (repeat + 1).astype(str) + ")")
    sizes = [*pairs["difference"].abs(), *table["margin"].dropna(), *table["seed_sd"].dropna()]
    # The axis begins here, and differences of exactly zero are drawn here.
    floor = float(min(size for size in sizes if size > 0)) / 3
    rows = table.set_index("cell").assign(
        name=names, series=table.set_index("cell")["verdict"], cell=table["cell"].to_numpy()
    )
    is_zero = pairs["difference"].eq(0).to_numpy()
    points = rows.loc[pairs["cell"], ["name", "series", "cell"]]
    points = points.assign(value=pairs["difference"].abs().clip(lower=floor).to_numpy())
    bars = rows[np.isfinite(rows["smallest_margin"])]
    bars = bars.assign(
        value=floor, value_low=floor, value_high=bars["smallest_margin"].clip(lower=floor)
    )
    margins = rows[["name", "margin"]].rename(columns={"margin": "value"})
    spread = rows[["name", "seed_sd"]].rename(columns={"seed_sd": "value"}).dropna()
    label = loss_axis("|difference| of the final loss", cells.runs)
    verdict_looks = {
        name: look for name, look in _VERDICTS.items() if rows["series"].eq(name).any()
    }
    by_seeds = {_SEEDS: Look(GREY.colour, GREY.dark, "diamond", hollow=True)} if len(spread) else {}
    return Chart(
        "equivalence",
        "Final losses of cuts against the margin",
        caption,
        Axis({"value": label}, kind="log"),
        Axis({"name": ""}, kind="names"),
        [
            Marks("interval", bars[["name", "series", "value", "value_low", "value_high", "cell"]]),
            Marks("point", margins.dropna(), "margin", size=60),
            *([Marks("point", spread, _SEEDS, size=20)] if len(spread) else []),
            Marks("point", points[~is_zero]),
            Marks("point", points[is_zero], placed="x"),
        ],
        {**verdict_looks, **by_seeds, "margin": Look(INK.colour, INK.dark, "M0,-.7L0,.7")},
        tables=["tables/equivalence.csv"],
    )


def divergence_chart(
    cells: Cells, pairs: pd.DataFrame, spread: pd.DataFrame, margin: float
) -> Chart | None:
    """Draw differences of training losses over the steps; None where all losses are equal."""
    differ = pairs["difference"].abs().gt(0) & np.isfinite(pairs["difference"])
    drawn = pairs[differ]
    families = sorted(drawn["reference"].unique())
    if not families:
        return None
    names = dict(zip(families, _labels(cells, families, geometry=False), strict=True))
    square = (drawn["difference"] ** 2).groupby(
        [drawn["reference"], drawn["cell"], drawn["optimizer_step"]]
    )
    rows = np.sqrt(square.mean()).rename("rms").reset_index()
    rows["series"] = geometry_label(cells.table).loc[rows["cell"]].to_numpy()
    seeds = spread[spread["reference"].isin(families) & spread["sd"].gt(0)]
    seeds = seeds[["reference", "optimizer_step", "sd"]].rename(columns={"sd": "rms"})
    for table in (rows, seeds):
        table["family"] = table["reference"].astype(str)
    drawn_names = set(rows["series"])
    looks_of_cuts = {name: look for name, look in looks(cells).items() if name in drawn_names}
    choices = [
        Choice("family", "Trajectory", {str(number): name for number, name in names.items()})
    ]
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
            *([Marks("line", seeds, _SEEDS)] if len(seeds) else []),
            Marks("line", rows),
        ],
        {
            **{name: replace(look, symbol="stroke") for name, look in looks_of_cuts.items()},
            **({_SEEDS: Look(GREY.colour, GREY.dark, "stroke")} if len(seeds) else {}),
            "margin": Look(INK.colour, INK.dark, "stroke", (4, 3)),
        },
        choices=choices if len(names) > 1 else [],
        panels="family" if len(names) > 1 else "",
    )


def _labels(
    cells: Cells, numbers: Sequence[int] | pd.Series[int], *, geometry: bool = True
) -> list[str]:
    """Label cells by their geometry, or global batch, and the varying settings."""
    table = cells.table.loc[list(numbers)]
    varying = [name for name in cells.contexts if cells.table[name].nunique() > 1]
    texts = geometry_label(table) if geometry else "batch " + table["global_batch_size"].astype(str)
    for name in varying:
        value = setting_texts(table, name)
        text = value if name == "precision" else setting_label(name) + " " + value
        texts = texts + ", " + text
    return texts.tolist()
