"""Step times, and errors of predicted memory, from runs that ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from batchscape.analysis.cost.model import outside
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
_PEAK = ("predicted.peak_allocated_gib.value", "peak_allocated_gib", "workspace_gib")
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
        numbers = [*_FIGURES, *_PEAK]
        runs = runs.reindex(columns=[*dict.fromkeys([*runs.columns, *numbers])])
        runs[numbers] = runs[numbers].apply(pd.to_numeric).astype(float)
        here = runs["hardware"].map(lambda name: isinstance(name, str) and is_like(name))
        runs = runs[runs["status"].eq("completed") & here]
        folders = zip(runs["sweep_dir"], runs["run_id"], strict=True)
        specs = pd.Series([_read_spec(*folder) for folder in folders], runs.index, dtype=object)
        predicted, measured, workspace = (runs[name] for name in _PEAK)
        # A prediction leaves out the workspace of cuBLAS.
        shares = ((measured - workspace.fillna(0)) / predicted)[predicted.gt(0) & measured.gt(0)]
        # Runs with equal predictions count as one.
        means = shares.groupby([specs.map(_memory_group), predicted]).mean()
        self._shares = {str(group): values.to_numpy() for group, values in means.groupby(level=0)}
        is_timed = runs["timing_valid"] & runs["step_time_s"].gt(0)
        table = runs.loc[is_timed, ["run_id", *FACTORS, *_FIGURES]]
        self._tables = dict(iter(table.groupby(specs.map(lambda spec: spec and spec.time_key))))
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
        cut = [getattr(geometry, name) for name in FACTORS]
        times = table.loc[(table[list(FACTORS)] == cut).all(axis=1), "step_time_s"]
        n = len(times)
        if n >= FEWEST:
            logs = np.log(times.to_numpy(dtype=float))
            method = f"t-interval of the mean logarithm of {n} runs"
            about = "step time of runs of this geometry"
            estimate = Estimate.of_ratio(logs, about, method, unit="s")
        else:
            if spec.time_key not in self._models:
                self._models[spec.time_key] = fit_step_time(table)
            model = self._models[spec.time_key]
            if outside(model.cells, *cut):
                return None
            estimate = replace(model.at(*cut), n=len(table))
        is_known = estimate.value > 0 and estimate.high <= WIDEST * estimate.low
        return estimate if is_known else None

    def memory_range(self, spec: RunSpec) -> tuple[float, float, int] | None:
        """Return the range of a run's peak of memory, as multiples of its prediction.

        Returns
        -------
        tuple of float, float, int, or None
            Ends of the 95 % prediction interval of measured over predicted, at least `_LEAST_OFF`
            off, by Student's t on logarithms; and the distinct predictions behind it, of runs with
            the same model, engine, precision and type of device. None below `FEWEST`.
        """
        shares = self._shares.get(str(_memory_group(spec)), np.empty(0))
        n = len(shares)
        if n < FEWEST:
            return None
        logs = np.log(shares)
        half = t_reach(float(logs.std(ddof=1)), n - 1) * math.sqrt(1 + 1 / n)
        low, high = np.exp(logs.mean() - half), np.exp(logs.mean() + half)
        return min(float(low), 1 - _LEAST_OFF), max(float(high), 1 + _LEAST_OFF), n


def _read_spec(sweep: str, run_id: str) -> RunSpec | None:
    try:
        return RunSpec.read(SweepFolder(Path(sweep)).run(run_id).config)
    except RecordError:
        return None


def _memory_group(spec: RunSpec | None) -> str | None:
    """Name what decides how far predictions of memory are off."""
    if spec is None:
        return None
    return repr((spec.config.model, spec.config.engine, spec.precision, spec.device_type))
