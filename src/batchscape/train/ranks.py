"""The row that every rank leaves about itself."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from batchscape.measure.memory_process import process_memory
from batchscape.measure.peak import peak_flops
from batchscape.record.files import JsonLines
from batchscape.record.folder import RunFolder
from batchscape.train.loop import Training
from batchscape.train.memory import MemoryPhases


def write_rank_row(
    folder: RunFolder,
    launch: dict[str, Any],
    training: Training,
    memory: MemoryPhases,
    *,
    rank: int,
    device: torch.device,
    begin: float,
) -> None:
    """Append the row of a rank that began then to `ranks.jsonl`; ranks share the file."""
    recorder, spec = training.recorder, training.spec
    measured = recorder.measured_optimizer_steps
    report, taken_gib, process = memory.report(), memory.peak_taken_gib(), process_memory()
    matmul = spec.config.in_process.float32_matmul
    peak = peak_flops(device, spec.precision, matmul, spec.config.cluster)
    row: dict[str, Any] = {
        "rank": rank,
        "attempt": launch["attempt"],
        "node": rank // spec.geometry.devices_per_node,
        "node_name": os.environ.get("SLURMD_NODENAME"),
        "device": str(device),
        "threads": torch.get_num_threads(),
        **({} if report is None else report.as_columns()),
        "rss_gib": process.rss_gib,
        "uss_gib": process.uss_gib,
        "peak_rss_gib": process.peak_rss_gib,
        "peak_taken_gib": taken_gib,
        **recorder.telemetry.totals()._asdict(),
        **training.model_columns._asdict(),
        **training.declaration,
        **(_cuda_columns() if device.type == "cuda" else {}),
        "peak_tflops": peak.tflops,
        "peak_source": peak.source,
        "mean_step_time_s": recorder.measured_s / measured if measured else None,
        "startup_s": None if training.started_at is None else training.started_at - begin,
        "memory_probe_s": memory.probe_s,
        "compile_s": training.compilations_s[0] if training.compilations_s else None,
        "evaluation_s": training.evaluation_s,
        "checkpoint_s": training.checkpoint_s,
    }
    # Network file systems lose lines that several machines append at the same time.
    for node in range(len(launch.get("nodes", [""]))):
        if node == row["node"]:
            lines = JsonLines(folder.lines("ranks"))
            lines.append([row])
            lines.close()
        if "nodes" in launch:
            dist.barrier()


def _cuda_columns() -> dict[str, str]:
    """Return columns of what decides how CUDA kernels round and is no setting."""
    products = torch.backends.cuda.matmul
    reduced = (
        products.allow_bf16_reduced_precision_reduction
        or products.allow_fp16_reduced_precision_reduction
    )
    nccl = "none"
    if dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        "reduction_precision": "reduced" if reduced else "float32",
        "libraries": f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, "
        f"NCCL {nccl}",
    }
