"""Documents as samples of next-token prediction, or of classification where they have a label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchscape.config import Documents
from batchscape.data.coding import Coder, coder_of, tokenizer_hash
from batchscape.data.fingerprints import file_sha256
from batchscape.data.progress import reading
from batchscape.data.records import Record, Records
from batchscape.data.sources import choose, draw
from batchscape.data.store import Arrays, DataArrays, keep
from batchscape.data.text import cut
from batchscape.errors import ConfigError
from batchscape.record.spec import DataIdentity


def prepare_documents(config: Documents) -> DataIdentity:
    """Read the documents, cut them into samples, and keep the arrays.

    A document is held out by a hash of its text, so that one more document moves no other, and
    copies of a document are in the same part. Documents without a token are left out.
    """
    records = Records(config.path, config.text_field, config.label_field)
    total = sum(file.stat().st_size for file in records.files)
    with reading("hashing", total) as advance:
        files = [(records.name(file), file_sha256(file, advance)) for file in records.files]
    manifest: dict[str, Any] = {
        "files": files,
        "text_field": config.text_field,
        "label_field": config.label_field,
        "sequence_length": config.sequence_length,
        "layout": config.layout,
        "held_out_pct": config.held_out_pct,
    }
    if config.tokenizer is not None:
        manifest["tokenizer"] = tokenizer_hash(config.tokenizer)

    def build() -> DataArrays:
        coder = coder_of(config.tokenizer)
        with reading("reading documents", total) as advance:
            encoded = _EncodedDocuments(config, coder)
            for batch in records.batches(advance):
                encoded.add(batch)
        return encoded.build_arrays()

    stored = keep(config.name, manifest, build)
    vocabulary = stored.facts["vocabulary"]
    if config.label_field is None:
        return stored.identity("next_token", vocabulary)
    return stored.identity("class", len(stored.facts["classes"]), vocabulary=vocabulary)


@dataclass
class _EncodedDocuments:
    """Documents as tokens, until they are dealt to the parts."""

    config: Documents
    coder: Coder
    documents: list[NDArray[Any]] = field(default_factory=list)
    labels: list[int | str | None] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)

    def add(self, records: Sequence[Record]) -> None:
        """Encode some documents."""
        texts = [record.text for record in records]
        if self.config.label_field is None:
            encoded = self.coder.encode(texts)
        else:
            encoded = self.coder.encode_whole(texts, self.config.sequence_length)
        for record, document in zip(records, encoded, strict=True):
            if len(document):
                self.documents.append(document)
                self.labels.append(record.label)
                self.draws.append(draw(record.text))

    def build_arrays(self) -> DataArrays:
        """Return the arrays of both parts."""
        if len(self.documents) < 2:
            msg = (
                f"data.path={self.config.path}: two or more documents with a text are needed, one "
                f"for each part; found {len(self.documents)}"
            )
            raise ConfigError(msg)
        held_out = choose(np.array(self.draws), self.config.held_out_pct)
        facts: dict[str, Any] = {"vocabulary": self.coder.vocabulary}
        labels = None
        if self.config.label_field is not None:
            facts["classes"] = self._classes()
            class_numbers = {label: index for index, label in enumerate(facts["classes"])}
            labels = np.array([class_numbers[label] for label in self.labels], dtype=np.int64)
        arrays: Arrays = {}
        samples = {}
        for part, is_chosen in (("train", ~held_out), ("held_out", held_out)):
            indices = np.flatnonzero(is_chosen)
            documents = [self.documents[index] for index in indices]
            arrays |= cut(part, documents, self.config, self.coder)
            if labels is not None:
                sizes = np.array([len(document) for document in documents], dtype=np.int64)
                # A document with a class is one sample, whatever its length.
                arrays |= {
                    f"{part}_offsets": np.cumsum(sizes) - sizes,
                    f"{part}_lengths": sizes,
                    f"{part}_labels": labels[indices],
                }
            samples[part] = len(arrays[f"{part}_offsets"])
        return DataArrays(arrays, samples, facts)

    def _classes(self) -> list[int | str]:
        """Return the distinct labels, sorted; refuse mixed kinds and fewer than two."""
        labels = set(self.labels)
        texts = sorted(label for label in labels if isinstance(label, str))
        numbers = sorted(label for label in labels if isinstance(label, int))
        if texts and numbers:
            msg = (
                f"data.label_field={self.config.label_field} must hold texts in all records or "
                f"numbers in all; found {texts[0]!r} and {numbers[0]}"
            )
            raise ConfigError(msg)
        if len(labels) < 2:
            msg = (
                f"data.label_field={self.config.label_field} must hold two or more classes; all "
                f"{len(self.labels)} documents are of class {[*texts, *numbers][0]!r}"
            )
            raise ConfigError(msg)
        return [*texts, *numbers]
