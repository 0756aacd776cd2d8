"""The chart of the best batch and rate over the horizon."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, INK
from batchscape.analysis.horizons.optima import NAMES, PUBLISHED

_BEST = "best, chosen together"
_DASHES = ((), (4.0, 2.0))


def optima_chart(optima: pd.DataFrame, labels: Mapping[int, str]) -> Chart:
    """Draw the optima over the horizon, with published slopes through their middle."""
    marks, looks = [], {_BEST: INK}
    for name, of in NAMES.items():
        columns = {"value": name, "low": f"{name}_low", "high": f"{name}_high"}
        rows = optima[optima["of"].eq(of)].rename(columns=columns)
        rows = rows.assign(group=rows["group"].astype(str)).dropna(subset=name)
        logs = rows[["horizon", name]].apply(np.log)
        middle = logs.groupby(rows["group"]).transform("mean")
        for power, dash in zip(PUBLISHED[name], _DASHES, strict=False):
            line = np.exp(middle[name] + power * (logs - middle)["horizon"])
            looks[f"horizon^{power}"] = Look(GREY.colour, GREY.dark, "stroke", dash)
            slope = rows[["group", "horizon"]].assign(**{name: line})
            marks.append(Marks("line", slope, f"horizon^{power}"))
        marks.append(Marks("interval", rows[rows["n"] >= FEWEST], _BEST))
        marks.append(Marks("point", rows, _BEST, size=40))
    options = {str(group): label for group, label in labels.items()}
    return Chart(
        "horizons",
        "Best global batch and learning rate by horizon",
        "Chosen together, with 95 % intervals over seeds; lines have published exponents and go "
        "through the middle of the optima.",
        Axis({"horizon": "horizon (samples)"}, kind="log", ticks=optima["horizon"].tolist()),
        Axis({name: f"best {of}" for name, of in NAMES.items()}, "Of", "log"),
        marks,
        looks,
        choices=[Choice("group", "Runs", options)] if len(options) > 1 else [],
        panels="y",
        tables=["tables/horizons.csv"],
    )
