"""Figures of one run, computed once from its rows when it is sealed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from pandas.core.groupby import DataFrameGroupBy

from batchscape.record import noise_scale

__all__ = [
    "FINAL_FRACTION",
    "OF_TOKENS",
    "SUMMARY",
    "counts_tokens",
    "summarise",
]

FINAL_FRACTION = 0.1
"""Share of the samples, at the end of a run, that `final_loss` averages over."""

SUMMARY: dict[str, str] = {
    "optimizer_steps": "optimizer steps done",
    "samples": "training samples seen",
    "tokens": "labels seen, padding excluded",
    "final_loss": "training loss over the last tenth of the samples, weighted by labels",
    "final_eval_loss": "held-out loss of the last evaluation",
    "final_eval_accuracy": "held-out accuracy of the last evaluation; classification only",
    "train_time_s": "time in optimizer steps, evaluation and checkpoints excluded",
    "measured_optimizer_steps": "optimizer steps behind times: no warm-up, no sampled noise; "
    "null: none is logged",
    "step_time_s": "median time of a measured optimizer step, of a ramp's last global batch",
    "step_time_p10_s": "10th percentile of the same",
    "step_time_p90_s": "90th percentile of the same",
    "data_s": "median time of waiting for samples, a measured optimizer step",
    "forward_backward_s": "median time in forward and backward",
    "exchange_s": "median time of gradient exchange that backward did not hide, rank 0's wait for "
    "the slowest rank included",
    "optimizer_s": "median time of clipping, update and averaging of weights",
    "exchange_span_s": "median time from the first bucket exchanged until all are back",
    "gap_pct": "share of the time on the wall between measured optimizer steps: in no step time, "
    "rate or MFU",
    "tokens_per_s": "tokens over the time in measured optimizer steps, all devices; "
    "null where samples are no sequences",
    "samples_per_s": "samples over the time in measured optimizer steps, all devices",
    "tokens_per_s_per_device": "the same tokens a second, over data_parallel_size",
    "model_tflops_per_s_per_device": "operations of the model a second and device, in 10^12",
    "mfu_pct": "model FLOP/s of a device over its peak, in percent",
    "peak_tflops": "peak of a device that mfu_pct refers to, minimum over ranks",
    "peak_source": "where that peak comes from",
    "attention_kernel": "kernels of scaled_dot_product_attention; null: none",
    "power_w": "energy over time of measured optimizer steps and gaps, sum over devices; CUDA only",
    "energy_j_per_token": "the same energy over their tokens, all devices; CUDA only",
    "skipped_optimizer_steps": "updates left out, a gradient having overflowed in float16",
    "gradient_noise_scale": "gradient noise scale in samples, over all sampled steps of the run",
    "not_invariant": "why decompositions may train unlike one another; null where they may not",
    "exchanged_bytes": "median gradient bytes a rank exchanged, an optimizer step",
    "involuntary_switches": "times the system took the core away, all measured optimizer steps",
    "core_wait_pct": "share of the measured step time in which rank 0 was ready and had no core",
    "processor_time_s": "median of the steps' processor_time_s, measured ones alone; CPU only",
    "peak_allocated_gib": "peak of allocated memory, maximum over ranks",
    "peak_reserved_gib": "peak of reserved memory, maximum over ranks; CUDA only",
    "allocated_after_model_gib": "allocated memory after the model, maximum over ranks",
    "peak_allocated_first_backward_gib": "peak up to the first update, maximum over ranks",
    "peak_allocated_first_optimizer_step_gib": "peak in the first update, maximum over ranks",
    "peak_allocated_steady_gib": "peak of a later optimizer step, maximum over ranks",
    "device_used_gib": "device memory as NVML sees it, maximum over ranks",
    "workspace_gib": "part of the peaks that cuBLAS works in, maximum over ranks; CUDA only",
    "allocator_retries": "times that the allocator gave back cached memory, all ranks; CUDA only",
    "uss_gib": "resident memory, shared pages excluded, maximum over ranks",
    "peak_rss_gib": "highest resident memory, maximum over ranks",
    "peak_taken_gib": "private memory above that before the model, maximum over ranks; CPU only",
    "startup_s": "process start to first step, evaluation and compile apart, maximum over ranks",
    "memory_probe_s": "part of it in the memory probe, maximum over ranks",
    "clock_mhz": "clock right after the last step, minimum over ranks",
    "throttled": "whether heat or the hardware's protection held a rank's clock down; CUDA only",
    "power_capped": "whether the power limit held the clock of a rank down; CUDA only",
    "device_limits": "what somebody set devices below their defaults, power limit and clocks; "
    "CUDA only",
    "foreign_processes": "processes outside of the run that computed on a device of it, maximum "
    "over ranks; CUDA only",
    "compile_s": "time of the first compilation, in no step, maximum over ranks",
    "checkpoint_s": "time in checkpoints of the last attempt, maximum over ranks",
    "evaluation_s": "time in evaluations, on rank 0, all attempts",
}
"""Columns of the summary and their definitions."""

OF_TOKENS = ("tokens_per_s", "tokens_per_s_per_device", "energy_j_per_token")
"""Figures that a run lacks whose samples are no sequences of tokens."""

_OVER_RANKS = (
    "peak_allocated_gib",
    "peak_reserved_gib",
    "allocated_after_model_gib",
    "peak_allocated_first_backward_gib",
    "peak_allocated_first_optimizer_step_gib",
    "peak_allocated_steady_gib",
    "device_used_gib",
    "workspace_gib",
    "uss_gib",
    "peak_rss_gib",
    "peak_taken_gib",
    "startup_s",
    "memory_probe_s",
    "compile_s",
    "checkpoint_s",
)
"""Figures that are the maximum over the ranks of the last attempt."""


def counts_tokens(config: Mapping[str, Any]) -> bool:
    """Whether what a run counts as tokens may be called so.

    A sample of `class` or `other` has a target, which is no token; what a program of others counts
    is its own.

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
        Rows of one run, with the columns of `record.columns`.
    data_parallel_size : int
        Data-parallel ranks of the run.

    Returns
    -------
    dict
        One value for each name in `SUMMARY`; None where there is nothing to compute it from.
    """
    figures: dict[str, Any] = dict.fromkeys(SUMMARY)
    if len(steps):
        figures |= _progress(steps) | _times(steps, data_parallel_size)
        figures["gradient_noise_scale"] = noise_scale.estimate(steps)
    if len(evals):
        last = evals.iloc[-1]
        figures["final_eval_loss"] = _number(last["eval_loss"])
        figures["final_eval_accuracy"] = _number(last["eval_accuracy"])
        figures["evaluation_s"] = _number(evals["evaluation_s"].sum(min_count=1))
    if len(ranks):
        latest = ranks[ranks["attempt"] == ranks["attempt"].max()]
        figures |= {name: _number(latest[name].max()) for name in _OVER_RANKS}
        figures["clock_mhz"] = _number(latest["clock_mhz"].min())
        for reason in ("throttled", "power_capped"):
            told = latest[reason].dropna()
            figures[reason] = bool(told.any()) if len(told) else None
        limits = latest["device_limits"].dropna().unique()
        figures["device_limits"] = "; ".join(sorted(map(str, limits))) or None
        figures["foreign_processes"] = _whole(latest["foreign_processes"].max())
        figures["allocator_retries"] = _whole(latest["allocator_retries"].sum(min_count=1))
        kernels = latest["attention_kernel"].dropna()
        figures["attention_kernel"] = str(kernels.iloc[0]) if len(kernels) else None
        labels = latest["not_invariant"].dropna()
        figures["not_invariant"] = str(labels.iloc[0]) if len(labels) else None
        if noise_scale.has_no_noise_scale(figures["not_invariant"]):
            figures["gradient_noise_scale"] = None
        figures |= _hardware_use(steps, latest, figures["samples_per_s"])
    return figures


def _progress(steps: pd.DataFrame) -> dict[str, Any]:
    last = steps.iloc[-1]
    # A program that is not ours may count samples alone; they then weigh alike.
    counted = steps["samples" if steps["tokens"].isna().any() else "tokens"]
    labels = counted.diff().fillna(counted)
    weighted = None
    if not pd.isna(last["samples"]):
        final = steps["samples"] > (1 - FINAL_FRACTION) * float(last["samples"])
        weighted = (steps["loss"] * labels)[final].sum(skipna=False) / labels[final].sum()
    return {
        "optimizer_steps": _whole(last["optimizer_step"]),
        "samples": _whole(last["samples"]),
        "tokens": _whole(last["tokens"]),
        "train_time_s": _number(last["train_time_s"]),
        "final_loss": _number(weighted),
        "skipped_optimizer_steps": _whole(steps["skipped"].sum()),
    }


def _times(steps: pd.DataFrame, data_parallel_size: int) -> dict[str, Any]:
    # The noise scale costs a step a little, and more with some geometries than with others.
    warm_up = steps["warmup"].fillna(value=True).astype(bool)
    measured = steps[~warm_up & steps["small_batch_size"].isna()]
    if (steps if measured.empty else measured)["step_time_s"].isna().all():
        return {}
    if measured.empty:
        return {"measured_optimizer_steps": 0}
    # Steps of another global batch take another time: a ramp's last stage names the run.
    last = measured[measured["global_batch_size"] == steps["global_batch_size"].iloc[-1]]
    # A program may log every n-th step: a row has the samples of n steps, and the time of one.
    counts = steps[["optimizer_step", "tokens", "samples"]]
    increments = counts.diff().fillna(counts)
    timed = measured.dropna(subset=["step_time_s"])
    steps_of_row = increments.loc[timed.index, "optimizer_step"].astype(float)
    total_s = float((timed["step_time_s"] * steps_of_row).sum())
    wait_s = _number((timed["core_wait_s"] * steps_of_row).sum(min_count=1))
    done = increments.loc[timed.index].sum(skipna=False)
    tokens = _number(done["tokens"])
    return {
        "measured_optimizer_steps": len(measured),
        "step_time_s": _number(last["step_time_s"].median()),
        "step_time_p10_s": _number(last["step_time_s"].quantile(0.1)),
        "step_time_p90_s": _number(last["step_time_s"].quantile(0.9)),
        "data_s": _number(last["data_s"].median()),
        "forward_backward_s": _number(last["forward_backward_s"].median()),
        "exchange_s": _number(last["exchange_s"].median()),
        "optimizer_s": _number(last["optimizer_s"].median()),
        "exchange_span_s": _number(last["exchange_span_s"].median()),
        "gap_pct": _gap_pct(measured),
        "tokens_per_s": None if tokens is None else tokens / total_s,
        "samples_per_s": float(done["samples"]) / total_s,
        "tokens_per_s_per_device": None
        if tokens is None
        else tokens / total_s / data_parallel_size,
        "exchanged_bytes": _number(last["exchanged_bytes"].median()),
        "involuntary_switches": _whole(measured["involuntary_switches"].sum(min_count=1)),
        "core_wait_pct": None if wait_s is None else 100 * wait_s / total_s,
        "processor_time_s": _number(last["processor_time_s"].median()),
    }


def _gap_pct(measured: pd.DataFrame) -> float | None:
    following = measured.dropna(subset=["gap_s"])
    gaps_s = _number(following["gap_s"].sum(min_count=1))
    if gaps_s is None:
        return None
    return 100 * gaps_s / (gaps_s + float(following["step_time_s"].sum()))


def _hardware_use(
    steps: pd.DataFrame, ranks: pd.DataFrame, samples_per_s: float | None
) -> dict[str, Any]:
    """Compute what the devices attained, and what it took; `ranks` are those of one attempt."""
    figures: dict[str, Any] = {"peak_tflops": _number(ranks["peak_tflops"].min(skipna=False))}
    sources = ranks["peak_source"].dropna().unique()
    figures["peak_source"] = "; ".join(sources) if len(sources) else None
    devices = _devices(ranks)
    flops = _number(ranks["model_flops_per_sample"].max())
    if flops is not None and samples_per_s is not None:
        attained = flops * samples_per_s / len(devices) / 1e12
        figures["model_tflops_per_s_per_device"] = attained
        if figures["peak_tflops"]:
            figures["mfu_pct"] = 100 * attained / figures["peak_tflops"]
    # Ranks that share a device report its energy once.
    energy_j = _number(devices["energy_j"].max().sum(skipna=False))
    attempt = steps[steps["attempt"].eq(ranks["attempt"].iloc[0])]
    measured = attempt[~attempt["warmup"].fillna(value=True).astype(bool)]
    if energy_j is not None and len(measured):
        # Energy is counted by attempt, so its steps are those of the same attempt.
        tokens = steps["tokens"].diff().fillna(steps["tokens"]).loc[measured.index].sum()
        figures["power_w"] = energy_j / float(measured[["step_time_s", "gap_s"]].sum().sum())
        figures["energy_j_per_token"] = energy_j / float(tokens)
    return figures


def _devices(ranks: pd.DataFrame) -> DataFrameGroupBy[Any, Any]:
    """Group ranks by device: ranks may share a CUDA device; each CPU rank is a device.

    Each machine counts its devices from 0.
    """
    shared = ranks["device"].str.startswith("cuda").fillna(value=False)
    device = ranks["device"].where(shared, ranks["rank"].astype("string"))
    return ranks.groupby([ranks["node"].fillna(0), device])


def _whole(value: Any) -> int | None:  # noqa: ANN401  (a pandas scalar, perhaps NA)
    """Return an integer; None stands for missing."""
    return None if pd.isna(value) else int(value)


def _number(value: Any) -> float | None:  # noqa: ANN401  (a pandas scalar, perhaps NA)
    """Return a float that JSON can carry; None stands for missing, NaN and infinity."""
    if value is None or pd.isna(value) or math.isinf(value):
        return None
    return float(value)
