"""Runs of one model on one machine: their reaches, times, memory and fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from batchscape.analysis.cells import PROGRAMS, SEEDS, Cells, find_cells
from batchscape.analysis.cost.capacity import LIMITED, device_memory
from batchscape.analysis.cost.memory_model import MemoryModel, fit_memory
from batchscape.analysis.cost.step_time import StepTimeModel, fit_step_time
from batchscape.analysis.cost.table import (
    FACTORS,
    cost_groups,
    cost_table,
    is_sharded,
)
from batchscape.analysis.estimates import FEWEST
from batchscape.analysis.horizons.runs import runs_by_horizon, without_shorter_horizons
from batchscape.analysis.joins import column_of
from batchscape.analysis.learning_rate.aim import STEPS
from batchscape.analysis.learning_rate.choice import at_best_learning_rate, tuning_warning
from batchscape.analysis.learning_rate.optimum import best_learning_rates
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.targets.curves import curve_groups, curves_of
from batchscape.errors import AnalysisError
from batchscape.record.tables import Tables, load
from batchscape.record.trials import refuse_trials
from batchscape.text import count_text, list_text

_TRAINING_COLUMNS = ("global_batch_size", *SEEDS, *FACTORS)


@dataclass(frozen=True)
class Basis:
    """Runs that may be compared, with the fits that a recommendation needs."""

    label: str
    """Settings that differ from the other runs of the folders; empty if there are no others."""
    table: pd.DataFrame
    """One row a completed run, as `cost_table` returns it; with `steps_to_target` and
    `time_to_target_s` where a run recorded them, at the learning rate that counts."""
    reaches: pd.DataFrame | None
    """One row a run, of one target and one learning rate a batch; None: nothing was reached. With
    the geometry of each run where `is_program`."""
    optimizer: str | None = None
    host_memory_gib: float = math.nan
    """Memory that all devices share, of a processor; NaN where devices have their own."""
    device_memory_gib: float = math.nan
    """Memory of each device: a limit that emulated a smaller one, else a CUDA device's own; NaN
    where devices share the host's, or it is not known."""
    out_of_memory: list[tuple[int, int, int]] = field(default_factory=list)
    """Geometries of runs that ended so."""
    is_sharded: bool = False
    """Whether devices share what a model takes, so that more of them need less memory each."""
    is_program: bool = False
    """Whether a program of others trained: its cuts have steps to the target of their own each."""
    warnings: list[str] = field(default_factory=list)
    target_warnings: list[str] = field(default_factory=list)
    """Global batches without the target."""
    runs: pd.DataFrame = field(default_factory=pd.DataFrame)
    """Rows of `Cells.runs` behind it."""
    same_sweeps: pd.DataFrame = field(default_factory=pd.DataFrame)
    """All runs of their sweeps."""
    fitted_memory: MemoryModel | None = None
    """The memory model, where it is there already."""

    @property
    def target_loss(self) -> float:
        """The target; NaN where nothing was reached, or a table does not say it."""
        if self.reaches is None or "target_loss" not in self.reaches:
            return math.nan
        return float(self.reaches["target_loss"].iloc[0])

    @property
    def rates_tried(self) -> int:
        """Number of learning rates at which the runs were trained, or of the most of one batch."""
        if self.reaches is None:
            return 0
        columns = ["learning_rate", "n_learning_rates"]
        rates = self.reaches.reindex(columns=columns).apply(pd.to_numeric)
        return int(np.nanmax([rates["learning_rate"].nunique(), rates["n_learning_rates"].max()]))

    @cached_property
    def step_time_table(self) -> pd.DataFrame:
        """`table`, with the time in `step_time_s` that an optimizer step adds to a training.

        With a target it is `time_to_target_s` over `steps_to_target` where `FEWEST` runs of a cut
        recorded them, or all of its runs with a time (`is_recorded`); else `mean_step_time_s`, and
        the median only where a run has no mean. Without a target it is the median step.
        """
        table = self.table.assign(is_recorded=False)
        if self.reaches is None:
            return table
        names = ("time_to_target_s", "steps_to_target", "mean_step_time_s")
        time, steps, mean = (pd.to_numeric(column_of(table, n)).astype(float) for n in names)
        to_target, mean = time / steps, mean.fillna(table["step_time_s"])
        cuts = [table[name] for name in FACTORS]
        n, n_timed = (figure.groupby(cuts).transform("count") for figure in (to_target, mean))
        is_recorded = n.gt(0) & (n.ge(FEWEST) | n.eq(n_timed))
        pace = to_target.where(is_recorded, to_target.fillna(mean))
        return table.assign(step_time_s=pace, is_recorded=is_recorded)

    @cached_property
    def memory(self) -> MemoryModel | None:
        """The memory model; None where no run has a figure."""
        with suppress(AnalysisError):
            return self.fitted_memory or fit_memory(self.table, is_sharded=self.is_sharded)
        return None

    @cached_property
    def step_time(self) -> StepTimeModel | None:
        """The step-time model; None where no run has a valid time."""
        with suppress(AnalysisError):
            return fit_step_time(self.step_time_table)
        return None


def gather(dirs: list[Path], target_loss: float | None = None) -> list[Basis]:
    """Load sweeps, and sort their runs by model, machine and settings.

    Parameters
    ----------
    dirs : list of Path
        Sweep folders.
    target_loss : float, optional
        Target; by default the hardest that `choose_targets` finds.

    Returns
    -------
    list of Basis
        One for each group of runs that may be compared; those without a completed run are left out.

    Raises
    ------
    RecordError
        If a folder holds no runs.
    AnalysisError
        If no run was completed.
    """
    refuse_trials(dirs)
    tables = load(*dirs, columns={"steps": (), "ranks": ()})
    all_cells = find_cells(tables.runs)
    cells = without_shorter_horizons(all_cells, runs_by_horizon(all_cells)[0])
    bases = bases_of(cells, tables, target_loss)
    if n_shorter := len(all_cells.runs) - len(cells.runs):
        left_out = (
            f"{count_text(n_shorter, 'run')} of shorter horizons are left out: the longest one has "
            "runs of all their batches, rates and seeds"
        )
        bases = [replace(basis, warnings=[left_out, *basis.warnings]) for basis in bases]
    if not bases:
        counts = ", ".join(f"{n} {s}" for s, n in cells.runs["status"].value_counts().items())
        raise AnalysisError(
            f"a recommendation needs completed runs, and of these none is: {counts}"
        )
    return bases


def bases_of(
    cells: Cells,
    tables: Tables,
    target_loss: float | None = None,
    reaches: pd.DataFrame | None = None,
    models: Mapping[int, MemoryModel] | None = None,
) -> list[Basis]:
    """Sort runs by model, machine and settings.

    `reaches`, and `models` (`memory_models`), spare computing them again.
    """
    notes: list[str] = []
    if reaches is None or reaches.empty:
        reaches, notes = _reaches(cells, tables, target_loss)
    groups = cost_groups(cells)
    loss_groups = pd.DataFrame({"label": [""], "cells": [tuple(cells.table.index)]})
    if reaches is not None:
        loss_groups = curve_groups(cells)
    bases = []
    # What never completed, such as a version of one's model that failed, has nothing to say.
    for number, table in cost_table(cells, groups).groupby("group"):
        runs = cells.runs[cells.runs["cell"].isin(groups.index[groups["group"].eq(number)])]
        is_here = [bool(table["cell"].isin(of).any()) for of in loss_groups["cells"]]
        labels = loss_groups["label"][is_here]
        for group, label in labels.items():
            names = [str(table["group_label"].iloc[0]), str(label) if len(labels) > 1 else ""]
            basis = _basis_of(
                ", ".join(filter(None, names)),
                table,
                None if reaches is None else reaches[reaches["group"].eq(int(str(group)))],
                runs,
                notes,
            )
            memory = (models or {}).get(int(str(number)))
            bases.append(replace(basis, same_sweeps=cells.runs, fitted_memory=memory))
    return bases


def _reaches(
    cells: Cells, tables: Tables, target_loss: float | None
) -> tuple[pd.DataFrame | None, list[str]]:
    """Return steps to the target, and why there are none."""
    why: object = "no target was reached by every batch"
    try:
        targets = None if target_loss is None else [target_loss]
        reaches = steps_to_target(curves_of(cells, tables), targets)
    except AnalysisError as error:
        if target_loss is not None:
            raise
        why = error
    else:
        if len(reaches):
            return reaches, []
    return None, [f"steps to a target are not identified: {why}"]


def more_than_tensors(runs: pd.DataFrame) -> list[str]:
    """Warn where the memory limit counts a process and the figures count its tensors."""
    taken, allocated = (
        pd.to_numeric(column_of(runs, name)).astype(float)
        for name in ("peak_taken_gib", "peak_allocated_gib")
    )
    times = (taken / allocated).max()
    text = (
        f"memory is that of tensors, and the limit counts all that a process takes, here up to "
        f"{times:.2g} times as much: beyond what was measured, less fits than predicted"
    )
    return [text] if times > 1 else []


def _basis_of(
    label: str,
    table: pd.DataFrame,
    reaches: pd.DataFrame | None,
    runs: pd.DataFrame,
    notes: Sequence[str],
) -> Basis:
    warnings, target_warnings = [*notes], list[str]()
    is_program = bool(column_of(runs, "engine.name").eq(PROGRAMS).any())
    if reaches is not None and len(reaches):
        hardest, target_warnings = _at_hardest_target(reaches)
        rated = hardest[hardest["learning_rate"].notna()]
        optima = best_learning_rates(rated, STEPS) if len(rated) else None
        # Of one global batch nothing is compared that a learning rate could favour.
        several = hardest["global_batch_size"].nunique() > 1
        untuned = tuning_warning(hardest, optima) if several else None
        reaches = at_best_learning_rate(hardest, optima=optima)
        # The runs of all cuts at the chosen learning rates; `reaches` has one run a trajectory.
        keys, names = ["global_batch_size", "learning_rate"], ["sweep_dir", "run_id"]
        rates = reaches[[*keys, "tuned", "edge", "n_learning_rates"]].drop_duplicates()
        all_cuts = hardest.merge(rates, on=keys).merge(runs[[*names, *FACTORS]], on=names)
        # What the runs themselves took to the target.
        reached = all_cuts[all_cuts["outcome"].eq("reached")].astype(dict.fromkeys(names, object))
        recorded = reached[[*names, "steps_to_target", "time_to_target_s"]]
        table = table.merge(recorded, on=names, how="left")
        warnings += filter(None, [untuned])
        target_warnings += _without_target(reaches)
        reaches = _one_rate(all_cuts if is_program else reaches)
    memory_gib = device_memory(runs)
    if column_of(runs, LIMITED).notna().any() and not math.isnan(memory_gib):
        warnings += [
            f"these runs had a device of {memory_gib:g} GiB, emulated by device.memory_limit_gib, "
            "and this is what fits it; for a larger device give --memory-gib",
            *more_than_tensors(runs),
        ]
    oom = runs.loc[runs["status"].eq("oom"), list(FACTORS)].dropna().drop_duplicates()
    host_gib = pd.to_numeric(column_of(runs, "environment.memory_gib"))
    on_cpu = runs["device_type"].eq("cpu").all()
    optimizers = column_of(runs, "optimizer.name").dropna().unique()
    return Basis(
        label=label,
        table=table,
        reaches=reaches if reaches is not None and len(reaches) else None,
        optimizer=str(optimizers[0]) if len(optimizers) == 1 else None,
        host_memory_gib=float(host_gib.min()) if on_cpu else math.nan,
        device_memory_gib=memory_gib,
        out_of_memory=[(int(d), int(m), int(a)) for d, m, a in oom.to_numpy()],
        is_sharded=is_sharded(runs),
        is_program=is_program,
        warnings=warnings,
        target_warnings=target_warnings,
        runs=runs,
    )


def _at_hardest_target(reaches: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Keep the lowest target that most runs of one batch and rate reached; warn of lower ones."""
    by = [reaches[name] for name in ("target_loss", "global_batch_size", "learning_rate")]
    share = reaches["outcome"].eq("reached").groupby(by, dropna=False).mean()
    reached = share.index[share > 0.5].get_level_values("target_loss")
    chosen = reached.min() if len(reached) else reaches["target_loss"].min()
    missed = sorted(reaches.loc[reaches["target_loss"] < chosen, "target_loss"].unique())
    names = list_text(f"{target:.4g}" for target in missed)
    lower = [
        f"in no global batch most runs reached a held-out loss of {names}: the choice is for "
        f"{chosen:.4g}"
    ]
    return reaches[reaches["target_loss"] == chosen], lower if missed else []


def _one_rate(reaches: pd.DataFrame) -> pd.DataFrame:
    """Of a batch whose runs all missed the target keep one run a seed, without a learning rate."""
    missed = ~reaches["outcome"].eq("reached").groupby(reaches["global_batch_size"]).transform(
        "any"
    )
    is_repeat = reaches.duplicated([name for name in _TRAINING_COLUMNS if name in reaches])
    kept = reaches[~(missed & is_repeat)]
    return kept.assign(learning_rate=kept["learning_rate"].mask(missed.reindex(kept.index)))


def _without_target(reaches: pd.DataFrame) -> list[str]:
    """Warn of global batches without the target."""
    outcomes = reaches["outcome"].eq("reached").groupby(reaches["global_batch_size"])
    return [
        f"no run of global batch {batch} reached a held-out loss of "
        f"{reaches['target_loss'].iloc[0]:.4g} ({count_text(len(reached), 'run')}): it is left out "
        "of the choice"
        for batch, reached in outcomes
        if not reached.any()
    ]
