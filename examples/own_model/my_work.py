"""A model and data of one's own: disease progression of 442 patients from ten measurements."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor, nn


class Regressor(nn.Module):
    """Two layers, and a loss that batchscape cannot guess: the squared error."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, width), nn.GELU(), nn.Linear(width, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs).squeeze(-1)

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The SUM over the samples: batchscape divides once, by the global number of labels."""
        return (outputs - labels).square().sum()


class Patients:
    """Samples by index."""

    task = "other"

    def __init__(self, part: str, every: int) -> None:
        features, progression = load_diabetes(return_X_y=True)
        held_out = np.arange(len(progression)) % every == 0
        chosen = held_out if part == "held_out" else ~held_out
        scaled = (progression - progression.mean()) / progression.std()
        self.inputs = torch.tensor(20 * features[chosen], dtype=torch.float32)
        self.labels = torch.tensor(scaled[chosen], dtype=torch.float32)
        self.num_samples = len(self.labels)

    def count_labels(self, indices: np.ndarray) -> int:
        return len(indices)

    def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(indices)
        return self.inputs[rows], self.labels[rows]
