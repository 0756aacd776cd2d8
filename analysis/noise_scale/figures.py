"""Charts of the gradient noise scale: by global batch, and over the training."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.settings import cell_names, setting_names
from batchscape.analysis.figures.style import ACCENT, GREY, looks

_SCALE = "gradient noise scale (samples)"


def noise_scale_charts(
    cells: Cells, identified: pd.DataFrame, curves: pd.DataFrame, at_best: Collection[int]
) -> Iterator[Chart]:
    """Draw the noise scale of each cell, and its course; `at_best` cells are shown first."""
    if len(identified):
        names = geometry_label(cells.table) + cell_names(cells).map(lambda n: f", {n}" if n else "")
        rows = identified[["global_batch_size", "estimate"]].assign(
            estimate_low=identified["low"],
            estimate_high=identified["high"],
            cell=identified.index,
            of=names.loc[identified.index],
        )
        batches = sorted(identified["global_batch_size"].unique())
        equal = pd.DataFrame({"global_batch_size": batches, "estimate": batches})
        yield Chart(
            "noise_scale",
            "Noise scale by global batch",
            "A point a cell in which it is identified, with its 95 % interval. Below the dashed "
            "line the batch is larger than the noise scale.",
            Axis({"global_batch_size": "global batch size (samples)"}, kind="log", ticks=batches),
            Axis({"estimate": _SCALE}, kind="log"),
            [
                Marks("line", equal, "as large as the batch"),
                Marks("interval", rows, "noise scale"),
                Marks("point", rows, "noise scale", "of", size=30),
            ],
            {
                "noise scale": ACCENT,
                "as large as the batch": Look(GREY.colour, GREY.dark, "stroke", (4, 3)),
            },
            tables=["tables/noise_scale.csv"],
        )
    drawn = curves[curves["estimate"].notna() & np.isfinite(curves["high"])]
    drawn = drawn[drawn["cell"].duplicated(keep=False)]
    if drawn.empty:
        return
    # Intervals may reach far beyond the points.
    floor, ceiling = float(drawn["estimate"].min()) / 3, float(drawn["estimate"].max()) * 3
    context = cells.context_of
    rows = drawn[["samples", "estimate", "cell"]].assign(
        estimate_low=drawn["low"].clip(floor, ceiling),
        estimate_high=drawn["high"].clip(floor, ceiling),
        series=geometry_label(cells.table).loc[drawn["cell"]].to_numpy(),
        setting=[
            [f"s{context[cell]}", *(["best"] if cell in at_best else [])] for cell in drawn["cell"]
        ],
    )
    options = {"best": "each global batch at its best learning rate"}
    options |= {f"s{number}": name for number, name in setting_names(cells, context).items()}
    names_shown = {*rows["series"], *(name for names in rows["setting"] for name in names)}
    options = {name: text for name, text in options.items() if name in names_shown}
    choices = [Choice("setting", "Settings", options)] if context.nunique() > 1 else []
    yield Chart(
        "noise_scale_curve",
        "Noise scale over the training",
        "Gradient noise scale against training samples: ratio of two debiased exponential moving "
        "averages, whose half-life is the distance of the points; shaded: its 95 % interval; "
        "points at which it is not identified are left out.",
        Axis({"samples": "samples"}),
        Axis({"estimate": _SCALE}, kind="log", ranges={"estimate": (floor, ceiling)}),
        [
            Marks("band", rows, line="cell"),
            Marks("line", rows, line="cell"),
            Marks("point", rows),
        ],
        {name: look for name, look in looks(cells).items() if name in names_shown},
        choices=choices,
        tables=["tables/noise_scale_curve.csv"],
    )
