"""A training whose gradient noise is known: the mean of Gaussian samples, found by descent.

The loss of a sample x is |w - x|^2 / 2, its gradient w - x. With x of mean m and covariance C, and
w kept at zero, tr(S) = tr(C) and |G|^2 = |m|^2.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

MEAN = np.array([0.6, -0.3, 0.2, 0.1])
DEVIATIONS = np.array([2.0, 1.0, 0.5, 1.5])
NOISE = float((DEVIATIONS**2).sum())
SIGNAL = float((MEAN**2).sum())


class Mean(nn.Module):
    """One vector."""

    def __init__(self) -> None:
        super().__init__()
        # Two tensors, so that norms must be added over tensors.
        self.first = nn.Parameter(torch.zeros(1))
        self.rest = nn.Parameter(torch.zeros(len(MEAN) - 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([self.first, self.rest]) - inputs

    def loss_sum(self, outputs: Tensor, _labels: Tensor) -> Tensor:
        return outputs.square().sum() / 2


class Gaussian:
    """Samples that are drawn once, from `seed`."""

    task = "other"

    def __init__(self, part: str, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples if part == "train" else 8
        rng = np.random.default_rng([seed, part == "train"])
        self.samples = MEAN + DEVIATIONS * rng.normal(size=(self.num_samples, len(MEAN)))

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        return len(indices)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        samples = torch.from_numpy(self.samples[indices])
        return samples, torch.zeros(len(indices), dtype=torch.int64)
