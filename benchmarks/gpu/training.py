"""A study on the device: one global batch in three cuts, eager and compiled, in bfloat16.

A small GPT with the vocabulary of GPT-2 is trained from two seeds. What the cuts cost stands
beside how far their final losses are apart. The sweep stays in outputs/gpu_training, for
`batchscape report`.

    python benchmarks/gpu/training.py [--limit-s 400] [key=value ...]
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from intervals import mean
from results import ROOT, cuda_device, save
from sweep import FIGURES, eager_over_compiled, late, options_of, row_of, runs_of

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
    options = options_of(__doc__, limit_s=400.0)
    cuda_device()
    # Runs of another commit would be taken as done.
    shutil.rmtree(FOLDER, ignore_errors=True)
    save("training", *study(FOLDER, options.limit_s, options.settings))
    sys.exit(bool(late))


def study(
    folder: Path, limit_s: float, settings: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Launch the sweep; return its runs, and what they come to."""
    runs = runs_of(folder, limit_s, *SETTINGS, *settings)
    rows = [row_of(run, (*FIGURES, "final_loss", "final_eval_loss")) for run in runs]
    rows.sort(key=lambda row: (row["compile"], row["micro_batch_size"], row["seed"]))
    return rows, eager_over_compiled(rows) + differences(rows)


def differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how far held-out losses are from those of the largest micro-batch, paired by seed.

    With the 90 % t-interval that two one-sided tests at 5 % look at.
    """
    ended = [row for row in rows if row["final_eval_loss"] is not None]
    found = []
    for compiled in (False, True):
        losses: dict[int, dict[int, float]] = {}
        for row in ended:
            if row["compile"] is compiled:
                of_seeds = losses.setdefault(row["micro_batch_size"], {})
                of_seeds[row["seed"]] = row["final_eval_loss"]
        *others, largest = sorted(losses) or [None]
        for size in others:
            seeds = losses[size].keys() & losses[largest].keys()
            apart = np.array([losses[size][seed] - losses[largest][seed] for seed in seeds])
            how = "compiled" if compiled else "eager"
            name = f"held-out loss, micro-batch {size} less {largest}, {how}"
            if len(apart):
                found.append({"comparison": name, **mean(apart, 0.90)})
    return found


if __name__ == "__main__":
    main()
