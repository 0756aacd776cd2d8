"""Workers that train wrongly, or in another order: what a test must tell from the real one."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchscape.config import Optimizer
from batchscape.engines.ddp import DdpEngine
from batchscape.train import loader, worker
from batchscape.train.loop import Training
from batchscape.train.stream import SampleStream, StepSamples


def permuted(run_dir: str, rank: int) -> int:
    """Shuffle the samples within each global batch: the same sums in another order."""
    generator = np.random.default_rng(int(os.environ["PERMUTATION"]))
    real = SampleStream.step

    def step(self: SampleStream, optimizer_step: int, *, sampling: bool = True) -> StepSamples:
        samples = real(self, optimizer_step, sampling=sampling)
        shuffled = generator.permutation(samples.indices.ravel())
        return samples._replace(indices=shuffled.reshape(samples.indices.shape))

    SampleStream.step = step  # type: ignore[method-assign]  # a planted change
    return worker.main(run_dir, rank)


def without_labels(run_dir: str, rank: int) -> int:
    """Meet a global batch without a label in optimizer step 3."""
    real = SampleStream.step

    def step(self: SampleStream, optimizer_step: int, *, sampling: bool = True) -> StepSamples:
        samples = real(self, optimizer_step, sampling=sampling)
        return samples._replace(labels=0) if optimizer_step == 2 else samples

    SampleStream.step = step  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)


def broken(run_dir: str, rank: int) -> int:
    """Raise in the first micro-step."""

    def micro_step(*_args: object, **_options: object) -> Tensor:
        msg = "planted"
        raise ZeroDivisionError(msg)

    DdpEngine.micro_step = micro_step  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)


def greedy(run_dir: str, rank: int) -> int:
    """Ask the allocator for more than any machine has, in the first update."""

    def optimizer_step(*_args: object) -> Tensor:
        return torch.zeros(2**58)

    DdpEngine.optimizer_step = optimizer_step  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)


def hanging(run_dir: str, rank: int) -> int:
    """Train as it should to three optimizer steps past the first checkpoint, then do nothing.

    The file `hangs-<rank>` tells that all of that is on the disk.
    """
    real_save, real_step = Training._save, Training._step
    left = None

    def save(self: Training) -> None:
        nonlocal left
        real_save(self)
        left = 3 if left is None else left

    def step(self: Training, k: int) -> None:
        nonlocal left
        real_step(self, k)
        if left is None:
            return
        left -= 1
        if left == 0:
            self.recorder.flush()
            (Path(run_dir) / f"hangs-{rank}").touch()
            while True:
                time.sleep(3600)

    Training._save = save  # type: ignore[method-assign]  # a planted fault
    Training._step = step  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)


def hanging_far_ahead(run_dir: str, rank: int) -> int:
    """The same, with workers of the loader that are far ahead."""
    loader._BATCHES_AHEAD = 50
    return hanging(run_dir, rank)


def waiting(run_dir: str, rank: int) -> int:
    """Train five optimizer steps, wait until asked to stop, and go on as it should."""
    real_step = Training._step

    def step(self: Training, k: int) -> None:
        real_step(self, k)
        if k == 4:
            self.recorder.flush()
            (Path(run_dir) / f"hangs-{rank}").touch()
            while not self._stop_requested:
                time.sleep(0.005)
            self.recorder._interval = 1  # ranks agree on it after the next step

    Training._step = step  # type: ignore[method-assign]  # a planted delay
    return worker.main(run_dir, rank)


def lopsided(run_dir: str, rank: int) -> int:
    """Meet a gradient norm that is not finite in optimizer step 6, on the last rank alone."""
    real = DdpEngine.optimizer_step
    calls = 0

    def optimizer_step(self: DdpEngine, settings: Optimizer, factor: float) -> Tensor:
        nonlocal calls
        calls += 1
        norm = real(self, settings, factor)
        return norm * float("nan") if calls == 6 and rank == 1 else norm

    DdpEngine.optimizer_step = optimizer_step  # type: ignore[method-assign]  # a planted fault
    return worker.main(run_dir, rank)
