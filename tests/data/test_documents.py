"""Documents: how they are read, which are held out, and what a sample is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from batchscape.config import Documents
from batchscape.config.data import IGNORED
from batchscape.data.corpus import prepare
from batchscape.data.datasets import open_dataset
from batchscape.errors import ConfigError

TEXTS = [f"document {number} " * (1 + number % 4) for number in range(60)]
LABELS = [("cat", "ant", "bee")[number % 3] for number in range(60)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def records(texts=TEXTS, labels=LABELS):
    both = zip(texts, labels, strict=True)
    return [{"text": text, "kind": label, "id": i} for i, (text, label) in enumerate(both)]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path, rows):
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    return path


def settings_of(path, **more):
    more = {"sequence_length": 16, "held_out_pct": 20.0, **more}
    return Documents(name="documents", path=str(path), **more)


def opened(config):
    identity = prepare(config)
    parts = {
        part: open_dataset(SimpleNamespace(data=config), identity, part)
        for part in ("train", "held_out")
    }
    return parts, identity


def everything(dataset):
    return dataset.batch(np.arange(dataset.num_samples))


def pieces(text):
    """Cut a document as it should be: 16 labels a sample, the last byte shared with the next."""
    return [text[begin : begin + 17] for begin in range(0, len(text) - 1, 16)]


def texts_of(dataset):
    """Return the documents of a padded part, whose samples are theirs one after the other."""
    inputs, labels = everything(dataset)
    samples = []
    for row, targets in zip(inputs.tolist(), labels.tolist(), strict=True):
        real = [token for token in targets if token != IGNORED]
        assert row[1:] == (real + [0] * 16)[:15]
        samples.append(bytes([row[0], *real]).decode())
    starts = {pieces(text)[0]: text for text in TEXTS}
    texts = []
    while samples:
        texts.append(starts[samples[0]])
        count = len(pieces(texts[-1]))
        assert samples[:count] == pieces(texts[-1])
        del samples[:count]
    return texts


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_every_source_gives_the_same_documents(tmp_path, kind):
    rows = records()
    if kind == "folder":
        path = tmp_path / "folder"
        (path / "b").mkdir(parents=True)
        write_lines(path / "a.jsonl", rows[:20])
        write_parquet(path / "b" / "c.parquet", rows[20:50])
        write_lines(path / "d.json", rows[50:])
        (path / "readme.txt").write_text("no documents")
        (path / ".hidden.jsonl").write_text("broken")
    elif kind == "parquet":
        path = write_parquet(tmp_path / "x.parquet", rows)
    else:
        path = write_lines(tmp_path / f"x.{kind}", rows)
    parts, identity = opened(settings_of(path, layout="padded"))
    assert identity.classes == 256
    texts = {part: texts_of(dataset) for part, dataset in parts.items()}
    assert sorted(texts["train"] + texts["held_out"]) == sorted(TEXTS)
    assert 2 <= len(texts["held_out"]) <= 25


def test_packed_documents_are_joined_by_blank_lines(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", records())
    parts, _ = opened(settings_of(path))
    padded, _ = opened(settings_of(path, layout="padded"))
    for part, dataset in parts.items():
        stream = "\n\n".join(texts_of(padded[part])).encode()
        inputs, labels = everything(dataset)
        samples = (len(stream) - 1) // 16
        assert bytes(inputs.flatten().tolist()) == stream[: samples * 16]
        assert bytes(labels.flatten().tolist()) == stream[1 : samples * 16 + 1]


def test_one_more_document_moves_no_other(tmp_path):
    held_out = []
    for count in (40, 60):
        path = write_lines(tmp_path / f"{count}.jsonl", records()[:count])
        parts, _ = opened(settings_of(path, layout="padded"))
        held_out.append(set(texts_of(parts["held_out"])))
    assert held_out[0] == held_out[1] & set(TEXTS[:40])


def test_copies_of_a_document_are_in_the_same_part(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", records() + records())
    parts, _ = opened(settings_of(path, layout="padded"))
    train, held_out = (texts_of(dataset) for dataset in parts.values())
    assert not set(train) & set(held_out)
    assert len(train) + len(held_out) == 120


@pytest.mark.parametrize(
    "labels", [LABELS, [3 * (n % 3) - 1 for n in range(60)]], ids=["text", "n"]
)
def test_labels_are_classes_in_their_order(tmp_path, labels):
    path = write_parquet(tmp_path / "x.parquet", records(labels=labels))
    config = settings_of(path, label_field="kind", layout="padded")
    parts, identity = opened(config)
    assert (identity.task, identity.classes, identity.vocabulary) == ("class", 3, 256)
    assert identity.train_samples + identity.held_out_samples == 60
    order = sorted(set(labels))
    manifest = json.loads((Path(identity.folder) / "manifest.json").read_text())
    assert manifest["facts"]["classes"] == order
    label_of = {text.encode()[:16]: label for text, label in zip(TEXTS, labels, strict=True)}
    for dataset in parts.values():
        inputs, classes = everything(dataset)
        assert inputs.shape == (dataset.num_samples, 16)
        assert dataset.count_labels(np.arange(3)) == 3
        for row, one in zip(inputs.tolist(), classes.tolist(), strict=True):
            text = bytes(token for token in row if token >= 0)
            assert row[len(text) :] == [-1] * (16 - len(text))
            assert label_of[text] == order[one]


def test_short_texts_are_padded_with_no_token(tmp_path):
    rows = [{"text": "ab", "kind": 0}, {"text": "abcdefgh", "kind": 1}] * 2
    path = write_lines(tmp_path / "x.jsonl", rows)
    config = settings_of(path, label_field="kind", layout="padded", sequence_length=4)
    parts, _ = opened(config)
    rows = {tuple(row) for d in parts.values() for row in everything(d)[0].tolist()}
    assert rows == {(97, 98, -1, -1), (97, 98, 99, 100)}


def test_a_document_without_text_is_left_out(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [*records()[:10], {"text": ""}, {"text": "a"}])
    parts, _ = opened(settings_of(path, layout="padded"))
    # A single byte has no label either.
    assert sorted(t for d in parts.values() for t in texts_of(d)) == sorted(TEXTS[:10])


@pytest.mark.parametrize(
    ("change", "more", "message"),
    [
        ({}, {"text_field": "content"}, "no such field .*; it has text, kind, id"),
        ({}, {"label_field": "class", "layout": "padded"}, "label_field=class.*text, kind, id"),
        ({"text": 3}, {}, "record 60 holds 3"),
        ({"text": None}, {}, "record 60 holds None"),
        ({"kind": None}, {"label_field": "kind", "layout": "padded"}, "record 60 holds None"),
        ({"kind": 0.5}, {"label_field": "kind", "layout": "padded"}, r"record 60 holds 0\.5"),
        ({"kind": 7}, {"label_field": "kind", "layout": "padded"}, "'ant' and 7"),
    ],
)
def test_fields_that_do_not_hold_what_they_should(tmp_path, change, more, message):
    rows = records()
    rows[-1] |= change
    path = write_lines(tmp_path / "x.jsonl", rows)
    with pytest.raises(ConfigError, match=message):
        prepare(settings_of(path, **more))


def test_missing_fields_of_parquet_are_named(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", records())
    with pytest.raises(ConfigError, match="it has text, kind, id"):
        prepare(settings_of(path, text_field="content"))


def test_one_class_is_refused(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", records(labels=["a"] * 60))
    with pytest.raises(ConfigError, match="two or more classes; all 60 documents are of class 'a'"):
        prepare(settings_of(path, label_field="kind", layout="padded"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", '[{"text": "a"}]', "line 1 is not a JSON object"),
        ("x.jsonl", '{"text": "a"}\n{"text": ', "line 2 is not a JSON object"),
        ("x.parquet", "no parquet", "cannot be read as Parquet"),
        ("x.csv", "text\na\n", "no documents there"),
        ("x.jsonl", '{"text": "only one"}\n', "two or more"),
        ("x.jsonl", "", "two or more"),
    ],
)
def test_what_holds_no_documents_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        prepare(settings_of(tmp_path / name))


def test_contents_and_rules_name_the_documents(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", records())
    first = prepare(settings_of(path))
    assert prepare(settings_of(path)) == first
    others = [{"sequence_length": 8}, {"layout": "padded"}, {"held_out_pct": 30.0}]
    hashes = {prepare(settings_of(path, **more)).manifest_hash for more in others}
    write_lines(path, records()[:-1])
    hashes.add(prepare(settings_of(path)).manifest_hash)
    assert len(hashes - {first.manifest_hash}) == 4
