"""A convolutional network with a loss of its own, and images for it, as a user would write them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

_CLASSES = 4


class Images:
    """Noise around a pattern for each class, 3 x 32 x 32."""

    task = "class"
    classes = _CLASSES

    def __init__(self, part: str) -> None:
        self.num_samples = 4096 if part == "train" else 64
        self._patterns = np.random.default_rng(0).normal(size=(_CLASSES, 3, 32, 32))

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        """One class an image."""
        return len(indices)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Images as float32, and their classes; each drawn from its index."""
        labels = indices % _CLASSES
        noise = [np.random.default_rng(int(i)).normal(size=(3, 32, 32)) for i in indices]
        images = torch.from_numpy(self._patterns[labels] + np.stack(noise)).float()
        return images, torch.from_numpy(labels)


class ConvNet(nn.Module):
    """Two blocks of convolutions with batch normalisation, and a label-smoothed margin loss."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, padding=1, stride=2, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        self.hidden = nn.Linear(32 * width, 4 * width)
        self.head = nn.Linear(4 * width, _CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a score for each class."""
        scores: Tensor = self.head(functional.gelu(self.hidden(self.blocks(inputs))))
        return scores

    def loss_sum(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the hinges of all wrong classes."""
        right = outputs.gather(1, labels[:, None])
        hinges = functional.relu(1 + outputs - right).square()
        return hinges.scatter(1, labels[:, None], 0.0).sum()
