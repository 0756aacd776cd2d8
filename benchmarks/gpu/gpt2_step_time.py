"""Step time, MFU and memory of GPT-2 124M and 350M over micro-batch sizes, in bfloat16.

Eager and compiled. The runs are those of `batchscape sweep`, one at a time, in folders of
outputs/gpu_gpt2, which stay for `batchscape report`. A micro-batch that does not fit is part of the
answer. The limit is that of each of the sweeps.

    python benchmarks/gpu/gpt2_step_time.py [--limit-s 120] [key=value ...]
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from results import ROOT, cuda_device, save
from sweep import FIGURES, eager_over_compiled, late, options_of, row_of, runs_of

FOLDER = ROOT / "outputs" / "gpu_gpt2"
SETTINGS = (
    *("batch=vary_global", "data.sequence_length=1024", "engine.precision=bfloat16"),
    *("budget=optimizer_steps", "budget.optimizer_steps=30", "measure.warmup_optimizer_steps=8"),
    *("evaluation.every_samples=null", "evaluation.samples=8", "evaluation.batch_size=8"),
    *("measure.noise_scale_every=null", "checkpoint.every_s=null"),
)
GRIDS = {
    "compiled_124m": ("model=gpt2_124m", "engine.compile=true", "batch.micro_batch_size=16,64"),
    "compiled_350m": ("model=gpt2_350m", "engine.compile=true", "batch.micro_batch_size=32"),
    "eager_124m": (
        *("model=gpt2_124m", "engine.compile=false"),
        "batch.micro_batch_size=1,2,4,8,16,32,64",
    ),
    "eager_350m": ("model=gpt2_350m", "engine.compile=false", "batch.micro_batch_size=1,4,16,32"),
}
"""In the order of what they teach, where time is short."""
PREDICTED = "predicted.peak_allocated_gib.value"
MEMORY = (
    "allocated_after_model_gib",
    "peak_allocated_first_backward_gib",
    "peak_allocated_first_optimizer_step_gib",
    "peak_allocated_steady_gib",
    "workspace_gib",
)


def main() -> None:
    options = options_of(__doc__, limit_s=120.0)
    cuda_device()
    # Runs of another commit would be taken as done.
    shutil.rmtree(FOLDER, ignore_errors=True)
    runs: list[tuple[str, dict[str, Any]]] = []
    for k, (name, grid) in enumerate(GRIDS.items(), start=1):
        settings = (*SETTINGS, *grid, f"sweep_name={name}", *options.settings)
        runs += [(name, run) for run in runs_of(FOLDER / name, options.limit_s, *settings)]
        rows = [
            {
                "model": of.rpartition("_")[2].upper(),
                **row_of(run, (*FIGURES, *MEMORY, "compile_s", PREDICTED)),
            }
            for of, run in runs
        ]
        rows.sort(key=lambda row: (row["model"], row["compile"], row["micro_batch_size"]))
        of_124m = [row for row in rows if row["model"] == "124M"]
        save("gpt2_step_time", rows, eager_over_compiled(of_124m), so_far=k < len(GRIDS))
    sys.exit(bool(late))


if __name__ == "__main__":
    main()
