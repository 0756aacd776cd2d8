"""Differences between decompositions of one global batch, paired by seed, against a margin."""

from __future__ import annotations

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import Cells
from batchscape.analysis.equivalence.decompositions import members_of
from batchscape.analysis.equivalence.tost import ALPHA, tost
from batchscape.analysis.joins import column_of

MARGIN_SETTINGS = {
    "final_eval_loss": "measure.equivalence_margin",
    "final_loss": "measure.equivalence_margin",
    "log_steps_to_target": "measure.equivalence_margin_steps",
}
"""Quantities that are compared, with the setting of their margin."""

MARGINS = {"measure.equivalence_margin": 0.005, "measure.equivalence_margin_steps": 0.02}
"""Defaults of these settings, for runs that state no margin."""

_NEVER = ("diverged", "censored")
"""Outcomes of runs that reached no target within their budget."""


def paired_differences(cells: Cells, reaches: pd.DataFrame | None = None) -> pd.DataFrame:
    """Pair the results of every decomposition with those of its reference, by trajectory.

    Completed and diverged runs take part, one for each cell and trajectory. A diverged run has an
    infinite loss, and one that did not reach a target an infinite number of steps, so that a pair
    of which one member failed has an infinite difference.

    Parameters
    ----------
    reaches : DataFrame, optional
        A row a run and target: `sweep_dir`, `run_id`, `target_loss`, `outcome` (`reached`,
        `censored`, `diverged`, `pruned`) and `steps_to_target`.

    Returns
    -------
    DataFrame
        One row a cell but the reference, trajectory, quantity and target: `cell`, `reference`,
        `trajectory_id`, `quantity`, `target_loss` (NaN for losses), `value`, `value_reference`,
        `difference` (NaN where neither has a value, or both are infinite), `margin` and
        `margin_reference` (as the runs state them, NaN where they do not), `sweep_dir`, `run_id`,
        and both of the reference (`..._reference`).
    """
    members = members_of(cells, ("completed", "diverged"))
    runs = cells.runs.loc[members.index]
    tables = []
    for name in ("final_eval_loss", "final_loss"):
        loss = pd.to_numeric(runs[name], errors="coerce").astype(float)
        loss = loss.mask(runs["status"].eq("diverged"), math.inf)
        tables.append(members.assign(quantity=name, target_loss=math.nan, value=loss))
    if reaches is not None:
        keys = ["sweep_dir", "run_id"]
        columns = [*keys, "target_loss", "outcome", "steps_to_target"]
        joined = members.reset_index(names="row").merge(reaches[columns], on=keys).set_index("row")
        steps = joined["steps_to_target"].astype(float)
        value = steps.where(steps > 0).apply(np.log).mask(joined["outcome"].isin(_NEVER), math.inf)
        tables.append(joined.assign(quantity="log_steps_to_target", value=value))
    for table in tables:
        stated = column_of(runs, MARGIN_SETTINGS[table["quantity"].iloc[0]] if len(table) else "")
        table["margin"] = pd.to_numeric(stated, errors="coerce").reindex(table.index).astype(float)
    keys = ["reference", "trajectory_id", "quantity", "target_loss"]
    shared = ["value", "margin", "sweep_dir", "run_id"]
    rows = pd.concat(tables, ignore_index=True)[["cell", *keys, *shared]]
    is_reference = rows["cell"] == rows["reference"]
    base = rows.loc[is_reference, [*keys, *shared]]
    pairs = rows[~is_reference].merge(base, on=keys, suffixes=("", "_reference"))
    with np.errstate(invalid="ignore"):
        return pairs.assign(difference=pairs["value"] - pairs["value_reference"])


def stated_margin(margins: NDArray[np.float64], quantity: str) -> tuple[float, str]:
    """Return the margin that runs state, else the default, and why several leave none."""
    distinct = np.unique(margins[~np.isnan(margins)]).tolist()
    margin_texts = ", ".join(f"{margin:g}" for margin in distinct)
    conflict = f"the runs state several margins ({margin_texts}); one is fixed before the first run"
    margin = distinct[0] if distinct else MARGINS[MARGIN_SETTINGS[quantity]]
    return margin, conflict if len(distinct) > 1 else ""


def judge_equivalence(pairs: pd.DataFrame) -> pd.DataFrame:
    """Test every decomposition for equivalence with its reference.

    Parameters
    ----------
    pairs : DataFrame
        As `paired_differences` returns them. If the runs of a cell state several margins there is
        no verdict: a margin is fixed before the first run.

    Returns
    -------
    DataFrame
        A row for each cell, quantity and target: `cell`, `reference`, `quantity`, `target_loss`,
        `n` (pairs), `n_without` (pairs without a difference), `mean_difference`, `sd_difference`,
        `low`, `high` ((1 - 2 `ALPHA`) t-interval), `margin`, `margin_stated` (in the config of
        every run), `verdict`, `reason`, `p_equivalent`, `p_different`, `smallest_margin`,
        `seed_sd` (between the values of the reference), `n_seeds`, `run_ids`,
        `reference_run_ids` and `sweep_dirs`.
    """
    keys = ["cell", "reference", "quantity", "target_loss"]
    # Arrays, because there may be many cells.
    columns = {name: pairs[name].to_numpy() for name in pairs}
    margins = pairs[["margin", "margin_reference"]].to_numpy(dtype=float)
    rows = []
    for places in _places(pairs.groupby(keys, dropna=False).ngroup()):
        paired = places[~np.isnan(columns["difference"][places])]
        margin, conflict = stated_margin(margins[places], str(columns["quantity"][places[0]]))
        verdict = asdict(tost(columns["difference"][paired], margin))
        verdict |= {f"{name}_difference": verdict.pop(name) for name in ("mean", "sd")}
        if conflict:
            verdict |= {"verdict": "not identified", "margin": math.nan, "reason": conflict}
        references = columns["value_reference"][paired]
        seeds = references[np.isfinite(references)]
        folders = [*columns["sweep_dir"][places], *columns["sweep_dir_reference"][places]]
        rows.append(
            {name: columns[name][places[0]] for name in keys}
            | verdict
            | {
                "margin_stated": not conflict and not np.isnan(margins[places]).any(),
                "n_without": len(places) - len(paired),
                "seed_sd": float(seeds.std(ddof=1)) if len(seeds) > 1 else math.nan,
                "n_seeds": len(seeds),
                "run_ids": " ".join(columns["run_id"][paired]),
                "reference_run_ids": " ".join(columns["run_id_reference"][paired]),
                "sweep_dirs": ";".join(dict.fromkeys(folders)),
            }
        )
    return pd.DataFrame(rows)


def _places(number: pd.Series[int]) -> list[NDArray[np.int64]]:
    """Return the positions of the rows of each group, given the number of each row's."""
    order = np.argsort(number.to_numpy(), kind="stable")
    ends = np.cumsum(np.bincount(number.to_numpy()))
    return np.split(order, ends[:-1]) if len(number) else []


def family_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Join the verdicts on all decompositions of one global batch.

    All are equivalent if each of them is, at the same level: no correction is needed
    (intersection-union test). That at least one is different needs one: Bonferroni's.
    """
    keys = ["reference", "quantity", "target_loss"]
    rows = []
    for key, group in table.groupby(keys, dropna=False):
        tested = group["p_different"].dropna().astype(float)
        p_different = float(np.minimum(tested.min() * len(tested), 1.0))
        equivalent, different = (group["verdict"].eq(v) for v in ("equivalent", "different"))
        verdict = "different" if different.any() and p_different <= ALPHA else "not identified"
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "n_decompositions": len(group),
                "n_equivalent": int(equivalent.sum()),
                "p_different": p_different,
                "verdict": "equivalent" if equivalent.all() else verdict,
            }
        )
    return pd.DataFrame(rows)
