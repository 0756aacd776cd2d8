"""What a report says of sweeps side by side, and of what they could have seen."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from operator import add
from typing import Any

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells, setting_label
from batchscape.analysis.comparing.power import ALPHA, POWER, detectable_effects
from batchscape.analysis.comparing.sides import Sides, compare_sweeps
from batchscape.analysis.estimates import LEVEL, interval_text
from batchscape.analysis.numbers import MISSING, TIMES, significant
from batchscape.analysis.report.grids import GEOMETRY_HEADER, Grid, columns_grid
from batchscape.analysis.report.topic import Section, TableView

__all__ = ["comparing_section"]

_WORDS = {
    "step_time_s": "step time",
    "peak_allocated_gib": "peak memory",
    "steps_to_target": "steps to target",
    "final_eval_loss": "final held-out loss",
}


def comparing_section(cells: Cells, reaches: pd.DataFrame | None = None) -> Section | None:
    """Set sweep folders side by side, and state the smallest effect that could have been seen.

    Parameters
    ----------
    reaches : DataFrame, optional
        One row a run and target, as `steps_to_target` returns it.

    Returns
    -------
    Section or None
        None where there is neither a second side nor a second seed.
    """
    detectable = detectable_effects(cells, reaches)
    sides = compare_sweeps(cells, reaches)
    has_pairs = sides is not None and len(sides.table) > 0
    if detectable.empty and sides is None:
        return None
    tables = []
    answer: list[str] = []
    if sides is not None:
        answer += _of_sides(sides)
        if has_pairs:
            tables.append(TableView("sides", "Side by side", sides.table, _sides_grid(sides.table)))
    if len(detectable):
        answer += _of_power(detectable)
        tables.append(
            TableView(
                "detectable_effects",
                "Smallest effect that could have been seen",
                detectable,
                _power_grid(detectable),
            )
        )
    return Section(
        title="Side by side, and what could have been seen",
        answer=answer,
        tables=tables,
        warnings=[] if sides is None or has_pairs else [_NO_PAIRS],
    )


_NO_PAIRS = (
    "The sweep folders share no geometry, settings and seeds, so nothing could be paired: run the "
    "same sweep on both sides."
)


def _of_sides(sides: Sides) -> Iterator[str]:
    axis = ", ".join(
        name.replace("_", " ") if "." not in name else setting_label(name) for name in sides.axis
    )
    yield (
        f"The folders differ in {axis}: {' against '.join(sides.names)}. They are set side by "
        "side, pair by pair of equal geometry, settings and seeds, and never pooled."
    )
    for (side, quantity, kind), own in sides.table.groupby(
        ["side", "quantity", "kind"], sort=False
    ):
        neutral = 1.0 if kind == "ratio" else 0.0
        clear = (own["low"].gt(neutral) | own["high"].lt(neutral)).sum()
        span = f"{significant(own['effect'].min(), 3)} to {significant(own['effect'].max(), 3)}"
        yield (
            f"{str(_WORDS[str(quantity)]).capitalize()}, {side}: {kind} {span} over "
            f"{len(own)} settings; in {clear} of them the {LEVEL:.0%} interval leaves out "
            f"{'1' if kind == 'ratio' else '0'}."
        )


def _of_power(detectable: pd.DataFrame) -> Iterator[str]:
    noisy = detectable[detectable["detectable"] > 0]
    for (quantity, paired), own in noisy.groupby(["quantity", "paired"], sort=False):
        effects = [_size(row) for row in own.sort_values("detectable").to_dict("records")]
        span = effects[0] if len(own) == 1 else f"{effects[0]} to {effects[-1]}"
        seeds = sorted(own["n"].unique())
        several = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        what = _WORDS[str(quantity)]
        chance = f"is found with {POWER:.0%} chance (at {ALPHA:.0%}, two-sided) only from {span} on"
        if paired:
            yield (
                f"Paired, with n = {several} of equal seed, a difference in {what} between two "
                f"cells {chance}; smaller ones may well be there and not show."
            )
        else:
            yield (
                f"Unpaired, with n = {several} runs on each of two sides that share no seeds, a "
                f"difference in {what} {chance}. These runs hold one cell of it to compare. Pairs "
                "of equal seed, such as cuts of one global batch, show far smaller ones."
            )


def _sides_grid(table: pd.DataFrame) -> Grid:
    rows = table.to_dict("records")
    units = table["kind"].map({"ratio": "", "difference": " nats"})
    ends = zip(*(table[name] for name in ("effect", "low", "high", "n")), strict=True)
    effects = [interval_text(*numbers) for numbers in ends]
    geometry = table[list(GEOMETRY[:3])].astype(str).agg(TIMES.join, axis=1)
    return columns_grid(
        [
            (GEOMETRY_HEADER, geometry),
            ("settings", table["settings"].replace("", MISSING)),
            ("sides", table["side"] + " / " + table["reference"]),
            ("figure", table["quantity"].map(_WORDS)),
        ],
        [
            (f"effect, {LEVEL:.0%} interval", [*map(add, effects, units)]),
            ("n", table["n"].astype(str)),
            ("smallest detectable", map(_size, rows)),
        ],
        notes=[
            "Ratios are side over reference, geometric means over pairs of equal seed and repeat; "
            "a difference is side minus reference. Times only where they are valid. Steps to "
            "target at the lowest target that both sides reached in every run.",
            _POWER_NOTE,
        ],
    )


def _power_grid(table: pd.DataFrame) -> Grid:
    return columns_grid(
        [
            ("settings", table["context"].replace("", MISSING)),
            ("figure", table["quantity"].map(_WORDS)),
            ("comparison", table["paired"].map({True: "paired", False: "unpaired"})),
        ],
        [
            ("n", table["n"].astype(str)),
            ("smallest detectable", map(_size, table.to_dict("records"))),
        ],
        notes=[
            _POWER_NOTE,
            "The spread of a paired difference is taken over all cells of the settings, once "
            "means of cells and of seeds are out; where there is one cell, runs of other seeds "
            "stand for two unpaired groups.",
        ],
    )


_POWER_NOTE = (
    f"Smallest detectable: the true effect that a two-sided t-test at {ALPHA:.0%} finds with "
    f"{POWER:.0%} chance, given n and the spread found here (noncentral t); % is that of a ratio."
)


def _size(row: Mapping[Hashable, Any]) -> str:
    """Write the smallest detectable effect of a row of either table."""
    # Runs that agree to the last bit tell nothing of noise.
    if row["n"] < 2 or row["detectable"] == 0:
        return MISSING
    unit = row.get("unit") or ("nats" if row["kind"] == "difference" else "%")
    return f"{significant(float(row['detectable']), 2)} {unit}"
