"""Every geometry that could be used, with its memory, time and cost.

What is compared was chosen by the data: the fastest geometry, the slowest, the one that might be
faster yet. So the intervals of `compare_with` hold for all pairs of the geometries compared at
once (Games and Howell; `multiplicity.pair_quantile`). Simulated coverage of the time of the
slowest over that of the fastest, of cuts that all take one time (1,000 simulations a row, seed 1;
spreads of logarithms equal, or 0.3, 0.3, 1, 1, 1, 1, 3 and 3 to one another); on the right what
the t-interval of that pair alone covers:

| cuts | runs each | spread | simultaneous | of the pair alone |
| --- | --- | --- | --- | --- |
| 8 | 3 | equal | 0.976 | 0.777 |
| 8 | 5 | equal | 0.950 | 0.646 |
| 8 | 10 | equal | 0.958 | 0.567 |
| 8 | 3 | unequal | 0.970 | 0.855 |

`tests/analysis/decisions/test_chosen_by_data.py` simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.cost.linear import welch
from batchscape.analysis.cost.model import outside
from batchscape.analysis.cost.table import FACTORS, Geometry
from batchscape.analysis.decisions.evidence import Basis
from batchscape.analysis.decisions.multiplicity import pair_quantile
from batchscape.analysis.decisions.to_target import (
    pareto_front,
    step_times,
    steps_by_batch,
    time_to_target,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.numbers import significant

DERIVED = "derived: optimizer steps times the mean time of a step, over whole trainings"
"""Text for a time to a target that the runs of a cut did not record themselves."""
MEMORY_MARGIN = 0.10
"""Share of the predicted memory kept free on top of its upper end: fragmentation, and what other
libraries take."""


def memory_of_device(basis: Basis, memory_gib: float | None, devices: int) -> float:
    """Return the memory of one of so many devices in GiB: given, else recorded, else NaN."""
    if memory_gib is not None:
        return memory_gib
    recorded = basis.device_memory_gib
    return basis.host_memory_gib / devices if math.isnan(recorded) else recorded


def is_to_target(candidates: pd.DataFrame) -> bool:
    """Tell whether times are times to a target; without a target they are times of one step."""
    return bool(candidates["n_seeds"].gt(0).any())


def own_learning_rate(candidates: pd.DataFrame, chosen: Mapping[Any, Any]) -> str:
    """Name the learning rate of a geometry; empty if one rate was tried or none is known."""
    rate = float(chosen["learning_rate"])
    if not candidates["rates_tried"].gt(1).any() or math.isnan(rate):
        return ""
    return f"learning rate {significant(rate, 3)}"


def failures_that_count(
    basis: Basis, memory_gib: float, devices: int | None = None
) -> list[Geometry]:
    """Return the geometries out of memory that a device of `memory_gib` must respect.

    On `devices` of them a failure counts if it was on as many or fewer, where each holds the whole
    model; where the model is sharded, if it was on as many or more.
    """
    sign = -1 if basis.is_sharded else 1
    return [
        cut
        for cut in basis.out_of_memory
        # A comparison with NaN is false: where either memory is unknown, the failure counts.
        if (devices is None or sign * cut[0] <= sign * devices)
        and not memory_gib > memory_of_device(basis, None, cut[0])
    ]


def candidates_of(basis: Basis, max_devices: int, memory_gib: float | None = None) -> pd.DataFrame:
    """List the cuts of every global batch whose steps to the target are known.

    Cuts of a program of others have steps of their own: only those that ran are listed.

    Parameters
    ----------
    max_devices : int
        Devices that may be used.
    memory_gib : float, optional
        Memory of a device; by default what `memory_of_device` knows. Where it knows nothing, only
        what ran out of memory is excluded.

    Returns
    -------
    DataFrame
        The columns of `time_to_target`, and `derived` (whether the time to a target of a cut that
        ran is made of its mean step time, and not recorded by its runs), `rates_tried`,
        `memory_gib` (what was measured, or the upper end of the prediction, its value where it has
        no interval; with `MEMORY_MARGIN`; or NaN), `memory_source` (measured, predicted or
        unknown), `memory_beyond` and `fits`. `on_front` counts measured geometries that fit only.
        Without a target, steps count one, and times are of a step.
    """
    measured_runs = basis.table
    steps = _steps(basis)
    if steps.index.nlevels > 1:
        geometries = [cut for cut in steps.index if cut[0] <= max_devices]
    else:
        geometries = _geometries(steps.index, measured_runs, max_devices)
    times = step_times(basis.step_time_table, geometries, basis.step_time)
    rows = time_to_target(steps, times)
    cuts = pd.MultiIndex.from_frame(rows[list(FACTORS)])
    timed = basis.step_time_table.dropna(subset="step_time_s").groupby(list(FACTORS))
    is_recorded = timed["is_recorded"].all().reindex(cuts, fill_value=False).to_numpy(dtype=bool)
    rows["derived"] = rows["source"].eq("measured") & rows["n_seeds"].gt(0) & ~is_recorded
    rows["rates_tried"] = basis.rates_tried
    columns = ["memory_gib", "memory_source", "memory_beyond", "fits"]
    memory = [_memory(basis, cut, memory_of_device(basis, memory_gib, cut[0])) for cut in cuts]
    rows = rows.join(pd.DataFrame(memory, columns=columns, index=rows.index))
    # A prediction must not push a measured geometry off the front.
    is_counted = (rows["source"] == "measured") & rows["fits"]
    rows["on_front"] = pareto_front(rows["time_s"].where(is_counted), rows["device_hours"])
    return rows


def compare_with(candidates: pd.DataFrame, chosen: pd.Series[Any], n_compared: int) -> pd.DataFrame:
    """Compare every candidate with one of them.

    Parameters
    ----------
    candidates : DataFrame
        As `candidates_of` returns it.
    chosen : Series
        One of its rows.
    n_compared : int
        Geometries among which the data chose it: the intervals hold for all pairs of so many.

    Returns
    -------
    DataFrame
        The candidates with `times_slower` (time over that of the chosen), `times_slower_low`,
        `times_slower_high`, `times_slower_n` (the fewest of the units behind: times of either, and
        seeds unless they cancel) and `times_dearer` (the same of device-hours). Ends are NaN
        below `FEWEST` units, and where nothing tells. Steps of cuts of one global batch are paired
        by trajectory, and cancel where they share them; those of different batches are taken as
        independent.
    """
    same_batch = candidates["global_batch_size"] == chosen["global_batch_size"]
    same_cut = same_batch & (candidates[list(FACTORS)] == chosen[list(FACTORS)]).all(axis=1)
    pairs = [_steps_apart(steps, chosen["steps_log_of"]) for steps in candidates["steps_log_of"]]
    paired = pd.DataFrame(pairs, columns=["mean", "variance", "degrees"], index=candidates.index)
    steps = (candidates["steps_log"] - chosen["steps_log"]).where(~same_batch, paired["mean"])
    difference = candidates["time_log"] - chosen["time_log"] + steps
    parts = [
        (candidates["time_log_variance"], candidates["time_degrees"]),
        (chosen["time_log_variance"], chosen["time_degrees"]),
        (
            candidates["steps_log_variance"].where(~same_batch, paired["variance"]),
            candidates["steps_degrees"].where(~same_batch, paired["degrees"]),
        ),
        (
            np.where(same_batch, 0.0, chosen["steps_log_variance"]),
            np.where(same_batch, math.inf, chosen["steps_degrees"]),
        ),
    ]
    variance, degrees = welch(parts)
    half_width = np.where(
        same_cut, 0.0, pair_quantile(max(n_compared, 2), degrees) * np.sqrt(variance)
    )
    # A cut that was timed once has no degrees of freedom.
    chosen_degrees = 0 if math.isnan(chosen["time_degrees"]) else chosen["time_degrees"]
    units = candidates["time_degrees"].fillna(0).clip(upper=chosen_degrees) + 1
    seeds = candidates["n_seeds"].clip(upper=chosen["n_seeds"])
    cancel = same_batch & paired["degrees"].eq(math.inf)
    units = units.where(cancel, units.clip(upper=seeds))
    has_interval = same_cut | (units >= FEWEST)
    # The end of a wide interval may be beyond all numbers: infinite.
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = np.exp(difference - half_width), np.exp(difference + half_width)
    devices = candidates["data_parallel_size"] / chosen["data_parallel_size"]
    ratio = np.exp(difference).fillna(candidates["time_s"] / chosen["time_s"])
    return candidates.assign(
        times_slower=ratio,
        times_slower_low=low.where(has_interval),
        times_slower_high=high.where(has_interval),
        times_slower_n=units,
        times_dearer=ratio * devices,
    )


def _steps_apart(
    steps: Mapping[object, float], other_steps: Mapping[object, float]
) -> tuple[float, float, float]:
    """Return mean, variance and degrees of freedom of the paired difference of logarithms."""
    if steps == other_steps:
        return 0.0, 0.0, math.inf
    shared = [step - other_steps[key] for key, step in steps.items() if key in other_steps]
    n = len(shared)
    if not n or not np.isfinite(shared).all():
        return math.nan, math.nan, math.nan
    variance = float(np.var(shared, ddof=1)) / n if n > 1 else math.nan
    return float(np.mean(shared)), variance, n - 1.0


def _steps(basis: Basis) -> pd.DataFrame:
    if basis.reaches is not None:
        by = FACTORS if basis.is_program else ("global_batch_size",)
        return steps_by_batch(basis.reaches, by)
    batch = int(basis.table["global_batch_size"].mode().to_numpy()[0])
    one = {
        "n_seeds": 0,
        "n_reached": 0,
        "steps": 1.0,
        "least_steps": 1.0,
        "steps_log": 0.0,
        "steps_log_variance": 0.0,
        "steps_degrees": math.inf,
        "steps_log_of": {},
        "learning_rate": math.nan,
        "outcomes": "",
        "run_ids": "",
    }
    return pd.DataFrame([one], index=pd.Index([batch], name="global_batch_size"))


def _geometries(batches: Iterable[int], measured: pd.DataFrame, max_devices: int) -> list[Geometry]:
    """Cut each batch by measured micro-batches and powers of two, on up to `max_devices`."""
    powers = {2**power for power in range(21)}
    micros = powers | set(measured["micro_batch_size"].astype(int))
    counts = powers | {max_devices} | set(measured["data_parallel_size"].astype(int))
    return [
        (devices, micro, batch // (devices * micro))
        for batch in map(int, batches)
        for devices in sorted(counts)
        for micro in sorted(micros)
        if devices <= max_devices and batch % (devices * micro) == 0
    ]


def _memory(basis: Basis, geometry: Geometry, limit: float) -> tuple[float, str, str, bool]:
    model = basis.memory
    devices, micro, accumulation = geometry
    failures = failures_that_count(basis, limit, devices)
    failed = any(m <= micro and (a > 1) <= (accumulation > 1) for _, m, a in failures)
    if model is None:
        return math.nan, "unknown", "", not failed
    value = model.largest.get(geometry, math.nan)
    source, beyond = "measured", ""
    if math.isnan(value):
        peak = model.peak(*geometry)
        value = peak.value if math.isnan(peak.high) else peak.high
        source = "predicted" if math.isfinite(value) else "unknown"
        beyond = "; ".join(outside(model.measured, *geometry))
    needed = value * (1 + MEMORY_MARGIN)
    return needed, source, beyond, not failed and not needed > limit
