r"""What loading and reporting many runs take: time and memory, against plain pandas.

Writes a sweep of made-up runs in the real format (once; a folder that is there is used again).
Then fresh processes import the libraries of a report and nothing else, load the sweep as a report
does, and report it. The peer reads some of the same run folders as `docs/record.md` shows for one:
two JSON files, `pandas.read_parquet` for each table, one `concat`.

    python benchmarks/report_at_scale.py [--runs 10000] [--points 1000] [--folder DIR]
    python benchmarks/report_at_scale.py --folder outputs/fixed_global_batch_digits \
        outputs/fewer_updates_digits         # the report of `make demo`
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from short_run import make_run

from batchscape.analysis.report.write import READ
from batchscape.config import RunConfig
from batchscape.geometry import BatchGeometry
from batchscape.record.environment import environment as environment_here
from batchscape.record.figures import COLUMNS
from batchscape.record.files import write_json
from batchscape.record.folder import TABLES, RunFolder, SweepFolder
from batchscape.record.spec import RunSpec, Stage
from batchscape.record.status import Attempt, RunStatus, Status, StopReason
from batchscape.record.summary import summarise
from batchscape.record.tables import write_sealed

BATCHES = (16, 32, 64, 128, 256)
CUTS = ((1, 16), (1, 8), (2, 8), (2, 4))
"""Ranks and micro-batch of the decompositions of each global batch."""
EVALUATIONS = 50
NOISE_EVERY = 20
PEER_RUNS = 500
LIBRARIES = (
    *("numpy", "pandas", "polars", "pyarrow.parquet", "scipy.optimize", "pydantic"),
    *("vl_convert", "jinja2", "rich.console", "rich.table"),
)
"""What a report imports of others."""
NOISE_SCALE = 40.0
"""Samples; the made-up trainings take 1 + NOISE_SCALE / batch times the least steps."""


class Cell(NamedTuple):
    """A geometry and learning rate, and one of its seeds."""

    batch: int
    cut: tuple[int, int]
    learning_rate: float
    seed: int


def cells_of(runs: int, seeds: int) -> list[Cell]:
    """Lay out a grid: batches x decompositions x learning rates x seeds."""
    rates = np.geomspace(1e-4, 1e-1, -(-runs // (seeds * len(BATCHES) * len(CUTS))))
    grid = itertools.product(BATCHES, CUTS, rates.round(7).tolist(), range(seeds))
    return [Cell(*values) for values in grid][:runs]


def write_sweep(folder: Path, runs: int, points: int, seeds: int) -> None:
    """Write the runs with all cores."""
    cells = cells_of(runs, seeds)
    chunks = [cells[start : start + 100] for start in range(0, len(cells), 100)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(write_runs, itertools.repeat(folder), itertools.repeat(points), chunks))


def write_runs(folder: Path, points: int, cells: list[Cell]) -> None:
    """Write some of the runs, as a launcher and its ranks would have left them."""
    # Nothing here has to outlive a loss of power.
    os.fsync = lambda _: None
    template = make_run("made-up", points, n_layers=2)
    environment = environment_here(os.environ, 1)
    for cell in cells:
        spec = spec_of(template, cell, points)
        run = SweepFolder(folder).run(spec.run_id)
        spec.write(run.config)
        write_json(run.environment, environment)
        write_json(run.launch, launch_of(spec.geometry.data_parallel_size))
        tables = rows_of(spec, cell, points)
        diverged = not np.isfinite(tables["steps"]["loss"]).all()
        status = RunStatus(
            Status.DIVERGED if diverged else Status.COMPLETED,
            None if diverged else StopReason.BUDGET,
            reason="the training loss is not finite" if diverged else None,
            attempts=[Attempt(1.0, 0, 2.0, "completed")],
        )
        status.summary = summarise(**tables, data_parallel_size=cell.cut[0])
        write_sealed(run, status, tables)


def spec_of(template: RunSpec, cell: Cell, points: int) -> RunSpec:
    """Name and resolve a run."""
    devices, micro = cell.cut
    settings = template.config.to_mapping()
    settings["seed"] = cell.seed
    settings["optimizer"]["learning_rate"] = cell.learning_rate
    settings["batch"] = {
        "data_parallel_size": devices,
        "micro_batch_size": micro,
        "global_batch_size": cell.batch,
    }
    config = RunConfig.from_mapping(settings)
    geometry = BatchGeometry(1, devices, micro, cell.batch // devices // micro)
    trajectory = f"{cell.batch}-{cell.learning_rate:g}-{cell.seed}"
    return RunSpec(
        run_id=f"b{cell.batch}-d{devices}-m{micro}-lr{cell.learning_rate:g}-s{cell.seed}",
        trajectory_id=trajectory,
        sweep_name="made_up",
        stages=(Stage(points * cell.batch, geometry, config.optimizer),),
        device_type="cpu",
        precision="float32",
        evaluation_every_samples=None,
        data=template.data,
        config=config,
    )


def launch_of(devices: int) -> dict[str, Any]:
    """Return what the launcher records of processes that ran alone."""
    return {
        "attempt": 0,
        "world_size": devices,
        "device_type": "cpu",
        "device_model": "Example CPU",
        "devices": list(range(devices)),
        "threads_per_rank": 1,
        "concurrent_runs": 1,
        "oversubscribed": False,
        "timing_valid": True,
        "timing_invalid_reason": None,
        "rendezvous": "/gone",
    }


def rows_of(spec: RunSpec, cell: Cell, points: int) -> dict[str, pd.DataFrame]:
    """Make up the rows of a run; runs of one trajectory differ by rounding."""
    shared = np.random.default_rng([cell.seed, cell.batch, round(1e7 * cell.learning_rate)])
    own = np.random.default_rng([cell.seed, *cell.cut])
    step = np.arange(1, points + 1)
    # The best learning rate grows with the batch, and four times the best one diverges.
    best = 0.003 * np.sqrt(cell.batch / 16)
    speed = 1 / (1 + NOISE_SCALE / cell.batch) / (1 + np.log(cell.learning_rate / best) ** 2)
    loss = 2.4 + 3.1 * np.exp(-step * speed * 4 / points)
    eval_loss = loss + 0.05
    loss = loss + shared.normal(0, 0.4 / np.sqrt(cell.batch), points)
    loss = loss + 1e-7 * own.normal(size=points)
    if cell.learning_rate > 8 * best:
        points //= 2
        step, loss = step[:points], loss[:points]
        loss[-1] = np.nan
    steps = _steps(spec, cell, step=step, loss=loss, shared=shared, own=own)
    when = np.unique(np.linspace(0, points, EVALUATIONS + 1).astype(int))
    evals = _typed(
        "evals",
        optimizer_step=when,
        samples=when * cell.batch,
        tokens=when * cell.batch * 64,
        train_time_s=np.concatenate([[0.0], steps["train_time_s"]])[when],
        attempt=0,
        eval_loss=eval_loss[np.maximum(when - 1, 0)] + 0.01 * shared.normal(size=len(when)),
        eval_labels=32_000,
        evaluation_s=0.05,
    )
    peak = 0.01 + 0.002 * cell.cut[1]
    ranks = _typed(
        "ranks",
        rank=np.arange(cell.cut[0]),
        attempt=0,
        device="cpu",
        threads=1,
        memory_method="allocator",
        **dict.fromkeys([n for n in COLUMNS["ranks"] if n.startswith("peak_alloc")], peak),
        allocated_after_model_gib=0.005,
        uss_gib=0.4 + 0.01 * own.random(cell.cut[0]),
        peak_rss_gib=0.6,
        model_flops_per_sample=1e9,
        mean_step_time_s=steps["step_time_s"].mean(),
        startup_s=0.4,
    )
    return {"steps": steps, "evals": evals, "ranks": ranks}


def _steps(
    spec: RunSpec,
    cell: Cell,
    *,
    step: np.ndarray,
    loss: np.ndarray,
    shared: np.random.Generator,
    own: np.random.Generator,
) -> pd.DataFrame:
    parts = dict.fromkeys(("data_s", "forward_backward_s", "exchange_s", "optimizer_s"))
    for name, mean in zip(parts, (0.0005, 0.0005 * cell.batch, 0.002, 0.001), strict=True):
        parts[name] = mean * (1 + 0.1 * own.random(len(step)))
    whole = sum(parts.values())
    signal = np.exp(-2 * step / len(step))
    small = signal * (1 + NOISE_SCALE / cell.cut[1]) * (1 + 0.1 * shared.normal(size=len(step)))
    sampled = step % NOISE_EVERY == 0
    accumulated = spec.geometry.gradient_accumulation_steps * cell.cut[0] > 1
    return _typed(
        "steps",
        optimizer_step=step,
        samples=step * cell.batch,
        tokens=step * cell.batch * 64,
        train_time_s=np.cumsum(whole),
        attempt=0,
        global_batch_size=cell.batch,
        loss=loss,
        learning_rate=cell.learning_rate,
        gradient_norm=np.sqrt(signal * (1 + NOISE_SCALE / cell.batch)),
        step_time_s=whole,
        **parts,
        exchange_span_s=2 * parts["exchange_s"],
        exchanged_bytes=1_000_000,
        skipped=False,
        small_batch_size=np.where(sampled & accumulated, float(cell.cut[1]), np.nan),
        small_gradient_square=np.where(sampled & accumulated, small, np.nan),
        core_wait_s=1e-4 * own.random(len(step)),
        warmup=step <= 5,
    )


def _typed(table: str, **columns: Any) -> pd.DataFrame:
    typed = {name: column.dtype for name, column in COLUMNS[table].items()}
    return pd.DataFrame(columns).reindex(columns=list(typed)).astype(typed)


class Taken(NamedTuple):
    """What a process took."""

    wall_s: float
    cpu_s: float
    peak_gib: float
    """Resident memory."""


_MEASURE = """
import json, resource, subprocess, sys, time
began = time.perf_counter()
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
wall_s = time.perf_counter() - began
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps([wall_s, used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20]))
sys.exit(code)
"""


def measure(*command: str, **environment: str) -> Taken:
    """Run a command, with more in its environment."""
    # From a small process: the peak of a new one begins with the memory of the one that starts it.
    starter = (sys.executable, "-c", _MEASURE, *command)
    done = subprocess.run(
        starter, stdout=subprocess.PIPE, env={**os.environ, **environment}, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}")
    return Taken(*json.loads(done.stdout))


def read_with_pandas(folders: list[RunFolder]) -> float:
    """Read run folders one after the other; return the seconds for each."""
    began = time.perf_counter()
    rows, parts = [], {table: [] for table in TABLES}
    for run in folders:
        config, status = (json.loads(p.read_text()) for p in (run.config, run.status))
        row = {"run_id": config["run_id"], **config["geometry"], **status["summary"]}
        rows.append({**row, **pd.json_normalize(config["config"]).iloc[0]})
        for table, found in parts.items():
            found.append(pd.read_parquet(run.parquet(table)).assign(run_id=row["run_id"]))
    pd.DataFrame(rows)
    for found in parts.values():
        pd.concat(found, ignore_index=True)
    return (time.perf_counter() - began) / len(folders)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--folder",
        type=Path,
        nargs="+",
        help="sweep folder to keep and use again, or finished ones",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = options.folder or [Path(scratch) / "sweep"]
        if not folders[0].exists():
            part = folders[0].with_name(f"{folders[0].name}.part")
            shutil.rmtree(part, ignore_errors=True)
            write_sweep(part, options.runs, options.points, options.seeds)
            part.rename(folders[0])
        # Cells that were rejected have no rows.
        runs = [run for folder in folders for run in SweepFolder(folder).run_folders()]
        whole = [run for run in runs if all(run.parquet(table).exists() for table in TABLES)]
        places = list(map(str, folders))
        out = Path(scratch) / "report"
        load = (
            "import sys; from pathlib import Path; from batchscape.record.tables import load; "
            f"load(*map(Path, sys.argv[1:]), columns={READ!r})"
        )
        imported = measure(sys.executable, "-c", f"import {', '.join(LIBRARIES)}")
        loaded = measure(sys.executable, "-c", load, *places)
        report = measure(sys.executable, "-m", "batchscape", "report", *places, "--out", str(out))
        peer_s = read_with_pandas(whole[:PEER_RUNS]) * len(whole)
    print(f"{len(runs)} runs, {os.cpu_count()} cores")
    for name, taken in (("libraries alone", imported), ("load", loaded), ("report", report)):
        print(
            f"{name}: {taken.wall_s:.1f} s, {taken.cpu_s:.1f} s of processor time, "
            f"peak of {taken.peak_gib:.2f} GiB"
        )
    print(f"ratio report / libraries alone: {report.cpu_s / imported.cpu_s:.1f} of processor time")
    print(f"plain pandas, every column: {peer_s:.1f} s for all, from {PEER_RUNS} runs at most")
    print(f"ratio plain pandas / load: {peer_s / loaded.wall_s:.1f}")


if __name__ == "__main__":
    main()
