"""Sweeps of two engines, models or machines, set side by side and never pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, SEEDS, Cells
from batchscape.analysis.comparing.pairs import (
    Contrast,
    blocks_of,
    contrasts_of,
    labels_of,
    logarithm,
    to_lowest,
    values_of,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.targets.tidy import at_common_target

COMPARED = ("step_time_s", "peak_allocated_gib", "steps_to_target", "final_eval_loss")
"""Compared figures: ratios, except for the loss, whose difference is in nats."""

_LOSSES = ("steps_to_target", "final_eval_loss")
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
    rows = [row for name in COMPARED for row in _rows(table, name)]
    return Sides(axis, names, pd.DataFrame(rows, columns=[*GEOMETRY, *_COLUMNS]))


_COLUMNS = (
    *("settings", "reference", "side", "quantity", "kind"),
    *("effect", "low", "high", "n", "run_ids"),
)


def _rows(table: pd.DataFrame, name: str) -> list[dict[str, object]]:
    is_loss = name in _LOSSES
    is_ratio = name != "final_eval_loss"
    block, settings = ("seeds", "settings") if is_loss else ("block", "cost")
    values = table[name].astype(float)
    values = logarithm(values) if is_ratio else values
    measured = table.assign(value=values).dropna(subset=["value"])
    # Sides stand in the order of the folders, so that the first one given is the reference.
    order = list(dict.fromkeys(measured["side"]))

    def to_first(sides: Sequence[str]) -> list[tuple[str, str]]:
        return to_lowest(sorted(sides, key=order.index))

    return [
        {
            **dict(zip([*GEOMETRY, "settings"], contrast.place, strict=True)),
            "reference": contrast.base,
            "side": contrast.level,
            "quantity": name,
            **_effect(contrast, "ratio" if is_ratio else "difference"),
            "run_ids": ";".join(contrast.run_ids),
        }
        for contrast in contrasts_of(measured, "side", [*GEOMETRY, settings], block, to_first)
        if len(contrast.values)
    ]


def _effect(contrast: Contrast, kind: str) -> dict[str, object]:
    estimate = contrast.estimate("", kind)
    low, high = (estimate.low, estimate.high) if estimate.n >= FEWEST else (np.nan, np.nan)
    return {"kind": kind, "effect": estimate.value, "low": low, "high": high, "n": estimate.n}
