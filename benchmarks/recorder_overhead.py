"""What recording costs a training step of at least 20 ms.

Two figures: the time inside the recorder over the time of the steps that it recorded, and the
ratio of the step time with and without a recorder, in blocks that alternate in one process.

    python benchmarks/recorder_overhead.py [--blocks 40] [--steps 25]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.progress import track
from scipy import stats
from short_run import make_run

from batchscape.measure.clock import CpuClock
from batchscape.record.folder import RunFolder
from batchscape.train.divergence import DivergenceRule
from batchscape.train.loop import Training
from batchscape.train.recorder import StepRecorder

SETTLE = 20
"""First steps, which belong to no figure."""


class Timed:
    """A recorder whose calls are timed."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.seconds = 0.0
        self._recorder = recorder

    def after(self, k: int, loss_sum: torch.Tensor, labels: int) -> None:
        """Do what the training loop does after a step."""
        began = time.perf_counter()
        self._recorder.add(
            optimizer_step=k + 1,
            samples=8 * (k + 1),
            global_batch_size=8,
            labels=labels,
            loss_sum=loss_sum,
            gradient_norm=loss_sum,
            learning_rate=1e-3,
            exchanged_bytes=0,
        )
        if self._recorder.is_due:
            self._recorder.drain(stop=False, checkpoint=False)
        self.seconds += time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = make_run("recorded", 10**6, n_layers=2, d_model=128, n_heads=4)
    device = torch.device("cpu")
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        training = Training(spec, folder, 0, device, 0)
        clock = CpuClock()
        # The loop's own parts, so that only the recorder comes and goes.
        training._build(clock)
        recorder = StepRecorder(
            folder,
            0,
            1,
            device,
            clock,
            ranks_on_node=1,
            attempt=0,
            warmup_optimizer_steps=0,
            rule=DivergenceRule(),
        )
        timed = Timed(recorder)
        step_s: dict[bool, list[list[float]]] = {True: [], False: []}
        k = 0
        for block in track(range(-1, options.blocks), description="measuring"):
            recording = block % 2 == 0
            times = []
            for _ in range(SETTLE if block < 0 else options.steps):
                began = time.perf_counter()
                if recording:
                    clock.begin()
                accumulated, _ = training._accumulate(k)
                training._engine.optimizer_step(spec.config.optimizer, 1.0)
                if recording:
                    clock.end()
                    timed.after(k, accumulated.loss_sum, accumulated.labels)
                times.append(time.perf_counter() - began)
                k += 1
            if block >= 0:
                step_s[recording].append(times)
        recorder.close()
    report(step_s, timed.seconds)


def report(step_s: dict[bool, list[list[float]]], inside_s: float) -> None:
    """Print both figures."""
    on = np.array(step_s[True])
    off = np.array(step_s[False])
    ratios = np.log(np.median(on, axis=1) / np.median(off, axis=1))
    half = stats.t.ppf(0.975, len(ratios) - 1) * stats.sem(ratios)
    low, middle, high = np.exp([ratios.mean() - half, ratios.mean(), ratios.mean() + half])
    print(f"median step: {1e3 * np.median(on):.1f} ms with a recorder, {on.size} steps")
    print(f"inside the recorder: {1e6 * inside_s / on.size:.0f} us a step")
    print(f"share of the step: {100 * inside_s / on.sum():.3f} %")
    print(
        f"step time with / without: {middle:.4f} (95 % interval {low:.4f} to {high:.4f}, "
        f"{len(ratios)} pairs of blocks)"
    )


if __name__ == "__main__":
    main()
