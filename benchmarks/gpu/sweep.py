"""A sweep of a benchmark: launched as a user launches it, stopped in order when time is over."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
from intervals import ratio

from batchscape.analysis.hardware import add_machines
from batchscape.record.figures import TIMES
from batchscape.record.folder import SweepFolder
from batchscape.record.reading import run_row
from batchscape.record.status import RunStatus

FIGURES = ("step_time_s", "tokens_per_s", "mfu_pct", "peak_allocated_gib", "peak_reserved_gib")
RUN_FAILED, INTERRUPTED = 1, 130
"""Codes of a sweep: out of memory is expected of the largest micro-batches."""
late: list[Path] = []
"""Sweeps that their limit interrupted."""
STOP_S = 60.0
"""For a sweep to end in order, once it was told to."""


def options_of(page: str, limit_s: float) -> argparse.Namespace:
    """Return `limit_s`, by default the one given, and more `settings` of the command line."""
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=limit_s, help="of each sweep")
    parser.add_argument("settings", nargs="*", help="more settings, key=value")
    return parser.parse_args()


def runs_of(folder: Path, limit_s: float, *settings: str) -> list[dict[str, Any]]:
    """Launch a sweep without a tracker; return its runs, with no times where these do not count.

    Parameters
    ----------
    folder : Path
        Folder of the sweep.
    limit_s : float
        Seconds after which it is interrupted: what has ended by then counts.
    *settings : str
        As on the command line.
    """
    command = [sys.executable, "-m", "batchscape", "sweep", *settings]
    running = subprocess.Popen([*command, "tracker=none", f"sweep_dir={folder}"])
    try:
        code = running.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"{limit_s:.0f} s are over: only runs that have ended have figures", flush=True)
        late.append(folder)
        code = _stop(running)
    if code not in {0, RUN_FAILED, INTERRUPTED}:
        sys.exit(code)
    folders = SweepFolder(folder).run_folders()
    if not folders:
        return []
    rows = [run_row(run, RunStatus.read(run.status)) for run in folders]
    runs = add_machines(pd.DataFrame(rows).assign(sweep_dir=str(folder)))
    times = [name for name in runs if name in TIMES]
    runs[times] = runs[times].where(runs["timing_valid"])
    return runs.to_dict("records")


def _stop(running: subprocess.Popen[bytes]) -> int:
    running.terminate()
    try:
        return running.wait(STOP_S)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
        return INTERRUPTED


def row_of(run: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return what is kept of a run; None where it has no such figure, or has not ended."""
    completed = run["status"] == "completed"
    figures = {name: run.get(name) if completed else None for name in names}
    figures |= {name: run.get(name) for name in ("reason", "timing_note")}
    return {
        "micro_batch_size": int(run["micro_batch_size"]),
        "gradient_accumulation_steps": int(run["gradient_accumulation_steps"]),
        "seed": int(run["seed"]),
        "compile": bool(run["engine.compile"]),
        "status": str(run["status"]),
        **{name: None if pd.isna(value) else value for name, value in figures.items()},
    }


def eager_over_compiled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return step times of eager runs over those of compiled ones, by micro-batch, paired by seed.

    Parameters
    ----------
    rows : list of dict
        Of `row_of`, with `step_time_s`.
    """
    pair = ["micro_batch_size", "seed"]
    table = pd.DataFrame(rows, columns=[*pair, "compile", "step_time_s"])
    times = table.pivot(index=pair, columns="compile", values="step_time_s").astype(float)
    both = times.reindex(columns=[False, True]).dropna()
    return [
        ratio(f"eager / compiled, micro-batch {size}", own[False].to_numpy(), own[True].to_numpy())
        for size, own in both.groupby(level="micro_batch_size")
    ]
