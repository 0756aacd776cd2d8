"""Differences of losses of engines at the same seed, global batch and optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from batchscape.analysis.cells import SEEDS, Cells
from batchscape.analysis.engines.matching import counterparts, order_engines
from batchscape.analysis.joins import rows_of

MAX_POINTS = 200
"""Points of a drawn curve; of more optimizer steps, the largest difference of each is kept."""


class EngineLosses(NamedTuple):
    """Losses of engines, compared with each other."""

    pairs: pd.DataFrame
    """A row for each group and two engines (an engine with itself: its decompositions): `group`,
    `engine`, `other`, `n_seeds`, `n_runs` (of both), `n_optimizer_steps` (over all seeds),
    `max_abs_difference` (over all decompositions, seeds and optimizer steps),
    `max_relative_difference` (over the smaller of the two losses), `seed_sd` (root mean square over
    optimizer steps of the spread between seeds), and `run_ids`."""
    by_step: pd.DataFrame
    """`group`, `engine`, `optimizer_step`, `largest`: the largest difference from the reference, a
    cell of the first engine, over seeds and decompositions."""
    spread: pd.DataFrame
    """`group`, `optimizer_step`, `sd`: spread of the reference's loss between seeds."""


def compare_engines(cells: Cells, steps: pd.DataFrame) -> EngineLosses:
    """Compare the training losses of engines with each other, step by step."""
    members = _members(cells)
    rows = rows_of(members, steps, ["optimizer_step", "loss"])
    rows = rows[np.isfinite(rows["loss"])].astype({"optimizer_step": "int64"})
    names = ["group", "family", "engine", "cell", "reference"]
    rows = rows.assign(**{name: members[name].to_numpy()[rows["run"]] for name in names})
    keys = ["group", "family", "optimizer_step", "engine"]
    extremes = rows.groupby(keys)["loss"].agg(["min", "max", "count"]).reset_index()
    reference_rows = rows[rows["cell"] == rows["reference"]]
    base = reference_rows.set_index(["family", "optimizer_step"])["loss"].rename("base")
    other_rows = rows[rows["cell"] != rows["reference"]].join(base, on=["family", "optimizer_step"])
    other_rows["largest"] = (other_rows["loss"] - other_rows["base"]).abs()
    differences = other_rows[["group", "engine", "optimizer_step", "largest"]].dropna()
    of_seeds = reference_rows.groupby(["group", "optimizer_step"])["loss"].std()
    spread = of_seeds.dropna().rename("sd").reset_index()
    pairs = _pairs(extremes, members)
    square = (spread.set_index("group")["sd"] ** 2).groupby("group").mean()
    pairs["seed_sd"] = np.sqrt(pairs["group"].map(square).astype(float))
    return EngineLosses(
        pairs,
        _windowed(differences, ["group", "engine"]).rename(columns={"value": "largest"}),
        _windowed(spread, ["group"]).rename(columns={"value": "sd"}),
    )


def _members(cells: Cells) -> pd.DataFrame:
    """Choose one run for each cell and seed, with its family and its reference cell."""
    groups = counterparts(cells)
    is_completed = cells.runs["status"].eq("completed")
    runs = cells.runs[cells.runs["cell"].isin(groups.index) & is_completed]
    seeds = [name for name in SEEDS if name in runs]
    runs = runs.drop_duplicates(["cell", *seeds])
    members = runs[["sweep_dir", "run_id", "cell", *seeds]].join(groups, on="cell")
    members["family"] = members.groupby(["group", *seeds], dropna=False).ngroup()
    several = members.groupby("family")["engine"].transform("nunique") > 1
    members = members[several]
    place = {engine: number for number, engine in enumerate(order_engines(members["engine"]))}
    first = members.assign(place=members["engine"].map(place)).sort_values(["place", "cell"])
    # The first cell of the first engine, seed by seed: a seed may be missing in one of them.
    reference = first.groupby("family")["cell"].first()
    return members.assign(reference=members["family"].map(reference)).reset_index(drop=True)


def _pairs(extremes: pd.DataFrame, members: pd.DataFrame) -> pd.DataFrame:
    """Return the largest differences of any two decompositions of two engines.

    It lies between the largest loss of one engine and the smallest of the other, so that pairs of
    runs need not be compared.
    """
    both = extremes.merge(
        extremes, on=["group", "family", "optimizer_step"], suffixes=("", "_other")
    )
    order = {engine: number for number, engine in enumerate(order_engines(members["engine"]))}
    first, second = both["engine"].map(order), both["engine_other"].map(order)
    # A single run has no other run of its engine to compare with.
    both = both[first.lt(second) | (first.eq(second) & both["count"].gt(1))]
    other_above, other_below = both["max_other"] - both["min"], both["max"] - both["min_other"]
    size = other_above.where(other_above > other_below, other_below)
    smaller = both[["min", "min_other"]].abs().min(axis=1)
    both = both.assign(size=size, relative=size / smaller)
    keys = ["group", "engine", "engine_other"]
    groups = both.groupby(keys)
    table = pd.DataFrame(
        {
            "n_seeds": groups["family"].nunique(),
            "n_optimizer_steps": groups.size(),
            "max_abs_difference": groups["size"].max(),
            "max_relative_difference": groups["relative"].max(),
        }
    ).reset_index()
    table = table.rename(columns={"engine_other": "other"})
    runs = members.groupby(["group", "engine"])["run_id"].agg(list)
    runs_of_pair = [
        sorted({*runs[(group, engine)], *runs[(group, other)]})
        for group, engine, other in table[["group", "engine", "other"]].itertuples(index=False)
    ]
    table["n_runs"] = [len(names) for names in runs_of_pair]
    table["run_ids"] = [";".join(names) for names in runs_of_pair]
    place = [table["group"], table["engine"].map(order), table["other"].map(order)]
    return table.iloc[np.lexsort(place[::-1])].reset_index(drop=True)


def _windowed(rows: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Keep the largest value of each window of optimizer steps."""
    value = rows.columns[-1]
    longest = rows.groupby(list(by))["optimizer_step"].transform("max")
    length = np.ceil(longest / MAX_POINTS).clip(lower=1)
    windows = rows.assign(window=(rows["optimizer_step"] - 1) // length).groupby([*by, "window"])
    largest = windows.agg(optimizer_step=("optimizer_step", "mean"), value=(value, "max"))
    return largest.reset_index().drop(columns="window")
