"""What sampling the gradient noise scale costs a training, at its default interval.

An optimizer step that is sampled and one that is not alternate in one process, over the same
samples; the extra time, over the interval, is the share of the training. Where there are micro-
steps only their norms are taken; a single micro-batch is cut into two.

    python benchmarks/noise_scale_overhead.py [--pairs 200] [--every 20]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.progress import track
from scipy import stats
from short_run import make_run

from batchscape.config import Measure, RunConfig
from batchscape.geometry import BatchGeometry
from batchscape.measure.clock import CpuClock
from batchscape.record.folder import RunFolder
from batchscape.record.spec import RunSpec
from batchscape.train.accumulation import accumulate
from batchscape.train.loop import Training

SETTLE = 5
"""First pairs, which belong to no figure."""

SIZES = {
    "small": {"n_layers": 2, "d_model": 128, "n_heads": 4},
    "medium": {"n_layers": 4, "d_model": 256, "n_heads": 4},
}
SOURCES = {
    "2 micro-steps of 4": BatchGeometry(1, 1, 4, 2),
    "1 micro-step of 8, cut": BatchGeometry(1, 1, 8, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--every", type=int, default=Measure().noise_scale_every)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for size, model in SIZES.items():
        for source, geometry in SOURCES.items():
            spec = sampled_run(f"{size}-{geometry.micro_batch_size}", geometry, **model)
            plain, sampled = measure(spec, options.pairs)
            report(f"{size}, {source}", plain, sampled, options.every)


def sampled_run(name: str, geometry: BatchGeometry, **model: int) -> RunSpec:
    """Return a run in which every optimizer step is sampled."""
    spec = make_run(name, 10**6, **model)
    mapping = spec.config.to_mapping()
    mapping["measure"]["noise_scale_every"] = 1
    stages = tuple(replace(stage, geometry=geometry) for stage in spec.stages)
    return replace(spec, stages=stages, config=RunConfig.from_mapping(mapping))


def measure(spec: RunSpec, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the times of optimizer steps without and with a sample, shape (pairs,) each."""
    with tempfile.TemporaryDirectory() as root:
        training = Training(spec, RunFolder(Path(root)), 0, torch.device("cpu"), 0)
        # The loop's own parts, so that only the sample comes and goes.
        training._build(CpuClock())
        micro_steps = spec.geometry.gradient_accumulation_steps
        ways: list[Callable[[int], object]] = [
            lambda k: accumulate(
                training._engine, training._loader, training._clock, k, micro_step_limit=micro_steps
            ),
            training._accumulate,
        ]
        times = np.empty((2, SETTLE + pairs))
        for k in track(range(SETTLE + pairs), description="measuring"):
            # Each goes first in turn, so that a drift of the machine favours none.
            for way in (k % 2, 1 - k % 2):
                began = time.perf_counter()
                ways[way](k)
                training._engine.optimizer_step(spec.config.optimizer, 1.0)
                times[way, k] = time.perf_counter() - began
    plain, sampled = times[:, SETTLE:]
    return plain, sampled


def report(name: str, plain: np.ndarray, sampled: np.ndarray, every: int) -> None:
    """Print the ratio and what it comes to, with intervals over blocks of pairs."""
    blocks = min(20, len(plain) // 2)
    ratios = np.log(
        [
            np.median(on) / np.median(off)
            for on, off in zip(
                np.array_split(sampled, blocks), np.array_split(plain, blocks), strict=True
            )
        ]
    )
    half = stats.t.ppf(0.975, blocks - 1) * stats.sem(ratios)
    low, middle, high = np.exp([ratios.mean() - half, ratios.mean(), ratios.mean() + half])
    shares = [100 * (ratio - 1) / every for ratio in (middle, low, high)]
    print(f"{name}: median step {1e3 * np.median(plain):.1f} ms")
    print(
        f"  step time with a sample / without: {middle:.3f} (95 % interval {low:.3f} to "
        f"{high:.3f}, {len(plain)} pairs)"
    )
    print(
        "  share of the training, sampled every {}: {:.2f} % ({:.2f} to {:.2f})".format(
            every, *shares
        )
    )


if __name__ == "__main__":
    main()
