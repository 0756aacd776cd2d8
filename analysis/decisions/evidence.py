"""Runs of one model on one machine: their reaches, times, memory and fits."""

from __future__ import annotations

import math
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
from batchscape.analysis.learning_rate.choice import at_best_learning_rate, tuning_warning
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
        names = ["time_to_target_s", "steps_to_target", "mean_step_time_s"]
        figures = table.reindex(columns=names).apply(pd.to_numeric).astype(float)
        to_target = figures["time_to_target_s"] / figures["steps_to_target"]
        mean = figures["mean_step_time_s"].fillna(table["step_time_s"])
        cuts = [table[name] for name in FACTORS]
        n, n_timed = (figure.groupby(cuts).transform("count") for figure in (to_target, mean))
        is_recorded = n.gt(0) & (n.ge(FEWEST) | n.eq(n_timed))
        pace = to_target.where(is_recorded, to_target.fillna(mean))
        return table.assign(step_time_s=pace, is_recorded=is_recorded)

    @cached_property
    def memory(self) -> MemoryModel | None:
        """The memory model; None where no run has a figure."""
        try:
            return fit_memory(self.table, is_sharded=self.is_sharded)
        except AnalysisError:
            return None

    @cached_property
    def step_time(self) -> StepTimeModel | None:
        """The step-time model; None where no run has a valid time."""
        try:
            return fit_step_time(self.step_time_table)
        except AnalysisError:
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
        msg = f"a recommendation needs completed runs, and of these none is: {counts}"
        raise AnalysisError(msg)
    return bases


def bases_of(
    cells: Cells,
    tables: Tables,
    target_loss: float | None = None,
    reaches: pd.DataFrame | None = None,
) -> list[Basis]:
    """Sort runs by model, machine and settings; `reaches` spares computing them again."""
    note = None
    if reaches is None or reaches.empty:
        reaches, note = _reaches(cells, tables, target_loss)
    table = cost_table(cells)
    groups = cost_groups(cells)
    loss_parts = [(0, "", tuple(cells.table.index))]
    if reaches is not None:
        loss_groups = curve_groups(cells)
        numbers = loss_groups.index.astype(int)
        loss_parts = list(zip(numbers, loss_groups["label"], loss_groups["cells"], strict=True))
    # What never completed, such as a version of one's model that failed, has nothing to say.
    completed_cells = set(cells.runs.loc[cells.runs["status"].eq("completed"), "cell"])
    bases = []
    for number in sorted(table["group"].unique()):
        group_table = table[table["group"] == number]
        group_cells = set(groups.index[groups["group"] == number])
        groups_here = [
            (group, label)
            for group, label, members in loss_parts
            if group_cells & completed_cells & set(members)
        ]
        for group, label in groups_here:
            group_reaches = None if reaches is None else reaches[reaches["group"] == group]
            names = [
                str(group_table["group_label"].iloc[0]),
                str(label) if len(groups_here) > 1 else "",
            ]
            runs = cells.runs[cells.runs["cell"].isin(group_cells)]
            text = ", ".join(filter(None, names))
            basis = _basis_of(text, group_table, group_reaches, runs, [note] if note else [])
            bases.append(replace(basis, same_sweeps=cells.runs))
    return bases


def _reaches(
    cells: Cells, tables: Tables, target_loss: float | None
) -> tuple[pd.DataFrame | None, str | None]:
    try:
        curves = curves_of(cells, tables)
        targets = None if target_loss is None else [target_loss]
        reaches = steps_to_target(curves, targets)
    except AnalysisError as error:
        if target_loss is not None:
            raise
        return None, f"steps to a target are not identified: {error}"
    if reaches.empty:
        return None, "steps to a target are not identified: no target was reached by every batch"
    return reaches, None


def more_than_tensors(runs: pd.DataFrame) -> list[str]:
    """Warn where the memory limit counts a process and the figures count its tensors."""
    columns = ["peak_taken_gib", "peak_allocated_gib"]
    peaks = runs.reindex(columns=columns).apply(pd.to_numeric).astype(float)
    times = float((peaks["peak_taken_gib"] / peaks["peak_allocated_gib"]).max())
    if not times > 1:
        return []
    return [
        f"memory is that of tensors, and the limit counts all that a process takes, here up to "
        f"{times:.2g} times as much: beyond what was measured, less fits than predicted",
    ]


def _basis_of(
    label: str,
    table: pd.DataFrame,
    reaches: pd.DataFrame | None,
    runs: pd.DataFrame,
    warnings: list[str],
) -> Basis:
    target_warnings = list[str]()
    is_program = bool(runs.reindex(columns=["engine.name"])["engine.name"].eq(PROGRAMS).any())
    if reaches is not None and len(reaches):
        hardest, target_warnings = _at_hardest_target(reaches)
        # Of one global batch nothing is compared that a learning rate could favour.
        several = hardest["global_batch_size"].nunique() > 1
        untuned = tuning_warning(hardest) if several else None
        reaches = at_best_learning_rate(hardest)
        # The runs of all cuts at the chosen learning rates; `reaches` has one run a trajectory.
        keys, names = ["global_batch_size", "learning_rate"], ["sweep_dir", "run_id"]
        rates = reaches[[*keys, "tuned", "edge", "n_learning_rates"]].drop_duplicates()
        all_cuts = hardest.merge(rates, on=keys).merge(runs[[*names, *FACTORS]], on=names)
        # What the runs themselves took to the target.
        reached = all_cuts[all_cuts["outcome"].eq("reached")].astype(dict.fromkeys(names, object))
        recorded = reached[[*names, "steps_to_target", "time_to_target_s"]]
        table = table.merge(recorded, on=names, how="left")
        warnings = [*warnings, *([untuned] if untuned else [])]
        target_warnings += _without_target(reaches)
        reaches = _one_rate(all_cuts if is_program else reaches)
    memory_gib = device_memory(runs)
    if runs.reindex(columns=[LIMITED])[LIMITED].notna().any() and not math.isnan(memory_gib):
        warnings = [
            *warnings,
            f"these runs had a device of {memory_gib:g} GiB, emulated by device.memory_limit_gib, "
            "and this is what fits it; for a larger device give --memory-gib",
            *more_than_tensors(runs),
        ]
    oom = runs.loc[runs["status"].eq("oom"), list(FACTORS)].dropna().drop_duplicates()
    on_cpu = runs["device_type"].eq("cpu").all()
    memory = pd.to_numeric(runs.reindex(columns=["environment.memory_gib"]).iloc[:, 0])
    optimizers = runs.reindex(columns=["optimizer.name"]).iloc[:, 0].dropna().unique()
    return Basis(
        label=label,
        table=table,
        reaches=reaches if reaches is not None and len(reaches) else None,
        optimizer=str(optimizers[0]) if len(optimizers) == 1 else None,
        host_memory_gib=float(memory.min()) if on_cpu else np.nan,
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
    target = f"{reaches['target_loss'].iloc[0]:.4g}"
    by_batch = reaches.groupby("global_batch_size")
    reached = reaches["outcome"].eq("reached").groupby(reaches["global_batch_size"]).any()
    warnings = []
    for batch in reached.index[~reached]:
        batch_runs = by_batch.get_group(batch)
        warnings.append(
            f"no run of global batch {batch} reached a held-out loss of {target} ("
            f"{count_text(len(batch_runs), 'run')}): it is left out of the choice"
        )
    return warnings
