"""The smallest effect that a comparison could have seen, given its seeds and their spread."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import optimize, special

from batchscape.analysis.cells import SEEDS, Cells
from batchscape.analysis.comparing.pairs import blocks_of, labels_of, logarithm
from batchscape.analysis.comparison import valid_figures
from batchscape.analysis.targets.tidy import at_common_target
from batchscape.errors import AnalysisError

__all__ = ["ALPHA", "POWER", "detectable_effects", "smallest_detectable_effect"]

ALPHA = 0.05
"""Level of the two-sided test that the smallest effect refers to."""
POWER = 0.80
"""Chance to find an effect of that size."""

_RATIOS = ("step_time_s", "steps_to_target")


def smallest_detectable_effect(
    sd: float, n: int, *, paired: bool = True, power: float = POWER, alpha: float = ALPHA
) -> float:
    """Return the smallest true difference that a two-sided t-test finds with some power.

    Parameters
    ----------
    sd : float
        Standard deviation of the n paired differences, or within each of two groups.
    n : int
        Pairs, or members of each of the two groups.
    paired : bool
        Whether it is a paired test.
    power : float
        Chance to find it, between `alpha` and 1.
    alpha : float
        Level of the test.

    Returns
    -------
    float
        In the unit of `sd`; NaN for fewer than two pairs, or an unknown spread.

    Raises
    ------
    AnalysisError
        If the spread is negative or infinite, or `power` and `alpha` are not in order.

    Notes
    -----
    The noncentrality at which the noncentral t distribution exceeds the critical value with the
    asked chance, times the standard error. Source: Cohen 1988, Statistical Power Analysis,
    chapter 2.
    """
    if not 0 < alpha < power < 1:
        msg = f"alpha must be above 0 and below power, and power below 1; given {alpha=}, {power=}"
        raise AnalysisError(msg)
    if sd < 0 or math.isinf(sd):
        msg = f"a spread must be finite and not negative; given {sd=}"
        raise AnalysisError(msg)
    if n < 2 or math.isnan(sd):
        return math.nan
    degrees = n - 1 if paired else 2 * n - 2
    error = sd / math.sqrt(n) if paired else sd * math.sqrt(2 / n)
    return _noncentrality(degrees, power, alpha) * error


def detectable_effects(cells: Cells, reaches: pd.DataFrame | None = None) -> pd.DataFrame:
    """Compute what the runs could have told apart between two cells of one context.

    The spread of a difference between two cells over seeds is twice the residual variance once
    means of cells and of seeds are taken out; where a context has one cell of a quantity, runs of
    different seeds stand for two unpaired groups.

    Parameters
    ----------
    reaches : DataFrame, optional
        One row a run and target with `sweep_dir`, `run_id`, `target_loss`, `outcome` and
        `steps_to_target`; the lowest target that every completed run reached counts.

    Returns
    -------
    DataFrame
        One row a context and quantity: `context` (label), `quantity`, `n` (seeds, or seeds and
        repeats for times), `cells`, `spread` (of a paired difference, or of runs where unpaired),
        `paired`, `detectable`, `unit` (`nats`, or `%`: a ratio, of time or steps), `run_ids` and
        `sweep_dirs`.
    """
    figures = _figures(cells, reaches)
    contexts = labels_of(cells, cells.runs.loc[figures.index], cells.contexts)
    rows = []
    for context, own in figures.groupby(contexts):
        for quantity, block in _BLOCKS.items():
            # Decompositions of one trajectory have one loss: they are one cell of a loss.
            unit = "cell" if block == "block" else "training"
            row = _row(own, quantity, block, unit)
            if row:
                rows.append({"context": context, "quantity": quantity, **row})
    return pd.DataFrame(rows, columns=list(_COLUMNS)).astype(_COLUMNS)


_BLOCKS = {"final_eval_loss": "seeds", "steps_to_target": "seeds", "step_time_s": "block"}
"""Quantities, and what makes their pairs."""

_COLUMNS = {
    "context": "object",
    "quantity": "object",
    "n": "int64",
    "cells": "int64",
    "spread": "float64",
    "paired": "bool",
    "detectable": "float64",
    "unit": "object",
    "run_ids": "object",
    "sweep_dirs": "object",
}


def _figures(cells: Cells, reaches: pd.DataFrame | None) -> pd.DataFrame:
    figures = valid_figures(cells.runs)
    runs = cells.runs.loc[figures.index]
    seeds = blocks_of(runs, SEEDS)
    # The same trajectory at every seed is one training, whatever its cut, but for programs'.
    head = runs[["sweep_dir", "run_id", "global_batch_size"]].assign(
        seeds=seeds, block=blocks_of(runs, (*SEEDS, "timing_repeat"))
    )
    figures = figures.join(head)
    first = figures.groupby("trajectory_id")["cell"].transform("min")
    own = first.isna() | figures["cell"].map(cells.of_programs()).astype(bool)
    figures["training"] = figures["cell"].where(own, first)
    if reaches is None or reaches.empty:
        return figures.assign(steps_to_target=np.nan)
    steps = at_common_target(reaches, head).set_index(["sweep_dir", "run_id"])["steps_to_target"]
    places = pd.MultiIndex.from_frame(figures[["sweep_dir", "run_id"]])
    return figures.assign(steps_to_target=steps.astype(float).reindex(places).to_numpy())


def _row(own: pd.DataFrame, quantity: str, block: str, unit: str) -> dict[str, object] | None:
    values = own[quantity].astype(float)
    is_ratio = quantity in _RATIOS
    values = logarithm(values) if is_ratio else values
    whole, used = _whole_blocks(values, own[block], own[unit])
    behind = own[used]
    n, count = whole.shape
    if n < 2:
        return None
    paired = count > 1
    if paired:
        rows, columns = whole.mean(axis=1, keepdims=True), whole.mean(axis=0, keepdims=True)
        residuals = whole - rows - columns + whole.mean()
        sd = math.sqrt(2 * float((residuals**2).sum()) / ((n - 1) * (count - 1)))
    else:
        sd = float(whole[:, 0].std(ddof=1))
    effect = smallest_detectable_effect(sd, n, paired=paired)
    return {
        "n": n,
        "cells": count,
        "spread": sd,
        "paired": paired,
        "detectable": 100 * math.expm1(effect) if is_ratio else effect,
        "unit": "%" if is_ratio else "nats",
        "run_ids": ";".join(behind["run_id"]),
        "sweep_dirs": ";".join(behind["sweep_dir"].unique()),
    }


def _whole_blocks(
    values: pd.Series[float], blocks: pd.Series[str], units: pd.Series[str]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the mean of each block and unit, shape (blocks, units), and which values are in it.

    Blocks without a value of every unit are left out.
    """
    known = (values.notna() & blocks.notna() & units.notna()).to_numpy(dtype=bool)
    row, rows = pd.factorize(blocks[known], sort=True)
    column, columns = pd.factorize(units[known], sort=True)
    sums, counts = np.zeros((2, len(rows), len(columns)))
    np.add.at(sums, (row, column), values[known].to_numpy(dtype=np.float64))
    np.add.at(counts, (row, column), 1)
    whole = np.asarray(counts.all(axis=1))
    used = known.copy()
    used[known] = whole[row]
    return sums[whole] / counts[whole], used


_legendre = cache(np.polynomial.legendre.leggauss)


@cache
def _noncentrality(degrees: int, power: float, alpha: float) -> float:
    critical = float(special.stdtrit(degrees, 1 - alpha / 2))

    # The noncentral t given its scale is normal. Its own distribution function has no value for
    # few degrees of freedom far out, so the density of the scale is integrated (Gauss-Legendre).
    nodes, weights = _legendre(200)
    scale = (nodes + 1) / 2 * math.sqrt(special.chdtri(degrees, 1e-14) / degrees)
    logs = (degrees - 1) * np.log(scale) - degrees * scale**2 / 2
    density = weights * np.exp(logs - logs.max())
    density = density / density.sum()

    def shortfall(noncentrality: float) -> float:
        reach = critical * scale
        found = special.ndtr(noncentrality - reach) + special.ndtr(-noncentrality - reach)
        return float(density @ found) - power

    high = 1.0
    while shortfall(high) < 0:
        high *= 2
    return float(optimize.brentq(shortfall, 0.0, high, xtol=1e-8))
