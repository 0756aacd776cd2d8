"""Step time and MFU of GPT-2 124M over micro-batch sizes, compiled against eager, in bfloat16.

The runs are those of `batchscape sweep`, one at a time, in a folder that is removed again. A
micro-batch that does not fit is part of the answer.

    python benchmarks/gpu/gpt2_step_time.py [--limit-s 400] [key=value ...]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from results import cuda_device, save
from sweep import FIGURES, eager_over_compiled, options_of, row_of, runs_of

SETTINGS = (
    *("batch=vary_global", "batch.micro_batch_size=4,16,32", "model=gpt2_124m"),
    *("data.sequence_length=1024", "budget=optimizer_steps", "budget.optimizer_steps=40"),
    *("evaluation.every_samples=null", "evaluation.samples=8", "evaluation.batch_size=4"),
    *("engine.precision=bfloat16", "engine.compile=false,true"),
    *("measure.warmup_optimizer_steps=10", "measure.noise_scale_every=null"),
    "sweep_name=gpt2_step_time",
)


def main() -> None:
    options = options_of(__doc__)
    cuda_device()
    with tempfile.TemporaryDirectory() as folder:
        runs = runs_of(Path(folder) / "sweep", options.limit_s, *SETTINGS, *options.settings)
    rows = [row_of(run, (*FIGURES, "compile_s")) for run in runs]
    rows.sort(key=lambda row: (row["micro_batch_size"], row["compile"]))
    save("gpt2_step_time", rows, eager_over_compiled(rows))


if __name__ == "__main__":
    main()
