"""Preparing data: what is a sample, what is held out, and what names the content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from batchscape.config import Digits, StandardLibrary, TextFiles
from batchscape.data import prepare
from batchscape.data.datasets import IGNORED, ImageDataset, TextDataset
from batchscape.data.text import split_blocks, split_packed
from batchscape.errors import BatchscapeError, ConfigError

texts = st.text(alphabet="ab\n", max_size=200).map(str.encode)


def stream_of(text):
    return np.frombuffer(text, dtype=np.uint8)


@given(texts, st.integers(2, 9))
def test_packed_targets_are_the_text_once(text, length):
    offsets, lengths = split_packed(stream_of(text), length)
    assert (lengths == length).all()
    targets = b"".join(text[o + 1 : o + 1 + n] for o, n in zip(offsets, lengths, strict=True))
    assert targets == text[1 : 1 + len(offsets) * length]
    assert len(text) - 1 - len(targets) < length


@given(texts, st.integers(2, 9))
def test_blocks_are_the_lines_between_empty_ones(text, length):
    offsets, lengths = split_blocks(stream_of(text), length)
    targets = [text[o + 1 : o + 1 + n] for o, n in zip(offsets, lengths, strict=True)]
    blocks = [b""]
    for number, line in enumerate(text.splitlines(keepends=True)):
        if line == b"\n" and number > 0:
            blocks.append(b"")
        else:
            blocks[-1] += line
    expected = [block[i : i + length] for block in blocks for i in range(1, len(block), length)]
    assert targets == expected


def test_padded_batches_ignore_what_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n\nlonger than six\n" * 20)
    config = TextFiles(
        name="text", path=str(tmp_path / "a.txt"), sequence_length=6, layout="padded"
    )
    dataset = TextDataset(Path(prepare(config).folder), "train", 6)
    inputs, targets = dataset.batch(np.arange(dataset.num_samples))
    real = targets != IGNORED
    assert real.sum().item() == dataset.count_targets(np.arange(dataset.num_samples))
    assert (inputs[:, 1:][real[:, :-1]] == targets[:, :-1][real[:, :-1]]).all()
    assert (inputs[:, 1:][~real[:, :-1]] == 0).all()
    first = bytes(inputs[0][real[0]].tolist()) + bytes([targets[0][real[0]][-1].item()])
    assert first == b"abc\n"


def test_standard_library_is_split_by_file():
    identity = prepare(StandardLibrary(name="stdlib", sequence_length=32))
    folder = Path(identity.folder)
    sizes = {part: len(np.load(folder / f"{part}_bytes.npy")) for part in ("train", "held_out")}
    assert sizes["train"] > 5_000_000
    assert 0.01 < sizes["held_out"] / sum(sizes.values()) < 0.15
    assert identity.train_samples == (sizes["train"] - 1) // 32
    dataset = TextDataset(folder, "train", 32)
    inputs, targets = dataset.batch(np.array([0, 1]))
    assert (targets[0, :-1] == inputs[0, 1:]).all()
    assert targets[0, -1] == inputs[1, 0]


def test_same_content_has_the_same_name_and_another_has_another(tmp_path):
    for name in ("x", "y", "z"):
        (tmp_path / f"{name}.txt").write_text(name * 500)
    config = TextFiles(name="text", path=str(tmp_path), held_out_pct=30.0)
    first = prepare(config)
    assert prepare(config) == first
    (tmp_path / "x.txt").write_text("x" * 499 + "!")
    assert prepare(config).manifest_hash != first.manifest_hash
    longer = TextFiles(name="text", path=str(tmp_path), held_out_pct=30.0, sequence_length=32)
    assert prepare(longer).manifest_hash != first.manifest_hash


def test_damaged_cache_is_made_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200)
    config = TextFiles(name="text", path=str(tmp_path / "a.txt"))
    identity = prepare(config)
    array = Path(identity.folder) / "train_bytes.npy"
    before = array.read_bytes()
    array.write_bytes(before[:-1] + b"?")
    assert prepare(config) == identity
    assert array.read_bytes() == before


@given(st.sets(st.text("abc", min_size=1, max_size=6), min_size=2, max_size=30), st.floats(0.1, 99))
def test_both_parts_have_files_and_no_file_moves_for_another(names, pct):
    from batchscape.data.corpus import _held_out_names

    ordered = sorted(names)
    chosen = _held_out_names(ordered, pct)
    assert 0 < len(chosen) < len(ordered)
    fewer = ordered[:-1]
    if len(fewer) > 2:
        again = _held_out_names(fewer, pct)
        # Only the rule for an empty part may move a file.
        assert len(again ^ (chosen - {ordered[-1]})) <= 1


def test_digits_have_all_classes_in_both_parts():
    identity = prepare(Digits(name="digits"))
    assert (identity.train_samples, identity.held_out_samples, identity.classes) == (1438, 359, 10)
    for part in ("train", "held_out"):
        dataset = ImageDataset(Path(identity.folder), part)
        images, labels = dataset.batch(np.arange(dataset.num_samples))
        assert images.shape == (dataset.num_samples, 64)
        assert 0 <= images.min() < images.max() == 1
        assert labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("pct", [0.1, 1.0, 30.0, 40.0, 66.0, 75.0, 99.9])
def test_digits_hold_out_the_share_that_was_asked_for(pct):
    identity = prepare(Digits(name="digits", held_out_pct=pct))
    assert abs(identity.held_out_samples - 1797 * pct / 100) <= 0.5
    assert identity.train_samples + identity.held_out_samples == 1797
    parts = [
        np.load(Path(identity.folder) / f"{part}_images.npy") for part in ("train", "held_out")
    ]
    rows = np.concatenate(parts)
    # All images, each in one part: the same rows as those of the library, in another order.
    expected = (load_digits().data / 16).astype(np.float32)
    assert np.array_equal(rows[np.lexsort(rows.T)], expected[np.lexsort(expected.T)])


def test_more_held_out_digits_hold_out_the_fewer_ones():
    held_out = []
    for pct in (5.0, 20.0):
        identity = prepare(Digits(name="digits", held_out_pct=pct))
        images = np.load(Path(identity.folder) / "held_out_images.npy")
        held_out.append({image.tobytes() for image in images})
    assert held_out[0] < held_out[1]


def test_a_share_that_leaves_no_digit_is_refused():
    for pct, part in ((0.01, "held_out"), (99.99, "train")):
        with pytest.raises(ConfigError, match=f"the {part} part holds no sample"):
            prepare(Digits(name="digits", held_out_pct=pct))


def test_hidden_files_and_sweep_folders_are_no_text(tmp_path):
    def write(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{path.name} " * 200)

    names = ("a.txt", "b.md", "deep/c.py", "runs/log.txt", "plan/plan.csv")
    for name in names:
        write(tmp_path / name)
    config = TextFiles(name="text", path=str(tmp_path))
    before = prepare(config)
    manifest = json.loads((Path(before.folder) / "manifest.json").read_text())
    # A folder of runs alone, or a plan alone, is the user's own.
    assert {name.partition(":")[2] for name, _ in manifest["files"]} == set(names)

    for name in (".hidden.txt", ".git/x.txt", ".venv/lib/y.py", "deep/.cache/z.json"):
        write(tmp_path / name)
    for name in ("plan.csv", "runs/r1/log.txt", "runs/r1/config.json", "report/report.md"):
        write(tmp_path / "outputs" / "fork" / name)
    assert prepare(config) == before
    # The folder itself may be hidden: it was asked for by name.
    write(tmp_path / ".git" / "more.txt")
    assert prepare(TextFiles(name="text", path=str(tmp_path / ".git"))).train_samples > 0


@pytest.mark.parametrize("content", [None, {}, {"a.txt": "x"}, {"a.bin": "x" * 99, "b.txt": "y"}])
def test_too_little_text_is_refused(tmp_path, content):
    root = tmp_path / "corpus"
    if content is not None:
        root.mkdir()
        for name, text in content.items():
            (root / name).write_text(text)
    with pytest.raises(ConfigError):
        prepare(TextFiles(name="text", path=str(root)))


def test_cache_that_cannot_be_written_is_explained(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    with pytest.raises(BatchscapeError, match="XDG_CACHE_HOME"):
        prepare(Digits(name="digits"))
