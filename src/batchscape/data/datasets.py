"""Samples by index, as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchscape.config import Digits, RunConfig
from batchscape.errors import RecordError
from batchscape.record.spec import DataIdentity

__all__ = ["IGNORED", "Dataset", "ImageDataset", "TextDataset", "open_dataset"]

IGNORED = -100
"""Target that bears no loss: padding."""

Part = Literal["train", "held_out"]
Indices = NDArray[np.int64]


class Dataset(Protocol):
    """Samples that can be fetched in any order."""

    num_samples: int
    """Samples in this part."""

    def count_targets(self, indices: Indices) -> int:
        """Return how many loss-bearing targets these samples have together."""

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets of these samples, on the CPU."""


class TextDataset:
    """Bytes of a text as next-byte prediction.

    A batch is two int64 tensors of shape (samples, sequence_length). Short samples are padded
    with zeros, their missing targets with `IGNORED`.
    """

    def __init__(self, folder: Path, part: Part, sequence_length: int) -> None:
        self._bytes = _array(folder, f"{part}_bytes")
        self._offsets: Indices = _array(folder, f"{part}_offsets")
        self._lengths: Indices = _array(folder, f"{part}_lengths")
        self._window = np.arange(sequence_length + 1)
        self._full = bool((self._lengths == sequence_length).all())
        self.num_samples = len(self._offsets)

    def count_targets(self, indices: Indices) -> int:
        """Return the number of real (not padded) targets."""
        return int(self._lengths[indices].sum())

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, each of shape (samples, sequence_length)."""
        positions = self._offsets[indices, None] + self._window
        if self._full:
            tokens = torch.from_numpy(self._bytes[positions].astype(np.int64))
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        real = self._window <= self._lengths[indices, None]
        gathered = self._bytes[np.minimum(positions, len(self._bytes) - 1)]
        tokens = torch.from_numpy(np.where(real, gathered, 0).astype(np.int64))
        targets = tokens[:, 1:].clone()
        targets[torch.from_numpy(~real[:, 1:])] = IGNORED
        return tokens[:, :-1].contiguous(), targets


class ImageDataset:
    """Images as flat vectors in [0, 1], with their class.

    A batch is a float32 tensor of shape (samples, pixels) and an int64 one of shape (samples,).
    """

    def __init__(self, folder: Path, part: Part) -> None:
        self._images = _array(folder, f"{part}_images")
        self._labels = _array(folder, f"{part}_labels")
        self.num_samples = len(self._labels)

    def count_targets(self, indices: Indices) -> int:
        """Return the number of samples: each has one target."""
        return len(indices)

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images of shape (samples, pixels) and labels of shape (samples,)."""
        return torch.from_numpy(self._images[indices]), torch.from_numpy(self._labels[indices])


def open_dataset(config: RunConfig, identity: DataIdentity, part: Part) -> Dataset:
    """Open one part of prepared data.

    Raises
    ------
    RecordError
        If the prepared arrays are gone; planning the run again makes them.
    """
    folder = Path(identity.folder)
    if isinstance(config.data, Digits):
        return ImageDataset(folder, part)
    return TextDataset(folder, part, config.data.sequence_length)


def _array(folder: Path, name: str) -> NDArray[Any]:
    path = folder / f"{name}.npy"
    try:
        mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        msg = f"the prepared data {path} cannot be read ({error}); the same command makes it anew"
        raise RecordError(msg) from None
    return mapped
