"""Predicted memory of training steps against what real runs allocate.

Models x 24 geometries x 3 optimizers x 2 precisions are planned and predicted. The predictions are
written to a file, whose hash is printed, before anything is launched. Then the runs are launched
through the product; on a CPU each rank's memory is what its allocator told in the probe, on CUDA
what the caching allocator counted in the run, without cuBLAS's workspace. The device follows the
machine. An error is predicted / measured - 1; the median of its size has a 95 % interval by order
statistics, over cells: the errors of a cell do not vary from run to run.

    python benchmarks/memory_prediction.py [--part 1] [--seed 0] [--family gpt llama]
    python benchmarks/memory_prediction.py --libraries [--part 1] [--family "gpt ZeRO 3"]

Without `--part` it is a tenth of the cells, drawn by the seed. With `--libraries` it is the engines
of libraries: accelerate, Fabric and the stages of ZeRO, of a GPT and an MLP, by 2 ranks, 2
accumulations, 2 micro-batches, 2 optimizers and 2 precisions. What is refused is counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import torch
from scipy import stats

from batchscape.compose import compose
from batchscape.data.corpus import prepare
from batchscape.launch.launcher import Launcher
from batchscape.measure.memory_report import MemoryReport
from batchscape.plan.build import Plan, make_plan
from batchscape.plan.expand import SweepCells
from batchscape.plan.machine import Machine
from batchscape.plan.memory import memory_key, predict_memories
from batchscape.plan.table import write_plan
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.tables import read_table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
FIGURES = (
    "allocated_after_model_gib",
    "peak_allocated_first_backward_gib",
    "peak_allocated_first_optimizer_step_gib",
    "peak_allocated_steady_gib",
)
FAMILIES = {
    "gpt": ("model=gpt_nano", "data=stdlib"),
    "transformers": ("model=hf_gpt2", "data=stdlib"),
    "llama": ("model=llama_nano", "data=stdlib"),
}
LIBRARIES = {
    f"{model} {engine}": (*data, *chosen)
    for model, data in {
        "gpt": FAMILIES["gpt"],
        "mlp": ("model=mlp", "data=digits"),
    }.items()
    for engine, chosen in {
        "accelerate": ("engine=accelerate",),
        "Fabric": ("engine=fabric",),
        **{f"ZeRO {n}": ("engine=deepspeed", f"engine.zero_stage={n}") for n in range(4)},
    }.items()
}
GEOMETRIES = (
    "batch.micro_batch_size=1,2,5,8,16,33",
    "batch.gradient_accumulation_steps=1,3",
    "optimizer=adamw,sgd,muon",
)
FEWER_GEOMETRIES = (
    "batch.micro_batch_size=8,64",
    "batch.gradient_accumulation_steps=1,2",
    "optimizer=adamw,sgd",
)
GRID = (
    "batch=vary_global",
    "batch.data_parallel_size=1,2",
    "engine.precision=float32,bfloat16",
    "budget=optimizer_steps",
    "budget.optimizer_steps=3",
    "launcher.concurrent_runs=2",
    "evaluation.every_samples=null",
    "evaluation.samples=8",
    "evaluation.batch_size=8",
    "measure.noise_scale_every=null",
    "checkpoint.every_s=null",
    "tracker=none",
)
"""With 24 geometries (global batches of 1 to 198), 3 optimizers and 2 precisions; of libraries 8, 2
and 2."""


def planned(family: str, folder: Path, machine: Machine) -> Plan:
    of_library = family in LIBRARIES
    arguments = [
        *(LIBRARIES if of_library else FAMILIES)[family],
        *GRID,
        *(FEWER_GEOMETRIES if of_library else GEOMETRIES),
        f"sweep_dir={folder / family.replace(' ', '_')}",
    ]
    grid = cast("SweepCells", compose(arguments, "batchscape sweep"))
    return make_plan(grid, machine, prepare)


def measured(folder: SweepFolder, spec: RunSpec) -> dict[str, float] | None:
    """Return what the rank that held most allocated; None where the run has no figures."""
    ranks = read_table(folder.run(spec.run_id), "ranks")
    if ranks.empty:
        return None
    found = ranks[list(FIGURES)].astype(float)
    workspace = ranks["workspace_gib"].astype(float).fillna(0.0)
    found[list(FIGURES[1:])] = found[list(FIGURES[1:])].sub(workspace, axis=0)
    return None if found.isna().any(axis=None) else dict(found.max())


def errors_of(name: str, errors: list[float]) -> dict[str, Any]:
    """Return the median and the largest size of errors, in percent."""
    sizes = [100 * abs(error) for error in errors]
    interval: Any = stats.quantile_test(sizes, q=0, p=0.5).confidence_interval(0.95)
    return {
        "family": name,
        "n": len(sizes),
        "median_pct": statistics.median(sizes),
        # Of few cells there is none.
        "low_pct": None if math.isnan(interval.low) else float(interval.low),
        "high_pct": None if math.isnan(interval.high) else float(interval.high),
        "worst_pct": max(sizes),
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", type=float, default=0.1, help="of the cells, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of what is written")
    parser.add_argument("--libraries", action="store_true", help="engines of libraries")
    parser.add_argument("--family", nargs="+", choices=[*FAMILIES, *LIBRARIES])
    options = parser.parse_args()
    options.family = options.family or list(LIBRARIES if options.libraries else FAMILIES)
    options.name = "memory_prediction" + ("_of_libraries" if options.libraries else "")
    options.out = options.out.resolve()
    return options


def without_refused(
    chosen: dict[str, list[RunSpec]], predicted: dict[str, dict[str, MemoryReport]]
) -> dict[str, list[RunSpec]]:
    """Return the cells that are predicted, and print how many are not, and why."""
    kept = {}
    for name, specs in chosen.items():
        problems = {spec.run_id: predicted[name][spec.run_id].problem for spec in specs}
        if refused := [problem for problem in problems.values() if problem is not None]:
            print(f"{name}: {len(refused)} of {len(specs)} refused, as {refused[0]}", flush=True)
        if predictable := [spec for spec in specs if problems[spec.run_id] is None]:
            kept[name] = predictable
    if not kept:
        sys.exit("nothing of this is predicted")
    return kept


def main() -> None:
    options = parsed()
    machine, rng = Machine.detect(), random.Random(options.seed)
    options.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="batchscape-") as temporary:
        plans = {name: planned(name, Path(temporary), machine) for name in options.family}
        chosen = {}
        for name, plan in plans.items():
            count = max(1, round(options.part * len(plan.specs)))
            chosen[name] = rng.sample(plan.specs, count)
        began = time.perf_counter()
        predicted = {
            name: dict(zip((s.run_id for s in specs), predict_memories(specs), strict=True))
            for name, specs in chosen.items()
        }
        took_s = time.perf_counter() - began
        chosen = without_refused(chosen, predicted)
        options.family = list(chosen)
        count = sum(map(len, chosen.values()))
        of_device = chosen[options.family[0]][0].device_type
        text = json.dumps(
            {
                name: {
                    run: {f: getattr(report, f) for f in FIGURES} for run, report in told.items()
                }
                for name, told in predicted.items()
            },
            indent=1,
        )
        frozen = options.out / f"{options.name}-{of_device}-predicted.json"
        frozen.write_text(text + "\n")
        digest = hashlib.sha256(frozen.read_bytes()).hexdigest()
        keys = {memory_key(spec) for specs in chosen.values() for spec in specs}
        print(
            f"{count} predictions of {len(keys)} keys in {took_s:.1f} s: {frozen}\nsha256 {digest}",
            flush=True,
        )
        for name, specs in chosen.items():
            began = time.perf_counter()
            predict_memories(specs[:1])
            print(f"{name}: {time.perf_counter() - began:.2f} s for one alone", flush=True)

        found: dict[str, dict[str, dict[str, float]]] = {}
        for name in options.family:
            folder = SweepFolder(plans[name].sweep_dir)
            write_plan(plans[name])
            Launcher(folder, machine, chosen[name], command="benchmarks/memory_prediction.py").run()
            figures = {spec.run_id: measured(folder, spec) for spec in chosen[name]}
            found[name] = {run: told for run, told in figures.items() if told is not None}
    missing = count - sum(map(len, found.values()))

    def errors(names: list[str], figures: tuple[str, ...]) -> list[float]:
        """Return the error of the peak, or of the worst of several figures, of each cell."""
        cells = []
        for name in names:
            for run, told in found[name].items():
                each = [getattr(predicted[name][run], f) / told[f] - 1 for f in figures]
                cells.append(max(each, key=abs))
        return cells

    def peak_errors(name: str) -> dict[str, float]:
        return {
            run: max(getattr(predicted[name][run], f) for f in FIGURES) / max(told.values()) - 1
            for run, told in found[name].items()
        }

    groups = {**{name: [name] for name in options.family}, "all": options.family}
    peaks = {name: peak_errors(name) for name in options.family}
    rows = [
        {
            "figure": "peak",
            **errors_of(of, [error for name in names for error in peaks[name].values()]),
        }
        for of, names in groups.items()
    ]
    rows += [
        {"figure": "worst of all phases", **errors_of(name, errors(who, FIGURES))}
        for name, who in groups.items()
    ]
    show(rows)
    for name in options.family:
        show_worst(name, peaks[name], chosen[name])
    print(f"runs without figures: {missing}; {took_s / count:.3f} s a prediction")
    save(rows, of_device, machine, took_s / count, digest, options)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the errors of each figure and family."""
    for row in rows:
        ends = [row["low_pct"], row["high_pct"]]
        between = "not identified" if None in ends else f"{ends[0]:.3f} to {ends[1]:.3f}"
        print(
            f"{row['figure']}, {row['family']}: median {row['median_pct']:.3f} % (95 % interval "
            f"{between}), worst {row['worst_pct']:.3f} %, n {row['n']}"
        )


def show_worst(family: str, errors: dict[str, float], specs: list[RunSpec]) -> None:
    """Print which cells of a family were predicted worst."""
    by_run = {spec.run_id: spec for spec in specs}
    for run in sorted(errors, key=lambda run: -abs(errors[run]))[:3]:
        cell = by_run[run]
        print(
            f"{family}: {100 * errors[run]:+.3f} %: {cell.geometry}, "
            f"{cell.config.optimizer.name}, {cell.precision}"
        )


def save(  # noqa: PLR0917  (a file has as many parts)
    rows: list[dict[str, Any]],
    device_type: str,
    machine: Machine,
    prediction_s: float,
    digest: str,
    options: argparse.Namespace,
) -> None:
    """Write what was measured; of a CUDA device as the other parts of `make gpu` do."""
    sys.path.append(str(HERE / "gpu"))
    import results

    if device_type == "cuda":
        results.save(options.name, rows)
        return
    result = {
        "part": options.name,
        "device": machine.cpu_name,
        "cores": machine.cpu_cores,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": results.commit(),
        "cells": {"part": options.part, "seed": options.seed, "families": options.family},
        "predictions_sha256": digest,
        "prediction_s": prediction_s,
        "rows": rows,
    }
    path = options.out / f"{options.name}-cpu.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
