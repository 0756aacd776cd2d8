"""Differences of training losses between decompositions, paired step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.joins import rows_of
from batchscape.errors import AnalysisError

_MAY_DIFFER = ("hardware", "device_type", "nodes")
"""Contexts in which cells that share a trajectory may differ."""


def loss_differences(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Pair every decomposition with a reference on the same trajectory and optimizer step.

    Cells that share trajectories form a family; its first cell in table order is the reference.
    Only runs that completed a whole curve take part, one for each cell and trajectory.

    Parameters
    ----------
    steps : DataFrame
        Rows of optimizer steps with `sweep_dir`, `run_id`, `optimizer_step`, `samples`, `loss`.

    Returns
    -------
    DataFrame
        One row for each cell but the reference, trajectory and optimizer step that both have:
        `cell`, `reference`, `trajectory_id`, `optimizer_step`, `samples`, `loss_reference` and
        `difference` (loss - loss of the reference, NaN where one of them is).

    Raises
    ------
    AnalysisError
        If a reference has an optimizer step twice.
    """
    members = members_of(cells)
    names = members.drop_duplicates("trajectory").set_index("trajectory")["trajectory_id"]
    categories = pd.CategoricalDtype(pd.Index(names.sort_index()))
    pairs = _paired(_member_rows(members, steps))
    numbers = pairs.pop("trajectory").to_numpy()
    return pairs.assign(trajectory_id=pd.Categorical.from_codes(numbers, dtype=categories))


def seed_spread(cells: Cells, steps: pd.DataFrame) -> pd.DataFrame:
    """Spread of the loss between seeds, at each optimizer step of each reference.

    Parameters
    ----------
    cells, steps
        As for `loss_differences`.

    Returns
    -------
    DataFrame
        `reference`, `optimizer_step`, `samples`, `sd` (ddof 1, over trajectories) and `n`.
    """
    members = members_of(cells)
    references = members[members["cell"] == members["reference"]]
    rows = _member_rows(references, steps)
    groups = rows.groupby(["reference", "optimizer_step"])
    spread = groups["loss"].agg(["std", "count"]).set_axis(["sd", "n"], axis=1)
    return spread.assign(samples=groups["samples"].first()).reset_index()


def differences_by_cell(cells: Cells, pairs: pd.DataFrame, spread: pd.DataFrame) -> pd.DataFrame:
    """Compute how far decompositions of one global batch are from training alike.

    Parameters
    ----------
    pairs, spread : DataFrame
        As `loss_differences` and `seed_spread` return them.

    Returns
    -------
    DataFrame
        One row a cell that has a reference: geometry, `reference` (its label), the varying
        settings, `precision`, `n_trajectories` and `n_optimizer_steps` (paired, over all
        trajectories), `max_abs_difference`, `rms_difference`, `max_relative_difference`,
        `rms_relative_difference` (relative to the loss of the reference), `seed_sd` (root mean
        square over optimizer steps of the spread between seeds of the reference; missing for one
        seed), `n_seeds`, `rms_over_seed_sd`, and `note` (why a difference is to be expected).
    """
    pairs = pairs.dropna(subset=["difference"])
    size = pairs["difference"].abs()
    relative = size / pairs["loss_reference"].abs()
    sizes = pd.DataFrame(
        {"size": size, "square": size**2, "relative": relative, "relative_square": relative**2}
    )
    groups, by_cell = pairs.groupby("cell"), sizes.groupby(pairs["cell"])
    largest, means = by_cell[["size", "relative"]].max(), by_cell.mean()
    table = pd.DataFrame(
        {
            "n_trajectories": groups["trajectory_id"].nunique(),
            "n_optimizer_steps": groups.size(),
            "max_abs_difference": largest["size"],
            "rms_difference": means["square"] ** 0.5,
            "max_relative_difference": largest["relative"],
            "rms_relative_difference": means["relative_square"] ** 0.5,
        }
    )
    reference = groups["reference"].first()
    variance = (spread["sd"] ** 2).groupby(spread["reference"]).mean()
    table["seed_sd"] = reference.map(variance**0.5)
    table["n_seeds"] = reference.map(spread.groupby("reference")["n"].max())
    table["rms_over_seed_sd"] = table["rms_difference"] / table["seed_sd"]
    first = cells.runs.drop_duplicates("cell").set_index("cell")
    why = first.reindex(index=table.index, columns=["not_invariant"])["not_invariant"]
    table["note"] = why.map("not decomposition-invariant: {}".format, na_action="ignore")
    head = cells.table.loc[table.index, list(GEOMETRY)]
    head["reference"] = reference.map(reference_labels(cells))
    settings = cells.table.loc[table.index, cells.settings]
    if "precision" not in settings:
        settings["precision"] = first["precision"].reindex(table.index)
    return pd.concat([head, settings, table], axis=1)


def reference_labels(cells: Cells) -> pd.Series[str]:
    """Label each cell as the other side of a comparison within its family."""
    return cells.labels([name for name in cells.contexts if name in _MAY_DIFFER])


def _member_rows(members: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Join rows of steps to their members."""
    rows = rows_of(members, steps, ["optimizer_step", "samples", "loss"])
    run = rows.pop("run").to_numpy()
    names = ("cell", "reference", "trajectory")
    # Cells and trajectories are few, and rows may be ten million.
    columns_of_rows = {name: members[name].to_numpy().astype("int32")[run] for name in names}
    return rows.astype({"optimizer_step": "int64", "samples": "int64"}).assign(**columns_of_rows)


def _paired(rows: pd.DataFrame) -> pd.DataFrame:
    # A trajectory belongs to one family, so that trajectory and step make a key.
    step = rows["optimizer_step"].to_numpy()
    key = rows["trajectory"].to_numpy().astype("int64") * (step.max(initial=0) + 1) + step
    is_reference = (rows["cell"] == rows["reference"]).to_numpy()
    base, others = np.flatnonzero(is_reference), np.flatnonzero(~is_reference)
    key_index = pd.Index(key[base])
    if not key_index.is_unique:
        msg = "the steps hold an optimizer step of one run twice; a run does each once"
        raise AnalysisError(msg)
    position = key_index.get_indexer(key[others])
    pairs: pd.DataFrame = rows.iloc[others[position >= 0]].reset_index(drop=True)
    pairs["loss_reference"] = rows["loss"].to_numpy()[base[position[position >= 0]]]
    pairs["difference"] = pairs.pop("loss") - pairs["loss_reference"]
    return pairs


def members_of(cells: Cells, statuses: Sequence[str] = ("completed",)) -> pd.DataFrame:
    """Choose one run for each cell and trajectory, and the reference of its family.

    Parameters
    ----------
    statuses : sequence of str
        Of the runs that take part; where a cell and trajectory have several runs, an earlier
        status is preferred.

    Returns
    -------
    DataFrame
        `cell`, `trajectory_id`, `sweep_dir`, `run_id`, `trajectory` (a number for the id) and
        `reference`, the first cell of the family: of all cells that share trajectories, directly
        or by way of others. Indexed as `cells.runs`.
    """
    names = ["cell", "trajectory_id", "sweep_dir", "run_id", "status"]
    runs = cells.runs[names]
    runs = runs[runs["status"].isin(statuses) & runs["trajectory_id"].notna()]
    runs = runs.assign(place=runs["status"].map(list(statuses).index))
    runs = runs.sort_values("place", kind="stable")
    members = runs.drop_duplicates(["cell", "trajectory_id"]).sort_index()
    members = members[["cell", "trajectory_id", "sweep_dir", "run_id"]]
    members["trajectory"], _ = pd.factorize(members["trajectory_id"])
    # The reference may lack a seed, so families are components over all trajectories.
    n_cells = len(cells.table)
    size = n_cells + len(members)
    links = (np.ones(len(members)), (members["cell"], n_cells + members["trajectory"]))
    _, family = connected_components(coo_array(links, shape=(size, size)), directed=False)
    members["family"] = family[members["cell"].to_numpy()]
    first = members.groupby("family")["cell"].min()
    members["reference"] = members["family"].map(first).astype("int64")
    return members.drop(columns="family")
