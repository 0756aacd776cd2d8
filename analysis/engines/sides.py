"""Engines as sides of a comparison: cells that differ in the engine alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, PROGRAMS, SEEDS, Cells, setting_label
from batchscape.analysis.comparing.pairs import blocks_of, contrasts_of, logarithm
from batchscape.analysis.equivalence.decompositions import differences_by_cell, step_differences
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.joins import column_of
from batchscape.config import Affects, affects_of

RATIOS = {"step_time_s": "step time ratio", "peak_allocated_gib": "peak memory ratio"}
"""Figures of which engines are compared by ratios, and their headers."""

_FIRST = "ddp"
"""The engine that others are compared with, if it took part."""
_ENGINE = "engine.name"


def engines_of(cells: Cells) -> pd.Series[str]:
    """Name the engine of each cell with its varying settings, as `deepspeed, zero stage 3`.

    The name is missing for programs, and where no run names an engine.
    """
    first = cells.runs.drop_duplicates("cell").set_index("cell").reindex(cells.table.index)
    name = column_of(first, _ENGINE)
    label = name.mask(name.eq(PROGRAMS))
    common_settings = {_ENGINE, *shared_settings(cells)}
    for setting in cells.key_settings:
        if setting.startswith("engine.") and setting not in common_settings:
            value = cells.table[setting]
            text = ", " + setting_label(setting) + " " + value.astype(str)
            label = label + text.where(value.notna() & value.ne("null"), "")
    return label


def shared_settings(cells: Cells) -> list[str]:
    """Return the varying settings beside those of the engine alone, which decide no loss."""
    affects = {name: affects_of(name) for name in cells.settings if name != _ENGINE}
    return [
        name
        for name, what in affects.items()
        if not name.startswith("engine.") or what is None or Affects.LOSS in what
    ]


def engine_members(cells: Cells) -> pd.DataFrame:
    """Choose the runs that must train alike although their engines differ.

    Returns
    -------
    DataFrame
        One row a run: `cell`, `sweep_dir`, `run_id`, `engine`, `place` (a number for the geometry
        and all settings beside the engine), `reference` (the cell of its first engine) and
        `trajectory` (a number for the place and seeds).
    """
    engine = engines_of(cells)
    table = cells.table.assign(engine=engine, name=engine.str.partition(",")[0])
    keys = [*GEOMETRY, *shared_settings(cells)]
    table["place"] = table.groupby(keys, dropna=False, sort=False).ngroup()
    is_completed = cells.runs["status"].eq("completed")
    table = table[engine.notna() & table.index.isin(cells.runs.loc[is_completed, "cell"])]
    # Cells that differ in settings of one engine are no two engines.
    table = table[table.groupby("place")["name"].transform("nunique") > 1]
    order = table.assign(later=table["name"].ne(_FIRST)).sort_values(["later", "engine"])
    first = order.reset_index().groupby("place")["cell"].first()
    table["reference"] = table["place"].map(first)
    seeds = [name for name in SEEDS if name in cells.runs]
    runs = cells.runs.loc[is_completed, ["cell", "sweep_dir", "run_id", *seeds]]
    members = runs.join(table[["engine", "place", "reference"]], on="cell", how="inner")
    members["trajectory"] = members.groupby(["place", *seeds], dropna=False).ngroup()
    return members


def compare_engines(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Compare each engine with the first one at equal geometry, settings and seed.

    Returns
    -------
    DataFrame
        One row a cell but the references, as `differences_by_cell` returns it, with `engine`;
        `reference` is the engine compared with. For each of `RATIOS` the geometric mean over pairs
        of runs `<figure>_ratio`, with `<figure>_ratio_low`, `<figure>_ratio_high` and
        `<figure>_ratio_n`.
    """
    members = engine_members(cells)
    one_run = members.drop_duplicates(["cell", "trajectory"])
    table = differences_by_cell(cells, *step_differences(one_run, steps))
    names = members.drop_duplicates("cell").set_index("cell")
    table["reference"] = names["reference"].map(names["engine"]).reindex(table.index)
    table["engine"] = names["engine"].reindex(table.index)
    runs = cells.runs.loc[members.index]
    rows = members.assign(block=blocks_of(runs, (*SEEDS, "timing_repeat")))

    def to_reference(numbers: Sequence[int]) -> list[tuple[int, int]]:
        base = int(names["reference"].loc[numbers[0]])
        return [(number, base) for number in numbers if number != base]

    for figure in RATIOS:
        values = rows.assign(value=logarithm(cells.figures.loc[rows.index, figure]))
        for contrast in contrasts_of(values, "cell", ["place"], "block", to_reference):
            ratio = contrast.estimate(figure, "ratio")
            low, high = (ratio.low, ratio.high) if ratio.n >= FEWEST else (math.nan, math.nan)
            parts = {"": ratio.value, "_low": low, "_high": high, "_n": ratio.n}
            if contrast.level in table.index:
                for part, number in parts.items():
                    table.loc[contrast.level, f"{figure}_ratio{part}"] = number
    return table
