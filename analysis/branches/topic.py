"""Batches that grow on the way, in the report: critical batches by branches, and ramps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.branches.critical import TOLERANCE, critical_batches, estimate_of
from batchscape.analysis.branches.figures import branches_chart
from batchscape.analysis.branches.ramps import against_constant
from batchscape.analysis.cells import Cells
from batchscape.analysis.commands import cut_command
from batchscape.analysis.comparing.pairs import Contrast
from batchscape.analysis.equivalence.paired import stated_margin
from batchscape.analysis.estimates import FEWEST, LEVEL, NOT_IDENTIFIED, Estimate
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.text import list_text

_TITLE = "Batches that grow on the way"
_RISE = "rise_"


def branches_section(cells: Cells, steps: pd.DataFrame) -> Section | None:
    """Show the critical batch at each age, and ramps; None where no run is one of either."""
    table, ramps = critical_batches(cells, steps), _ramps(cells)
    if table.empty and ramps.empty:
        return None
    estimates = [estimate_of(row) for row in table.to_dict("records")]
    tables = [_critical_table(table, estimates)] if len(table) else []
    answer = [*_ramp_answer(ramps)]
    if table.empty or len(table[["training", "rate_exponent"]].drop_duplicates()) > 1:
        return Section(_TITLE, answer, [*tables, *_ramp_tables(ramps)])
    tried = [int(name.removeprefix(_RISE)) for name in table if name.startswith(_RISE)]
    places = [f"critical_batch_after_{age}" for age in table["age_samples"]]
    return Section(
        _TITLE,
        [*_critical_answer(table, estimates), *answer],
        [*tables, *_ramp_tables(ramps)],
        [branches_chart(table, max(tried))],
        headlines=dict(zip(places, estimates, strict=True)),
        settle=[*_settle(cells, table, max(tried))],
    )


def _critical_answer(table: pd.DataFrame, estimates: Sequence[Estimate]) -> Iterator[str]:
    first = table.iloc[0]
    texts = [
        f"{estimate.text()} after {age}"
        for estimate, age in zip(estimates, table["age_samples"], strict=True)
    ]
    yield (
        f"The largest global batch that loses at most {first['tolerance']:g} nats against "
        f"{first['small_batch_size']}, by the samples trained before: {'; '.join(texts)}."
    )
    ratios = (table["estimate"] / table["noise"]).dropna()
    if len(ratios):
        ends = dict.fromkeys(f"{end:.2g}" for end in (ratios.min(), ratios.max()))
        yield (
            f"It is {' to '.join(ends)} times the gradient noise scale of the same window, where "
            f"both are identified ({len(ratios)} of {len(table)} ages)."
        )


def _settle(cells: Cells, table: pd.DataFrame, largest: int) -> Iterator[str]:
    """Name the command that tries a larger batch, where the largest is not surely too large."""
    is_open = np.isinf(table["high"])
    if is_open.any():
        names = " ".join(table.loc[is_open, "run_ids"]).split()
        runs = cells.runs[cells.runs["run_id"].isin(names)]
        command = cut_command(runs, {"batch.global_batch_size": str(2 * largest)})
        if command is not None:
            yield f"A critical batch without an upper end needs a larger one: {command}"


def _critical_table(table: pd.DataFrame, estimates: Sequence[Estimate]) -> Table:
    trainings = [
        ", ".join(filter(None, (label, f"rate {rate:g} x batch^{power:g}")))
        for (label, rate, _), power in zip(table["training"], table["rate_exponent"], strict=True)
    ]
    return Table(
        "critical_batch",
        "Critical batch by branches",
        table.assign(training=trainings),
        [
            *([Column("training", is_left=True)] if len({*trainings}) > 1 else []),
            Column("age_samples", "samples before", is_left=True),
            Column("estimate", "critical batch", texts=[each.text() for each in estimates]),
            Column(
                "noise",
                "noise scale",
                format=3,
                low="noise_low",
                high="noise_high",
                missing=NOT_IDENTIFIED,
            ),
            *(
                Column(name, f"rise at {name.removeprefix(_RISE)}", format="+.4f")
                for name in table
                if name.startswith(_RISE)
            ),
            Column("n", "seeds"),
        ],
        footnotes=[table["note"]],
        notes=[
            "Rise: training loss (nats) over the last quarter of the window after the batch grew, "
            "less that of the same seed whose batch stays; both see the same samples. Critical "
            "batch (samples): where the mean rise, linear in the logarithm of the batch, crosses "
            "the tolerance; in brackets all batches of which the t-interval of the rise contains "
            f"it ({LEVEL:.0%}). It is one of this window, tolerance and rule for the rate. Noise "
            "scale (samples): of the runs whose batch stays, over the window."
        ],
    )


def _ramps(cells: Cells) -> pd.DataFrame:
    """Return a row a ramp: `ramp`, optimizer steps, and what it loses against a constant batch."""
    margins = pd.to_numeric(cells.runs.reindex(columns=[TOLERANCE])[TOLERANCE]).astype(float)
    margin, _ = stated_margin(margins.to_numpy(), "final_eval_loss")
    return pd.DataFrame([_ramp_row(each, margin) for each in against_constant(cells)])


def _ramp_row(contrast: Contrast, margin: float) -> dict[str, object]:
    settings, samples = contrast.place
    steps, base = (side.optimizer_steps(int(samples)) for side in (contrast.level, contrast.base))
    low, high = contrast.interval(LEVEL)
    few = len(contrast.values) < FEWEST
    verdict = "no worse" if high < margin else "worse" if low > margin else NOT_IDENTIFIED
    return {
        "settings": settings,
        "samples": samples,
        "ramp": contrast.level.text,
        "base": contrast.base.text,
        "optimizer_steps": steps,
        "saved": 1 - steps / base,
        "difference": contrast.mean,
        "low": low,
        "high": high,
        "n": len(contrast.values),
        "margin": margin,
        "verdict": NOT_IDENTIFIED if few else verdict,
        "run_ids": " ".join(contrast.run_ids),
    }


def _ramp_answer(ramps: pd.DataFrame) -> Iterator[str]:
    if len(ramps):
        counts = ramps["verdict"].value_counts()
        margin = ramps["margin"].iloc[0]
        yield (
            f"Of {len(ramps)} schedules of the batch, against {ramps['base'].iloc[0]} throughout "
            f"at equal samples and within {margin:g} nats of the held-out loss: "
            f"{list_text((f'{count} {verdict}' for verdict, count in counts.items()), 'and')}."
        )


def _ramp_tables(ramps: pd.DataFrame) -> Iterator[Table]:
    if len(ramps):
        yield Table(
            "ramps",
            "Schedules of the batch at equal samples",
            ramps,
            [
                Column("settings", is_left=True),
                Column("ramp", "batches", is_left=True),
                *([Column("samples")] if ramps["samples"].nunique() > 1 else []),
                Column("optimizer_steps"),
                Column("saved", "fewer", texts=[f"{saved:.0%}" for saved in ramps["saved"]]),
                Column("difference", "loss", "nats", 3, "low", "high", n="n"),
                Column("verdict"),
            ],
            notes=[
                f"Loss: final held-out loss less that of batches of {ramps['base'].iloc[0]} "
                f"throughout, over pairs of seeds, with its {LEVEL:.0%} t-interval. No worse: it "
                f"lies below {ramps['margin'].iloc[0]:g} nats, a margin set before; worse: above. "
                "Rates are over that of the first stage. A schedule whose rate falls is "
                "compared with one whose rate stays: what it gains or loses is the rate's, too."
            ],
        )
