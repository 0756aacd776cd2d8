"""A study on the device: the critical batch of a small GPT, at tuned learning rates.

With 3.2 million parameters it learns Python, until a held-out loss of 2 nats a byte, with global
batches over two decades and the learning rates around the best of each. Steps are asked for, not
times: small runs share the device. The sweeps stay in outputs/gpu_critical_batch, in a folder of
the commit, and go on there where a limit was too short. The limit is that of each of them.

    python benchmarks/gpu/critical_batch.py [--limit-s 120] [key=value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from results import ROOT, commit, cuda_device, save
from sweep import late, options_of, runs_of

from batchscape.analysis.learning_rate.choice import at_best_learning_rate
from batchscape.analysis.targets.crossings import steps_to_target
from batchscape.analysis.tradeoff.fit import fit_tradeoff
from batchscape.errors import AnalysisError
from batchscape.record.folder import SweepFolder
from batchscape.record.reading import run_row
from batchscape.record.status import RunStatus
from batchscape.record.tables import read_table

FOLDER = ROOT / "outputs" / "gpu_critical_batch"
TARGET = 2.0
SETTINGS = (
    *("batch=vary_global", "batch.micro_batch_size=null", "batch.gradient_accumulation_steps=2"),
    *("scaling=sqrt", "optimizer.weight_decay=0", "schedule.warmup_samples=1024", "seed=0,1,2"),
    *("model=gpt_mini", "model.n_layers=4", "data.sequence_length=128"),
    *("budget=target", f"budget.target_loss={TARGET:g}", "budget.samples=262144"),
    *("evaluation.every_samples=512", "evaluation.samples=256", "evaluation.batch_size=256"),
    *("engine.precision=bfloat16", "measure.memory=false", "checkpoint.every_s=null"),
    *("launcher.concurrent_runs=16", "launcher.oversubscribe=16"),
    "sweep_name=gpu_critical_batch",
)
# Rates are those of a global batch of 32 and grow with its root.
GRIDS = {
    "small": (
        "batch.global_batch_size=4,8,16",
        "optimizer.learning_rate=0.001,0.002,0.004,0.008",
    ),
    "middle": (
        "batch.global_batch_size=32,64",
        "optimizer.learning_rate=0.0005,0.001,0.002,0.004",
    ),
    "large": (
        "batch.global_batch_size=128,256,512",
        "optimizer.learning_rate=0.000125,0.00025,0.0005,0.001",
    ),
}


def main() -> None:
    options = options_of(__doc__, limit_s=120.0)
    cuda_device()
    folder = FOLDER / str(commit())
    for name, grid in GRIDS.items():
        runs_of(folder / name, options.limit_s, *SETTINGS, *grid, *options.settings)
    save("critical_batch", *found(folder, TARGET))
    sys.exit(bool(late))


def found(folder: Path, target: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return steps to the target by global batch and learning rate, and what is fitted to them.

    Runs that had not ended count as such that did not reach it. A batch that no run reached it
    with has no best rate, and then nothing is fitted.
    """
    known = list(curves(folder))
    if not known:
        return [], []
    reaches = steps_to_target(pd.concat(known, ignore_index=True), [target])
    best = at_best_learning_rate(reaches)
    tried = best.groupby("global_batch_size")["learning_rate"]
    rates = tried.first().where(tried.nunique() == 1)
    rows = []
    for (size, rate), own in reaches.groupby(["global_batch_size", "learning_rate"]):
        reached = own["steps_to_target"].dropna()
        mean = float(np.exp(np.log(reached).mean())) if len(reached) == len(own) else None
        rows.append(
            {
                "global_batch_size": int(size),
                "learning_rate": rate,
                "runs": len(own),
                "reached": len(reached),
                "steps_to_target": mean,
                "best_rate": bool(rates[size] == rate),
            }
        )
    try:
        fit = fit_tradeoff(best)
    except AnalysisError as error:
        print(f"nothing is fitted: {error}")
        return rows, []
    for warning in fit.warnings:
        print(warning)
    estimates = {
        "critical batch, samples": fit.critical_batch_size,
        "exponent": fit.exponent,
        "fewest optimizer steps": fit.s_min,
        "fewest samples": fit.e_min,
    }
    return rows, [
        {
            "comparison": name,
            **{
                end: value if np.isfinite(value) else None
                for end, value in (("value", e.value), ("low", e.low), ("high", e.high))
            },
            "n": fit.n_seeds,
            "note": e.note,
        }
        for name, e in estimates.items()
    ]


def curves(folder: Path) -> Iterator[pd.DataFrame]:
    """Give the held-out losses of the runs that were evaluated, of all sweeps in a folder."""
    for sweep in sorted(folder.iterdir()):
        for run in SweepFolder(sweep).run_folders():
            row = run_row(run, RunStatus.read(run.status))
            evals = read_table(run, "evals")
            yield pd.DataFrame(
                {
                    **{name: evals[name] for name in ("optimizer_step", "samples")},
                    "loss": evals["eval_loss"],
                    "run": str(row["run_id"]),
                    "seed": row["seed"],
                    "status": row["status"],
                    "stop_reason": row.get("stop_reason"),
                    "global_batch_size": row["global_batch_size"],
                    "learning_rate": row["learning_rate"],
                }
            )


if __name__ == "__main__":
    main()
