"""Memory of a device: a fixed part, a part a sample, and copies of the gradient."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from batchscape.analysis.cost.linear import Floats
from batchscape.analysis.cost.model import CostFit, Form, Term, fit_cost
from batchscape.analysis.cost.table import FACTORS, MEMORY_PHASES, one_group
from batchscape.analysis.estimates import Estimate
from batchscape.errors import AnalysisError

MEMORY_TERMS = {
    "fixed_gib": Term(
        "memory that does not grow with the micro-batch, on one device without accumulation",
    ),
    "per_sample_gib": Term(
        "memory that each further sample of the micro-batch takes", ("micro_batch_size",)
    ),
    "accumulation_gib": Term(
        "memory that more than one micro-step takes beside that: gradients kept between them",
        ("gradient_accumulation_steps",),
    ),
    "devices_gib": Term(
        "memory that more than one device takes on each of them: buckets of the exchange, less "
        "what shards save",
        ("data_parallel_size",),
    ),
}
"""Terms of a memory phase."""

_LIMITING = (
    ("device_used_gib",),
    ("peak_reserved_gib",),
    (
        "peak_allocated_first_backward_gib",
        "peak_allocated_first_optimizer_step_gib",
        "peak_allocated_steady_gib",
    ),
    ("peak_allocated_gib",),
)
"""Figures that decide whether a run fits; the first that were measured do."""


@dataclass(frozen=True)
class MemoryModel:
    """Memory of the fullest device over geometries, by phase of a run."""

    phases: dict[str, CostFit]
    """By the name of the figure, in the order of `MEMORY_PHASES`."""
    measured: pd.DataFrame
    """The rows fitted."""

    @property
    def limiting(self) -> list[str]:
        """Figures that decide whether a run fits: that of the device, else the three peaks."""
        for names in _LIMITING:
            if figures := [name for name in names if name in self.phases]:
                return figures
        return list(self.phases)

    @cached_property
    def largest(self) -> dict[Hashable, float]:
        """Largest measured memory of each geometry, in GiB; NaN where a figure is missing."""
        peaks = self.measured[self.limiting].astype(float).max(axis=1, skipna=False)
        cuts = [self.measured[name].astype(int) for name in FACTORS]
        return peaks.groupby(cuts).agg(lambda values: values.max(skipna=False)).to_dict()

    def peak(self, devices: int, micro: int, accumulation: int) -> Estimate:
        """Predict the memory that decides whether a run fits.

        Returns
        -------
        Estimate
            Of the phase with the largest upper end; not identified where one phase is not.
        """
        estimates = [self.phases[n].at(devices, micro, accumulation) for n in self.limiting]
        unidentified = [estimate for estimate in estimates if not estimate.is_identified]
        if unidentified:
            return unidentified[0]
        return max(estimates, key=lambda e: e.value if math.isnan(e.high) else e.high)


def _weights(devices: Floats, micro: Floats, accumulation: Floats) -> dict[str, Floats]:
    """Return the factor of each term."""
    return {
        "fixed_gib": np.ones_like(micro),
        "per_sample_gib": micro,
        "accumulation_gib": (accumulation > 1).astype(float),
        "devices_gib": (devices > 1).astype(float),
    }


def fit_memory(table: pd.DataFrame, *, is_sharded: bool = False) -> MemoryModel:
    """Fit memory = fixed + slope x micro-batch + copies of the gradient, for each phase.

    Parameters
    ----------
    table : DataFrame
        One row a run of one machine, model and setting: `data_parallel_size`,
        `micro_batch_size`, `gradient_accumulation_steps`, and one or more of `MEMORY_PHASES` in
        GiB, of the fullest device.
    is_sharded : bool
        Whether devices share what a model takes. Only then more of them may need less memory each;
        elsewhere a term below zero is a form that does not hold.

    Returns
    -------
    MemoryModel
        One fit a phase that was measured. A term that the cells do not determine is not
        identified, with the reason. The cells are the units: repeats of a geometry allocate the
        same bytes and add no information.

    Raises
    ------
    AnalysisError
        As `check` does, or if the table has several groups, or no row a figure.
    """
    rows = one_group(table, others=list(MEMORY_PHASES))
    devices = replace(MEMORY_TERMS["devices_gib"], may_save=is_sharded)
    form = Form({**MEMORY_TERMS, "devices_gib": devices}, _weights, "GiB")
    phases = {
        name: fit_cost(rows, rows[name], form)
        for name in MEMORY_PHASES
        if name in rows and rows[name].notna().any()
    }
    if not phases:
        raise AnalysisError(
            f"no run has a memory figure; a table needs one of {', '.join(MEMORY_PHASES)} in GiB"
        )
    return MemoryModel(phases, rows)
