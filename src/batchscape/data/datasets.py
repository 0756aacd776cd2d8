"""Samples by index, as tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from batchscape.config import CustomData, Digits, Documents, ExternalData, RunConfig, TokenFiles
from batchscape.config.data import IGNORED
from batchscape.data.custom import make_custom
from batchscape.data.store import load_array
from batchscape.data.tokens import pieces_of
from batchscape.record.spec import DataIdentity

NO_TOKEN = -1
"""Input behind the end of a text with a class."""

Part = Literal["train", "held_out"]
Unit = Literal["bytes", "tokens"]
Indices = NDArray[np.int64]


class Dataset(Protocol):
    """Samples that can be fetched in any order."""

    num_samples: int
    """Samples in this part."""

    def count_labels(self, indices: Indices) -> int:
        """Return how many loss-bearing labels these samples have together."""

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels of these samples, on the CPU."""


class TextDataset:
    """Pieces of a stream of bytes or tokens, as next-token prediction or with a class each.

    A batch is an int64 tensor of shape (samples, sequence_length), and one of the same shape or,
    of classes, of shape (samples,). Samples that are shorter are padded: with zeros, and their
    missing labels with `IGNORED`; with `NO_TOKEN` where they have a class.
    """

    def __init__(
        self,
        folder: Path,
        part: Part,
        sequence_length: int,
        kind: Unit = "bytes",
        *,
        is_labelled: bool = False,
    ) -> None:
        self._stream = load_array(folder, f"{part}_{kind}")
        self._offsets: Indices = load_array(folder, f"{part}_offsets")
        self._lengths: Indices = load_array(folder, f"{part}_lengths")
        self._classes = load_array(folder, f"{part}_labels") if is_labelled else None
        self._window = np.arange(sequence_length if is_labelled else sequence_length + 1)
        self._is_full = bool((self._lengths == sequence_length).all())
        self.num_samples = len(self._offsets)

    def count_labels(self, indices: Indices) -> int:
        """Return the number of real (not padded) labels: one a sample where it has a class."""
        return len(indices) if self._classes is not None else int(self._lengths[indices].sum())

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs of shape (samples, sequence_length), and their labels."""
        # A window from the beginning of each piece, even beyond its end.
        positions = self._offsets[indices, None] + self._window
        values = self._stream[np.minimum(positions, len(self._stream) - 1)].astype(np.int64)
        lengths = self._lengths[indices, None]
        if self._classes is not None:
            texts = torch.from_numpy(np.where(self._window < lengths, values, NO_TOKEN))
            return texts, torch.from_numpy(self._classes[indices])
        if self._is_full:
            return _shifted(torch.from_numpy(values))
        is_real = self._window <= lengths
        tokens = torch.from_numpy(np.where(is_real, values, 0))
        # A copy, also of a single sample, whose labels would share memory with its inputs.
        labels = tokens[:, 1:].clone()
        labels[torch.from_numpy(~is_real[:, 1:])] = IGNORED
        return tokens[:, :-1].contiguous(), labels


class TokenDataset:
    """Token files as next-token prediction, mapped into memory.

    A batch is two int64 tensors of shape (samples, sequence_length), always full.
    """

    def __init__(self, folder: Path, part: Part, sequence_length: int) -> None:
        pieces = [p for p in pieces_of(folder, part) if p.samples(sequence_length)]
        self._tokens = [piece.map() for piece in pieces]
        self._sequence_length = sequence_length
        # Samples up to the end of each piece.
        self._ends = np.cumsum([piece.samples(sequence_length) for piece in pieces])
        self.num_samples = int(self._ends[-1])

    def count_labels(self, indices: Indices) -> int:
        """Return the number of labels: every sample is full."""
        return len(indices) * self._sequence_length

    def batch(self, indices: Indices) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and labels, each of shape (samples, sequence_length)."""
        length = self._sequence_length
        tokens = np.empty((len(indices), length + 1), dtype=np.int64)
        pieces = np.searchsorted(self._ends, indices, side="right")
        firsts = np.concatenate(([0], self._ends[:-1]))[pieces]
        for row, (piece, sample) in enumerate(zip(pieces, indices - firsts, strict=True)):
            begin = int(sample) * length
            tokens[row] = self._tokens[piece][begin : begin + length + 1]
        return _shifted(torch.from_numpy(tokens))


class ImageDataset:
    """Images as flat vectors in [0, 1], with their class.

    A batch is a float32 tensor of shape (samples, pixels) and an int64 one of shape (samples,).
    """

    def __init__(self, folder: Path, part: Part) -> None:
        self._images = load_array(folder, f"{part}_images")
        self._labels = load_array(folder, f"{part}_labels")
        self.num_samples = len(self._labels)

    def count_labels(self, indices: Indices) -> int:
        """Return the number of samples: each has one label."""
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
    ConfigError
        If data of the user's own cannot be made.
    """
    folder, data = Path(identity.folder), config.data
    if isinstance(data, CustomData):
        return make_custom(data, part)
    if isinstance(data, Digits):
        return ImageDataset(folder, part)
    if isinstance(data, TokenFiles):
        return TokenDataset(folder, part, data.sequence_length)
    if isinstance(data, ExternalData):
        raise AssertionError("data=external are read by a program, not by our own loop")
    kind: Unit = "bytes" if data.tokenizer is None else "tokens"
    is_labelled = isinstance(data, Documents) and data.label_field is not None
    return TextDataset(folder, part, data.sequence_length, kind, is_labelled=is_labelled)


def _shifted(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
