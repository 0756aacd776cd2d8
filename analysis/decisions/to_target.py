"""Time and device-hours to a target: optimizer steps times the time of one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cost.linear import welch
from batchscape.analysis.cost.model import outside
from batchscape.analysis.cost.step_time import WIDEST, StepTimeModel
from batchscape.analysis.cost.table import FACTORS, Geometry
from batchscape.analysis.estimates import FEWEST, t_reach


def steps_by_batch(
    reaches: pd.DataFrame, by: Sequence[str] = ("global_batch_size",)
) -> pd.DataFrame:
    """Summarise the optimizer steps to one target by global batch, or by cut.

    Parameters
    ----------
    reaches : DataFrame
        One row a run, of one group, one target and one learning rate a batch: `global_batch_size`,
        `seed`, `steps_to_target` (NaN or infinite: not reached), and optionally `steps_low` (a
        bound for runs that ended before), `outcome`, `trajectory_id`, `learning_rate`, `run_id`.
    by : sequence of str
        What has steps of its own. The cuts of a global batch share them, but for those of a program
        of others: give `FACTORS`, columns of `reaches` too. Its timing repeats then have steps of
        their own as well, and count once, by the mean of their logarithms.

    Returns
    -------
    DataFrame
        Indexed by `by`: `n_seeds`, `n_reached`, `steps` (geometric mean; median
        with infinity where a run did not reach), `least_steps` (what any of the seeds took or
        would have taken at least), `steps_log`, `steps_log_variance` (of the mean) and
        `steps_degrees` (NaN where a run did not reach, or there is one seed), `steps_log_of` (a
        dict of the logarithms by trajectory, or by seed), `learning_rate`, `outcomes`, `run_ids`.
        Runs that did not reach stay in every count.
    """
    steps_of_runs = pd.to_numeric(reaches["steps_to_target"]).astype(float).fillna(math.inf)
    has_reached = np.isfinite(steps_of_runs)
    optional = ("outcome", "trajectory_id", "run_id", "learning_rate", "steps_low")
    rows = reaches.reindex(columns=["seed", *by, *optional])
    bounds = pd.to_numeric(rows["steps_low"]).astype(float).fillna(0.0)
    unknown = np.where(has_reached, "reached", "not reached")
    rows = rows.assign(
        steps=steps_of_runs,
        learning_rate=pd.to_numeric(rows["learning_rate"]).astype(float),
        least=steps_of_runs.where(has_reached, bounds),
        outcome=rows["outcome"].astype(object).where(rows["outcome"].notna(), unknown),
    )
    summaries = {}
    for key, group in rows.groupby(list(by) if len(by) > 1 else by[0]):
        runs, name = _trajectories(group, by)
        steps = runs["steps"].to_numpy(dtype=float)
        reached = np.isfinite(steps)
        logs = np.log(steps)
        n, all_reached = len(steps), bool(reached.all())
        has_variance = all_reached and n > 1
        summaries[key] = {
            "n_seeds": n,
            "n_reached": int(reached.sum()),
            "steps": math.exp(logs.mean()) if all_reached else float(np.median(steps)),
            "least_steps": float(runs["least"].min()),
            "steps_log": logs.mean() if all_reached else math.nan,
            "steps_log_variance": logs.var(ddof=1) / n if has_variance else math.nan,
            "steps_degrees": n - 1.0 if has_variance else math.nan,
            "steps_log_of": dict(zip(runs[name], logs.tolist(), strict=True)),
            "learning_rate": runs["learning_rate"].iloc[0],
            "outcomes": ", ".join(f"{v} {k}" for k, v in runs["outcome"].value_counts().items()),
            "run_ids": ";".join(sorted(map(str, runs["run_id"].dropna()))),
        }
    return pd.DataFrame.from_dict(summaries, orient="index").rename_axis(list(by))


def step_times(
    table: pd.DataFrame, geometries: Sequence[Geometry], model: StepTimeModel | None = None
) -> pd.DataFrame:
    """Give the time of an optimizer step, measured where it was, else predicted.

    Parameters
    ----------
    table : DataFrame
        As `fit_step_time` takes it; `Basis.step_time_table` where times are to add up to a target.
    geometries : sequence of tuple of int
        Devices, micro-batch and accumulation.
    model : StepTimeModel, optional
        Predicts geometries without a measurement; without it they are left unknown.

    Returns
    -------
    DataFrame
        One row a geometry: the three factors, `global_batch_size`, `step_time_s` (geometric mean
        of the runs; NaN where unknown), `time_log`, `time_log_variance`, `time_degrees` (NaN: no
        interval), `n_runs`, `source` (`measured`, `predicted` or `unknown`), `beyond` (in which
        factors a prediction leaves the measured range; else empty). A prediction whose interval has
        ends more than `WIDEST` times apart is none.
    """
    cuts = list(FACTORS)
    measured = table.dropna(subset="step_time_s")
    logs = measured["step_time_s"].astype(float).apply(np.log)
    summary = (
        logs.groupby([measured[n] for n in cuts])
        .agg(["mean", "var", "size"])
        .set_axis(["time_log", "var", "n_runs"], axis=1)
    )
    rows = pd.DataFrame(geometries, columns=cuts).join(summary, on=cuts)
    n = rows["n_runs"].fillna(0).astype(int)
    rows = rows.drop(columns="var").assign(
        global_batch_size=rows[cuts].prod(axis=1),
        time_log_variance=rows["var"] / n,
        time_degrees=(n - 1.0).where(n > 1),
        n_runs=n,
        source=np.where(n > 0, "measured", "unknown"),
        beyond="",
    )
    if model is not None:
        guesses = {}
        for row in np.flatnonzero(n == 0).tolist():
            if (guess := _predict(model, geometries[row])) is not None:
                guesses[row] = guess
        rows.update(pd.DataFrame.from_dict(guesses, orient="index", columns=[*_PREDICTION_COLUMNS]))
    return rows.assign(step_time_s=np.exp(rows["time_log"]))


def time_to_target(steps: pd.DataFrame, times: pd.DataFrame) -> pd.DataFrame:
    """Multiply steps to a target by the time of a step.

    Any decomposition of a global batch takes that batch's optimizer steps, unless steps are given
    by cut: then each takes its own, and one without any is left out. Logarithms add, their
    variances add, and the degrees of freedom are Satterthwaite's.

    Parameters
    ----------
    steps : DataFrame
        As `steps_by_batch` returns it.
    times : DataFrame
        As `step_times` returns it.

    Returns
    -------
    DataFrame
        The rows of `times` whose global batch, or cut, is in `steps`, with the columns of both and
        `time_s`, `time_low_s`, `time_high_s`, `device_hours`, `device_hours_low`,
        `device_hours_high`, `log`, `log_variance` and `degrees`. Where a run did not reach, the
        upper end is infinite and the lower one a bound; where most did not, the value is infinite.
        NaN: unknown, or no interval, which takes `FEWEST` seeds and degrees to match.
    """
    rows = times.merge(steps, left_on=list(steps.index.names), right_index=True, how="inner")
    rows = rows.reset_index(drop=True)
    columns = (("steps_log_variance", "steps_degrees"), ("time_log_variance", "time_degrees"))
    variance, degrees = welch([(rows[name], rows[of_degrees]) for name, of_degrees in columns])
    rows["log"] = rows["steps_log"] + rows["time_log"]
    rows["log_variance"], rows["degrees"] = variance, degrees
    half = t_reach(variance**0.5, degrees)
    all_reached = rows["n_reached"] == rows["n_seeds"]
    bound = rows["least_steps"] * rows["step_time_s"]
    rows["time_s"] = rows["steps"] * rows["step_time_s"]
    # Without a target (0 seeds) the runs that were timed are the units.
    has_few = rows["n_seeds"].between(1, FEWEST - 1) | (degrees < FEWEST - 1)
    rows["time_low_s"] = np.exp(rows["log"] - half).where(all_reached, bound).mask(has_few)
    rows["time_high_s"] = np.exp(rows["log"] + half).where(all_reached, math.inf).mask(has_few)
    hours = rows["data_parallel_size"] / 3600
    for end in ("", "_low", "_high"):
        rows[f"device_hours{end}"] = rows[f"time{end}_s"] * hours
    return rows


def pareto_front(time: pd.Series[float], cost: pd.Series[float]) -> NDArray[np.bool_]:
    """Tell which rows no other row beats in both.

    Parameters
    ----------
    time, cost : Series
        Less is better; rows that are not finite in both are not on the front.

    Returns
    -------
    array of bool, shape (rows,)
    """
    values = np.column_stack([time.to_numpy(dtype=float), cost.to_numpy(dtype=float)])
    is_finite = np.isfinite(values).all(axis=1)
    others, each = values[is_finite, None], values[None, :]
    is_beaten = ((others <= each).all(axis=2) & (others < each).any(axis=2)).any(axis=0)
    is_on_front: NDArray[np.bool_] = is_finite & ~is_beaten
    return is_on_front


def _trajectories(group: pd.DataFrame, by: Sequence[str]) -> tuple[pd.DataFrame, str]:
    """Give one row a trajectory, and the column that names it."""
    key = "seed" if group["trajectory_id"].isna().all() else "trajectory_id"
    ordered = group.sort_values("steps", kind="stable")
    if not set(FACTORS) & set(by):
        return ordered.drop_duplicates(key), key
    repeats = ordered.assign(steps=np.log(ordered["steps"])).groupby(key, dropna=False)
    runs = repeats.agg(
        steps=("steps", "mean"),
        least=("least", "min"),
        # The last is the one that took longest, or did not reach.
        outcome=("outcome", "last"),
        learning_rate=("learning_rate", "first"),
        run_id=("run_id", lambda ids: ";".join(sorted(map(str, ids.dropna()))) or None),
    )
    return runs.assign(steps=np.exp(runs["steps"])).reset_index(), key


def _predict(model: StepTimeModel, geometry: Geometry) -> tuple[object, ...] | None:
    """Predict `_PREDICTION_COLUMNS` of a cut; None where its interval is wider than `WIDEST`."""
    predicted = model.combine(*geometry)
    if not (math.isfinite(predicted.value) and predicted.value > 0):
        return None
    variance = degrees = math.nan
    if predicted.degrees > 0:
        variance, degrees = predicted.variance / predicted.value**2, predicted.degrees
        if 2 * t_reach(math.sqrt(variance), degrees) > math.log(WIDEST):
            return None
    beyond = "; ".join(outside(model.cells, *geometry))
    return math.log(predicted.value), variance, degrees, "predicted", beyond


_PREDICTION_COLUMNS = ("time_log", "time_log_variance", "time_degrees", "source", "beyond")
