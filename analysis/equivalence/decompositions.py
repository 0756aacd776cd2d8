"""Differences of training losses between decompositions, paired step by step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from batchscape.analysis.cells import GEOMETRY, Cells
from batchscape.analysis.joins import column_of, rows_of

_MAY_DIFFER = ("hardware", "device_type", "nodes")
"""Contexts in which cells that share a trajectory may differ."""


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
    names = ["cell", "trajectory_id", "sweep_dir", "run_id"]
    runs = cells.runs[cells.runs["status"].isin(statuses) & cells.runs["trajectory_id"].notna()]
    order = runs["status"].map(list(statuses).index).sort_values(kind="stable").index
    members = runs.loc[order, names].drop_duplicates(["cell", "trajectory_id"]).sort_index()
    members["trajectory"], _ = pd.factorize(members["trajectory_id"])
    # The reference may lack a seed, so families are components over all trajectories.
    n_cells = len(cells.table)
    size = n_cells + len(members)
    links = (np.ones(len(members)), (members["cell"], n_cells + members["trajectory"]))
    _, families = connected_components(coo_array(links, shape=(size, size)), directed=False)
    family = families[members["cell"].to_numpy()]
    members["reference"] = members["cell"].groupby(family).transform("min").astype("int64")
    return members


def step_differences(
    members: pd.DataFrame, steps: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pair every cell with its reference on the same trajectory and optimizer step.

    Parameters
    ----------
    members : DataFrame
        As `members_of` returns them: a trajectory has one reference.
    steps : DataFrame
        Rows of optimizer steps with `sweep_dir`, `run_id`, `optimizer_step`, `loss`.

    Returns
    -------
    pairs : DataFrame
        One row for each cell but the reference, trajectory and optimizer step that both have:
        `cell`, `reference`, `trajectory`, `optimizer_step`, `loss_reference` and `difference`
        (loss - loss of the reference, NaN where one of them is).
    spread : DataFrame
        `reference`, `optimizer_step`, `sd` of the loss of a reference (ddof 1, over trajectories)
        and `n`.
    """
    rows = rows_of(members, steps, ["optimizer_step", "loss"])
    run = rows.pop("run").to_numpy()
    rows = rows.astype({"optimizer_step": "int64"})
    for name in ("cell", "reference", "trajectory"):
        # Cells and trajectories are few, and rows may be ten million.
        rows[name] = members[name].to_numpy().astype("int32")[run]
    is_reference = rows["cell"] == rows["reference"]
    base, others = rows[is_reference], rows[~is_reference]
    # A trajectory has one reference, so that trajectory and step make a key.
    length = rows["optimizer_step"].max() + 1 if len(rows) else 1

    def key(table: pd.DataFrame) -> pd.Index:
        return pd.Index(table["trajectory"].astype("int64") * length + table["optimizer_step"])

    position = key(base).get_indexer(key(others))
    pairs = others[position >= 0].reset_index(drop=True)
    pairs["loss_reference"] = base["loss"].to_numpy()[position[position >= 0]]
    pairs["difference"] = pairs.pop("loss") - pairs["loss_reference"]
    spread = base.groupby(["reference", "optimizer_step"])["loss"].agg(sd="std", n="count")
    return pairs, spread.reset_index()


def differences_by_cell(cells: Cells, pairs: pd.DataFrame, spread: pd.DataFrame) -> pd.DataFrame:
    """Compute how far the cells of `step_differences` are from training like their references.

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
    sizes = pairs.assign(
        size=pairs["difference"].abs(),
        relative=(pairs["difference"] / pairs["loss_reference"]).abs(),
        square=pairs["difference"] ** 2,
        relative_square=(pairs["difference"] / pairs["loss_reference"]) ** 2,
    )
    table = sizes.groupby("cell").agg(
        n_trajectories=("trajectory", "nunique"),
        n_optimizer_steps=("size", "size"),
        max_abs_difference=("size", "max"),
        rms_difference=("square", "mean"),
        max_relative_difference=("relative", "max"),
        rms_relative_difference=("relative_square", "mean"),
        reference=("reference", "first"),
    )
    roots = ["rms_difference", "rms_relative_difference"]
    table[roots] = table[roots] ** 0.5
    seeds = spread.assign(sd=spread["sd"] ** 2).groupby("reference").agg({"sd": "mean", "n": "max"})
    reference = table.pop("reference")
    table["seed_sd"] = reference.map(seeds["sd"] ** 0.5)
    table["n_seeds"] = reference.map(seeds["n"])
    table["rms_over_seed_sd"] = table["rms_difference"] / table["seed_sd"]
    first_runs = cells.runs.drop_duplicates("cell").set_index("cell").reindex(table.index)
    why = column_of(first_runs, "not_invariant")
    table["note"] = why.map("not decomposition-invariant: {}".format, na_action="ignore")
    head = with_precision(cells).loc[table.index]
    head.insert(len(GEOMETRY), "reference", reference.map(reference_labels(cells)))
    return pd.concat([head, table], axis=1)


def with_precision(cells: Cells) -> pd.DataFrame:
    """Return the geometry, varying settings and precision of each cell."""
    head = cells.table[[*GEOMETRY, *cells.settings]]
    first = cells.runs.drop_duplicates("cell").set_index("cell")["precision"].reindex(head.index)
    return head.copy() if "precision" in head else head.assign(precision=first)


def reference_labels(cells: Cells) -> pd.Series[str]:
    """Label each cell as the other side of a comparison within its family."""
    return cells.labels([name for name in cells.contexts if name in _MAY_DIFFER])
