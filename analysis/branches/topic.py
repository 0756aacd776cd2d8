"""Batches that grow on the way, in the report: critical batches by branches, and ramps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.branches.critical import TRAINING, critical_batches, estimate_of
from batchscape.analysis.branches.ramps import against_first_batch, compared_ramps
from batchscape.analysis.branches.schedule import TOLERANCE, tolerance_of
from batchscape.analysis.cells import Cells
from batchscape.analysis.estimates import FEWEST, LEVEL, NOT_IDENTIFIED, Estimate
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, GREY, INK, MARK
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section

_RISE = "rise_"
_ROOM = 2.0
"""Factor beyond what was tried, where an interval without an end leaves the chart."""
_LOOKS = {
    "critical batch": MARK,
    "no upper end": Look(MARK.colour, symbol="triangle-up", hollow=True),
    "no lower end": Look(MARK.colour, symbol="triangle-down", hollow=True),
    "gradient noise scale": Look(ACCENT.colour, ACCENT.dark, "stroke"),
}
_VERDICTS = {
    "no worse": Look("#009E73"),
    "worse": Look("#D55E00"),
    NOT_IDENTIFIED: Look("#56B4E9"),
    "margin": Look(INK.colour, INK.dark, "M0,-.7L0,.7"),
    "no difference": Look(GREY.colour, GREY.dark, "stroke"),
}


def branches_section(cells: Cells, steps: pd.DataFrame) -> Section | None:
    """Show the critical batch at each age, and ramps; None where no run is one of either."""
    table, ramps = critical_batches(cells, steps), _ramps(cells)
    answer, tables, charts, headlines = [], [], [], {}
    if len(table):
        estimates = [estimate_of(row) for row in table.to_dict("records")]
        tables.append(_critical_table(table, estimates))
        if len(table[[*TRAINING]].drop_duplicates()) == 1:
            ages, tolerance = table["age_samples"], table["tolerance"].iloc[0]
            texts = [f"{e.text()} after {age}" for e, age in zip(estimates, ages, strict=True)]
            answer.append(
                f"The runs state several tolerances ({TOLERANCE}): no critical batch is identified."
                if math.isnan(tolerance)
                else f"The largest global batch that loses at most {tolerance:g} nats against "
                f"{table['small_batch_size'].iloc[0]}, by the samples trained before: "
                f"{'; '.join(texts)}."
            )
            charts.append(_branches_chart(table))
            names = "critical_batch_after_" + ages.astype(str)
            if ages.duplicated().any():
                names += "_over_" + table["window_samples"].astype(str)
            headlines = dict(zip(names, estimates, strict=True))
    if len(ramps):
        tables.append(_ramp_table(ramps))
        ended = ramps[np.isfinite(ramps["difference"])]
        charts += [_ramps_chart(ended)] if len(ended) else []
        counts = ramps["verdict"].value_counts().items()
        answer.append(
            f"Of {len(ramps)} schedules of the batch, against the first batch throughout: "
            f"{', '.join(f'{count} {verdict}' for verdict, count in counts)}."
        )
    title = "Batches that grow on the way"
    return Section(title, answer, tables, charts, headlines=headlines) if tables else None


def _critical_table(table: pd.DataFrame, estimates: Sequence[Estimate]) -> Table:
    trainings = ("settings", "learning_rate", "rate_exponent")
    windows = ["window_samples"] * (table["window_samples"].nunique() > 1)
    return Table(
        "critical_batch_by_age",
        "Critical batch by branches",
        table,
        [
            *(Column(name, is_left=True) for name in trainings if table[name].nunique() > 1),
            Column("age_samples", "samples before", is_left=True),
            *(Column(name, "window (samples)") for name in windows),
            Column("estimate", "critical batch", texts=[each.text() for each in estimates]),
            Column(
                "noise_estimate",
                "noise scale",
                format=3,
                low="noise_low",
                high="noise_high",
                missing=NOT_IDENTIFIED,
            ),
            *(
                Column(name, f"rise at {name.removeprefix(_RISE)}", format="+.4f")
                for name in table.filter(like=_RISE).columns
            ),
            Column("n", "seeds"),
        ],
        notes=[
            "Rise: training loss (nats) over the last quarter of the window after the batch grew, "
            "less that of the same seed whose batch stays; both see the same samples (batches that "
            "do not divide that quarter are left out). Critical "
            "batch (samples): where the mean rise, linear in the logarithm of the batch, crosses "
            "the tolerance; in brackets all batches of which the t-interval of the rise contains "
            f"it ({LEVEL:.0%}). It is one of this window, tolerance and rule for the rate. Noise "
            "scale (samples): of the runs whose batch stays, over the window."
        ],
    )


def _ramps(cells: Cells) -> pd.DataFrame:
    """Return a row a ramp: its steps, and what it loses against its first batch throughout."""
    rows = compared_ramps(cells)
    margin = tolerance_of(rows, "final_eval_loss")
    steps = rows.set_index(["at", "batches"])["optimizer_steps"].to_dict()
    table = []
    for contrast in against_first_batch(rows):
        (low, high), n, (at,) = contrast.interval(LEVEL), len(contrast.values), contrast.place
        taken, base = steps[at, contrast.level], steps[at, contrast.base]
        verdict = "no worse" if high < margin else "worse" if low > margin else NOT_IDENTIFIED
        table.append(
            {
                "batches": contrast.level,
                "against": contrast.base,
                "at": at,
                "optimizer_steps": taken,
                "saved": f"{1 - taken / base:.0%}",
                "difference": contrast.mean,
                "low": low,
                "high": high,
                "margin": margin,
                "n": n,
                "verdict": NOT_IDENTIFIED if n < FEWEST else verdict,
                "run_ids": " ".join(contrast.run_ids),
            }
        )
    return pd.DataFrame(table)


def _ramp_table(ramps: pd.DataFrame) -> Table:
    return Table(
        "ramps",
        "Schedules of the batch at equal samples",
        ramps,
        [
            Column("batches", is_left=True),
            *([Column("at", is_left=True)] if ramps["at"].nunique() > 1 else []),
            Column("optimizer_steps"),
            Column("saved", "fewer"),
            Column("difference", "loss", "nats", 3, "low", "high", n="n"),
            Column("verdict"),
        ],
        notes=[
            f"Loss: final held-out loss less that of {ramps['against'].iloc[0]} throughout, over "
            f"pairs of seeds, with its {LEVEL:.0%} t-interval. No worse: it lies below the margin "
            "set before launch (measure.equivalence_margin); worse: above. A schedule whose rate "
            "falls gains or loses by that, too."
        ],
    )


def _branches_chart(table: pd.DataFrame) -> Chart:
    """Draw critical batch and noise scale over the samples; no larger batch was tried."""
    ages = table["age_samples"].tolist()
    largest = max(int(name.removeprefix(_RISE)) for name in table.filter(like=_RISE).columns)
    floor, ceiling = table["small_batch_size"].min() / _ROOM, largest * _ROOM

    def shown(prefix: str) -> pd.DataFrame:
        rows = table[["age_samples", *(f"{prefix}{name}" for name in ("estimate", "low", "high"))]]
        rows = rows.set_axis(["samples_seen", "batch", "batch_low", "batch_high"], axis=1)
        ends = rows.filter(like="batch_").clip(floor, ceiling)
        return rows[["samples_seen", "batch"]].join(ends)

    critical, noise = shown(""), shown("noise_").dropna()
    plain = critical[["samples_seen", "batch"]]
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
        [
            Marks("band", noise, "gradient noise scale"),
            Marks("line", noise, "gradient noise scale"),
            Marks("interval", critical.dropna(subset="batch_low"), "critical batch"),
            Marks("point", critical.dropna(subset="batch"), "critical batch", size=30),
            Marks("point", plain[table["high"].gt(ceiling)].assign(batch=ceiling), "no upper end"),
            Marks("point", plain[table["low"].eq(0)].assign(batch=floor), "no lower end"),
        ],
        _LOOKS,
        tables=["tables/critical_batch_by_age.csv"],
    )


def _ramps_chart(ramps: pd.DataFrame) -> Chart:
    """Draw what each schedule of the batch loses, beside the optimizer steps that it spares."""
    names = ramps["batches"] + " (" + ramps["optimizer_steps"].astype(str) + " steps)"
    bases = " against " + ramps["against"] if ramps["against"].nunique() > 1 else ""
    places = ramps["at"] + ": " if ramps["at"].nunique() > 1 else ""
    columns = {"difference": "value", "low": "value_low", "high": "value_high", "verdict": "series"}
    rows = ramps.rename(columns=columns).assign(name=places + names + bases)
    margins = rows[["name"]].assign(value=ramps["margin"]).dropna()
    return Chart(
        "ramps",
        "Schedules of the batch at equal samples",
        "Final held-out loss less that of the first batch throughout, over pairs of seeds, with "
        "95 % intervals: no worse where the interval ends before the margin. Schedules that "
        "diverged are not drawn.",
        Axis({"value": "difference of the final held-out loss (nats)"}),
        Axis({"name": ""}, kind="names"),
        [
            Marks("rule", pd.DataFrame({"value": [0.0]}), "no difference"),
            Marks("interval", rows[ramps["n"].ge(FEWEST)]),
            Marks("point", rows, size=30),
            Marks("point", margins, "margin", size=60),
        ],
        _VERDICTS,
        tables=["tables/ramps.csv"],
    )
