"""Weak and strong scaling efficiency over devices, paired by seed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pandas as pd

from batchscape.analysis.cost.model import join_ids
from batchscape.analysis.cost.table import FACTORS, Geometry
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.numbers import TIMES

_PAIRED_BY = ("seed", "init_seed", "data_seed", "timing_repeat")
_DEFINITIONS = {
    "weak": "step time on the fewer devices / step time on the more, at equal micro-batch and "
    "accumulation",
    "strong": "step time on the fewer devices x their number / the same of the more, at an equal "
    "global batch and equal {held}",
}


def scaling_efficiency(table: pd.DataFrame) -> pd.DataFrame:
    """Compare step times on several devices with those on the fewest measured.

    Weak scaling gives each device the same work (equal micro-batch and accumulation); strong
    scaling shares one global batch out, by smaller micro-batches or by less accumulation. Runs
    are paired by seed and timing repeat; without those columns a cell is one unit.

    Parameters
    ----------
    table : DataFrame
        One row a run of one machine, model and setting: `data_parallel_size`,
        `micro_batch_size`, `gradient_accumulation_steps`, `step_time_s` (NaN where the machine was
        not free), and optionally `seed`, `timing_repeat`, `run_id`.

    Returns
    -------
    DataFrame
        One row a comparison: `kind` (weak or strong), `held` (what stays equal beside the global
        batch), `devices`, `geometry`, `reference` (its geometry), `efficiency` (1: ideal),
        `low`, `high`, `n` (pairs), `estimate` (the same as an `Estimate`) and `run_ids`. Empty
        where nothing can be compared.

    Notes
    -----
    Ratios are geometric means over the pairs, with the t-interval of the mean logarithm.
    """
    rows = table[table["step_time_s"] > 0]
    rows = rows.assign(
        **{name: np.nan for name in _PAIRED_BY if name not in rows},
        **{name: rows[name].astype(int) for name in FACTORS},
        log=np.log(rows["step_time_s"].to_numpy(dtype=float)),
    )
    comparisons = [_compare(rows, pair) for pair in _pairs(rows)]
    columns = ["kind", "held", "devices", "geometry", "reference", "efficiency", "low", "high"]
    columns += ["n", "estimate", "run_ids"]
    table = pd.DataFrame([row for row in comparisons if row["n"]], columns=columns)
    return table.sort_values(["kind", "held", "reference", "devices"], ignore_index=True)


Pair = tuple[Geometry, Geometry, str, str]


def _pairs(rows: pd.DataFrame) -> Iterator[Pair]:
    """Yield each cell with that of the fewest devices that it scales from, weakly or strongly."""
    cells: list[Geometry] = list(
        rows[list(FACTORS)].drop_duplicates().itertuples(index=False, name=None)
    )
    fewest: dict[tuple[object, ...], Geometry] = {}
    for devices, micro, accumulation in sorted(cells):
        for key in (
            ("weak", "micro-batch and accumulation", micro, accumulation),
            ("strong", "accumulation", devices * micro, accumulation),
            ("strong", "micro-batch", devices * accumulation, micro),
        ):
            cell = (devices, micro, accumulation)
            base = fewest.setdefault(key, cell)
            if base[0] < devices:
                yield cell, base, str(key[0]), str(key[1])


def _compare(rows: pd.DataFrame, pair: Pair) -> dict[str, object]:
    cell, base, kind, held = pair
    names = list(FACTORS)
    sides, runs = [], []
    for geometry in (base, cell):
        side = rows[(rows[names] == list(geometry)).all(axis=1)]
        runs.append(side)
        sides.append(side.groupby(list(_PAIRED_BY), dropna=False)["log"].mean())
    factor = math.log(base[0] / cell[0]) if kind == "strong" else 0.0
    logs = (sides[0] - sides[1]).dropna() + factor
    n = len(logs)
    estimate = Estimate.of_ratio(
        logs.to_numpy(dtype=np.float64),
        _DEFINITIONS[kind].format(held=held),
        f"t-interval of the mean log ratio over {n} pairs of runs",
        note=None if n > 1 else "no interval: one pair",
    )
    return {
        "kind": kind,
        "held": held,
        "devices": cell[0],
        "geometry": TIMES.join(map(str, cell)),
        "reference": TIMES.join(map(str, base)),
        "efficiency": estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "n": n,
        "estimate": estimate,
        "run_ids": join_ids(run_id for side in runs for run_id in side.get("run_id", ())),
    }
