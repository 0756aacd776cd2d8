"""Figure of memory's end: what fit, what ran out, and what was not launched, by micro-batch."""

from __future__ import annotations

from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from batchscape.analysis.cost.frontier import FIT, OUT, SKIPPED
from batchscape.analysis.figures.style import COLUMN_IN
from batchscape.text import count_text

__all__ = ["draw_frontier"]

_MAX_SETTINGS = 24
_LETTERS = 26
"""Of a line of a setting's name."""
_LOOKS: dict[str, dict[str, Any]] = {
    FIT: {"marker": "o", "markersize": 6, "color": "#0072B2"},
    OUT: {"marker": "X", "markersize": 6, "color": "#D55E00"},
    SKIPPED: {"marker": "o", "markersize": 4, "markerfacecolor": "white", "color": "#777777"},
}
_SHIFT = {FIT: 0.16, OUT: -0.16, SKIPPED: 0.0}
"""Of a micro-batch that both fit and ran out, so that both are seen."""


def draw_frontier(rows: pd.DataFrame, table: pd.DataFrame) -> Figure | None:
    """Draw the outcome of every micro-batch tried, a line a setting.

    One is drawn as not launched where no run of it was; the legend has what is drawn.

    Parameters
    ----------
    rows : DataFrame
        As `frontier_rows` returns it.
    table : DataFrame
        As `memory_frontier` returns it for them.

    Returns
    -------
    Figure or None
        None where there is one micro-batch only.
    """
    if rows["micro_batch_size"].nunique() < 2:
        return None
    shown = table.head(_MAX_SETTINGS).iloc[::-1].reset_index(drop=True)
    labelled = bool(table["group_label"].ne("").any())
    names = [_name(row, labelled=labelled) for _, row in shown.iterrows()]
    lines = sum(1 + name.count("\n") for name in names)
    height = 0.85 + 0.14 * lines + 0.06 * len(names)
    figure = Figure((COLUMN_IN, height), layout="constrained")
    axes = figure.subplots()
    drawn = set()
    for place, (_, row) in enumerate(shown.iterrows()):
        keys = ["group", "data_parallel_size"]
        own = rows[(rows[keys] == row[keys].to_list()).all(axis=1)]
        sizes = {
            name: set(own.loc[own["outcome"].eq(name), "micro_batch_size"].astype(int))
            for name in _LOOKS
        }
        sizes[SKIPPED] -= sizes[FIT] | sizes[OUT]
        both = sizes[FIT] & sizes[OUT]
        for name, look in _LOOKS.items():
            xs = sorted(sizes[name])
            if not xs:
                continue  # an empty line that is not clipped takes room down to the corner
            drawn.add(name)
            ys = [place + (_SHIFT[name] if x in both else 0.0) for x in xs]
            axes.plot(xs, ys, linestyle="none", clip_on=False, **look)
    for name in (name for name in _LOOKS if name in drawn):
        axes.plot([], [], linestyle="none", label=name, **_LOOKS[name])
    micros = sorted(rows["micro_batch_size"].astype(int).unique())
    axes.set_xscale("log", base=2)
    axes.set_xlim(micros[0] / 1.3, micros[-1] * 1.3)
    axes.set_xticks(micros, [str(micro) for micro in micros])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.set_xlabel("micro-batch (samples a device)")
    figure.legend(loc="outside lower center", ncols=3, handletextpad=0.2, columnspacing=1.2)
    return figure


def _name(row: pd.Series[Any], *, labelled: bool) -> str:
    devices = int(row["data_parallel_size"])
    text = count_text(devices, "device")
    return f"{fill(row['group_label'], _LETTERS)}\n{text}" if labelled else text
