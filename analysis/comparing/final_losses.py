"""Final losses of a user's own table in `batchscape analyze`, cell by cell."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import LEVEL, half_widths
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.tidy import distinct_trajectories

_LOSS = "final_eval_loss"


def final_losses_section(runs: pd.DataFrame, groups: Mapping[int, str]) -> Section:
    """Show mean and spread of the final losses, and how many runs diverged (their loss is inf)."""
    runs = distinct_trajectories(runs)
    has_rates = "learning_rate" in runs
    keys = ["group", "global_batch_size", "learning_rate"]
    parts = runs.assign(
        loss=runs[_LOSS].where(np.isfinite(runs[_LOSS])), is_inf=np.isinf(runs[_LOSS])
    ).groupby([name for name in keys if name in runs], dropna=False)
    table = parts.agg(
        n=("is_inf", "size"),
        diverged=("is_inf", "sum"),
        finite=("loss", "count"),
        mean=("loss", "mean"),
        sd=("loss", "std"),
    ).reset_index()
    table["ci95"] = half_widths(table["sd"], table["finite"])
    return Section(
        "Final losses",
        [f"Of {len(runs)} runs {table['diverged'].sum()} diverged."],
        [
            Table(
                "final_losses",
                "Final losses",
                table,
                [
                    *([Column("group", words=groups, is_left=True)] if len(groups) > 1 else []),
                    Column("global_batch_size", "global batch", format="g", is_left=True),
                    *([Column("learning_rate", format=3, is_left=True)] if has_rates else []),
                    Column("n", "runs"),
                    Column("mean", spread="ci95", n="finite", usual="n"),
                    Column("sd", format=2),
                    Column("diverged"),
                ],
                notes=[
                    f"Means ± half-widths of {LEVEL:.0%} t-intervals, and standard deviations, "
                    "over the runs that did not diverge."
                ],
            )
        ],
    )
