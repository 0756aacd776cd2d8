"""Device time of studies of beginnings: what runs share trained once, against each run in full.

`sweeps/critical_batch_by_branches` and `sweeps/horizons` are launched twice for some of their
seeds, once with `launcher.share_beginnings` and once without, one run at a time. Device time of a
run is that of the optimizer steps that it trained itself, and of its evaluations; that of its
processes' starts is printed beside it.

    python benchmarks/branches.py [--seeds 1]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

from batchscape.record.tables import load

STUDIES = ("critical_batch_by_branches", "horizons")


def device_time_s(
    study: str, folder: Path, seeds: int, *, shares: bool
) -> tuple[float, float, int]:
    """Return device time of steps and evaluations, that from starts to ends, and runs."""
    settings = [
        *(f"sweeps={study}", f"seed=range({seeds})", f"sweep_dir={folder}"),
        *("launcher.concurrent_runs=1", "tracker=none"),
    ]
    command = [sys.executable, "-m", "batchscape", "sweep", *settings]
    command.append(f"launcher.share_beginnings={str(shares).lower()}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    tables = load(folder)
    runs = tables.runs.set_index("run_id")
    if not runs["status"].eq("completed").all():
        raise RuntimeError(f"not all runs completed in {folder}")
    first = tables.attempts.groupby("run_id")["from_optimizer_step"].first()
    steps = tables.steps.astype({"run_id": str})
    own = steps[steps["optimizer_step"].gt(steps["run_id"].map(first))]
    trained = own["step_time_s"].sum() + pd.to_numeric(runs["evaluation_s"]).sum()
    attempts = tables.attempts
    return float(trained), float((attempts["ended_at"] - attempts["started_at"]).sum()), len(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    seeds = parser.parse_args().seeds
    for study in STUDIES:
        times = []
        for shares in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                trained, whole, runs = device_time_s(
                    study, Path(folder) / "s", seeds, shares=shares
                )
            times.append((trained, whole))
            how = "what they share trained once" if shares else "each in full"
            print(
                f"{study}: {runs} runs, {how}: {trained:.1f} s of training, {whole:.1f} s from "
                "start to end",
                flush=True,
            )
        (shared, shared_whole), (full, full_whole) = times
        print(
            f"{study}: in full over shared: {full / shared:.2f} times the training, "
            f"{full_whole / shared_whole:.2f} times from start to end",
            flush=True,
        )


if __name__ == "__main__":
    main()
