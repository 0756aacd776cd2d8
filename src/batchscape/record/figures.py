"""The figures of a run, each declared once with its meaning, its measurement and its uses.

A column is measured in every optimizer step, in every evaluation, or by every rank. A figure is one
value of a run, in the summary of `status.json`; most are reductions of one column. From
here follow the types of the rows, the summary (`record.summary`), which figures are times and may
not count (`record.timing`), the curves in W&B (`tracking.run`), the columns of the comparison
(`analysis.comparison`), and docs/columns.md (`python docs/record_reference.py`).

A new figure is one entry, and the line that measures it. Its name ends in its unit: `_s`, `_gib`,
`_pct`, `_w`, `_mhz`, or none for a count or a loss.

Types are pandas' nullable ones: a missing number stays missing, and an integer stays one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

RESIDENT = "process tree (uss)"
"""`memory_method` of a program on a CPU, whose resident memory stands for what it allocated."""

FigureKind = Literal["loss", "memory", "time", ""]
Reduction = Literal["", "last", "sum", "median", "max", "min", "any", "first", "each"]


@dataclass(frozen=True)
class Figure:
    """One value of a run."""

    meaning: str
    """Its definition, with the steps or ranks that it covers."""
    reduction: Reduction = ""
    """Reduction of its column, over the last attempt of every rank, or over all evaluations or
    optimizer steps; of steps `median` covers the measured ones of the last global batch; `min` is
    missing where one value is; empty: `record.summary` computes it."""
    kind: FigureKind = ""
    """A loss depends on the trajectory alone, so that repeats of one count once; a time counts only
    where it was measured on a free machine. Figures of no kind are in no comparison of cells."""
    name: str = ""
    """Its name; empty: that of its column."""
    label: str = ""
    """Its name in the comparison; empty: the comparison does not show it."""
    better: Literal["lower", "higher"] = "lower"
    """Which values are better, for the comparison."""

    def __post_init__(self) -> None:
        """Refuse a reduction that `record.summary` does not have."""
        if self.reduction not in get_args(Reduction):
            raise ValueError(
                f"a figure reduces its column by one of: {', '.join(get_args(Reduction)[1:])}; "
                f"given {self.reduction!r} ({self.meaning}). Choose one of these, or add the "
                "reduction to `record/figures.py` and `record/summary.py`"
            )


class FigureColumn(NamedTuple):
    """One column of the rows."""

    dtype: str
    """pandas dtype."""
    meaning: str
    """Its meaning, with its scope."""
    figure: Figure | None = None
    """Figure of a run that follows from the column."""
    curve: str = ""
    """Its curve in W&B; the part before the slash is a section of panels. Empty: none."""


_PROGRESS = {
    "optimizer_step": FigureColumn(
        "Int64",
        "optimizer steps done, from 1 (0: before the first)",
        Figure("optimizer steps done", "last", name="optimizer_steps"),
    ),
    "samples": FigureColumn(
        "Int64", "training samples seen so far", Figure("training samples seen", "last")
    ),
    "tokens": FigureColumn(
        "Int64",
        "loss-bearing labels seen so far, padding excluded",
        Figure("labels seen, padding excluded", "last"),
    ),
    "train_time_s": FigureColumn(
        "Float64",
        "time spent in optimizer steps so far, evaluation excluded",
        Figure("time in optimizer steps, evaluation and checkpoints excluded", "last", "time"),
    ),
}

_ATTEMPT = "which start of the run wrote the row, from 0; -1: the run from whose state it began"

COLUMNS: dict[str, dict[str, FigureColumn]] = {
    "steps": {
        **_PROGRESS,
        "attempt": FigureColumn("Int64", _ATTEMPT),
        "global_batch_size": FigureColumn(
            "Int64", "samples of the step, over all ranks", curve="data/global_batch_size"
        ),
        "loss": FigureColumn(
            "Float64",
            "sum of the losses over the global batch / number of labels",
            Figure(
                "training loss over the last tenth of the samples, weighted by labels",
                "",
                "loss",
                name="final_loss",
                label="final loss",
            ),
            "loss/train",
        ),
        "learning_rate": FigureColumn(
            "Float64", "learning rate of the step", curve="optimizer/learning_rate"
        ),
        "gradient_norm": FigureColumn(
            "Float64", "norm of the whole gradient before clipping", curve="gradient/norm"
        ),
        "step_time_s": FigureColumn(
            "Float64",
            "time of the optimizer step, on rank 0",
            Figure(
                "median time of a measured optimizer step, of a ramp's last global batch",
                "median",
                "time",
                label="step time",
            ),
            "time/step_time_s",
        ),
        "data_s": FigureColumn(
            "Float64",
            "part of step_time_s spent on fetching samples",
            Figure(
                "median time of waiting for samples, a measured optimizer step", "median", "time"
            ),
            "time/data_s",
        ),
        "forward_backward_s": FigureColumn(
            "Float64",
            "part of step_time_s spent in forward and backward",
            Figure("median time in forward and backward", "median", "time"),
            "time/forward_backward_s",
        ),
        "exchange_s": FigureColumn(
            "Float64",
            "part of step_time_s: gradient exchange that backward did not hide, rank 0's"
            " wait for the slowest rank included",
            Figure(
                "median time of gradient exchange that backward did not hide, rank "
                "0's wait for the slowest rank included",
                "median",
                "time",
            ),
            "time/exchange_s",
        ),
        "optimizer_s": FigureColumn(
            "Float64",
            "part of step_time_s: clipping, update, averaging of weights",
            Figure("median time of clipping, update and averaging of weights", "median", "time"),
            "time/optimizer_s",
        ),
        "exchange_span_s": FigureColumn(
            "Float64",
            "from the first bucket given to the exchange until all are back; overlaps",
            Figure(
                "median time from the first bucket exchanged until all are back", "median", "time"
            ),
            "time/exchange_span_s",
        ),
        "gap_s": FigureColumn(
            "Float64",
            "from the end of the step before to the begin of this one, in no "
            "step; missing where an evaluation or a checkpoint came between",
            Figure(
                "share of the time on the wall between measured optimizer steps: in"
                " no step time, rate or MFU",
                "",
                "time",
                name="gap_pct",
            ),
            "time/gap_s",
        ),
        "exchanged_bytes": FigureColumn(
            "Int64",
            "gradient bytes that a rank gave to the exchange",
            Figure("median gradient bytes a rank exchanged, an optimizer step", "median"),
            "gradient/exchanged_bytes",
        ),
        "skipped": FigureColumn(
            "boolean",
            "whether the update was left out: a gradient overflowed in float16",
            Figure(
                "updates left out, a gradient having overflowed in float16",
                "sum",
                name="skipped_optimizer_steps",
            ),
            "gradient/skipped",
        ),
        "small_batch_size": FigureColumn(
            "Int64",
            "samples behind each small gradient of the noise scale; missing: not sampled",
            curve="gradient/small_batch_size",
        ),
        "small_gradient_square": FigureColumn(
            "Float64",
            "mean squared norm of the mean gradients of small batches, before clipping",
            Figure(
                "gradient noise scale in samples, over all sampled steps of the run",
                name="gradient_noise_scale",
            ),
            "gradient/small_gradient_square",
        ),
        "power_w": FigureColumn(
            "Float64",
            "power of rank 0's device, about once a second; CUDA only",
            curve="system/power_w",
        ),
        "clock_mhz": FigureColumn(
            "Float64", "clock of rank 0's device, about once a second", curve="system/clock_mhz"
        ),
        "core_wait_s": FigureColumn(
            "Float64",
            "time in the step that rank 0 was ready and had no core; of a "
            "program of your own, that of the process that waited longest, look"
            " by look",
            Figure(
                "share of the measured step time in which rank 0 was ready and had no core",
                name="core_wait_pct",
            ),
            "system/core_wait_s",
        ),
        "processor_time_s": FigureColumn(
            "Float64",
            "time in the step that threads of rank 0 were on a core, added up; "
            "of a program of your own, those of all its processes; CPU only",
            Figure("median of processor_time_s over measured optimizer steps; CPU only", "median"),
            "system/processor_time_s",
        ),
        "warmup": FigureColumn("boolean", "whether the step stays out of step-time figures"),
    },
    "evals": {
        **{name: column._replace(figure=None) for name, column in _PROGRESS.items()},
        "attempt": FigureColumn("Int64", _ATTEMPT),
        "eval_loss": FigureColumn(
            "Float64",
            "sum of the losses over the held-out samples / labels, of averaged "
            "weights where evaluation.ema_half_life_tokens is set",
            Figure(
                "held-out loss of the last evaluation",
                "last",
                "loss",
                name="final_eval_loss",
                label="eval loss",
            ),
            "loss/eval",
        ),
        "raw_eval_loss": FigureColumn(
            "Float64",
            "eval_loss of the weights themselves; missing where "
            "evaluation.ema_half_life_tokens is null",
            curve="loss/raw_eval",
        ),
        "eval_accuracy": FigureColumn(
            "Float64",
            "share of right classes; missing for language models",
            Figure(
                "held-out accuracy of the last evaluation; classification only",
                "last",
                "loss",
                name="final_eval_accuracy",
                label="eval accuracy",
                better="higher",
            ),
            "loss/eval_accuracy",
        ),
        "eval_labels": FigureColumn("Int64", "labels in the held-out samples"),
        "evaluation_s": FigureColumn(
            "Float64",
            "time of the evaluation",
            Figure("time in evaluations, on rank 0, all attempts", "sum", "time"),
            "time/evaluation_s",
        ),
    },
    "ranks": {
        "rank": FigureColumn("Int64", "data-parallel rank"),
        "attempt": FigureColumn("Int64", "which start of the run wrote the row, from 0"),
        "node": FigureColumn("Int64", "machine of the rank, from 0"),
        "node_name": FigureColumn("string", "what Slurm calls it; null elsewhere"),
        "device": FigureColumn(
            "string", "device of the rank, by its number among those of its machine"
        ),
        "threads": FigureColumn("Int64", "threads of an operation on CPU"),
        "memory_method": FigureColumn(
            "string", "where the allocated and reserved figures come from"
        ),
        "allocated_after_model_gib": FigureColumn(
            "Float64",
            "tensors alive once the model is built",
            Figure("allocated memory after the model, maximum over ranks", "max", "memory"),
        ),
        "peak_allocated_first_backward_gib": FigureColumn(
            "Float64",
            "peak up to the first update",
            Figure("peak up to the first update, maximum over ranks", "max", "memory"),
        ),
        "peak_allocated_first_optimizer_step_gib": FigureColumn(
            "Float64",
            "peak in the first update",
            Figure("peak in the first update, maximum over ranks", "max", "memory"),
        ),
        "peak_allocated_steady_gib": FigureColumn(
            "Float64",
            "peak of a later optimizer step",
            Figure("peak of a later optimizer step, maximum over ranks", "max", "memory"),
        ),
        "peak_allocated_gib": FigureColumn(
            "Float64",
            "largest of the peaks above",
            Figure(
                "peak of allocated memory, maximum over ranks", "max", "memory", label="peak memory"
            ),
        ),
        "peak_reserved_gib": FigureColumn(
            "Float64",
            "peak that the allocator held; CUDA only",
            Figure("peak of reserved memory, maximum over ranks; CUDA only", "max", "memory"),
        ),
        "device_used_gib": FigureColumn(
            "Float64",
            "device memory of the process as NVML sees it",
            Figure("device memory as NVML sees it, maximum over ranks", "max", "memory"),
        ),
        "workspace_gib": FigureColumn(
            "Float64",
            "part of the peaks after the model that cuBLAS works in, whatever "
            "the micro-batch; CUDA only",
            Figure(
                "part of the peaks that cuBLAS works in, maximum over ranks; CUDA only",
                "max",
                "memory",
            ),
        ),
        "allocator_retries": FigureColumn(
            "Int64",
            "times in training steps that the allocator had to give cached memory back; CUDA only",
            Figure("times that the allocator gave back cached memory, all ranks; CUDA only", "sum"),
        ),
        "rss_gib": FigureColumn("Float64", "resident memory at the end, shared pages included"),
        "uss_gib": FigureColumn(
            "Float64",
            "resident memory at the end, shared pages excluded",
            Figure("resident memory, shared pages excluded, maximum over ranks", "max", "memory"),
        ),
        "peak_rss_gib": FigureColumn(
            "Float64",
            "highest resident memory, shared pages included",
            Figure("highest resident memory, maximum over ranks", "max", "memory"),
        ),
        "peak_taken_gib": FigureColumn(
            "Float64",
            "highest private memory mapped above that right before the model; CPU only",
            Figure(
                "private memory above that before the model, maximum over ranks; CPU only",
                "max",
                "memory",
            ),
        ),
        "parameters": FigureColumn(
            "Int64",
            "trained parameters of the model, tied ones counted once",
            Figure("trained parameters of the model, tied ones counted once", "max"),
        ),
        "model_flops_per_sample": FigureColumn(
            "Float64", "operations of the model on a sample, forward and backward"
        ),
        "attention_kernel": FigureColumn(
            "string",
            "kernels of torch's scaled_dot_product_attention on the first "
            "samples: flash, efficient, cudnn, math; missing: none",
            Figure("kernels of scaled_dot_product_attention; null: none", "first"),
        ),
        "reduction_precision": FigureColumn(
            "string", "what products of halves may add parts up in: float32, or reduced; CUDA only"
        ),
        "libraries": FigureColumn(
            "string", "CUDA, cuDNN and NCCL as this rank has them; CUDA only"
        ),
        "peak_tflops": FigureColumn(
            "Float64",
            "peak of the device, to which MFU refers, in 10^12 FLOP/s",
            Figure("peak of a device that mfu_pct refers to, minimum over ranks", "min"),
        ),
        "peak_source": FigureColumn(
            "string", "where that peak comes from", Figure("where that peak comes from", "each")
        ),
        "energy_j": FigureColumn(
            "Float64", "energy of the device in measured steps of 2 s or more; CUDA only"
        ),
        "energy_source": FigureColumn("string", "how the energy was read; CUDA only"),
        "not_invariant": FigureColumn(
            "string",
            "why decompositions may train unlike one another; missing where they may not",
            Figure(
                "why decompositions may train unlike one another; null where they may not", "first"
            ),
        ),
        "exchanges_every_micro_step": FigureColumn(
            "boolean", "whether the engine exchanges gradients in every micro-step, not in the last"
        ),
        "declared_exchange_bytes": FigureColumn(
            "Int64", "gradient bytes of one exchange, as the engine declares them; checked"
        ),
        "reported_data_parallel_size": FigureColumn(
            "Int64", "ranks that the engine's library exchanges over, asked before the first step"
        ),
        "reported_micro_batch_size": FigureColumn(
            "Int64", "micro-batch as the engine's library reports it; missing where it reports none"
        ),
        "reported_gradient_accumulation_steps": FigureColumn(
            "Int64", "accumulation as the engine's library reports it"
        ),
        "reported_global_batch_size": FigureColumn(
            "Int64", "global batch as the engine's library reports it"
        ),
        "clock_mhz": FigureColumn(
            "Float64",
            "clock of the device right after the last step",
            Figure("clock right after the last step, minimum over ranks", "min"),
        ),
        "throttled": FigureColumn(
            "boolean",
            "whether heat or the hardware's protection held the clock down; CUDA only",
            Figure(
                "whether heat or the hardware's protection held a rank's clock down; CUDA only",
                "any",
            ),
        ),
        "power_capped": FigureColumn(
            "boolean",
            "whether the power limit held the clock down; CUDA only",
            Figure("whether the power limit held the clock of a rank down; CUDA only", "any"),
        ),
        "device_limits": FigureColumn(
            "string",
            "limits of the device that are set below its defaults: power and clocks; CUDA only",
            Figure(
                "limits of devices that are set below their defaults: power and clocks; CUDA only",
                "each",
            ),
        ),
        "foreign_processes": FigureColumn(
            "Int64",
            "processes outside of the run that computed on the device, the most"
            " of any sample; CUDA only",
            Figure(
                "processes outside of the run that computed on a device of it, "
                "maximum over ranks; CUDA only",
                "max",
            ),
        ),
        "mean_step_time_s": FigureColumn("Float64", "mean time of a measured optimizer step"),
        "startup_s": FigureColumn(
            "Float64",
            "from process start to first step, evaluation and compilation excluded",
            Figure(
                "process start to first step, evaluation and compile apart, maximum over ranks",
                "max",
                "time",
            ),
        ),
        "memory_probe_s": FigureColumn(
            "Float64",
            "part of startup_s spent on the memory probe",
            Figure("part of startup_s in the memory probe, maximum over ranks", "max", "time"),
        ),
        "compile_s": FigureColumn(
            "Float64",
            "time of the first compilation, in no step; short where disk caches help",
            Figure("time of the first compilation, in no step, maximum over ranks", "max", "time"),
        ),
        "evaluation_s": FigureColumn("Float64", "time in evaluations of this attempt"),
        "checkpoint_s": FigureColumn(
            "Float64",
            "time in checkpoints of this attempt",
            Figure("time in checkpoints of the last attempt, maximum over ranks", "max", "time"),
        ),
    },
}
"""Columns by table."""

FIGURES: dict[str, Figure] = {
    column.figure.name or name: column.figure
    for columns in COLUMNS.values()
    for name, column in columns.items()
    if column.figure is not None
} | {
    "measured_optimizer_steps": Figure(
        "optimizer steps behind times: no warm-up, no sampled noise; null: none is logged"
    ),
    "tokens_per_s": Figure(
        "tokens over the time in measured optimizer steps, all devices; "
        "null where samples are no sequences",
        "",
        "time",
        label="tokens/s",
        better="higher",
    ),
    "samples_per_s": Figure(
        "samples over the time in measured optimizer steps, all devices",
        "",
        "time",
        label="samples/s",
        better="higher",
    ),
    "tokens_per_s_per_device": Figure("tokens_per_s over data_parallel_size", "", "time"),
    "model_tflops_per_s_per_device": Figure(
        "operations of the model a second and device, in 10^12", "", "time"
    ),
    "mfu_pct": Figure(
        "model FLOP/s of a device over its peak, in percent",
        "",
        "time",
        label="MFU",
        better="higher",
    ),
    "power_w": Figure(
        "energy over time of measured optimizer steps and gaps, sum over devices; CUDA only",
        "",
        "time",
    ),
    "energy_j_per_token": Figure(
        "energy of measured optimizer steps and gaps over their tokens, all devices; CUDA only",
        "",
        "time",
        label="energy a token",
    ),
}
"""Figures by name: those of one column, then those of several."""

TIMES = frozenset(name for name, figure in FIGURES.items() if figure.kind == "time")
"""Figures that count only where the run had the machine to itself."""

COMPARED = tuple(
    name
    for kind in ("memory", "time", "loss")
    for name, figure in FIGURES.items()
    if figure.label and figure.kind == kind
)
"""Figures of the comparison, in its order."""

OF_TOKENS = ("tokens_per_s", "tokens_per_s_per_device", "energy_j_per_token")
"""Figures of runs on sequences of tokens; other runs lack them."""
