"""Where each run ran, and whether its times may be compared."""

from __future__ import annotations

from typing import Any

import pandas as pd

from batchscape.record.summary import BUSY, BUSY_PCT

__all__ = ["known_where"]

_NOT_MEASURED = "no optimizer step was measured: all were warm-up, or sampled the gradient's noise"
_NO_LAUNCH = "no record of how it was launched"
_NO_REASON = "marked as not valid, without a reason"


def known_where(runs: pd.DataFrame) -> pd.DataFrame:
    """Add what tells machines apart, and the validity of times.

    A run that was never launched has no record of its machine. It takes its sweep's, where that
    is one machine.

    Parameters
    ----------
    runs : DataFrame
        One row a run, as `load` returns it.

    Returns
    -------
    DataFrame
        The same rows with `hardware`, `device_type`, `precision`, `timing_valid` and
        `timing_note` (why a launched run's times are not valid; missing where they are).
    """
    runs = runs.reset_index(drop=True)
    valid = _column(runs, "launch.timing_valid").eq(True)
    launched = _column(runs, "launch.world_size").notna()
    ended = ~runs["status"].isin(["rejected", "pending"])
    waited = pd.to_numeric(_column(runs, "core_wait_pct")).astype(float)
    busy = valid & waited.gt(BUSY_PCT)
    note = _column(runs, "launch.timing_invalid_reason").fillna(_NO_REASON)
    note = note.where(~busy, BUSY)
    valid &= ~busy
    unmeasured = valid & pd.to_numeric(_column(runs, "measured_optimizer_steps")).eq(0)
    note = note.where(~unmeasured, _NOT_MEASURED)
    valid &= ~unmeasured
    note = note.where(launched, _NO_LAUNCH).where(~valid & (launched | ended))
    where = {
        "hardware": _hardware(runs),
        "device_type": _column(runs, "device_type"),
        "precision": _precision(runs),
    }
    return runs.assign(
        timing_valid=valid,
        timing_note=note,
        **{name: _fill(column, runs["sweep_dir"]) for name, column in where.items()},
    )


def _column(runs: pd.DataFrame, name: str) -> pd.Series[Any]:
    if name in runs.columns:
        return runs[name].astype(object)
    return pd.Series(None, index=runs.index, dtype=object)


def _precision(runs: pd.DataFrame) -> pd.Series[Any]:
    asked = _column(runs, "engine.precision")
    return _column(runs, "precision").fillna(asked.where(asked != "auto"))


def _hardware(runs: pd.DataFrame) -> pd.Series[Any]:
    """Name the devices that a run was given; a processor with the cores that it could use."""
    columns = ("device_type", "launch.device_model", "environment.cpu.usable_cores")
    rows = zip(*(_column(runs, name) for name in columns), strict=True)
    return pd.Series([_device(*row) for row in rows], index=runs.index, dtype=object)


def _device(device_type: object, model: object, cores: object) -> str | None:
    if not isinstance(model, str):
        return None
    # The same processor lent in parts is not the same machine.
    counted = device_type == "cpu" and isinstance(cores, (int, float)) and cores > 0
    return f"{model}, {cores:g} cores" if counted else model


def _fill(column: pd.Series[Any], sweep: pd.Series[Any]) -> pd.Series[Any]:
    groups = column.groupby(sweep)
    only = groups.transform("first").where(groups.transform("nunique") == 1)
    return column.fillna(only)
