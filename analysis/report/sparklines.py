"""Loss curves as lines of text, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import Cells
from batchscape.analysis.figures.curves import mean_curves
from batchscape.analysis.numbers import significant

__all__ = ["curve_lines", "sparkline"]

_MOST = 12
_WIDTH = 24
_OF_THE_UPDATE = ("optimizer.", "scaling.", "schedule.")
_BARS = "▁▂▃▄▅▆▇█"


def curve_lines(cells: Cells, evals: pd.DataFrame) -> Iterator[str]:
    """Write the held-out loss of each cell over its samples; all on one scale.

    Parameters
    ----------
    evals : DataFrame
        Rows of evaluations, as loaded.

    Yields
    ------
    str
        A heading, and a line a cell: the curve, its first and last mean over runs, and the cell.
        Of several cuts and learning rates of one global batch that with the lowest last loss stands
        for all; of more than 12 the first are shown. Nothing where no completed run was evaluated.
    """
    curves = mean_curves(cells, evals, "eval_loss", timed=False, points=_WIDTH)
    if curves.empty:
        return
    last = curves.groupby("cell")["mean"].last()
    batch = cells.table["global_batch_size"].astype("Int64")
    # Settings of the update are what each global batch wants of its own.
    apart = [name for name in cells.contexts if not name.startswith(_OF_THE_UPDATE)]
    keys = cells.table.loc[last.index, apart].astype(str).assign(batch=batch[last.index])
    chosen = sorted(last.groupby([keys[name] for name in keys]).idxmin())
    whole = curves[curves["cell"].isin(chosen)]["mean"].to_numpy(dtype=np.float64)
    low, high = float(whole.min()), float(whole.max())
    which = "" if len(chosen) == len(last) else ", of each global batch the lowest at the end"
    yield f"Held-out loss over samples, mean over runs{which}"
    labels = "B = " + batch.astype(str) + ", " + cells.labels(cells.shown)
    for cell in chosen[:_MOST]:
        losses = curves[curves["cell"] == cell]["mean"].to_numpy(dtype=np.float64)
        ends = f"{significant(losses[0], 3)} to {significant(losses[-1], 3)}"
        yield f"  {sparkline(losses, low, high)}  {ends:<16}  {labels[cell]}"
    if len(chosen) > _MOST:
        yield f"  ... and {len(chosen) - _MOST} more in the figures"


def sparkline(values: NDArray[np.float64], low: float, high: float) -> str:
    """Draw values as bars of eight heights.

    Parameters
    ----------
    values : array, shape (n,)
        Finite.
    low, high : float
        Ends of the scale.
    """
    span = high - low
    shares = (values - low) / span if span > 0 else np.zeros(len(values))
    return "".join(_BARS[round(7 * float(share))] for share in shares.clip(0, 1))
