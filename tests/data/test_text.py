"""Text files: what is a sample, what is held out, and what names the content."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.config import TextFiles
from batchscape.config.data import IGNORED
from batchscape.data.corpus import prepare
from batchscape.data.datasets import TextDataset
from batchscape.data.sources import choose, draw
from batchscape.errors import ConfigError


def test_padded_batches_ignore_what_is_not_text(tmp_path):
    (tmp_path / "a.txt").write_text("abc\n\nlonger than six\n" * 20)
    config = TextFiles(
        name="text", path=str(tmp_path / "a.txt"), sequence_length=6, layout="padded"
    )
    dataset = TextDataset(Path(prepare(config).folder), "train", 6)
    inputs, labels = dataset.batch(np.arange(dataset.num_samples))
    real = labels != IGNORED
    assert real.sum().item() == dataset.count_labels(np.arange(dataset.num_samples))
    assert (inputs[:, 1:][real[:, :-1]] == labels[:, :-1][real[:, :-1]]).all()
    assert (inputs[:, 1:][~real[:, :-1]] == 0).all()
    first = bytes(inputs[0][real[0]].tolist()) + bytes([labels[0][real[0]][-1].item()])
    assert first == b"abc\n"


def test_standard_library_is_split_by_file():
    identity = prepare(TextFiles(name="stdlib", sequence_length=32))
    folder = Path(identity.folder)
    sizes = {part: len(np.load(folder / f"{part}_bytes.npy")) for part in ("train", "held_out")}
    assert sizes["train"] > 5_000_000
    assert 0.01 < sizes["held_out"] / sum(sizes.values()) < 0.15
    assert identity.train_samples == (sizes["train"] - 1) // 32
    dataset = TextDataset(folder, "train", 32)
    inputs, labels = dataset.batch(np.array([0, 1]))
    assert (labels[0, :-1] == inputs[0, 1:]).all()
    assert labels[0, -1] == inputs[1, 0]


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


@given(st.sets(st.text("abc", min_size=1, max_size=6), min_size=2, max_size=30), st.floats(0.1, 99))
def test_both_parts_have_files_and_no_file_moves_for_another(names, pct):
    def held_out(names):
        chosen = choose(np.array([draw(name.encode()) for name in names]), pct)
        return {name for name, out in zip(names, chosen, strict=True) if out}

    ordered = sorted(names)
    chosen = held_out(ordered)
    assert 0 < len(chosen) < len(ordered)
    fewer = ordered[:-1]
    if len(fewer) > 2:
        # Only the rule for an empty part may move a file.
        assert len(held_out(fewer) ^ (chosen - {ordered[-1]})) <= 1


def test_the_share_that_is_held_out_is_as_asked_for():
    draws = np.array([draw(str(number).encode()) for number in range(20_000)])
    for pct in (1.0, 20.0, 90.0):
        share = 100 * choose(draws, pct).mean()
        # Five standard errors of a binomial share.
        assert abs(share - pct) < 5 * (pct * (100 - pct) / 20_000) ** 0.5


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
