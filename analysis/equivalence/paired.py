"""Differences between decompositions of one global batch, paired by seed, against a margin."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cells import Cells
from batchscape.analysis.comparing.pairs import logarithm
from batchscape.analysis.equivalence.decompositions import members_of
from batchscape.analysis.equivalence.tost import ALPHA, tost
from batchscape.analysis.joins import column_of
from batchscape.analysis.targets.tidy import at_common_target

MARGIN_SETTINGS = {
    "final_eval_loss": "measure.equivalence_margin",
    "final_loss": "measure.equivalence_margin",
    "log_steps_to_target": "measure.equivalence_margin_steps",
}
"""Quantities that are compared, with the setting of their margin."""

MARGINS = {"measure.equivalence_margin": 0.005, "measure.equivalence_margin_steps": 0.02}
"""Defaults of these settings, for runs that state no margin."""


def paired_differences(cells: Cells, reaches: pd.DataFrame | None = None) -> pd.DataFrame:
    """Pair the results of every decomposition with those of its reference, by trajectory.

    Completed and diverged runs take part, one for each cell and trajectory. A diverged run has an
    infinite loss, so that a pair of which one member failed has an infinite difference.

    Parameters
    ----------
    reaches : DataFrame, optional
        A row a run and target: `sweep_dir`, `run_id`, `target_loss`, `outcome` and
        `steps_to_target`. Those at the lowest target that all cuts of a reference reached count.

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
    tables = {
        name: members.assign(
            target_loss=math.nan,
            value=runs[name].astype(float).mask(runs["status"].eq("diverged"), math.inf),
        )
        for name in ("final_eval_loss", "final_loss")
    }
    if reaches is not None:
        keys = ["sweep_dir", "run_id"]
        is_compared = members.groupby("reference")["cell"].transform("nunique") > 1
        at_target = at_common_target(reaches, members[is_compared], ["reference"])
        at_target = at_target[[*keys, "target_loss", "steps_to_target"]]
        joined = members.reset_index(names="row").merge(at_target, on=keys).set_index("row")
        steps = logarithm(joined["steps_to_target"])
        tables["log_steps_to_target"] = joined.assign(value=steps)
    for quantity, table in tables.items():
        stated = pd.to_numeric(column_of(runs, MARGIN_SETTINGS[quantity]), errors="coerce")
        table["quantity"], table["margin"] = quantity, stated.reindex(table.index).astype(float)
    keys = ["reference", "trajectory_id", "quantity", "target_loss"]
    shared = ["value", "margin", "sweep_dir", "run_id"]
    rows = pd.concat([*tables.values()], ignore_index=True)[["cell", *keys, *shared]]
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
    number = pairs.groupby(keys, dropna=False).ngroup()
    for places in number.groupby(number).indices.values():
        paired = places[~np.isnan(columns["difference"][places])]
        margin, conflict = stated_margin(margins[places], str(columns["quantity"][places[0]]))
        verdict = tost(columns["difference"][paired], margin)
        if conflict:
            verdict = verdict._replace(verdict="not identified", margin=math.nan, reason=conflict)
        references = columns["value_reference"][paired]
        seeds = references[np.isfinite(references)]
        folders = [*columns["sweep_dir"][places], *columns["sweep_dir_reference"][places]]
        rows.append(
            {name: columns[name][places[0]] for name in keys}
            | verdict._asdict()
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
    renamed = {"mean": "mean_difference", "sd": "sd_difference"}
    return pd.DataFrame(rows).rename(columns=renamed)


def family_verdicts(table: pd.DataFrame) -> pd.DataFrame:
    """Join the verdicts on all decompositions of one global batch.

    All are equivalent if each of them is, at the same level: no correction is needed
    (intersection-union test). That at least one is different needs one: Bonferroni's.
    """
    keys = ["reference", "quantity", "target_loss"]
    flags = {verdict: table["verdict"].eq(verdict) for verdict in ("equivalent", "different")}
    families = (
        table.assign(**flags)
        .groupby(keys, dropna=False)
        .agg(
            n_decompositions=("verdict", "size"),
            n_equivalent=("equivalent", "sum"),
            is_different=("different", "any"),
            p_different=("p_different", "min"),
            n_tested=("p_different", "count"),
        )
    )
    families["p_different"] = (families["p_different"] * families["n_tested"]).clip(upper=1.0)
    verdicts = {
        "equivalent": families["n_equivalent"].eq(families["n_decompositions"]),
        "different": families["is_different"] & families["p_different"].le(ALPHA),
    }
    families["verdict"] = np.select([*verdicts.values()], [*verdicts], "not identified")
    return families.reset_index()
