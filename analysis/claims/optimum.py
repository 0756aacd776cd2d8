"""Claims about the optimizer's step: its best size, and its variance, against the global batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.claims.claim import ClaimResult, found, nothing, undecided
from batchscape.analysis.claims.contrasts import (
    CONTRADICTED,
    OPEN,
    SUPPORTED,
    Contrast,
    all_above,
    of_comparable_cuts,
    said,
)
from batchscape.analysis.claims.evidence import Context
from batchscape.analysis.claims.rates import best_rates, score_of
from batchscape.analysis.comparing.pairs import logarithm
from batchscape.analysis.estimates import FEWEST, LEVEL, too_few
from batchscape.analysis.learning_rate.aim import Optima, final_losses, find_optima
from batchscape.analysis.learning_rate.laws import LearningRateLaws, learning_rate_laws
from batchscape.errors import AnalysisError
from batchscape.record.noise_scale import has_no_noise_scale

__all__ = ["large_batch_less_variance", "learning_rate_grows_with_batch"]

_BATCH = "global_batch_size"
_LEAST = 0.1
"""An exponent below 0.1 is no growth: a batch 10 times larger would change things by 26 %. Ours."""


def learning_rate_grows_with_batch(context: Context) -> ClaimResult | None:
    """The best learning rate rises with the global batch, by the exponent that a report gives."""
    try:
        optima = _optima(context)
    except AnalysisError as error:
        reason = str(error).rstrip(".")
        return nothing(reason, "exponent of the best learning rate", context.runs["run_id"])
    if optima is None:
        return None
    laws, rows, elsewhere = _of_one_group(optima)
    exponent, used = laws.exponent, laws.used
    behind = rows[rows[_BATCH].isin(used[_BATCH])] if len(used) else rows
    ids = tuple(sorted(set(behind["run_id"])))
    left_out = "".join(f" Left out: B = {text}." for text in laws.left_out) + elsewhere
    if not exponent.is_identified:
        return ClaimResult(OPEN, exponent, ids, f"{str(exponent.note).capitalize()}.{left_out}")
    n_seeds = int(used["n"].max())
    if np.isnan(exponent.low):
        return nothing(str(exponent.note), exponent.definition, ids)
    shared = _shared_blocks(context, behind)
    if shared < FEWEST:
        reason = too_few(shared, "seeds of one sweep that all of these global batches have")
        return nothing(reason, exponent.definition, ids)
    low, high = exponent.low, exponent.high
    answer = SUPPORTED if low > _LEAST else CONTRADICTED if high < _LEAST else OPEN
    linear, root = ("" if low <= power <= high else "not " for power in (1.0, 0.5))
    # What weakens the optima behind it, each thing once.
    batches = used[_BATCH].map("{:g}".format).groupby(used["note"]).agg(", ".join)
    notes = "; ".join(f"B = {names}: {note}" for note, names in batches.items()) or None
    explanation = (
        f"Exponent {exponent.text(2)} over {exponent.n} global batches, as in the report on "
        f"learning rates; growth means more than {_LEAST:g}. The linear rule (1) is {linear}within "
        f"the interval; the square root rule (0.5) is {root}within the interval."
        f"{f' {notes}.' if notes else ''}{left_out}"
    )
    return ClaimResult(answer, replace(exponent, note=notes), ids, explanation, n_seeds=n_seeds)


def large_batch_less_variance(context: Context) -> ClaimResult | None:
    """The gradient of an update varies less from step to step as the global batch grows."""
    if "gradient_norm" not in context.evidence.steps:
        return None
    labels = context.figures["not_invariant"]
    runs = context.figures[~labels.map(has_no_noise_scale).astype(bool)]
    # A learning rate that hardly trains stays where gradients are noisy: the best ones compare.
    runs = best_rates(runs, score_of(context).reindex(runs.index)).runs
    if runs[_BATCH].nunique() < 2:
        return None
    table = runs.assign(variance=logarithm(_step_to_step(context, runs)))
    table = table.dropna(subset=["variance"])
    definition = "exponent p of (step-to-step variance of the gradient norm) ~ (global batch)^p"
    wide = table.groupby(["seed_block", _BATCH])["variance"].mean().unstack(_BATCH)
    most = wide.notna().sum().nlargest(2)
    wide = wide.dropna(axis=1, thresh=FEWEST).dropna()
    if wide.shape[1] < 2 or wide.empty:
        n = int(most.min()) if len(most) == 2 else 0
        return nothing(too_few(n, "seeds at two global batches"), definition, table["run_id"])
    slopes = _slopes(wide)
    ids = tuple(sorted(set(table.loc[table["seed_block"].isin(wide.index), "run_id"])))
    name = f"global batches {', '.join(map(str, wide.columns))}"
    contrast = Contrast(name, slopes, ids)
    decision = all_above([Contrast(name, -slopes, ids)], _LEAST)
    if decision is None:
        return undecided([contrast], definition)
    low, high = contrast.interval(LEVEL)
    inside = "" if low <= -1 <= high else "not "
    explanation = (
        f"Of the step-to-step variance of the gradient norm: {said(contrast, 'exponent')}; lower "
        f"means below -{_LEAST:g}. -1, as for independent samples at the same weights, is {inside}"
        "within the interval. The norm stands for the gradient, of which it is one number; what "
        "it drifts by steadily is taken out, and what the weights move by in other ways is taken "
        "for noise. The noise-scale records are not used: their tr(S)/B puts the 1/B in."
    )
    return found(decision.answer, contrast, [contrast], explanation, definition, ratio=False)


def _optima(context: Context) -> Optima | None:
    """Find the best learning rates as a report does, from the runs of one context."""
    reaches, runs = context.reaches, of_comparable_cuts(context.runs)
    if runs is None:
        return None
    if not reaches.empty:
        reaches = reaches.merge(runs[["sweep_dir", "run_id"]])
        reaches = reaches.assign(seed=reaches["seed_block"])
    figures = context.evidence.cells.runs.loc[runs.index]
    return find_optima(reaches, final_losses(figures.assign(learning_rate=runs["learning_rate"])))


def _shared_blocks(context: Context, rows: pd.DataFrame) -> int:
    """Count the seeds of one sweep that every global batch was trained with."""
    own = context.runs[["sweep_dir", "run_id", "seed_block"]]
    blocks = rows[["sweep_dir", "run_id", _BATCH]].merge(own, on=["sweep_dir", "run_id"])
    batches = blocks.groupby("seed_block")[_BATCH].nunique()
    return int(batches.eq(blocks[_BATCH].nunique()).sum())


def _of_one_group(optima: Optima) -> tuple[LearningRateLaws, pd.DataFrame, str]:
    """Return the laws of the group with most optima, its rows, and what else there is."""
    counts = optima.best.groupby("group")["learning_rate"].count()
    group = counts.idxmax()
    laws = learning_rate_laws(optima.best[optima.best["group"] == group])
    if len(counts) == 1:
        return laws, optima.table, ""
    rest = f" Of {len(counts)} groups of runs that are not pooled, the one with most optima."
    return laws, optima.table[optima.table["group"] == group], rest


def _slopes(wide: pd.DataFrame) -> NDArray[np.float64]:
    """Least-squares slope against the logarithm of the global batch, one for each row."""
    x = np.log(wide.columns.to_numpy(dtype=float))
    x = x - x.mean()
    slopes: NDArray[np.float64] = wide.to_numpy(dtype=float) @ x / (x @ x)
    return slopes


def _step_to_step(context: Context, runs: pd.DataFrame) -> pd.Series[float]:
    """Return the variance of the gradient norm between the steps of each run, without its drift.

    Second differences of independent values have 6 times their variance, and a steady drift has
    none.
    """
    rows = context.evidence.rows("steps", runs, ["gradient_norm"])
    norms = rows["gradient_norm"].groupby(rows["run"])
    bends = norms.diff() - norms.diff().groupby(rows["run"]).shift()
    variance: pd.Series[float] = (bends**2 / 6).groupby(rows["run"]).mean().reindex(runs.index)
    return variance
