"""A study on the device: one global batch in three cuts, eager and compiled, in bfloat16.

A small GPT with the vocabulary of GPT-2 is trained from two seeds. What the cuts cost stands
beside how far their final losses are apart; the report of the sweep says both at length, and
stays in outputs/gpu_training.

    python benchmarks/gpu/training.py [--limit-s 400] [key=value ...]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from results import ROOT, cuda_device, save
from sweep import FIGURES, eager_over_compiled, options_of, row_of, runs_of

FOLDER = ROOT / "outputs" / "gpu_training"
SETTINGS = (
    *("batch=hold_global", "batch.global_batch_size=64", "batch.micro_batch_size=4,16,64"),
    *("model=gpt_mini", "model.d_model=512", "model.vocabulary_size=50257"),
    *("data.sequence_length=512", "budget=optimizer_steps", "budget.optimizer_steps=60"),
    *("evaluation.every_samples=1280", "evaluation.batch_size=16"),
    *("engine.precision=bfloat16", "engine.compile=false,true", "seed=0,1"),
    *("measure.warmup_optimizer_steps=10", "sweep_name=gpu_training"),
)


def main() -> None:
    options = options_of(__doc__)
    cuda_device()
    # Runs of another commit would be taken as done.
    shutil.rmtree(FOLDER, ignore_errors=True)
    save("training", *study(FOLDER, options.limit_s, options.settings))


def study(
    folder: Path, limit_s: float, settings: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Launch the sweep and write its report; return its runs, and what they come to."""
    runs = runs_of(folder, limit_s, *SETTINGS, *settings)
    report = [sys.executable, "-m", "batchscape", "report", str(folder)]
    # Runs have figures without it, too.
    subprocess.run(report, check=False)
    rows = [
        {"seed": int(run["seed"]), **row_of(run, (*FIGURES, "final_loss", "final_eval_loss"))}
        for run in runs
    ]
    rows.sort(key=lambda row: (row["compile"], row["micro_batch_size"], row["seed"]))
    return rows, eager_over_compiled(rows) + differences(folder)


def differences(folder: Path) -> list[dict[str, Any]]:
    """Return how far held-out losses of cuts are apart, with 90 % intervals, from the report."""
    path = folder / "report" / "tables" / "equivalence.csv"
    if not path.exists():  # fewer than two cuts have ended
        return []
    table = pd.read_csv(path)
    found = []
    for row in table[table["quantity"] == "final_eval_loss"].to_dict("records"):
        sides = f"micro-batch {row['micro_batch_size']} less {row['reference']}"
        compiled = "compiled" if row.get("engine.compile") else "eager"
        interval = {side: None if pd.isna(row[side]) else row[side] for side in ("low", "high")}
        found.append(
            {
                "comparison": f"held-out loss, {sides}, {compiled}",
                "value": row["mean_difference"],
                **interval,
                "n": row["n"],
            }
        )
    return found


if __name__ == "__main__":
    main()
