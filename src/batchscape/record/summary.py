"""Figures of one run, computed from its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from batchscape.record import noise_scale
from batchscape.record.figures import COLUMNS, FIGURES, How

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
        figures |= _reduce_columns("steps", steps, "last", "sum") | _times(
            steps, data_parallel_size
        )
        figures["final_loss"] = _final_loss(steps)
        figures["gradient_noise_scale"] = noise_scale.estimate(steps)
    if len(evals):
        figures |= _reduce_columns("evals", evals)
    if len(ranks):
        latest = ranks[ranks["attempt"] == ranks["attempt"].max()]
        figures |= _reduce_columns("ranks", latest)
        if noise_scale.has_no_noise_scale(figures["not_invariant"]):
            figures["gradient_noise_scale"] = None
        figures |= _hardware_use(steps, latest, figures["samples_per_s"], figures["peak_tflops"])
    return figures


_REDUCTIONS: dict[How, Callable[[Any], Any]] = {
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
_NOT_NUMERIC = ("any", "first", "each")
"""Reductions whose results are not numbers."""


def _reduce_columns(table: str, rows: pd.DataFrame, *hows: How) -> dict[str, Any]:
    """Compute the figures of single columns, by the given reductions or by all."""
    figures = {}
    for name, column in COLUMNS[table].items():
        figure = column.figure
        if figure is not None and figure.how in (hows or _REDUCTIONS):
            value = _REDUCTIONS[figure.how](rows[name])
            if figure.how not in _NOT_NUMERIC:
                # A median of counts need not be a whole number.
                is_count = column.dtype != "Float64" and figure.how != "median"
                value = _to_int(value) if is_count else _to_float(value)
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
    # Sampling the noise scale takes time, with some geometries more than with others.
    warm_up = steps["warmup"].fillna(value=True).astype(bool)
    measured = steps[~warm_up & steps["small_batch_size"].isna()]
    if (steps if measured.empty else measured)["step_time_s"].isna().all():
        return {}
    if measured.empty:
        return {"measured_optimizer_steps": 0}
    # The last stage of a ramp counts: steps of another global batch take another time.
    last = measured[measured["global_batch_size"] == steps["global_batch_size"].iloc[-1]]
    # A program may log every n-th step: a row has the samples of n steps, and the time of one.
    counts = steps[["optimizer_step", "tokens", "samples"]]
    increments = counts.diff().fillna(counts)
    timed = measured.dropna(subset=["step_time_s"])
    steps_of_row = increments.loc[timed.index, "optimizer_step"].astype(float)
    total_s = float((timed["step_time_s"] * steps_of_row).sum())
    wait_s = _to_float((timed["core_wait_s"] * steps_of_row).sum(min_count=1))
    done = increments.loc[timed.index].sum(skipna=False)
    tokens = _to_float(done["tokens"])
    following = measured.dropna(subset=["gap_s"])
    gaps_s = _to_float(following["gap_s"].sum(min_count=1))
    stepping_s = float(following["step_time_s"].sum())
    return _reduce_columns("steps", last, "median") | {
        "measured_optimizer_steps": len(measured),
        "step_time_p10_s": _to_float(last["step_time_s"].quantile(0.1)),
        "step_time_p90_s": _to_float(last["step_time_s"].quantile(0.9)),
        "gap_pct": None if gaps_s is None else 100 * gaps_s / (gaps_s + stepping_s),
        "tokens_per_s": None if tokens is None else tokens / total_s,
        "samples_per_s": float(done["samples"]) / total_s,
        "tokens_per_s_per_device": None
        if tokens is None
        else tokens / total_s / data_parallel_size,
        "involuntary_switches": _to_int(measured["involuntary_switches"].sum(min_count=1)),
        "core_wait_pct": None if wait_s is None else 100 * wait_s / total_s,
    }


def _hardware_use(
    steps: pd.DataFrame,
    ranks: pd.DataFrame,
    samples_per_s: float | None,
    peak_tflops: float | None,
) -> dict[str, Any]:
    """Compute FLOP/s, power and energy of the devices; `ranks` are the rows of one attempt."""
    figures: dict[str, Any] = {}
    # Ranks may share a CUDA device, while each CPU rank is a device; machines count from 0.
    shared = ranks["device"].str.startswith("cuda").fillna(value=False)
    device = ranks["device"].where(shared, ranks["rank"].astype("string"))
    devices = ranks.groupby([ranks["node"].fillna(0), device])
    flops = _to_float(ranks["model_flops_per_sample"].max())
    if flops is not None and samples_per_s is not None:
        attained = flops * samples_per_s / len(devices) / 1e12
        figures["model_tflops_per_s_per_device"] = attained
        if peak_tflops:
            figures["mfu_pct"] = 100 * attained / peak_tflops
    # Ranks that share a device report its energy once.
    energy_j = _to_float(devices["energy_j"].max().sum(skipna=False))
    attempt = steps[steps["attempt"].eq(ranks["attempt"].iloc[0])]
    measured = attempt[~attempt["warmup"].fillna(value=True).astype(bool)]
    if energy_j is not None and len(measured):
        # Energy is counted by attempt, so that only steps of the same attempt count.
        tokens = steps["tokens"].diff().fillna(steps["tokens"]).loc[measured.index].sum()
        figures["power_w"] = energy_j / float(measured[["step_time_s", "gap_s"]].sum().sum())
        figures["energy_j_per_token"] = energy_j / float(tokens)
    return figures


def _to_int(value: Any) -> int | None:  # noqa: ANN401  (a pandas scalar, perhaps NA)
    """Return an integer; None stands for missing."""
    return None if pd.isna(value) else int(value)


def _to_float(value: Any) -> float | None:  # noqa: ANN401  (a pandas scalar, perhaps NA)
    """Return a float that JSON can carry; None stands for missing, NaN and infinity."""
    if value is None or pd.isna(value) or math.isinf(value):
        return None
    return float(value)
