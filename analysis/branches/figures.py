"""The chart of the critical batch as training goes on."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, MARK

_ROOM = 2.0
"""Factor beyond what was tried, where an interval without an end leaves the chart."""
_LOOKS = {
    "critical batch": MARK,
    "no upper end": Look(MARK.colour, symbol="triangle-up", hollow=True),
    "no lower end": Look(MARK.colour, symbol="triangle-down", hollow=True),
    "gradient noise scale": Look(ACCENT.colour, ACCENT.dark, "stroke"),
}


def branches_chart(table: pd.DataFrame, largest: int) -> Chart:
    """Draw critical batch and noise scale over the samples; no larger batch was tried."""
    ages = table["age_samples"].tolist()
    floor, ceiling = table["small_batch_size"].min() / _ROOM, largest * _ROOM

    def shown(prefix: str) -> pd.DataFrame:
        columns = {"estimate": "batch", "low": "batch_low", "high": "batch_high"}
        rows = table[[f"{prefix}{name}" for name in columns]].set_axis([*columns.values()], axis=1)
        ends = rows[["batch_low", "batch_high"]].clip(floor, ceiling)
        return rows.assign(samples_seen=ages, **ends)

    critical, noise = shown(""), shown("noise_").dropna()
    plain = critical[["samples_seen", "batch"]]
    marks = [
        Marks("band", noise, "gradient noise scale"),
        Marks("line", noise, "gradient noise scale"),
        Marks("interval", critical.dropna(subset="batch_low"), "critical batch"),
        Marks("point", critical.dropna(subset="batch"), "critical batch", size=30),
        Marks("point", plain[table["high"].gt(ceiling)].assign(batch=ceiling), "no upper end"),
        Marks("point", plain[table["low"].eq(0)].assign(batch=floor), "no lower end"),
    ]
    marks = [mark for mark in marks if len(mark.table)]
    names = {mark.name for mark in marks}
    return Chart(
        "critical_batch_by_age",
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
        {name: look for name, look in _LOOKS.items() if name in names},
        tables=["tables/critical_batch_by_age.csv"],
    )
