"""Step times, and errors of predicted memory, from runs that ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.analysis.cost.step_time import WIDEST, StepTimeModel, fit_step_time
from batchscape.analysis.cost.table import FACTORS, TIME_PARTS
from batchscape.analysis.estimates import FEWEST, Estimate, t_reach
from batchscape.analysis.hardware import add_machines
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.tables import load

_FIGURES = ("step_time_s", *TIME_PARTS)
_LEAST_OFF = 0.01
"""Least relative error of a predicted peak: another model has other kernels."""


class MeasuredSteps:
    """Step times of runs on one kind of hardware, kept apart by all settings that decide them.

    A geometry with `FEWEST` runs has their geometric mean, with the t-interval of the mean
    logarithm; for others the cost model of all these runs predicts.

    Parameters
    ----------
    dirs : sequence of Path
        Sweep folders; completed runs with valid times count.
    is_like : callable
        Tells whether runs on a named hardware count.

    Raises
    ------
    RecordError
        If a folder holds no runs.
    """

    def __init__(self, dirs: Sequence[Path], is_like: Callable[[str], bool]) -> None:
        runs = add_machines(load(*dirs, columns={"steps": (), "evals": (), "ranks": ()}).runs)
        runs = runs.reindex(columns=[*dict.fromkeys([*runs.columns, *_FIGURES])])
        runs[list(_FIGURES)] = runs[list(_FIGURES)].apply(pd.to_numeric).astype(float)
        here = runs["hardware"].map(lambda name: isinstance(name, str) and is_like(name))
        runs = runs[runs["status"].eq("completed") & here]
        self._shares = _measured_over_predicted(runs)
        runs = runs[runs["timing_valid"] & runs["step_time_s"].gt(0)]
        keys = [
            _of_spec(sweep, run_id, attrgetter("time_key"))
            for sweep, run_id in zip(runs["sweep_dir"], runs["run_id"], strict=True)
        ]
        table = runs[["run_id", *FACTORS, *_FIGURES]]
        self._tables = dict(iter(table.groupby(pd.Series(keys, table.index, dtype=object))))
        self._models: dict[str, StepTimeModel] = {}

    def __call__(self, spec: RunSpec, geometry: BatchGeometry) -> Estimate | None:
        """Predict the step time of a geometry of a run, in seconds.

        Returns
        -------
        Estimate or None
            With its interval, and the number of runs as `n`; None where fewer than `FEWEST` runs
            determine it, they give no interval or one of which the ends are more than `WIDEST`
            times apart, or it lies outside of what they cover.
        """
        table = self._tables.get(spec.time_key)
        if table is None or len(table) < FEWEST:
            return None
        estimate = self._from_runs(table, geometry) or self._from_model(spec, table, geometry)
        return estimate if estimate is not None and estimate.high <= WIDEST * estimate.low else None

    def _from_runs(self, table: pd.DataFrame, geometry: BatchGeometry) -> Estimate | None:
        cut = [getattr(geometry, name) for name in FACTORS]
        times = table.loc[(table[list(FACTORS)] == cut).all(axis=1), "step_time_s"]
        n = len(times)
        if n < FEWEST:
            return None
        logs = np.log(times.to_numpy(dtype=float))
        method = f"t-interval of the mean logarithm of {n} runs"
        return Estimate.of_ratio(logs, "step time of runs of this geometry", method, unit="s")

    def _from_model(
        self, spec: RunSpec, table: pd.DataFrame, geometry: BatchGeometry
    ) -> Estimate | None:
        if spec.time_key not in self._models:
            self._models[spec.time_key] = fit_step_time(table)
        cut = geometry.micro_batch_size, geometry.gradient_accumulation_steps
        estimate = self._models[spec.time_key].at(geometry.data_parallel_size, *cut)
        if not (estimate.is_identified and estimate.value > 0 and math.isfinite(estimate.low)):
            return None
        if self._models[spec.time_key].beyond(geometry.data_parallel_size, *cut):
            return None
        return replace(estimate, n=len(table))

    def memory_range(self, spec: RunSpec) -> tuple[float, float, int] | None:
        """Return the range of a run's peak of memory, as multiples of its prediction.

        Returns
        -------
        tuple of float, float, int, or None
            Ends of the 95 % prediction interval of measured over predicted, at least `_LEAST_OFF`
            off, by Student's t on logarithms; and the distinct predictions behind it, of runs with
            the same model, engine, precision and type of device. None below `FEWEST`.
        """
        shares = self._shares.get(_memory_group(spec), np.empty(0))
        n = len(shares)
        if n < FEWEST:
            return None
        logs = np.log(shares)
        half = t_reach(float(logs.std(ddof=1)), n - 1) * math.sqrt(1 + 1 / n)
        low, high = np.exp(logs.mean() - half), np.exp(logs.mean() + half)
        return min(float(low), 1 - _LEAST_OFF), max(float(high), 1 + _LEAST_OFF), n


def _measured_over_predicted(runs: pd.DataFrame) -> dict[str, NDArray[np.float64]]:
    """Return ratios of measured to predicted peaks, by model, engine, precision and device type.

    Runs with equal predictions count as one, by their mean.
    """
    names = ("predicted.peak_allocated_gib.value", "peak_allocated_gib", "workspace_gib")
    table = runs.reindex(columns=list(names)).apply(pd.to_numeric).astype(float)
    predicted, measured, workspace = (table[name] for name in names)
    # A prediction leaves out the workspace of cuBLAS.
    shares = ((measured - workspace.fillna(0)) / predicted)[predicted.gt(0) & measured.gt(0)]
    groups = [
        _of_spec(sweep, run_id, _memory_group)
        for sweep, run_id in zip(
            runs.loc[shares.index, "sweep_dir"], runs.loc[shares.index, "run_id"], strict=True
        )
    ]
    means = shares.groupby([pd.Series(groups, shares.index, dtype=object), predicted]).mean()
    return {
        str(group): np.asarray(group_means, dtype=np.float64)
        for group, group_means in means.groupby(level=0)
    }


def _memory_group(spec: RunSpec) -> str:
    return repr((spec.config.model, spec.config.engine, spec.precision, spec.device_type))


def _of_spec(sweep: str, run_id: str, key: Callable[[RunSpec], str]) -> str | None:
    try:
        return key(RunSpec.read(SweepFolder(Path(sweep)).run(run_id).config))
    except RecordError:
        return None
