"""Runs at the best learning rate of their global batch, and warnings where none was tuned."""

from __future__ import annotations

import numpy as np
import pandas as pd

from batchscape.analysis.joins import column_of
from batchscape.analysis.learning_rate.aim import find_optima
from batchscape.analysis.learning_rate.optimum import (
    best_learning_rates,
    optima_of,
    tried_often,
)
from batchscape.analysis.learning_rate.table import SERIES, costs_by_rate, has_result
from batchscape.analysis.numbers import significant
from batchscape.text import list_text

_KEYS = [*SERIES, "global_batch_size"]
_MARKS = ["tuned", "edge", "n_learning_rates"]
"""What is said of the best learning rate beside each run."""


def at_best_learning_rate(
    reaches: pd.DataFrame, value: str = "steps_to_target", optima: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Select the runs at the best learning rate of each global batch.

    The best of the grid is taken, for there are runs at no other; its steps are the lowest of
    several, and hence a little too low: fresh seeds at the chosen rates have no such bias.

    Parameters
    ----------
    reaches : DataFrame
        One row a run and target: `global_batch_size`, `seed` and the column `value`; where there
        are any, `learning_rate`, `group`, `target_loss`, `outcome`, `trajectory_id`.
    value : str
        What is to be low: the steps to a target, or a loss, of which no logarithm is taken.
    optima : DataFrame, optional
        `best_learning_rates` of the same rows, where it is there already.

    Returns
    -------
    DataFrame
        Rows of `reaches`, of each group, target and global batch those at the rate whose mean
        logarithm of steps is lowest over the seeds common to all rates. Where at no rate every
        seed reached the target, it is the rate at which the largest share of its seeds did (a seed
        that did not run at a rate says nothing of it); where none did, all rows stay.
        With `tuned` (the chosen rate lies inside its grid), `edge` (it is the lowest or highest
        of several) and `n_learning_rates` (of how many it is the
        best). Of runs of one trajectory one is returned.
        Without the column `learning_rate` every row is returned, not tuned.

    Raises
    ------
    AnalysisError
        As `costs_by_rate` does.
    """
    if column_of(reaches, "learning_rate").isna().all():
        return reaches.assign(tuned=False, edge=False, n_learning_rates=1)
    with_rate = reaches.dropna(subset="learning_rate")
    costs = costs_by_rate(with_rate, value)
    best = optima_of(costs) if optima is None else optima
    columns = [*_KEYS, "grid_learning_rate", *_MARKS]
    chosen = costs.merge(best[columns], on=_KEYS, how="left", validate="many_to_one")
    grid = chosen["grid_learning_rate"]
    grid = grid.fillna(_most_often_reached(chosen[grid.isna()]))
    kept = chosen[grid.isna() | chosen["learning_rate"].eq(grid)].sort_values("row")
    marks = kept.assign(edge=kept["edge"].isin(["lowest", "highest"]))[_MARKS]
    rows = with_rate.iloc[kept["row"].to_numpy()]
    return rows.assign(**{str(name): column.to_numpy() for name, column in marks.items()})


def cells_at_best(
    reaches: pd.DataFrame, finals: pd.DataFrame, optima: pd.DataFrame | None = None
) -> dict[int, float]:
    """Return the cells at the best rate of their batch (fewest steps, else loss), and the rate."""
    searches = [find_optima(reaches, optima=optima), find_optima(reaches.iloc[:0], finals)]
    best = [optimum.best for optimum in searches if optimum is not None]
    if not best:
        return {}
    keys = ["group", "global_batch_size"]
    chosen = pd.concat(best).dropna(subset="grid_learning_rate").drop_duplicates(keys)
    rates = chosen[keys].assign(learning_rate=chosen["grid_learning_rate"]).astype(float)
    tried = pd.concat([table[[*rates, "cell"]].astype(float) for table in (reaches, finals)])
    met = tried.merge(rates).astype({"cell": int}).sort_values("cell")
    return dict(zip(met["cell"], met["learning_rate"], strict=True))


def with_cuts_of_programs(best: pd.DataFrame, reaches: pd.DataFrame) -> pd.DataFrame:
    """Add the runs of every cut of a program at the learning rates that `best` has."""
    keys = [*_KEYS, "learning_rate"]
    is_program = best["program_cut"].notna()
    rates = best.loc[is_program, [*keys, *_MARKS]].drop_duplicates(keys)
    cuts = reaches[reaches["program_cut"].notna() & has_result(reaches)].merge(rates, on=keys)
    return pd.concat([best[~is_program], cuts], ignore_index=True) if len(cuts) else best


def tuning_warning(reaches: pd.DataFrame, optima: pd.DataFrame | None = None) -> str | None:
    """Say loudly where steps to a target are not those of a tuned learning rate.

    Parameters
    ----------
    reaches, optima : DataFrame
        As for `at_best_learning_rate`.

    Returns
    -------
    str or None
        None where the best learning rate of every global batch lies inside its grid, with rates on
        both sides that are worse beyond the noise (or there are too few seeds to tell the noise).

    Raises
    ------
    AnalysisError
        As `costs_by_rate` does.
    """
    effect = (
        "A learning rate that suits some global batches better than others makes or moves a "
        "critical batch"
    )
    remedy = (
        f"{effect}. To tune each, train every global batch at several of them, as "
        "sweeps=learning_rate does on text and sweeps=learning_rate_digits on images"
    )
    tried = column_of(reaches, "learning_rate").dropna().astype(float).unique()
    if not len(tried):
        return f"UNTUNED: the table has no learning rates. {remedy}"
    best = optima
    if best is None:
        best = best_learning_rates(reaches.dropna(subset="learning_rate"), "steps_to_target")
    single = best["edge"] == "single"
    if single.all():
        what = "one learning rate of its own"
        if len(tried) == 1:
            what = f"one and the same learning rate, {significant(tried[0], 3)}"
        return f"UNTUNED: each global batch was trained at {what}. {remedy}"
    problems = {
        "one learning rate only": single,
        "the lowest learning rate of its grid is the best": best["edge"] == "lowest",
        "the highest learning rate of its grid is the best": best["edge"] == "highest",
        "on one side of the best rate, or both, none is worse beyond the noise": best["tuned"]
        & ((best["low"] == 0) | np.isposinf(best["high"])),
        "no learning rate took every seed to the target": best["grid_learning_rate"].isna(),
    }
    findings = "; ".join(
        f"at {_batches_text(best, where)}: {text}"
        for text, where in problems.items()
        if where.any()
    )
    if not findings:
        return None
    losses = best["target_loss"].dropna().unique()
    aim = f" to reach a loss of {losses[0]:g}" if len(losses) == 1 else ""
    return (
        f"NOT TUNED EVERYWHERE{aim}: {findings}. {effect}. Rates further out or more "
        "seeds settle it, and so does a search for just that, search.objective=steps_to_target: "
        "the rate of the least loss may be another"
    )


def tied_warning(table: pd.DataFrame, value: str) -> str | None:
    """Warn where several learning rates share the lowest cost; tables show one of them."""
    if column_of(table, "learning_rate").isna().all():
        return None
    costs = costs_by_rate(table.dropna(subset="learning_rate"), value)
    means = costs.groupby([*_KEYS, "learning_rate"], dropna=False)["cost"].mean().reset_index()
    least = means.groupby(_KEYS, dropna=False)["cost"].transform("min")
    # Equal but for the rounding of a mean; two infinite costs are no tie.
    tied = means[np.isfinite(least) & np.isclose(means["cost"], least, rtol=1e-12, atol=0)]
    ties = []
    for (*_, batch), rows in tied.groupby(_KEYS, dropna=False):
        rates = [significant(rate, 3) for rate in rows["learning_rate"]]
        ties += [f"B = {batch:g}: {list_text(rates, 'and')}"] * (len(rates) > 1)
    if not ties:
        return None
    return f"TIES: learning rates of equally low cost, of which none is the best: {'; '.join(ties)}"


def _most_often_reached(costs: pd.DataFrame) -> pd.Series[float]:
    """Return, by row, the learning rate at which the largest share of seeds reached the target."""
    rates = pd.Series(np.nan, index=costs.index)
    for _, batch in costs.groupby(_KEYS, dropna=False):
        comparable = batch[batch["learning_rate"].isin(tried_often(batch))]
        missed = np.isinf(comparable["cost"])
        if not missed.all():
            # The larger share first, then fewer steps.
            steps = comparable["cost"].mask(missed)
            means = comparable.assign(missed=missed, cost=steps).groupby("learning_rate")
            order = means[["missed", "cost"]].mean().sort_values(["missed", "cost"])
            rates.loc[batch.index] = float(order.index[0])
    return rates


def _batches_text(best: pd.DataFrame, where: pd.Series[bool]) -> str:
    """List the batches of some rows, with their losses where the table has several targets."""
    rows = best[where]
    names = [f"B = {batch:g}" for batch in sorted(rows["global_batch_size"].unique())]
    several = best["target_loss"].nunique() > 1
    losses = ", ".join(f"{loss:g}" for loss in sorted(rows["target_loss"].dropna().unique()))
    return ", ".join(names) + (f" (of losses {losses})" if several and losses else "")
