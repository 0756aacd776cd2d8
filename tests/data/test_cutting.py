"""Cutting streams: what is a sample."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchscape.data.text import split_documents, split_packed, text_blocks

texts = st.text(alphabet="ab\n", max_size=200).map(str.encode)


def stream_of(text):
    return np.frombuffer(text, dtype=np.uint8)


@given(texts, st.integers(2, 9))
def test_packed_labels_are_the_text_once(text, length):
    offsets, lengths = split_packed(stream_of(text), length)
    assert (lengths == length).all()
    labels = b"".join(text[o + 1 : o + 1 + n] for o, n in zip(offsets, lengths, strict=True))
    assert labels == text[1 : 1 + len(offsets) * length]
    assert len(text) - 1 - len(labels) < length


@given(texts)
def test_blocks_are_the_lines_between_empty_ones(text):
    blocks = [b""]
    for number, line in enumerate(text.splitlines(keepends=True)):
        if line == b"\n" and number > 0:
            blocks.append(b"")
        else:
            blocks[-1] += line
    assert text_blocks(text) == [block for block in blocks if len(block) > 1]


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(2, 9))
def test_documents_are_cut_one_by_one(documents, length):
    stream = b"".join(documents)
    offsets, lengths = split_documents(
        np.array([len(d) for d in documents], dtype=np.int64), length
    )
    samples = [stream[o : o + n + 1] for o, n in zip(offsets, lengths, strict=True)]
    expected = [
        document[begin : begin + length + 1]
        for document in documents
        for begin in range(0, len(document) - 1, length)
    ]
    assert samples == expected
