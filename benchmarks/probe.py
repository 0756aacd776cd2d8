"""Trainings that `batchscape probe` takes to find the largest micro-batch, against doubling.

Random models, optimizers, devices and global batches, each under an emulated limit of memory:
about what a training with one of its micro-batches, drawn at random, was measured to take. Beside
it stands the usual search for the same boundary: double the micro-batch until it runs out of
memory, then halve what is left.

    python benchmarks/probe.py [--cases 10] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track


def probed(settings: Sequence[str]) -> dict[str, Any]:
    """Probe one case, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "batchscape", "probe", "--json", *settings]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{ran.stderr}")
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def taken_gib(settings: Sequence[str], micro_batch_size: int) -> float:
    """Measure what a training takes of a process, under a limit that it is far from."""
    short = ["budget=optimizer_steps", "budget.optimizer_steps=3", "evaluation.every_samples=null"]
    short += [
        "schedule.warmup_samples=0",
        "measure.noise_scale_every=2",
        "measure.memory=false",
        "evaluation.samples=64",
        "device.memory_limit_gib=8",
    ]
    cut = [*settings[:-1], f"batch.micro_batch_size={micro_batch_size}"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "batchscape", "run", *cut, *short, "tracker=none"]
        subprocess.run(command, cwd=folder, capture_output=True, check=True)
        (status,) = Path(folder).glob("outputs/*/runs/*/status.json")
        return float(json.loads(status.read_text())["summary"]["peak_taken_gib"])


def case(rng: random.Random) -> tuple[list[str], int]:
    """Draw a training, and the samples of an optimizer step on each of its devices."""
    width = rng.choice([64, 96, 128, 192])
    devices, each = rng.choice([1, 1, 2]), rng.choice([60, 96, 112, 120, 180, 224, 240, 256, 360])
    settings = [
        f"model.n_layers={rng.choice([2, 3, 4, 6])}",
        f"model.d_model={width}",
        f"model.n_heads={width // 32}",
        f"data.sequence_length={rng.choice([32, 64, 128])}",
        f"optimizer={rng.choice(['adamw', 'sgd', 'muon'])}",
        f"batch.data_parallel_size={devices}",
        f"batch.global_batch_size={devices * each}",
        "batch.micro_batch_size=1",
    ]
    return settings, each


def by_doubling(candidates: Sequence[int], largest: int | None) -> int:
    """Count the trainings of the usual search among the same micro-batches."""

    def fits(position: int) -> bool:
        return largest is not None and candidates[position] <= largest

    tried, last, first_out, micro = 0, -1, len(candidates), 1
    while first_out - last > 1:
        above = [p for p in range(last + 1, first_out) if candidates[p] >= micro]
        doubling = first_out == len(candidates) and above
        position = above[0] if doubling else (last + first_out) // 2
        tried += 1
        last, first_out = (position, first_out) if fits(position) else (last, position)
        micro = 2 * candidates[position]
    return tried


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    ours, theirs, exact = [], [], 0
    for _ in track(range(options.cases), description="probing"):
        settings, each = case(rng)
        micro = rng.choice([m for m in range(1, each + 1) if each % m == 0])
        limit = rng.uniform(0.9, 1.3) * taken_gib(settings, micro)
        found = probed([*settings, f"device.memory_limit_gib={limit:.4g}"])
        largest = found["largest"] and found["largest"]["micro_batch_size"]
        ours.append(len(found["tried"]))
        theirs.append(by_doubling(found["candidates"], largest))
        fitting = [one["micro_batch_size"] for one in found["tried"] if one["fits"]]
        out = [one["micro_batch_size"] for one in found["tried"] if not one["fits"]]
        position = found["candidates"].index(largest) if largest else -1
        following = found["candidates"][position + 1 :]
        # The boundary was seen from both sides.
        exact += (max(fitting, default=None) == largest) and (not following or following[0] in out)
        print(f"{' '.join(settings)} limit {limit:.3g} GiB: {largest}, {ours[-1]} / {theirs[-1]}")
    few = sum(count <= 3 for count in ours)
    print(f"boundary seen from both sides: {exact} of {options.cases}")
    print(f"at most 3 trainings: {few} of {options.cases}")
    print(f"trainings: {sum(ours)} by probing, {sum(theirs)} by doubling and halving")
    print(f"ratio doubling / probing: {sum(theirs) / sum(ours):.2f}")


if __name__ == "__main__":
    main()
