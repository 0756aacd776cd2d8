"""Cutting a stream of tokens into samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["split_blocks", "split_documents", "split_packed"]

Split = tuple[NDArray[np.int64], NDArray[np.int64]]


def split_packed(stream: NDArray[Any], sequence_length: int) -> Split:
    """Cut a stream into full samples; a sample shares its last token with the next one's first.

    Parameters
    ----------
    stream : array, shape (n,)
        Bytes or tokens.
    sequence_length : int
        Labels a sample.

    Returns
    -------
    offsets, lengths : int64 arrays, shape ((n - 1) // sequence_length,)
        First token and number of labels of each sample; a shorter rest of the stream is unused.
    """
    samples = max(0, (len(stream) - 1) // sequence_length)
    offsets = np.arange(samples, dtype=np.int64) * sequence_length
    return offsets, np.full(samples, sequence_length, dtype=np.int64)


def split_documents(sizes: NDArray[np.int64], sequence_length: int) -> Split:
    """Cut a stream at the ends of its documents; a longer one is continued in further samples.

    Every token of a document but its first is the label of exactly one sample.

    Parameters
    ----------
    sizes : int64 array, shape (documents,)
        Tokens of each document, one after the other in the stream.
    sequence_length : int
        Labels a sample at most.

    Returns
    -------
    offsets, lengths : int64 arrays, shape (samples,)
        First token and number of labels (at least 1) of each sample.
    """
    return _pieces(np.cumsum(sizes) - sizes, sizes - 1, sequence_length)


def split_blocks(stream: NDArray[np.uint8], sequence_length: int) -> Split:
    """Cut bytes at their blank lines, as `split_documents` does at the ends of documents.

    Parameters
    ----------
    stream : uint8 array, shape (n,)
    sequence_length : int
        Labels a sample at most.

    Returns
    -------
    offsets, lengths : int64 arrays, shape (samples,)
        First byte and number of labels (at least 1) of each sample.
    """
    newline = stream == ord("\n")
    # A block starts after a run of blank lines and ends with the newline before the next run.
    blank = np.flatnonzero(newline[1:] & newline[:-1]) + 1
    edges = np.concatenate(([-1], blank, [len(stream)]))
    starts, ends = edges[:-1] + 1, edges[1:]
    return _pieces(starts, ends - starts - 1, sequence_length)


def _pieces(starts: NDArray[np.int64], labels: NDArray[np.int64], sequence_length: int) -> Split:
    starts, labels = starts[labels >= 1], labels[labels >= 1]
    pieces = -(-labels // sequence_length)
    piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = np.repeat(starts, pieces) + piece * sequence_length
    lengths = np.minimum(sequence_length, np.repeat(labels, pieces) - piece * sequence_length)
    return offsets.astype(np.int64), lengths.astype(np.int64)
