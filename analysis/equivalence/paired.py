"""Differences between decompositions of one global batch, paired by seed, against a margin."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import Cells
from batchscape.analysis.equivalence.decompositions import members_of
from batchscape.analysis.equivalence.tost import ALPHA, tost

MARGIN_SETTINGS = {
    "final_eval_loss": "measure.equivalence_margin",
    "final_loss": "measure.equivalence_margin",
    "log_steps_to_target": "measure.equivalence_margin_steps",
}
"""Quantities that are compared, with the setting of their margin."""

MARGINS = {"measure.equivalence_margin": 0.005, "measure.equivalence_margin_steps": 0.02}
"""Defaults of these settings, for runs that state no margin."""

_NUMBERS = ("difference", "margin", "margin_reference", "value_reference")
_TEXTS = ("run_id", "run_id_reference", "sweep_dir", "sweep_dir_reference")

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
        tables.append(_with_identity(cells, members, name, math.nan, loss))
    if reaches is not None:
        tables.append(_log_steps(cells, members, reaches))
    rows = pd.concat(tables, ignore_index=True)
    keys = ["reference", "trajectory_id", "quantity", "target_loss"]
    is_reference = rows["cell"] == rows["reference"]
    shared = ["value", "margin", "sweep_dir", "run_id"]
    base = rows.loc[is_reference, [*keys, *shared]].rename(
        columns={name: f"{name}_reference" for name in shared}
    )
    pairs = rows[~is_reference].merge(base, on=keys)
    with np.errstate(invalid="ignore"):
        pairs["difference"] = pairs["value"] - pairs["value_reference"]
    return pairs.reset_index(drop=True)


def stated_margin(margins: NDArray[np.float64], quantity: str) -> tuple[float, str]:
    """Return the margin that runs state, else the default, and why several leave none."""
    distinct = np.unique(margins[~np.isnan(margins)]).tolist()
    margin_texts = ", ".join(f"{margin:g}" for margin in distinct)
    conflict = f"the runs state several margins ({margin_texts}); one is fixed before the first run"
    margin = distinct[0] if distinct else MARGINS[MARGIN_SETTINGS[quantity]]
    return margin, conflict if len(distinct) > 1 else ""


def judge_equivalence(
    pairs: pd.DataFrame,
    margin: float | None = None,
) -> pd.DataFrame:
    """Test every decomposition for equivalence with its reference.

    Parameters
    ----------
    pairs : DataFrame
        As `paired_differences` returns them, or any table with `cell`, `quantity` and
        `difference`; the other columns are optional.
    margin : float, optional
        By default the one that the runs state. If they state several there is no verdict: a
        margin is fixed before the first run.

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
    names = [*pairs.columns, "reference", "target_loss", *_NUMBERS, *_TEXTS]
    pairs = pairs.reindex(columns=list(dict.fromkeys(names)))
    keys = ["cell", "reference", "quantity", "target_loss"]
    number = pairs.groupby(keys, dropna=False).ngroup().to_numpy()
    pairs = pairs.iloc[np.argsort(number, kind="stable")]
    starts = np.flatnonzero(np.diff(np.sort(number), prepend=-1))
    columns: dict[str, NDArray[Any]] = {
        name: pairs[name].to_numpy(dtype=float) for name in _NUMBERS
    }
    columns |= {name: pairs[name].to_numpy(dtype=object) for name in _TEXTS}
    heads = pairs[keys].iloc[starts].to_dict("records")
    rows = []
    ends = np.append(starts, len(pairs))[1:]
    for head, begin, end in zip(heads, starts, ends, strict=True):
        arrays = {name: values[begin:end] for name, values in columns.items()}
        verdict = _judged(arrays, str(head["quantity"]), margin)
        rows.append(dict(zip(keys, head.values(), strict=True)) | verdict)
    return pd.DataFrame(rows)


def family_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Join the verdicts on all decompositions of one global batch.

    All are equivalent if each of them is, at the same level: no correction is needed
    (intersection-union test). That at least one is different needs one: Bonferroni's.
    """
    rows = []
    for key, group in table.groupby(["reference", "quantity", "target_loss"], dropna=False):
        tested = group["p_different"].dropna().astype(float)
        p_different = float(np.minimum(tested.min() * len(tested), 1.0))
        equivalent = group["verdict"].eq("equivalent")
        different = group["verdict"].eq("different").any() and p_different <= ALPHA
        verdict = "different" if different else "not identified"
        rows.append(
            dict(zip(("reference", "quantity", "target_loss"), key, strict=True))
            | {
                "n_decompositions": len(group),
                "n_equivalent": int(equivalent.sum()),
                "largest_smallest_margin": float(group["smallest_margin"].max(skipna=False)),
                "p_different": p_different,
                "verdict": "equivalent" if equivalent.all() else verdict,
                "margin_stated": bool(group["margin_stated"].all()),
            }
        )
    return pd.DataFrame(rows)


def _log_steps(cells: Cells, members: pd.DataFrame, reaches: pd.DataFrame) -> pd.DataFrame:
    columns = ["sweep_dir", "run_id", "target_loss", "outcome", "steps_to_target"]
    joined = members.reset_index(names="row").merge(reaches[columns], on=["sweep_dir", "run_id"])
    joined = joined.set_index("row")
    steps = joined["steps_to_target"].astype(float)
    value = pd.Series(np.log(steps.where(steps > 0)), index=joined.index)
    value = value.mask(joined["outcome"].isin(_NEVER), math.inf)
    return _with_identity(cells, joined, "log_steps_to_target", joined["target_loss"], value)


def _with_identity(
    cells: Cells,
    members: pd.DataFrame,
    quantity: str,
    target: float | pd.Series[float],
    value: pd.Series[float],
) -> pd.DataFrame:
    setting = MARGIN_SETTINGS[quantity]
    stated = cells.runs.get(setting, pd.Series(math.nan, index=cells.runs.index))
    names = ["cell", "reference", "trajectory_id", "sweep_dir", "run_id"]
    return members[names].assign(
        quantity=quantity,
        target_loss=target,
        value=value,
        margin=pd.to_numeric(stated, errors="coerce").reindex(members.index).astype(float),
    )


def _judged(
    arrays: Mapping[str, NDArray[Any]],
    quantity: str,
    margin: float | None,
) -> dict[str, object]:
    """Judge the pairs of one cell, given as arrays because there are many cells."""
    has_difference = ~np.isnan(arrays["difference"])
    differences = arrays["difference"][has_difference]
    margins = np.concatenate([arrays["margin"], arrays["margin_reference"]])
    used_margin, conflict = (margin, "") if margin is not None else stated_margin(margins, quantity)
    verdict = asdict(tost(differences, used_margin))
    renamed = {"mean": "mean_difference", "sd": "sd_difference"}
    row = {renamed.get(name, name): value for name, value in verdict.items()}
    row["margin_stated"] = margin is None and not conflict and not np.isnan(margins).any()
    if conflict:
        row |= {"verdict": "not identified", "margin": math.nan, "reason": conflict}
    references = arrays["value_reference"][has_difference]
    finite = references[np.isfinite(references)]
    return row | {
        "n_without": len(has_difference) - len(differences),
        "seed_sd": float(finite.std(ddof=1)) if len(finite) > 1 else math.nan,
        "n_seeds": len(finite),
        "run_ids": _joined(arrays["run_id"][has_difference]),
        "reference_run_ids": _joined(arrays["run_id_reference"][has_difference]),
        "sweep_dirs": _joined(
            dict.fromkeys([*arrays["sweep_dir"], *arrays["sweep_dir_reference"]]), ";"
        ),
    }


def _joined(names: Iterable[Any], between: str = " ") -> str:
    return between.join(name for name in names if isinstance(name, str))
