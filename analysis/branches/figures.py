"""Charts of the critical batch as training goes on, and of schedules of the batch."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.estimates import NOT_IDENTIFIED
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, GREY, INK, MARK

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


_VERDICTS = {
    "no worse": Look("#009E73"),
    "worse": Look("#D55E00"),
    NOT_IDENTIFIED: Look("#56B4E9"),
}


def ramps_chart(ramps: pd.DataFrame) -> Chart:
    """Draw what each schedule of the batch loses, beside the optimizer steps that it spares."""
    steps = ramps["optimizer_steps"].astype(str)
    names = ramps["batches"] + " (" + steps + " steps, " + ramps["saved"] + " fewer)"
    places = ramps["at"] + ": " if ramps["at"].nunique() > 1 else ""
    rows = pd.DataFrame(
        {
            "name": places + names,
            "series": ramps["verdict"],
            "value": ramps["difference"],
            "value_low": ramps["low"],
            "value_high": ramps["high"],
            "run_ids": ramps["run_ids"],
        }
    )
    margins = rows[["name"]].assign(value=ramps["margin"]).dropna()
    verdicts = {name: look for name, look in _VERDICTS.items() if rows["series"].eq(name).any()}
    margin = {"margin": Look(INK.colour, INK.dark, "M0,-.7L0,.7")} if len(margins) else {}
    return Chart(
        "ramps",
        "Schedules of the batch at equal samples",
        f"Final held-out loss less that of {ramps['against'].iloc[0]} throughout, over pairs of "
        "seeds, with 95 % intervals: no worse where the interval ends before the margin.",
        Axis({"value": "difference of the final held-out loss (nats)"}),
        Axis({"name": ""}, kind="names"),
        [
            Marks("rule", pd.DataFrame({"value": [0.0]}), "no difference"),
            Marks("interval", rows[rows["value_low"].notna()]),
            Marks("point", rows, size=30),
            *([Marks("point", margins, "margin", size=60)] if len(margins) else []),
        ],
        {**verdicts, **margin, "no difference": Look(GREY.colour, GREY.dark, "stroke")},
        tables=["tables/ramps.csv"],
    )
