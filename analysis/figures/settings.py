"""Short names of runs whose settings differ, for legends and lists."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from textwrap import shorten

import pandas as pd

from batchscape.analysis.cells import Cells, setting_label, setting_texts
from batchscape.analysis.numbers import MISSING

_LETTERS = 48
_FIRST = ("model.", "data.", "engine.", "optimizer.")
"""Settings that say most of an experiment."""


def setting_names(cells: Cells, number: pd.Series[int]) -> dict[int, str]:
    """Name parts of the cells, given the number of each cell, by sweeps or by few settings."""

    def base(name: str) -> pd.Series[str]:
        values = cells.table[name].astype(object).fillna(MISSING)
        return cells.label_of(name) + " " + values.astype(str)

    firsts = number.drop_duplicates().sort_values()
    names = _parted(cells, number, base)[firsts.index]
    return dict(zip(firsts, names, strict=True))


def cell_names(cells: Cells) -> pd.Series[str]:
    """Name the context of each cell, with the learning rate that the cell was trained with."""
    return _parted(
        cells,
        cells.context_of,
        lambda name: setting_label(name) + " " + setting_texts(cells.table, name),
    )


def _parted(
    cells: Cells, number: pd.Series[int], write: Callable[[str], pd.Series[str]]
) -> pd.Series[str]:
    """Name the part of each cell; `write` returns the texts of a setting, by cell."""
    parts = number.nunique()
    if parts < 2:
        return pd.Series("", index=number.index)
    of_runs = cells.runs["cell"].map(number)
    sweeps = cells.runs["sweep_name"].astype(str).groupby(of_runs).unique()
    if sweeps.str.len().eq(1).all() and sweeps.str[0].is_unique:
        return number.map(sweeps.str[0])
    firsts = number.drop_duplicates().index
    table = cells.table.loc[firsts, cells.contexts].astype(object).fillna(MISSING)
    names_apart: list[str] = []
    n_apart = 1
    for name in sorted(cells.contexts, key=lambda name: not name.startswith(_FIRST)):
        n_with_name = len(table[[*names_apart, name]].drop_duplicates())
        if n_with_name > n_apart:
            names_apart.append(name)
            n_apart = n_with_name
    names = pd.Series("", index=number.index)
    for name in names_apart:
        names = names + ", " + write(name)[number.index]
    short = partial(shorten, width=_LETTERS, placeholder=" ...")
    return names.str.removeprefix(", ").map(short)
