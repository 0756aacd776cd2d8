"""Data as a user would write them, for runs of their own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info


class Blobs:
    """Points around one centre for each class."""

    task = "class"
    classes = 3
    features = 4

    def __init__(
        self, part: str, samples: int = 200, slow_s: float = 0.0, stuck_after: int | None = None
    ) -> None:
        generator = np.random.default_rng(0 if part == "train" else 1)
        self._labels = generator.integers(0, self.classes, samples)
        noise = generator.normal(size=(samples, self.features))
        self._points = np.eye(self.classes, self.features)[self._labels] * 3 + noise
        self._slow_s = slow_s
        self._stuck_after = stuck_after
        self._calls = 0
        self.num_samples = samples

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        """One class a sample."""
        return len(indices)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Points as float32, and their classes; slowly, or some times only, if so asked."""
        self._calls += 1
        stuck = self._stuck_after is not None and self._calls > self._stuck_after
        time.sleep(3600 if stuck else self._slow_s)
        points = torch.from_numpy(self._points[indices]).float()
        return points, torch.from_numpy(self._labels[indices])


class Meeting(Blobs):
    """Training batches that are handed out once several processes are at one, each its own."""

    def __init__(self, part: str, folder: str = "", parties: int = 1) -> None:
        super().__init__(part)
        self._place = Path(folder)
        self._parties = parties if part == "train" else 0

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Wait for the others; who is here stays, and waits no second time."""
        if self._parties:
            (self._place / f"{os.getpid()}").touch()
            while len(list(self._place.iterdir())) < self._parties:
                time.sleep(0.01)
        return super().batch(indices)


class Counting:
    """Sequences that count upwards from anywhere, some of them short."""

    task = "next_token"
    classes = 16

    def __init__(self, part: str, sequence_length: int | None = None, longest: int = 12) -> None:
        self._length = sequence_length or longest
        self._full = sequence_length is not None
        self.num_samples = 300 if part == "train" else 60
        self.content_hash = f"counting {part} to {self._length}"

    def _sizes(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._full:
            return np.full(len(indices), self._length)
        return 1 + indices * 7 % self._length

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        """As many as the sequence is long."""
        return int(self._sizes(indices).sum())

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Sequences of one length, with labels of -100 behind their ends."""
        steps = np.arange(self._length + 1)
        tokens = (indices[:, None] * 5 + steps * (1 + indices[:, None] % 3)) % self.classes
        labels = np.where(steps[:-1] < self._sizes(indices)[:, None], tokens[:, 1:], -100)
        return torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(labels)


class Ragged(Counting):
    """Sequences that are padded to the longest of a batch."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Sequences as long as the longest of these."""
        inputs, labels = super().batch(indices)
        longest = int(self._sizes(indices).max())
        return inputs[:, :longest], labels[:, :longest]


class Failing(Blobs):
    """Points that cannot all be read."""

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Fail at sample 77."""
        if 77 in indices:
            msg = "sample 77 is damaged"
            raise ValueError(msg)
        return super().batch(indices)


class Overcounting(Counting):
    """Sequences of whose held-out samples some later ones are said to be longer than they are."""

    def __init__(self, part: str, sequence_length: int | None = None) -> None:
        super().__init__(part, sequence_length)
        self._miscounts = part == "held_out"

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        """One too many for each of the samples 20 to 24."""
        wrong = (indices >= 20) & (indices < 25) & self._miscounts
        return super().count_labels(indices) + int(wrong.sum())


class Greedy(Blobs):
    """Points of which a worker of the loader takes a GiB to read the first, for a moment."""

    began = False

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Take it there alone."""
        if get_worker_info() is not None and not self.began:
            self.began = True
            torch.empty(2**28).fill_(0.0)
        return super().batch(indices)


class Pictures:
    """Noise of three channels, and a class for each."""

    task = "class"
    classes = 3

    def __init__(self, part: str) -> None:
        self.num_samples = 400 if part == "train" else 16

    def count_labels(self, indices: NDArray[np.int64]) -> int:
        """One class a sample."""
        return len(indices)

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Pictures as float32, and their classes."""
        noise = [np.random.default_rng(int(i)).normal(size=(3, 12, 12)) for i in indices]
        return torch.from_numpy(np.stack(noise)).float(), torch.from_numpy(indices % self.classes)
