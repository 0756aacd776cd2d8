"""Text files as samples of next-token prediction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.config import Documents, TextFiles
from batchscape.data.coding import Coder, coder_of, tokenizer_hash
from batchscape.data.progress import reading
from batchscape.data.sources import text_sources
from batchscape.data.store import PARTS, Arrays, DataArrays, keep
from batchscape.record.spec import DataIdentity

Split = tuple[NDArray[np.int64], NDArray[np.int64]]


def split_packed(stream: NDArray[Any], sequence_length: int) -> Split:
    """Cut a stream into full samples; a sample shares its last token with the next one's first."""
    samples = max(0, (len(stream) - 1) // sequence_length)
    offsets = np.arange(samples, dtype=np.int64) * sequence_length
    return offsets, np.full(samples, sequence_length, dtype=np.int64)


def split_documents(sizes: NDArray[np.int64], sequence_length: int) -> Split:
    """Cut a stream at the ends of its documents; a longer one is continued in further samples.

    Every token of a document but its first is the label of exactly one sample.
    """
    return _cut_pieces(np.cumsum(sizes) - sizes, sizes - 1, sequence_length)


def split_blocks(stream: NDArray[np.uint8], sequence_length: int) -> Split:
    """Cut bytes at their blank lines, as `split_documents` does at the ends of documents."""
    newline = stream == ord("\n")
    # A block starts after a run of blank lines and ends with the newline before the next run.
    blank = np.flatnonzero(newline[1:] & newline[:-1]) + 1
    edges = np.concatenate(([-1], blank, [len(stream)]))
    starts, ends = edges[:-1] + 1, edges[1:]
    return _cut_pieces(starts, ends - starts - 1, sequence_length)


def _cut_pieces(
    starts: NDArray[np.int64], labels: NDArray[np.int64], sequence_length: int
) -> Split:
    starts, labels = starts[labels >= 1], labels[labels >= 1]
    counts = -(-labels // sequence_length)
    # Number of each piece within its document, from 0.
    piece = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(starts, counts) + piece * sequence_length
    lengths = np.minimum(sequence_length, np.repeat(labels, counts) - piece * sequence_length)
    return offsets.astype(np.int64), lengths.astype(np.int64)


def prepare_text(config: TextFiles) -> DataIdentity:
    """Read the files, cut them into samples, and keep the arrays."""
    parts: dict[str, list[bytes]] = {part: [] for part in PARTS}
    files: list[tuple[str, str]] = []
    for name, content, part in text_sources(config):
        files.append((f"{part}:{name}", hashlib.sha256(content).hexdigest()))
        parts[part].append(content)
    manifest: dict[str, Any] = {
        "files": files,
        "sequence_length": config.sequence_length,
        "layout": config.layout,
    }
    if config.tokenizer is not None:
        manifest["tokenizer"] = tokenizer_hash(config.tokenizer)

    def build() -> DataArrays:
        coder = coder_of(config.tokenizer)
        arrays: Arrays = {}
        total = sum(len(content) for contents in parts.values() for content in contents)
        with reading("reading text", total) as advance:
            for part, contents in parts.items():
                # A padded sample is a block between blank lines.
                texts = iter(contents) if config.layout == "packed" else _blocks(contents)
                encoded: list[NDArray[Any]] = []
                while batch := list(islice(texts, 256)):
                    encoded += coder.encode(batch)
                    advance(sum(map(len, batch)))
                arrays |= cut(part, encoded, config, coder)
        samples = {part: len(arrays[f"{part}_offsets"]) for part in PARTS}
        return DataArrays(arrays, samples, {"vocabulary": coder.vocabulary})

    stored = keep(config.name, manifest, build)
    return stored.identity("next_token", stored.facts["vocabulary"])


def cut(
    part: str, encoded: Sequence[NDArray[Any]], config: TextFiles | Documents, coder: Coder
) -> Arrays:
    """Cut the tokens of one part, all in a row or each piece for itself, into samples."""
    if config.layout == "packed":
        stream = _join(encoded, coder.separator)
        offsets, lengths = split_packed(stream, config.sequence_length)
    else:
        stream = _join(encoded, coder.separator[:0])
        sizes = np.array([len(piece) for piece in encoded], dtype=np.int64)
        offsets, lengths = split_documents(sizes, config.sequence_length)
    return {
        f"{part}_{coder.kind}": stream,
        f"{part}_offsets": offsets,
        f"{part}_lengths": lengths,
    }


def _join(tokens: Sequence[NDArray[Any]], separator: NDArray[Any]) -> NDArray[Any]:
    """Return tokens one after the other, with a separator between each two."""
    arrays = [array for piece in tokens for array in (separator, piece)]
    return np.concatenate(arrays[1:]) if arrays else separator[:0]


def _blocks(contents: Sequence[bytes]) -> Iterator[bytes]:
    text = b"\n\n".join(contents)
    offsets, lengths = split_blocks(np.frombuffer(text, dtype=np.uint8), len(text) + 1)
    for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
        yield text[offset : offset + length + 1]
