"""Sweeps of two engines, models or machines, set side by side and never pooled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, SEEDS, Cells
from batchscape.analysis.comparing.pairs import (
    blocks_of,
    contrasts_of,
    labels_of,
    logarithm,
    to_lowest,
    values_of,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.targets.tidy import at_common_target

_COMPARED = {
    "step_time_s": ("ratio", "block", "cost"),
    "peak_allocated_gib": ("ratio", "block", "cost"),
    "steps_to_target": ("ratio", "seeds", "settings"),
    "final_eval_loss": ("difference", "seeds", "settings"),
}
"""Compared figures: ratios, except for the loss, whose difference is in nats; and the columns in
which a pair is equal."""

_HOW_LONG = ("budget.", "evaluation.", "schedule.")
"""Settings that make another study, not another side; their losses are not compared."""


@dataclass(frozen=True)
class Sides:
    """Sweeps side by side."""

    axis: tuple[str, ...]
    """Settings that are the same in each sweep folder, and differ between them."""
    names: tuple[str, ...]
    """The sides, by their values of the axis; the first is the reference."""
    table: pd.DataFrame
    """One row for each side but the reference, setting that both have, and figure: `geometry`
    columns, `settings` (others that vary), `reference`, `side`, `quantity`, `kind` (`ratio`, side
    over reference, or `difference` in nats), `effect`, `low`, `high` (t-interval over pairs of
    equal seeds and repeats), `n` and `run_ids`."""


def find_axis(cells: Cells) -> tuple[str, ...]:
    """Return the settings that are the same in each sweep folder, and differ between folders."""
    runs = cells.runs[cells.runs["status"].eq("completed")]
    names = [name for name in cells.key_settings if not name.startswith(_HOW_LONG)]
    axis = []
    for name in names:
        values = values_of(cells, runs, name)
        within = values.groupby(runs["sweep_dir"]).nunique()
        if len(within) > 1 and within.max() == 1 and values.nunique() > 1:
            axis.append(name)
    return tuple(axis)


def compare_sweeps(cells: Cells, reaches: pd.DataFrame | None = None) -> Sides | None:
    """Pair the runs of two sides, and compute ratios with their intervals.

    Runs are paired by geometry, by every other setting that varies, by seeds and, for times and
    memory, by timing repeat. Several runs of one pair on a side are averaged. Machines are sides
    of their own, or cells of their own: nothing is averaged over them.

    Parameters
    ----------
    reaches : DataFrame, optional
        One row a run and target, with `sweep_dir`, `run_id`, `target_loss`, `outcome` and
        `steps_to_target`. Pairs are compared at the lowest target that both sides reached in
        every run.

    Returns
    -------
    Sides or None
        None where no setting distinguishes the folders.
    """
    axis = find_axis(cells)
    if not axis:
        return None
    figures = cells.figures
    runs = cells.runs.loc[figures.index]
    side = labels_of(cells, runs, axis)
    others = [name for name in cells.key_settings if name not in axis]
    head = pd.DataFrame({name: runs[name] for name in ("sweep_dir", "run_id", *GEOMETRY)})
    head = head.assign(
        side=side,
        seeds=blocks_of(runs, SEEDS),
        block=blocks_of(runs, (*SEEDS, "timing_repeat")),
        cost=labels_of(cells, runs, [n for n in others if not n.startswith(_HOW_LONG)]),
        settings=labels_of(cells, runs, others),
    )
    # Folders in the order given, so that the first one is the reference.
    folder = runs["sweep_dir"].map({d: n for n, d in enumerate(cells.runs["sweep_dir"].unique())})
    table = figures.join(head).assign(folder=folder).sort_values(["folder", "run_id"])
    names = tuple(table["side"].unique().tolist())
    if reaches is None or reaches.empty:
        table["steps_to_target"] = np.nan
    else:
        # Steps to the lowest target that all runs of a setting reached, on every side.
        keys = ["sweep_dir", "run_id"]
        common = at_common_target(reaches, table, [*GEOMETRY, "settings"])
        table = table.merge(common[[*keys, "steps_to_target"]], on=keys, how="left")
    rows = [row for name in _COMPARED for row in _rows(table, name)]
    return Sides(axis, names, pd.DataFrame(rows, columns=[*GEOMETRY, *_COLUMNS]))


_COLUMNS = (
    *("settings", "reference", "side", "quantity", "kind"),
    *("effect", "low", "high", "n", "run_ids"),
)


def _rows(table: pd.DataFrame, name: str) -> Iterator[tuple[object, ...]]:
    """Compare one figure of each side with that of the reference."""
    kind, block, settings = _COMPARED[name]
    values = table[name].astype(float)
    measured = table.assign(value=logarithm(values) if kind == "ratio" else values)
    measured = measured.dropna(subset=["value"])
    # Sides stand in the order of the folders, so that the first one given is the reference.
    order = list(dict.fromkeys(measured["side"]))

    def to_first(sides: Sequence[str]) -> list[tuple[str, str]]:
        return to_lowest(sorted(sides, key=order.index))

    for contrast in contrasts_of(measured, "side", [*GEOMETRY, settings], block, to_first):
        if len(contrast.values):
            size = contrast.estimate("", kind)
            ends = (size.low, size.high) if size.n >= FEWEST else (np.nan, np.nan)
            sides = (contrast.base, contrast.level)
            ids = ";".join(contrast.run_ids)
            yield *contrast.place, *sides, name, kind, size.value, *ends, size.n, ids
