"""A noisy quadratic under SGD, whose critical batch at each age is known in closed form.

Per dimension of curvature h a step of rate a on a batch B makes of the mean m (1 - a h) m, and of
the variance v (1 - a h)^2 v + a^2 c / B; the expected loss is half the sum of h (m^2 + v).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

SMALL = 4
BATCHES = (4, 8, 16, 32, 64)
WINDOW = 512
CURVATURES = 1 / np.arange(1, 9)
RATE, SPREAD, TOLERANCE = 0.05, 2.0, 0.05
AGES = (64, 128, 256)


def rate_of(batch: int) -> float:
    """Follow the root of the batch."""
    return RATE * math.sqrt(batch / SMALL)


@dataclass
class State:
    """Weights of some trainings, shape (n, dimensions), or mean and variance of all there are."""

    mean: np.ndarray
    variance: np.ndarray

    def step(self, batch: int) -> State:
        """Return the mean and the variance after one step."""
        keep = 1 - rate_of(batch) * CURVATURES
        noise = rate_of(batch) ** 2 * SPREAD * CURVATURES / batch
        return State(keep * self.mean, keep**2 * self.variance + noise)

    def draw(self, batch: int, rng: np.random.Generator) -> State:
        """Return weights after one step, drawn."""
        after = State(self.mean, np.zeros(())).step(batch)
        return State(
            after.mean + rng.normal(size=self.mean.shape) * np.sqrt(after.variance), self.variance
        )

    @property
    def loss(self) -> np.ndarray:
        """The expected loss, or that of each training."""
        return ((self.mean**2 + self.variance) * CURVATURES).sum(axis=-1) / 2


def begin(n: int) -> State:
    return State(np.ones((n, len(CURVATURES))), np.zeros(len(CURVATURES)))


def known_critical_batch(age: int) -> float:
    """Return the critical batch of the expected losses; infinite where none is too large."""
    state = begin(1)
    for _ in range(age // SMALL):
        state = state.step(SMALL)
    losses = []
    for batch in BATCHES:
        branch, seen = state, []
        for _ in range(WINDOW // batch):
            seen.append(float(branch.loss[0]))
            branch = branch.step(batch)
        losses.append(np.mean(seen[-len(seen) // 4 :]))
    rises = np.array(losses) - losses[0]
    for low, high in zip(range(len(BATCHES)), range(1, len(BATCHES)), strict=False):
        if rises[low] <= TOLERANCE < rises[high]:
            share = (TOLERANCE - rises[low]) / (rises[high] - rises[low])
            return BATCHES[low] * (BATCHES[high] / BATCHES[low]) ** share
    return math.inf


def drawn_losses(n: int, seed: int) -> dict[tuple[int, int], np.ndarray]:
    """Draw trainings; return the losses of their steps, (steps, n), by age and batch from there.

    Each sample has a part of its own in the loss, the same for all batches.
    """
    rng = np.random.default_rng(seed)
    own = rng.normal(size=(max(AGES) + WINDOW, n))
    state, seen, drawn = begin(n), 0, {}
    for age in AGES:
        while seen < age:
            state, seen = state.draw(SMALL, rng), seen + SMALL
        for batch in BATCHES:
            branch, losses = state, []
            for first in range(age, age + WINDOW, batch):
                losses.append(branch.loss + own[first : first + batch].mean(axis=0))
                branch = branch.draw(batch, rng)
            drawn[age, batch] = np.array(losses)
    return drawn


def rises_of(drawn: dict[tuple[int, int], np.ndarray], age: int) -> np.ndarray:
    """Return the rise of each training at each batch, (n, batches)."""
    means = [drawn[age, batch][-len(drawn[age, batch]) // 4 :].mean(axis=0) for batch in BATCHES]
    return np.transpose(means) - means[0][:, None]


def tables(trainings: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return runs and steps of trainings that were drawn."""
    runs, rows = [], []
    for (age, batch), losses in drawn_losses(trainings, seed=1).items():
        grows = batch > SMALL
        for seed in range(trainings):
            name = f"{age}-{batch}-{seed}"
            samples = age + batch * np.arange(1, len(losses) + 1)
            steps = pd.DataFrame({"samples": samples, "loss": losses[:, seed]})
            rows.append(steps.assign(global_batch_size=batch, sweep_dir="sweep", run_id=name))
            stages = ((0, SMALL, rate_of(SMALL)), (age, batch, rate_of(batch)))
            runs.append(
                {
                    "sweep_dir": "sweep",
                    "run_id": name,
                    "trajectory_id": name,
                    "status": "completed",
                    "data_parallel_size": 1,
                    "micro_batch_size": batch,
                    "gradient_accumulation_steps": 1,
                    "global_batch_size": batch,
                    "learning_rate": rate_of(batch),
                    "optimizer.learning_rate": rate_of(SMALL),
                    "schedule.name": "constant",
                    "measure.equivalence_margin": TOLERANCE,
                    "planned_samples": age + WINDOW,
                    "budget.samples": age + WINDOW,
                    "seed": seed,
                    "stages": stages if grows else stages[:1],
                    "ramp_samples": str(age) if grows else None,
                }
            )
    steps = pd.concat(rows, ignore_index=True)
    return pd.DataFrame(runs), steps.reindex(
        columns=[*steps, "tokens", "gradient_norm", "small_batch_size", "small_gradient_square"]
    )
