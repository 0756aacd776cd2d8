"""Short names of runs whose settings differ, for legends and lists."""

from __future__ import annotations

from textwrap import shorten

import pandas as pd

from batchscape.analysis.cells import Cells
from batchscape.analysis.numbers import MISSING

__all__ = ["setting_names"]

_LETTERS = 48
_FIRST = ("model.", "data.", "engine.", "optimizer.")
"""What says most of an experiment."""


def setting_names(cells: Cells, number: pd.Series[int]) -> dict[int, str]:
    """Name parts of the cells by as little as tells them apart.

    Parameters
    ----------
    number : Series
        The part that each cell belongs to, indexed by `cell`; cells that are missing are in none.

    Returns
    -------
    dict of int to str
        By number: the name of the sweep where every part is one; else the first of the settings,
        beginning with those of the model, that tell all parts apart. Empty for a single part.
    """
    numbers = sorted(number.unique())
    if len(numbers) < 2:
        return dict.fromkeys(numbers, "")
    parted = cells.runs[cells.runs["cell"].isin(number.index)]
    sweeps = parted["sweep_name"].astype(str).groupby(parted["cell"].map(number)).unique()
    if sweeps.str.len().eq(1).all() and sweeps.str[0].is_unique:
        return {int(str(n)): str(names[0]) for n, names in sweeps.items()}
    firsts = number.drop_duplicates().sort_values()
    table = cells.table.loc[firsts.index, cells.contexts].astype(object).fillna(MISSING)
    chosen: list[str] = []
    told = 1
    for name in sorted(cells.contexts, key=lambda name: not name.startswith(_FIRST)):
        apart = len(table[[*chosen, name]].drop_duplicates())
        if apart > told:
            chosen.append(name)
            told = apart
    texts = [
        ", ".join(f"{cells.label_of(str(name))} {row[name]}" for name in row)
        for row in table[chosen].to_dict("records")
    ]
    shown = [shorten(text, _LETTERS, placeholder=" ...") for text in texts]
    return dict(zip(firsts, shown, strict=True))
