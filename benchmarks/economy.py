"""Device time of a study of cost with one curve a trajectory, against the plain grid.

Both train the same cuts of one global batch, seed after seed in turn, on the same machine. What
they say of cost and time is then compared: the geometry recommended, step times, memory.

    python benchmarks/economy.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from batchscape.analysis.cells import GEOMETRY, find_cells
from batchscape.analysis.comparison import DISTURBED, compare
from batchscape.analysis.decisions.evidence import gather
from batchscape.analysis.decisions.recommend import Needs, recommend
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus
from batchscape.record.tables import load

STUDIES = {
    "four cuts": ("batch.data_parallel_size=1,2", "batch.micro_batch_size=8,16"),
    "eight cuts": ("batch.data_parallel_size=1,2", "batch.micro_batch_size=2,4,8,16"),
}
SEEDS = 3
GRID, ECONOMY = "grid", "one curve"


def sweep(folder: Path, axes: tuple[str, ...], seed: int, samples: int, *, one_curve: bool) -> None:
    """Train one seed of a study."""
    command = [
        *(sys.executable, "-m", "batchscape", "sweep", "batch=hold_global", *axes, f"seed={seed}"),
        *(
            "model=gpt_micro",
            "batch.global_batch_size=32",
            f"budget.samples={samples}",
            "tracker=none",
        ),
        *(f"evaluation.every_samples={samples // 4}", f"sweep_dir={folder}"),
        f"launcher.one_curve={str(one_curve).lower()}",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def device_times(folder: Path) -> tuple[float, float]:
    """Return the seconds that devices were held for, and those in optimizer steps."""
    held, stepping = 0.0, 0.0
    for run in SweepFolder(folder).run_folders():
        status = RunStatus.read(run.status)
        devices = int(run.path.name.split("-d")[1].split("-")[0])
        spans = [a.ended_at - a.started_at for a in status.attempts if a.ended_at is not None]
        held += devices * sum(spans)
        stepping += devices * float(status.summary["train_time_s"])
    return held, stepping


def figures(folder: Path) -> pd.DataFrame:
    """Return the comparison of a sweep, by cut."""
    table = compare(find_cells(load(folder, columns={"steps": (), "evals": ()}).runs))
    return table.set_index(list(GEOMETRY[:3]))


def recommended(folder: Path) -> str:
    """Return the geometry that a sweep recommends."""
    found = recommend(gather([folder])[0], Needs()).geometry
    return "none" if found is None else " x ".join(map(str, found))


def agreeing(grid: pd.DataFrame, economy: pd.DataFrame, name: str) -> str:
    """Say in how many cuts the 95 % intervals of a figure overlap."""
    means = [table[f"{name}_mean"].astype(float) for table in (grid, economy)]
    halves = [table[f"{name}_ci95"].astype(float) for table in (grid, economy)]
    known = (means[0] - means[1]).notna() & (halves[0] + halves[1]).notna()
    apart = (means[0] - means[1]).abs()[known]
    agree = apart <= (halves[0] + halves[1])[known] + 1e-9 * means[0][known]
    ratios = (means[1] / means[0]).dropna()
    span = f"{ratios.min():.3f} to {ratios.max():.3f}" if len(ratios) else "not known"
    return f"{agree.sum()} of {known.sum()} cuts agree within intervals; one curve / grid {span}"


def main() -> None:
    """Run all studies, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=6400, help="of a full run, 32 a step")
    parser.add_argument("--study", choices=[*STUDIES, "all"], default="all")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for study, axes in STUDIES.items():
            if asked.study not in {study, "all"}:
                continue
            folders = {way: Path(scratch) / study / way for way in (GRID, ECONOMY)}
            for seed in range(SEEDS):
                for way in sorted(folders, reverse=bool(seed % 2)):
                    one_curve = way == ECONOMY
                    sweep(folders[way], axes, seed, asked.samples, one_curve=one_curve)
            held, stepping = np.transpose([device_times(folders[way]) for way in folders])
            tables = [figures(folders[way]) for way in folders]
            short = int(tables[1]["n_prefix"].sum())
            print(
                f"{study}: {asked.samples // 32} optimizer steps, {SEEDS} seeds, "
                f"{short} of {int(tables[1]['n'].sum())} runs as far as a prefix"
            )
            print(
                f"  device time, grid / one curve: {held[0] / held[1]:.2f} "
                f"({held[0]:.1f} s / {held[1]:.1f} s)"
            )
            print(
                f"  in optimizer steps alone:      {stepping[0] / stepping[1]:.2f} "
                f"({stepping[0]:.1f} s / {stepping[1]:.1f} s)"
            )
            print(
                "  recommended: "
                + ", ".join(f"{way} {recommended(folder)}" for way, folder in folders.items())
            )
            for name in ("step_time_s", DISTURBED, "peak_allocated_gib"):
                print(f"  {name}: {agreeing(*tables, name)}")


if __name__ == "__main__":
    main()
