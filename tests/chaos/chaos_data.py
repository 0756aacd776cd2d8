"""Data of a sweep that is disturbed: small, and slow where the environment says so."""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DELAY = "BATCHSCAPE_CHAOS_DELAY_S"
"""Seconds that every sample takes longer. Not a setting: it changes no name of a run."""


class Points:
    """Points around one centre for each class."""

    task = "class"
    classes = 3
    features = 4

    def __init__(self, part: str) -> None:
        generator = np.random.default_rng(0 if part == "train" else 1)
        self.num_samples = 240
        self._labels = generator.integers(0, self.classes, self.num_samples)
        noise = generator.normal(size=(self.num_samples, self.features))
        self._points = np.eye(self.classes, self.features)[self._labels] * 3 + noise
        self._delay_s = float(os.environ.get(DELAY, "0")) if part == "train" else 0.0

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        """One class a sample."""
        return len(indices)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Points as float32, and their classes."""
        time.sleep(self._delay_s * len(indices))
        points = torch.from_numpy(self._points[indices]).float()
        return points, torch.from_numpy(self._labels[indices])
