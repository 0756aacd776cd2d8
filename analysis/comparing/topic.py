"""Sweeps side by side in the report."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label, setting_label
from batchscape.analysis.comparing.sides import compare_sweeps
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import GEOMETRY_HEADER
from batchscape.analysis.report.topic import Section

_LABELS = {
    "step_time_s": "step time",
    "peak_allocated_gib": "peak memory",
    "steps_to_target": "steps to target",
    "final_eval_loss": "final held-out loss",
}


def comparing_section(cells: Cells, reaches: pd.DataFrame | None = None) -> Section | None:
    """Set sweep folders side by side; None where there is no second side."""
    sides = compare_sweeps(cells, reaches)
    if sides is None:
        return None
    axis = ", ".join(
        name.replace("_", " ") if "." not in name else setting_label(name) for name in sides.axis
    )
    answer = [
        f"The folders differ in {axis}: {' against '.join(sides.names)}. They are set side by "
        "side, pair by pair of equal geometry, settings and seeds, and never pooled."
    ]
    if sides.table.empty:
        warning = (
            "The sweep folders share no geometry, settings and seeds, so nothing could be paired: "
            "run the same sweep on both sides."
        )
        return Section("Side by side", answer, warnings=[warning])
    groups = sides.table.groupby(["side", "quantity", "kind"], sort=False)
    answer += [
        _sentence(str(side), str(quantity), str(kind), rows)
        for (side, quantity, kind), rows in groups
    ]
    return Section("Side by side", answer, [_table(sides.table)])


def _sentence(side: str, quantity: str, kind: str, rows: pd.DataFrame) -> str:
    neutral = float(kind == "ratio")
    is_clear = rows["low"].gt(neutral) | rows["high"].lt(neutral)
    ends = (significant(end, 3) for end in (rows["effect"].min(), rows["effect"].max()))
    return (
        f"{_LABELS[quantity].capitalize()}, {side}: {kind} {' to '.join(dict.fromkeys(ends))} over "
        f"{len(rows)} settings; in {is_clear.sum()} of them the {LEVEL:.0%} interval leaves out "
        f"{neutral:g}."
    )


def _table(table: pd.DataFrame) -> Table:
    sides = table["side"] + " / " + table["reference"]
    units = table["kind"].map({"ratio": "", "difference": "nats"})
    return Table(
        "sides",
        "Side by side",
        table.assign(unit=units),
        [
            Column("geometry", GEOMETRY_HEADER, texts=geometry_label(table), is_left=True),
            Column("settings", texts=table["settings"].replace("", MISSING), is_left=True),
            Column("sides", texts=sides, is_left=True),
            Column("quantity", "figure", words=_LABELS, is_left=True),
            Column(
                "effect",
                f"effect, {LEVEL:.0%} interval",
                format=3,
                low="low",
                high="high",
                n="n",
                units="unit",
            ),
            Column("n"),
        ],
        notes=[
            "Ratios are side over reference, geometric means over pairs of equal seed and repeat; "
            "a difference is side minus reference. Times only where they are valid. Steps to "
            "target at the lowest target that both sides reached in every run.",
        ],
        hidden=["unit"],
    )
