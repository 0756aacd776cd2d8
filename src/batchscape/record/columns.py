"""Columns of the three tables of a run folder: name, type, meaning.

The types are pandas' nullable ones, so that a missing number stays missing and an integer
stays an integer.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COLUMNS", "RESIDENT", "Column"]

RESIDENT = "process tree (uss)"
"""`memory_method` of a program on a CPU, whose resident memory stands for what it allocated."""


class Column(NamedTuple):
    """One column."""

    dtype: str
    """pandas dtype."""
    meaning: str
    """What it holds, with its unit and scope."""


_PROGRESS = {
    "optimizer_step": Column("Int64", "optimizer steps done, from 1 (0: before the first)"),
    "samples": Column("Int64", "training samples seen so far"),
    "tokens": Column("Int64", "loss-bearing labels seen so far, padding excluded"),
    "train_time_s": Column("Float64", "time spent in optimizer steps so far, evaluation excluded"),
}

COLUMNS: dict[str, dict[str, Column]] = {
    "steps": {
        **_PROGRESS,
        "attempt": Column("Int64", "which start of the run wrote the row, from 0"),
        "global_batch_size": Column("Int64", "samples of the step, over all ranks"),
        "loss": Column("Float64", "sum of the losses over the global batch / number of labels"),
        "learning_rate": Column("Float64", "learning rate of the step"),
        "gradient_norm": Column("Float64", "norm of the whole gradient before clipping"),
        "step_time_s": Column("Float64", "time of the optimizer step, on rank 0"),
        "data_s": Column("Float64", "part of it spent on fetching samples"),
        "forward_backward_s": Column("Float64", "part of it spent in forward and backward"),
        "exchange_s": Column(
            "Float64",
            "part of it: gradient exchange that backward did not hide, rank 0's wait for the "
            "slowest rank included",
        ),
        "optimizer_s": Column("Float64", "part of it: clipping, update, averaging of weights"),
        "exchange_span_s": Column(
            "Float64", "from the first bucket given to the exchange until all are back; overlaps"
        ),
        "gap_s": Column(
            "Float64",
            "from the end of the step before to the begin of this one, in no step; missing where "
            "an evaluation or a checkpoint came between",
        ),
        "exchanged_bytes": Column("Int64", "gradient bytes that a rank gave to the exchange"),
        "skipped": Column(
            "boolean", "whether the update was left out: a gradient overflowed in float16"
        ),
        "small_batch_size": Column(
            "Int64", "samples behind each small gradient of the noise scale; missing: not sampled"
        ),
        "small_gradient_square": Column(
            "Float64", "mean squared norm of the mean gradients of small batches, before clipping"
        ),
        "power_w": Column("Float64", "power of rank 0's device, about once a second; CUDA only"),
        "clock_mhz": Column("Float64", "clock of rank 0's device, about once a second"),
        "involuntary_switches": Column("Int64", "times the system took the core away in the step"),
        "core_wait_s": Column(
            "Float64",
            "time in the step that rank 0 was ready and had no core; of a program of your own, "
            "that of the process that waited longest, look by look",
        ),
        "processor_time_s": Column(
            "Float64",
            "time in the step that threads of rank 0 were on a core, added up; of a program of "
            "your own, those of all its processes; CPU only",
        ),
        "warmup": Column("boolean", "whether the step stays out of step-time figures"),
    },
    "evals": {
        **_PROGRESS,
        "attempt": Column("Int64", "which start of the run wrote the row, from 0"),
        "eval_loss": Column(
            "Float64",
            "sum of the losses over the held-out samples / labels, of averaged weights "
            "where evaluation.ema_half_life_tokens is set",
        ),
        "raw_eval_loss": Column("Float64", "the same of the weights themselves; missing without"),
        "eval_accuracy": Column("Float64", "share of right classes; missing for language models"),
        "eval_labels": Column("Int64", "labels in the held-out samples"),
        "evaluation_s": Column("Float64", "time of the evaluation"),
    },
    "ranks": {
        "rank": Column("Int64", "data-parallel rank"),
        "attempt": Column("Int64", "which start of the run wrote the row, from 0"),
        "node": Column("Int64", "machine of the rank, from 0"),
        "node_name": Column("string", "what Slurm calls it; null elsewhere"),
        "device": Column("string", "device of the rank, by its number among those of its machine"),
        "threads": Column("Int64", "threads of an operation on CPU"),
        "memory_method": Column("string", "where the allocated and reserved figures come from"),
        "allocated_after_model_gib": Column("Float64", "tensors alive once the model is built"),
        "peak_allocated_first_backward_gib": Column("Float64", "peak up to the first update"),
        "peak_allocated_first_optimizer_step_gib": Column("Float64", "peak in the first update"),
        "peak_allocated_steady_gib": Column("Float64", "peak of a later optimizer step"),
        "peak_allocated_gib": Column("Float64", "largest of the peaks above"),
        "peak_reserved_gib": Column("Float64", "peak that the allocator held; CUDA only"),
        "device_used_gib": Column("Float64", "device memory of the process as NVML sees it"),
        "workspace_gib": Column(
            "Float64",
            "part of the peaks after the model that cuBLAS works in, whatever the micro-batch; "
            "CUDA only",
        ),
        "allocator_retries": Column(
            "Int64",
            "times in training steps that the allocator had to give cached memory back; CUDA only",
        ),
        "rss_gib": Column("Float64", "resident memory at the end, shared pages included"),
        "uss_gib": Column("Float64", "resident memory at the end, shared pages excluded"),
        "peak_rss_gib": Column("Float64", "highest resident memory, shared pages included"),
        "peak_taken_gib": Column(
            "Float64", "highest private memory mapped above that right before the model; CPU only"
        ),
        "model_flops_per_sample": Column(
            "Float64", "operations of the model on a sample, forward and backward"
        ),
        "attention_kernel": Column(
            "string",
            "kernels of torch's scaled_dot_product_attention on the first samples: flash, "
            "efficient, cudnn, math; missing: none",
        ),
        "reduction_precision": Column(
            "string",
            "what products of halves may add parts up in: float32, or reduced; CUDA only",
        ),
        "libraries": Column("string", "CUDA, cuDNN and NCCL as this rank has them; CUDA only"),
        "peak_tflops": Column("Float64", "peak of the device that MFU refers to, 10^12 FLOP/s"),
        "peak_source": Column("string", "where that peak comes from"),
        "energy_j": Column(
            "Float64", "energy of the device in measured steps of 2 s or more; CUDA only"
        ),
        "energy_source": Column("string", "how the energy was read; CUDA only"),
        "not_invariant": Column(
            "string", "why decompositions may train unlike one another; missing where they may not"
        ),
        "exchanges_every_micro_step": Column(
            "boolean", "whether the engine exchanges gradients in every micro-step, not in the last"
        ),
        "declared_exchange_bytes": Column(
            "Int64", "gradient bytes of one exchange, as the engine declares them; checked"
        ),
        "reported_data_parallel_size": Column(
            "Int64", "ranks that the engine's library exchanges over, asked before the first step"
        ),
        "reported_micro_batch_size": Column(
            "Int64", "as the engine's library has it; missing where it has no notion of it"
        ),
        "reported_gradient_accumulation_steps": Column("Int64", "the same of accumulation"),
        "reported_global_batch_size": Column("Int64", "the same of the global batch"),
        "clock_mhz": Column("Float64", "clock of the device right after the last step"),
        "throttled": Column(
            "boolean",
            "whether heat or the hardware's protection held the clock down; CUDA only",
        ),
        "power_capped": Column("boolean", "whether the power limit held the clock down; CUDA only"),
        "device_limits": Column(
            "string",
            "what somebody set the device below its defaults, power limit and clocks; CUDA only",
        ),
        "foreign_processes": Column(
            "Int64",
            "processes outside of the run that computed on the device, the most of any sample; "
            "CUDA only",
        ),
        "mean_step_time_s": Column("Float64", "mean time of a measured optimizer step"),
        "startup_s": Column(
            "Float64", "from process start to first step, evaluation and compilation excluded"
        ),
        "memory_probe_s": Column("Float64", "part of it spent on the memory probe"),
        "compile_s": Column(
            "Float64", "time of the first compilation, in no step; short where disk caches help"
        ),
        "evaluation_s": Column("Float64", "time in evaluations of this attempt"),
        "checkpoint_s": Column("Float64", "time in checkpoints of this attempt"),
    },
}
"""Columns by table."""
