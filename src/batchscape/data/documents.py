"""Documents as samples of next-token prediction, or of classification where they have a label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from batchscape.config import Documents
from batchscape.data.coding import Tokens, coder_of, tokenizer_hash
from batchscape.data.fingerprints import file_sha256
from batchscape.data.progress import reading
from batchscape.data.records import Label, Record, document_files, read_records
from batchscape.data.sources import choose, draw
from batchscape.data.store import PARTS, Arrays, Facts, keep
from batchscape.data.text import cut
from batchscape.errors import ConfigError
from batchscape.record.spec import DataIdentity


def prepare_documents(config: Documents) -> DataIdentity:
    """Read the documents, cut them into samples, and keep the arrays.

    A document is held out by a hash of its text, so that one more document moves no other, and
    copies of a document are in the same part. Documents without a token are left out.
    """
    files = document_files(config.path)
    total = sum(file.stat().st_size for file in files.values())
    with reading("hashing", total) as advance:
        digests = [(name, file_sha256(file, advance)) for name, file in files.items()]
    manifest: dict[str, Any] = {
        "files": digests,
        "text_field": config.text_field,
        "label_field": config.label_field,
        "sequence_length": config.sequence_length,
        "layout": config.layout,
        "held_out_pct": config.held_out_pct,
    }
    if config.tokenizer is not None:
        manifest["tokenizer"] = tokenizer_hash(config.tokenizer)

    def build() -> tuple[dict[str, Arrays], Facts]:
        with reading("reading documents", total) as advance:
            return _deal(config, read_records(files.values(), config, advance))

    place, facts = keep(config.name, manifest, build)
    vocabulary = facts["vocabulary"]
    if config.label_field is None:
        return DataIdentity(**place, classes=vocabulary, task="next_token")
    classes = len(facts["classes"])
    return DataIdentity(**place, classes=classes, task="class", vocabulary=vocabulary)


def _deal(config: Documents, batches: Iterable[list[Record]]) -> tuple[dict[str, Arrays], Facts]:
    """Encode the documents and deal them to the parts."""
    coder = coder_of(config.tokenizer)
    kept: list[tuple[Tokens, Label, float]] = []
    for batch in batches:
        texts = [text for text, _ in batch]
        encoded = (
            coder.encode(texts)
            if config.label_field is None
            else coder.encode_whole(texts, config.sequence_length)
        )
        kept += [
            (document, label, draw(text))
            for (text, label), document in zip(batch, encoded, strict=True)
            if len(document)
        ]
    if len(kept) < 2:
        raise ConfigError(
            f"data.path={config.path}: two or more documents with a text are needed, one for each "
            f"part; found {len(kept)}"
        )
    documents, labels, draws = zip(*kept, strict=True)
    facts: Facts = {"vocabulary": coder.vocabulary}
    if config.label_field is not None:
        facts["classes"] = _classes(config.label_field, labels)
    class_numbers = {label: number for number, label in enumerate(facts.get("classes", ()))}
    held_out = choose(np.array(draws), config.held_out_pct)
    parts = {}
    for part, is_chosen in zip(PARTS, (~held_out, held_out), strict=True):
        indices = np.flatnonzero(is_chosen)
        chosen = [documents[index] for index in indices]
        parts[part] = cut(chosen, config, coder)
        if config.label_field is not None:
            sizes = np.array([len(document) for document in chosen], dtype=np.int64)
            numbers = [class_numbers[labels[index]] for index in indices]
            # A document with a class is one sample, whatever its length.
            parts[part] |= {
                "offsets": np.cumsum(sizes) - sizes,
                "lengths": sizes,
                "labels": np.array(numbers, dtype=np.int64),
            }
    return parts, facts


def _classes(label_field: str, labels: Sequence[Label]) -> list[Label]:
    """Return the distinct labels, sorted; refuse mixed kinds and fewer than two."""
    texts = sorted({label for label in labels if isinstance(label, str)})
    numbers = sorted({label for label in labels if isinstance(label, int)})
    if texts and numbers:
        raise ConfigError(
            f"data.label_field={label_field} must hold texts in all records or numbers in all; "
            f"found {texts[0]!r} and {numbers[0]}"
        )
    classes: list[Label] = [*texts, *numbers]
    if len(classes) < 2:
        raise ConfigError(
            f"data.label_field={label_field} must hold two or more classes; all {len(labels)} "
            f"documents are of class {classes[0]!r}"
        )
    return classes
