"""Prepared arrays on disk: whole, or made anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from batchscape.config import Digits, TextFiles
from batchscape.data.corpus import prepare
from batchscape.data.fingerprints import cache_folder, cached_result, file_sha256
from batchscape.data.store import keep
from batchscape.errors import BatchscapeError, ConfigError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def built():
    return {"train": {"x": np.arange(5)}, "held_out": {"x": np.arange(2)}}, {}


def test_damaged_cache_is_made_anew(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200)
    config = TextFiles(name="text", path=str(tmp_path / "a.txt"))
    identity = prepare(config)
    array = Path(identity.folder) / "train_bytes.npy"
    before = array.read_bytes()
    array.write_bytes(before[:-1] + b"?")
    assert prepare(config) == identity
    assert array.read_bytes() == before


def test_what_is_whole_is_not_built_again():
    first, _ = keep("kind", {"rule": 1}, built)
    assert keep("kind", {"rule": 1}, lambda: pytest.fail("built again"))[0] == first
    assert (first["train_samples"], first["held_out_samples"]) == (5, 2)
    other, _ = keep("kind", {"rule": 2}, built)
    assert other["folder"] != first["folder"]


@pytest.mark.parametrize("lost", ["train_x.npy", "manifest.json"])
def test_what_is_lost_is_built_again(lost):
    first, _ = keep("kind", {"rule": 1}, built)
    (Path(first["folder"]) / lost).unlink()
    assert keep("kind", {"rule": 1}, built)[0] == first
    assert (Path(first["folder"]) / lost).exists()


def test_an_empty_part_leaves_nothing_behind():
    with pytest.raises(ConfigError, match="the held_out part holds no sample"):
        keep("kind", {}, lambda: ({"train": {"x": [0]}, "held_out": {"x": []}}, {}))
    assert not list(cache_folder().glob("kind-*"))


def settled(path, seconds_ago=100.0):
    """Pretend that a file was last modified some time ago."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds_ago * 1e9)))


def test_a_file_is_read_once_while_it_stays_as_it_is(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    settled(path)
    calls = []

    def find():
        calls.append(path.read_bytes())
        return {"size": path.stat().st_size}

    assert cached_result(path, "size", find) == cached_result(path, "size", find) == {"size": 7}
    assert len(calls) == 1
    cached_result(path, "another kind", find)
    assert len(calls) == 2
    path.write_bytes(b"changed")
    settled(path, 50.0)
    cached_result(path, "size", find)
    assert calls == [b"content", b"content", b"changed"]


def test_a_file_that_was_just_written_is_read_each_time(tmp_path):
    """Its time of modification may stay the same when it is written once more."""
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    status = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_sha256(path) != first


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"one")

    def find():
        path.write_bytes(b"longer")
        return {}

    with pytest.raises(ConfigError, match="changed while it was read"):
        cached_result(path, "kind", find)


def test_cache_that_cannot_be_written_is_explained(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    with pytest.raises(BatchscapeError, match="XDG_CACHE_HOME"):
        prepare(Digits(name="digits"))


def test_a_manifest_names_what_was_read(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 200)
    identity = prepare(TextFiles(name="text", path=str(tmp_path / "a.txt")))
    manifest = json.loads((Path(identity.folder) / "manifest.json").read_text())
    assert [name for name, _ in manifest["files"]] == ["train:a.txt", "held_out:a.txt"]
    assert manifest["samples"] == {
        "train": identity.train_samples,
        "held_out": identity.held_out_samples,
    }
