"""Step time and MFU of GPT-2 124M over micro-batch sizes, compiled against eager, in bfloat16.

The runs are those of `batchscape sweep`, one at a time, in a folder that is removed again. A
micro-batch that does not fit is part of the answer.

    python benchmarks/gpu/gpt2_step_time.py [--micro 4,8,16,32] [--steps 40] [key=value ...]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
from hardware import cuda_device, save
from rich.console import Console
from rich.table import Table

from batchscape.record.tables import load

SHOWN = ("step_time_s", "tokens_per_s", "mfu_pct", "peak_allocated_gib", "peak_reserved_gib")
WARMUP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro", default="4,8,16,32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("settings", nargs="*", help="more settings, key=value")
    options = parser.parse_args()
    cuda_device()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder) / "sweep", options.micro, options.steps, options.settings)
    ratios = compare(rows)
    show(rows, ratios)
    save("gpt2_step_time", {"optimizer_steps": options.steps, "runs": rows, "ratios": ratios})


def measure(folder: Path, micro: str, steps: int, settings: list[str]) -> list[dict[str, Any]]:
    """Launch the sweep; return a row a run, by micro-batch and then eager before compiled."""
    command = [
        *(sys.executable, "-m", "batchscape", "sweep"),
        *("batch=vary_global", f"batch.micro_batch_size={micro}"),
        *("model=gpt2_124m", "model.vocabulary_size=50257", "data.sequence_length=1024"),
        *("budget=optimizer_steps", f"budget.optimizer_steps={steps}"),
        *("evaluation.every_samples=null", "evaluation.samples=8", "evaluation.batch_size=4"),
        *("engine.precision=bfloat16", "engine.compile=false,true"),
        *(f"measure.warmup_optimizer_steps={WARMUP}", "measure.noise_scale_every=null"),
        *("tracker=none", f"sweep_dir={folder}", "sweep_name=gpt2_step_time"),
        *settings,
    ]
    # Code 1 says that a run failed: out of memory is expected of the largest micro-batches.
    done = subprocess.run(command, check=False)
    if done.returncode not in {0, 1}:
        sys.exit(done.returncode)
    runs = load(folder).runs.sort_values(["micro_batch_size", "engine.compile"])
    return [row_of(run) for run in runs.to_dict("records")]


def row_of(run: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a run; null where it has no such figure."""
    figures = {name: run.get(name) for name in (*SHOWN, "compile_s", "reason")}
    return {
        "micro_batch_size": int(run["micro_batch_size"]),
        "compile": bool(run["engine.compile"]),
        "status": str(run["status"]),
        **{name: None if pd.isna(value) else value for name, value in figures.items()},
    }


def compare(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the step time of the eager run over that of the compiled one, by micro-batch."""
    times = {(row["micro_batch_size"], row["compile"]): row["step_time_s"] for row in rows}
    sizes = sorted({size for size, _ in times})
    return {
        str(size): times[size, False] / times[size, True]
        for size in sizes
        if times.get((size, False)) and times.get((size, True))
    }


def show(rows: list[dict[str, Any]], ratios: dict[str, float]) -> None:
    """Print a table and the ratios."""
    table = Table("micro-batch", "compile", "status", *SHOWN)
    for row in rows:
        figures = ("" if row[name] is None else f"{row[name]:.4g}" for name in SHOWN)
        compiled = "yes" if row["compile"] else "no"
        table.add_row(str(row["micro_batch_size"]), compiled, row["status"], *figures)
    Console(width=120).print(table)
    for size, value in ratios.items():
        print(f"ratio eager / compiled, micro-batch {size}: {value:.2f}")


if __name__ == "__main__":
    main()
