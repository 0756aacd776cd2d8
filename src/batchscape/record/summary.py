"""Figures of one run, computed from its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from batchscape.record import noise_scale
from batchscape.record.figures import COLUMNS, FIGURES, Reduction

FINAL_FRACTION = 0.1
"""Share of the samples, at the end of a run, that `final_loss` averages over."""


def counts_tokens(config: Mapping[str, Any]) -> bool:
    """Whether the labels of a run are tokens.

    Labels of `class` and `other` are not; a program decides itself what it counts as tokens.

    Parameters
    ----------
    config : mapping
        Content of `config.json`.
    """
    data = config["data"] or {}
    is_program = config["config"]["engine"]["name"] == "command"
    return is_program or data.get("task") not in {"class", "other"}


def summarise(
    steps: pd.DataFrame, evals: pd.DataFrame, ranks: pd.DataFrame, data_parallel_size: int
) -> dict[str, Any]:
    """Compute the figures of one run.

    Parameters
    ----------
    steps, evals, ranks : DataFrame
        Rows of one run, with the columns of `record.figures`.
    data_parallel_size : int
        Data-parallel ranks of the run.

    Returns
    -------
    dict
        One value for each name in `FIGURES`; None where it cannot be computed.
    """
    figures: dict[str, Any] = dict.fromkeys(FIGURES)
    if len(steps):
        figures |= _reduce_columns("steps", steps, _OVER_ALL_STEPS)
        figures |= _times(steps, data_parallel_size)
        figures["final_loss"] = _final_loss(steps)
        figures["gradient_noise_scale"] = noise_scale.estimate(steps)
    if len(evals):
        figures |= _reduce_columns("evals", evals)
    if len(ranks):
        latest = ranks[ranks["attempt"] == ranks["attempt"].max()]
        figures |= _reduce_columns("ranks", latest)
        if noise_scale.objective_depends_on_batch(figures["not_invariant"]):
            figures["gradient_noise_scale"] = None
        figures |= _hardware_use(steps, latest, figures["samples_per_s"], figures["peak_tflops"])
    return figures


_REDUCTIONS: dict[Reduction, Callable[[Any], Any]] = {
    "last": lambda values: values.iloc[-1],
    "sum": lambda values: values.sum(min_count=1),
    "median": lambda values: values.median(),
    "max": lambda values: values.max(),
    "min": lambda values: values.min(skipna=False),
    "any": lambda values: bool(values.any()) if values.notna().any() else None,
    "first": lambda values: next(iter(values.dropna()), None),
    "each": lambda values: "; ".join(sorted(values.dropna().unique())) or None,
}
"""Reductions of the rows of a column."""
_OVER_ALL_STEPS = _REDUCTIONS.keys() - {"median"}
"""Reductions of steps, but for that of the measured ones."""


def _reduce_columns(
    table: str, rows: pd.DataFrame, reductions: Collection[Reduction] = _REDUCTIONS.keys()
) -> dict[str, Any]:
    """Compute the figures of single columns that are declared with one of these reductions."""
    figures = {}
    for name, column in COLUMNS[table].items():
        figure = column.figure
        if figure is not None and figure.reduction in reductions:
            value = _REDUCTIONS[figure.reduction](rows[name])
            if column.dtype != "string" and figure.reduction != "any":
                # A median of counts need not be a whole number.
                is_count = column.dtype != "Float64" and figure.reduction != "median"
                value = int(value) if is_count and not pd.isna(value) else _to_float(value)
            figures[figure.name or name] = value
    return figures


def _final_loss(steps: pd.DataFrame) -> float | None:
    samples = steps["samples"].iloc[-1]
    if pd.isna(samples):
        return None
    # A program may count samples alone, which then have equal weights.
    counts = steps["samples" if steps["tokens"].isna().any() else "tokens"]
    labels = counts.diff().fillna(counts)
    final = steps["samples"] > (1 - FINAL_FRACTION) * float(samples)
    return _to_float((steps["loss"] * labels)[final].sum(skipna=False) / labels[final].sum())


def _times(steps: pd.DataFrame, data_parallel_size: int) -> dict[str, Any]:
    step_time_s, gap_s = _floats(steps["step_time_s"]), _floats(steps["gap_s"])
    # Sampling the noise scale takes time, with some geometries more than with others.
    is_measured = ~_is_warm_up(steps) & steps["small_batch_size"].isna().to_numpy()
    if np.isnan(step_time_s[is_measured] if is_measured.any() else step_time_s).all():
        return {}
    if not is_measured.any():
        return {"measured_optimizer_steps": 0}
    # The last stage of a ramp counts: steps of another global batch take another time.
    batch = _floats(steps["global_batch_size"])
    is_last = is_measured & (batch == batch[-1])
    # A program may log every n-th step: a row has the samples of n steps, and the time of one.
    is_timed = is_measured & ~np.isnan(step_time_s)
    steps_of_row = _increments(steps["optimizer_step"])[is_timed]
    total_s = float(np.nansum(step_time_s[is_timed] * steps_of_row))
    wait_s = _sum(_floats(steps["core_wait_s"])[is_timed] * steps_of_row)
    tokens, samples = (
        float(_increments(steps[name])[is_timed].sum()) for name in ("tokens", "samples")
    )
    if not math.isfinite(samples):
        raise ValueError("a row has a time and no samples")
    is_followed = is_measured & ~np.isnan(gap_s)
    gaps_s, stepping_s = _sum(gap_s[is_followed]), float(np.nansum(step_time_s[is_followed]))
    rates = {
        "gap_pct": 100 * gaps_s / (gaps_s + stepping_s),
        "tokens_per_s": tokens / total_s,
        "samples_per_s": samples / total_s,
        "tokens_per_s_per_device": tokens / total_s / data_parallel_size,
        "core_wait_pct": 100 * wait_s / total_s,
    }
    figures = _reduce_columns("steps", steps[is_last], {"median"})
    figures["measured_optimizer_steps"] = int(is_measured.sum())
    return figures | {name: _to_float(rate) for name, rate in rates.items()}


def _hardware_use(
    steps: pd.DataFrame,
    ranks: pd.DataFrame,
    samples_per_s: float | None,
    peak_tflops: float | None,
) -> dict[str, Any]:
    """Compute FLOP/s, power and energy of the devices; `ranks` are the rows of one attempt."""
    figures: dict[str, Any] = {}
    # Ranks may share a CUDA device, while each CPU rank is a device; machines count from 0.
    is_shared = ranks["device"].str.startswith("cuda").fillna(False)
    device = ranks["device"].where(is_shared, ranks["rank"].astype("string"))
    # Ranks that share a device report its energy once.
    by_device = ranks.groupby([ranks["node"].fillna(0), device], sort=False, dropna=False)
    energies_j = by_device["energy_j"].max()
    flops = _to_float(ranks["model_flops_per_sample"].max())
    if flops is not None and samples_per_s is not None:
        attained = flops * samples_per_s / len(energies_j) / 1e12
        figures["model_tflops_per_s_per_device"] = attained
        if peak_tflops:
            figures["mfu_pct"] = 100 * attained / peak_tflops
    energy_j = _to_float(energies_j.sum(skipna=False))
    attempt = steps["attempt"].eq(ranks["attempt"].iloc[0]).to_numpy(dtype=bool, na_value=False)
    is_measured = attempt & ~_is_warm_up(steps)
    if energy_j is not None and is_measured.any():
        # Energy is counted by attempt, so that only steps of the same attempt count.
        tokens = np.nansum(_increments(steps["tokens"])[is_measured])
        times_s = (np.nansum(_floats(steps[n])[is_measured]) for n in ("step_time_s", "gap_s"))
        figures["power_w"] = energy_j / float(sum(times_s))
        figures["energy_j_per_token"] = energy_j / float(tokens)
    return figures


def _floats(column: pd.Series[Any]) -> NDArray[np.float64]:
    """Return the numbers of a column, NaN where one is missing."""
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def _is_warm_up(steps: pd.DataFrame) -> NDArray[np.bool_]:
    return steps["warmup"].to_numpy(dtype=bool, na_value=True)


def _increments(counter: pd.Series[Any]) -> NDArray[np.float64]:
    """Return what a counter grew by since the row before; all that it counts where none did."""
    counts = _floats(counter)
    increments = np.diff(counts, prepend=np.nan)
    return np.where(np.isnan(increments), counts, increments)


def _sum(values: NDArray[np.float64]) -> float:
    """Add the values that are there; NaN where none is."""
    return math.nan if np.isnan(values).all() else float(np.nansum(values))


def _to_float(value: Any) -> float | None:  # noqa: ANN401  (a pandas scalar, perhaps NA)
    """Return a float that JSON can carry; None stands for missing, NaN and infinity."""
    if value is None or pd.isna(value) or math.isinf(value):
        return None
    return float(value)
