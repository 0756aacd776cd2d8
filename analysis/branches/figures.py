"""The chart of the critical batch as training goes on."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, MARK

_ROOM = 2.0
"""Factor beyond what was tried, where an interval without an end leaves the chart."""


def branches_chart(table: pd.DataFrame, largest: int) -> Chart:
    """Draw critical batch and noise scale over the samples; no larger batch was tried."""
    ages = table["age_samples"].tolist()
    floor, ceiling = table["small_batch_size"].min() / _ROOM, largest * _ROOM
    rows, noise = (
        pd.DataFrame(
            {
                "samples_seen": table["age_samples"],
                "batch": table[value],
                "batch_low": table[low].clip(floor, ceiling),
                "batch_high": table[high].clip(floor, ceiling),
            }
        )
        for value, low, high in (("estimate", "low", "high"), ("noise", "noise_low", "noise_high"))
    )
    noise = noise.dropna()
    # Where an interval has no end, a triangle points on.
    up = rows[np.isinf(table["high"])].assign(batch=ceiling)
    down = rows[table["low"].eq(0)].assign(batch=floor)
    marks = [
        Marks("band", noise, "gradient noise scale"),
        Marks("line", noise, "gradient noise scale"),
        Marks("interval", rows.dropna(subset=["batch_low", "batch_high"]), "critical batch"),
        Marks("point", rows.dropna(subset="batch"), "critical batch", size=30),
        Marks("point", up[["samples_seen", "batch"]], "no upper end", size=30),
        Marks("point", down[["samples_seen", "batch"]], "no lower end", size=30),
    ]
    looks = {
        "critical batch": MARK,
        "no upper end": Look(MARK.colour, symbol="triangle-up", hollow=True),
        "no lower end": Look(MARK.colour, symbol="triangle-down", hollow=True),
        "gradient noise scale": Look(ACCENT.colour, ACCENT.dark, "stroke"),
    }
    marks = [mark for mark in marks if len(mark.table)]
    names = {mark.name for mark in marks}
    return Chart(
        "critical_batch",
        "Critical batch over the training",
        "The largest global batch that loses no more than the tolerance in a window after so many "
        "samples, and the gradient noise scale in the same window, with their 95 % intervals.",
        Axis(
            {"samples_seen": "samples before the batch grows"},
            kind="log",
            ticks=ages,
            ranges={"samples_seen": (min(ages) / 1.3, max(ages) * 1.3)},
        ),
        Axis({"batch": "samples"}, kind="log", ranges={"batch": (floor, ceiling)}),
        marks,
        {name: look for name, look in looks.items() if name in names},
        tables=["tables/critical_batch.csv"],
    )
