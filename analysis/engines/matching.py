"""Cells that differ only in the engine, and in how it cuts the global batch."""

from __future__ import annotations

import pandas as pd

from batchscape.analysis.cells import PROGRAMS, Cells, setting_label
from batchscape.analysis.joins import column_of
from batchscape.config import Affects, affects_of

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
    for setting in cells.key_settings:
        if setting.startswith("engine.") and not _decides_loss(setting):
            value = cells.table[setting]
            text = ", " + setting_label(setting) + " " + value.astype(str)
            label = label + text.where(value.notna() & value.ne("null"), "")
    return label


def order_engines(engines: pd.Series[str]) -> list[str]:
    """List engines, with the one that others are compared with first."""
    names = engines.dropna().unique()
    return sorted(names, key=lambda name: (name.partition(",")[0] != _FIRST, name))


def shared_settings(cells: Cells) -> list[str]:
    """Return the varying settings, beside the engine, that decide losses."""
    return [name for name in cells.settings if name != _ENGINE and _decides_loss(name)]


def _decides_loss(name: str) -> bool:
    affects = affects_of(name)
    return affects is None or Affects.LOSS in affects


def counterparts(cells: Cells) -> pd.DataFrame:
    """Group the cells that must train alike although their engines differ, by `group`."""
    engine = engines_of(cells)
    keys = ["global_batch_size", *shared_settings(cells)]
    table = cells.table.assign(engine=engine, name=engine.str.partition(",")[0])
    table["group"] = table.groupby(keys, dropna=False, sort=False).ngroup()
    completed = cells.runs.loc[cells.runs["status"].eq("completed"), "cell"]
    table = table[engine.notna() & table.index.isin(completed)]
    # Cells that differ in settings of one engine are decompositions, and no two engines.
    several = table.groupby("group")["name"].transform("nunique") > 1
    return table.loc[several, ["engine", "group"]]
