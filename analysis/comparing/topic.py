"""What a report says of sweeps side by side."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells, setting_label
from batchscape.analysis.comparing.power import ALPHA, POWER
from batchscape.analysis.comparing.sides import Sides, compare_sweeps
from batchscape.analysis.estimates import LEVEL
from batchscape.analysis.numbers import MISSING, TIMES, significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.tables import GEOMETRY_HEADER
from batchscape.analysis.report.topic import Section

_WORDS = {
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
    answer = list(_answer(sides))
    if sides.table.empty:
        return Section("Side by side", answer, warnings=[_NO_PAIRS])
    return Section("Side by side", answer, [_table(sides.table)])


_NO_PAIRS = (
    "The sweep folders share no geometry, settings and seeds, so nothing could be paired: run the "
    "same sweep on both sides."
)


def _answer(sides: Sides) -> Iterator[str]:
    axis = ", ".join(
        name.replace("_", " ") if "." not in name else setting_label(name) for name in sides.axis
    )
    yield (
        f"The folders differ in {axis}: {' against '.join(sides.names)}. They are set side by "
        "side, pair by pair of equal geometry, settings and seeds, and never pooled."
    )
    for (side, quantity, kind), rows in sides.table.groupby(
        ["side", "quantity", "kind"], sort=False
    ):
        neutral = 1.0 if kind == "ratio" else 0.0
        is_clear = rows["low"].gt(neutral) | rows["high"].lt(neutral)
        span = f"{significant(rows['effect'].min(), 3)} to {significant(rows['effect'].max(), 3)}"
        yield (
            f"{str(_WORDS[str(quantity)]).capitalize()}, {side}: {kind} {span} over "
            f"{len(rows)} settings; in {is_clear.sum()} of them the {LEVEL:.0%} interval leaves "
            f"out {'1' if kind == 'ratio' else '0'}.{_not_found(rows[~is_clear], str(kind))}"
        )


def _not_found(rows: pd.DataFrame, kind: str) -> str:
    """Say which difference would have been found, of settings where none was."""
    # Runs that agree to the last bit tell nothing of noise.
    sizes = rows["detectable"][rows["detectable"] > 0]
    if sizes.empty:
        return ""
    span = " to ".join(dict.fromkeys(significant(size, 2) for size in (sizes.min(), sizes.max())))
    unit = "%" if kind == "ratio" else "nats"
    return (
        f" Where it does not, a difference from {span} {unit} on would be found with {POWER:.0%} "
        f"chance (two-sided t-test at {ALPHA:.0%})."
    )


def _table(table: pd.DataFrame) -> Table:
    geometry = table[list(GEOMETRY[:3])].astype(str).agg(TIMES.join, axis=1)
    sides = table["side"] + " / " + table["reference"]
    units = table["kind"].map({"ratio": "", "difference": "nats"})
    return Table(
        "sides",
        "Side by side",
        table.assign(unit=units),
        [
            Column("geometry", GEOMETRY_HEADER, texts=geometry, is_left=True),
            Column("settings", texts=table["settings"].replace("", MISSING), is_left=True),
            Column("sides", texts=sides, is_left=True),
            Column("quantity", "figure", words=_WORDS, is_left=True),
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
