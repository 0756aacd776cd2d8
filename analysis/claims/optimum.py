"""Claims about the optimizer's step: its best size, and its variance, against the global batch."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.claims.claim import ONE_SEED, Finding, found, nothing
from batchscape.analysis.claims.contrasts import Contrast, all_above, run_ids_of, said
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import best_rates, score_of
from batchscape.analysis.comparing.pairs import logarithm
from batchscape.analysis.estimates import LEVEL
from batchscape.record.noise_scale import SAMPLED, has_no_noise_scale, noise_samples

__all__ = ["large_batch_less_variance", "learning_rate_grows_with_batch", "log_optimum"]

_BATCH = "global_batch_size"
_LEAST = 0.1
"""An exponent below 0.1 is no growth: a batch 10 times larger would change things by 26 %. Ours."""


def learning_rate_grows_with_batch(context: Context) -> Finding | None:
    """The best learning rate, found seed by seed, rises with the global batch."""
    table = context.runs.assign(loss=score_of(context)).dropna(subset=["loss", "learning_rate"])
    table = table[table["learning_rate"] > 0]
    rates = table.groupby(_BATCH)["learning_rate"].nunique()
    swept = sorted(rates.index[rates > 2])
    if len(swept) < 2:
        return None
    table = table[table[_BATCH].isin(swept)]
    definition = "exponent p of best learning rate ~ (global batch)^p"
    cells = table.groupby(["seed_block", _BATCH, "learning_rate"])["loss"].mean()
    optima = cells.groupby(level=[0, 1]).agg(_optimum_of).unstack(_BATCH)
    # A batch whose optimum lies at the edge of the grid in some seed has none that is known.
    inner = [batch for batch in swept if optima[batch].notna().all()]
    if len(inner) < 2:
        edges = ", ".join(str(batch) for batch in swept if batch not in inner)
        reason = f"the best learning rate lies at the edge of the grid at global batch {edges}"
        return nothing(reason, definition, table["run_id"])
    ids = tuple(sorted(set(table.loc[table[_BATCH].isin(inner), "run_id"])))
    slopes = _slopes(optima[inner])
    contrast = Contrast(f"global batches {', '.join(map(str, inner))}", slopes, ids)
    decision = all_above([contrast], _LEAST)
    if decision is None:
        return nothing(ONE_SEED, definition, ids, [contrast])
    low, high = contrast.interval(LEVEL)
    rules = [
        f"{name} ({power:g}) is {'' if low <= power <= high else 'not '}within the interval"
        for name, power in (("the linear rule", 1.0), ("the square root rule", 0.5))
    ]
    left_out = len(swept) - len(inner)
    edge = f" {left_out} global batches with their best at the grid's edge are left out." * (
        left_out > 0
    )
    explanation = (
        f"{said(contrast, 'exponent').capitalize()}; growth means more than {_LEAST:g}. "
        f"{rules[0][0].upper()}{rules[0][1:]}; {rules[1]}.{edge}"
    )
    return found(decision.answer, contrast, [contrast], explanation, definition, ratio=False)


def large_batch_less_variance(context: Context) -> Finding | None:
    """The variance of the gradient of an update falls as the global batch grows."""
    if "gradient_norm" not in context.evidence.steps:
        return None
    labels = context.figures["not_invariant"]
    runs = context.figures[~labels.map(has_no_noise_scale).astype(bool)]
    # A learning rate that hardly trains stays where gradients are noisy: the best ones compare.
    runs = best_rates(runs, score_of(context).reindex(runs.index)).runs
    if runs[_BATCH].nunique() < 2:
        return None
    variance, words = _variances(context, runs)
    table = runs.assign(variance=logarithm(variance)).dropna(subset=["variance"])
    definition = f"exponent p of {words} ~ (global batch)^p"
    wide = table.groupby(["seed_block", _BATCH])["variance"].mean().unstack(_BATCH)
    wide = wide.dropna(axis=1, thresh=2).dropna()
    if wide.shape[1] < 2 or wide.empty:
        return nothing(ONE_SEED, definition, table["run_id"])
    slopes = _slopes(wide)
    ids = tuple(sorted(set(table.loc[table["seed_block"].isin(wide.index), "run_id"])))
    name = f"global batches {', '.join(map(str, wide.columns))}"
    contrast = Contrast(name, slopes, ids)
    decision = all_above([Contrast(name, -slopes, ids)], _LEAST)
    if decision is None:
        return nothing(ONE_SEED, definition, run_ids_of([contrast]), [contrast])
    low, high = contrast.interval(LEVEL)
    inside = "" if low <= -1 <= high else "not "
    explanation = (
        f"Of {words}: {said(contrast, 'exponent')}; lower means below -{_LEAST:g}. "
        f"-1, as for independent samples at the same weights, is {inside}within the interval."
    )
    return found(decision.answer, contrast, [contrast], explanation, definition, ratio=False)


def log_optimum(log_rates: NDArray[np.float64], losses: NDArray[np.float64]) -> float:
    """Return the logarithm of the best learning rate, between the points of the grid.

    Parameters
    ----------
    log_rates : array, shape (n,)
        Ascending.
    losses : array, shape (n,)
        Infinite where a run diverged.

    Returns
    -------
    float
        Lowest point of the parabola through the best point and its neighbours; the best point
        where a neighbour diverged; NaN where it lies at an edge of the grid.
    """
    best = int(np.argmin(losses))
    if best in {0, len(losses) - 1}:
        return np.nan
    x, y = log_rates[best - 1 : best + 2], losses[best - 1 : best + 2]
    if not np.isfinite(y).all():
        return float(x[1])
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if right <= left:
        return float(x[1])
    # The slope is `left` and `right` at the middles of the two intervals, and zero in between.
    middle = (x[0] + x[1]) / 2
    return float(middle - left * ((x[2] - x[0]) / 2) / (right - left))


def _optimum_of(losses: pd.Series[float]) -> float:
    known = losses.droplevel([0, 1]).sort_index()
    if len(known) < 3:
        return np.nan
    return log_optimum(
        np.log(np.asarray(known.index, dtype=np.float64)), np.asarray(known, dtype=np.float64)
    )


def _slopes(wide: pd.DataFrame) -> NDArray[np.float64]:
    """Least-squares slope against the logarithm of the global batch, one for each row."""
    x = np.log(wide.columns.to_numpy(dtype=float))
    x = x - x.mean()
    slopes: NDArray[np.float64] = wide.to_numpy(dtype=float) @ x / (x @ x)
    return slopes


def _variances(context: Context, runs: pd.DataFrame) -> tuple[pd.Series[float], str]:
    """Return a variance for each run, and what it is; NaN where it is not known."""
    rows = context.rows("steps", runs, SAMPLED)
    if set(SAMPLED) <= set(rows):
        samples = noise_samples(rows)
        trace = samples["noise"].groupby(rows.loc[samples.index, "run"]).mean()
        variance = trace.reindex(runs.index) / runs[_BATCH]
        if runs.loc[variance.gt(0), _BATCH].nunique() > 1:
            return variance, "the gradient's variance tr(S)/B, from the noise-scale records"
    changes = logarithm(rows["gradient_norm"]).groupby(rows["run"]).diff() ** 2 / 2
    spread = changes.groupby(rows["run"]).mean().reindex(runs.index)
    return spread, "the step-to-step variance of the log gradient norm"
