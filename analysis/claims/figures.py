"""A forest of the effects behind the verdicts."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.claims.rules import CONTRADICTED, SUPPORTED
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.figures.chart import Axis, Chart, Look, Marks
from batchscape.analysis.figures.style import ACCENT, INK, MARK

__all__ = ["claims_chart"]

_LOOKS = {SUPPORTED: ACCENT, CONTRADICTED: Look(MARK.colour, hollow=True)}
_MOST_ROWS = 40


def claims_chart(table: pd.DataFrame) -> list[Chart]:
    """Draw the ratios among the effects of settled claims.

    Parameters
    ----------
    table : DataFrame
        As `claims_table` returns it.

    Returns
    -------
    list of Chart
        Empty where there is no ratio.
    """
    settled = table[table["verdict"].isin([*_LOOKS])]
    ratios = settled[settled["definition"].str.startswith("ratio") & settled["low"].gt(0)]
    ratios = ratios.head(_MOST_ROWS)
    if ratios.empty:
        return []
    # A claim that is judged in several contexts has a line for each.
    several = ratios["context"].nunique() > 1
    names = ratios["claim"] + ("\n" + ratios["context"] if several else "")
    rows = ratios.assign(
        name=names,
        series=ratios["verdict"],
        effect_low=ratios["low"],
        effect_high=ratios["high"].where(np.isfinite(ratios["high"]), ratios["effect"]),
    )
    one = pd.DataFrame({"effect": [1.0]})
    return [
        Chart(
            "claims",
            "Effects behind the verdicts",
            f"Effects behind the verdicts that are ratios, with their {LEVEL:.0%} intervals; "
            "filled: the claim is supported; open: it is contradicted. What is compared, and the "
            "threshold of each rule, stand in the table.",
            Axis({"effect": "ratio, as the claim's rule defines it"}, kind="log"),
            Axis({"name": ""}, kind="names"),
            [
                Marks("rule", one, "no effect"),
                Marks("interval", rows),
                Marks("point", rows, text="definition", size=30),
            ],
            {name: look for name, look in _LOOKS.items() if rows["series"].eq(name).any()}
            | {"no effect": Look(INK.colour, INK.dark, "stroke")},
            tables=["tables/claims.csv"],
        )
    ]
