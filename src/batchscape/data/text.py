"""Text files as samples of next-token prediction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.config import Documents, TextFiles
from batchscape.data.coding import Coder, Tokens, coder_of, tokenizer_hash
from batchscape.data.progress import reading
from batchscape.data.sources import text_sources
from batchscape.data.store import PARTS, Arrays, Facts, keep
from batchscape.record.spec import DataIdentity

_BATCH_TEXTS = 256
"""Texts that are encoded at once."""

Split = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Where each sample begins, and how many labels it has."""


def split_packed(stream: NDArray[Any], sequence_length: int) -> Split:
    """Cut a stream into full samples; a sample shares its last token with the next one's first."""
    samples = max(0, (len(stream) - 1) // sequence_length)
    offsets = np.arange(samples, dtype=np.int64) * sequence_length
    return offsets, np.full(samples, sequence_length, dtype=np.int64)


def split_documents(sizes: NDArray[np.int64], sequence_length: int) -> Split:
    """Cut a stream at the ends of its documents; a longer one is continued in further samples.

    Every token of a document but its first is the label of exactly one sample.
    """
    has_label = sizes >= 2
    starts, labels = (np.cumsum(sizes) - sizes)[has_label], sizes[has_label] - 1
    counts = -(-labels // sequence_length)
    # Number of each piece within its document, from 0.
    piece = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.repeat(starts, counts) + piece * sequence_length
    lengths = np.minimum(sequence_length, np.repeat(labels, counts) - piece * sequence_length)
    return offsets.astype(np.int64), lengths.astype(np.int64)


def text_blocks(text: bytes) -> list[bytes]:
    """Cut a text at its blank lines; blocks of one byte have no label and are left out."""
    return [block for block in re.split(rb"(?<=\n)\n", text) if len(block) > 1]


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

    def build() -> tuple[dict[str, Arrays], Facts]:
        coder = coder_of(config.tokenizer)
        arrays = {}
        total = sum(len(content) for contents in parts.values() for content in contents)
        with reading("reading text", total) as advance:
            for part, contents in parts.items():
                # A padded sample is a block between blank lines.
                is_packed = config.layout == "packed"
                texts = contents if is_packed else text_blocks(b"\n\n".join(contents))
                encoded: list[Tokens] = []
                for start in range(0, len(texts), _BATCH_TEXTS):
                    batch = texts[start : start + _BATCH_TEXTS]
                    encoded += coder.encode(batch)
                    advance(sum(map(len, batch)))
                arrays[part] = cut(encoded, config, coder)
        return arrays, {"vocabulary": coder.vocabulary}

    place, facts = keep(config.name, manifest, build)
    return DataIdentity(**place, classes=facts["vocabulary"], task="next_token")


def cut(encoded: Sequence[Tokens], config: TextFiles | Documents, coder: Coder) -> Arrays:
    """Cut the tokens of one part, all in a row or each piece for itself, into samples."""
    is_packed = config.layout == "packed"
    separator = coder.separator if is_packed else coder.separator[:0]
    pieces = [array for piece in encoded for array in (separator, piece)]
    stream = np.concatenate([separator[:0], *pieces[1:]])
    if is_packed:
        offsets, lengths = split_packed(stream, config.sequence_length)
    else:
        sizes = np.array([len(piece) for piece in encoded], dtype=np.int64)
        offsets, lengths = split_documents(sizes, config.sequence_length)
    return {coder.kind: stream, "offsets": offsets, "lengths": lengths}
