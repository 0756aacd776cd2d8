"""A study on the device: the critical batch of a small GPT, at tuned learning rates.

With 3.2 million parameters it learns Python, until a held-out loss of 2 nats a byte, with global
batches over two decades and four learning rates each. Steps are asked for, not times: small runs
share the device. The sweep stays in outputs/gpu_critical_batch, and goes on there where its limit
was too short.

    python benchmarks/gpu/critical_batch.py [--limit-s 240] [key=value ...]
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from results import ROOT, cuda_device, save
from sweep import options_of, runs_of

FOLDER = ROOT / "outputs" / "gpu_critical_batch"
SETTINGS = (
    "seed=0,1,2",  # first, so that what there is time for is whole seeds
    *("batch=vary_global", "batch.micro_batch_size=null", "batch.gradient_accumulation_steps=2"),
    "batch.global_batch_size=4,8,16,32,64,128,256,512",
    *("scaling=sqrt", "optimizer.learning_rate=0.0005,0.001,0.002,0.004"),
    *("optimizer.weight_decay=0", "schedule.warmup_samples=1024"),
    *("model=gpt_mini", "model.n_layers=4", "data.sequence_length=128"),
    *("budget=target", "budget.target_loss=2", "budget.samples=262144"),
    *("evaluation.every_samples=512", "evaluation.samples=256", "evaluation.batch_size=256"),
    *("engine.precision=bfloat16", "measure.memory=false", "checkpoint.every_s=null"),
    *("launcher.concurrent_runs=16", "launcher.max_runs_per_device=16"),
    "sweep_name=gpu_critical_batch",
)
ESTIMATES = {
    "critical_batch_size": "critical batch",
    "exponent": "exponent",
    "s_min": "fewest steps",
    "e_min": "fewest samples",
}
ENDS = {"value": "", "low": "_low", "high": "_high"}


def main() -> None:
    options = options_of(__doc__, limit_s=240.0)
    cuda_device()
    save("critical_batch", *study(FOLDER, options.limit_s, options.settings))


def study(
    folder: Path, limit_s: float, settings: list[str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Launch the sweep; return steps to its target by batch and rate, and what is fitted to them.

    The report of the sweep, in its folder, says both at length.
    """
    runs = runs_of(folder, limit_s, *SETTINGS, *settings)
    if not runs:
        return [], []
    command = [sys.executable, "-m", "batchscape", "report", str(folder)]
    subprocess.run([*command, "--target", f"{runs[0]['budget.target_loss']:g}"], check=True)
    tables = folder / "report" / "tables"
    return steps_by_rate(pd.read_csv(tables / "reaches.csv")), estimates(tables)


def steps_by_rate(reaches: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row a global batch and learning rate.

    Steps are the geometric mean over seeds, where all reached the target.
    """
    rows = []
    for (size, rate), own in reaches.groupby(["global_batch_size", "learning_rate"]):
        steps, reached = own["steps_to_target"], int(own["steps_to_target"].notna().sum())
        all_reached = reached == len(own)
        rows.append(
            {
                "global_batch_size": int(size),
                "learning_rate": rate,
                "runs": len(own),
                "reached": reached,
                "steps_to_target": float(np.exp(np.log(steps).mean())) if all_reached else None,
                "best_rate": all_reached and bool(own["is_best"].all()),
            }
        )
    return rows


def estimates(tables: Path) -> list[dict[str, Any]]:
    """Return what is identified, with its interval over seeds."""
    path = tables / "critical_batch.csv"
    if not path.exists():  # too few runs have ended
        return []
    (fit,) = pd.read_csv(path).to_dict("records")
    return [
        {
            "comparison": f"{said}, {fit['form']}",
            **{end: fit[f"{name}{part}"] for end, part in ENDS.items()},
            "n": int(fit["n_seeds"]),
        }
        for name, said in ESTIMATES.items()
        if not pd.isna(fit[name])
    ]


if __name__ == "__main__":
    main()
