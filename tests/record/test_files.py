"""Checks inside of files: any change of a byte is found, and a check costs next to nothing."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.errors import DamageError, RecordError
from batchscape.record.checked import checked_row, checked_text, row_of, text_of
from batchscape.record.claims import CLAIMS
from batchscape.record.files import (
    JsonLines,
    keep_json_lines,
    read_json,
    read_json_lines,
    write_json,
)
from batchscape.record.folder import RunFolder
from batchscape.record.tail import Tail

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
OBJECTS = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name not in {"sha256", "crc32"}), PLAIN, max_size=4
)


@given(
    OBJECTS.filter(lambda content: "nfinity" not in json.dumps(content)),
    st.sampled_from([2, None]),
    st.data(),
)
def test_an_object_is_read_as_it_was_written_or_not_at_all(content, indent, data):
    text = checked_text(content, indent=indent)
    assert text_of(text) == content
    assert json.loads(text) == {**content, "sha256": text[-70:].split(b'"')[-2].decode()}
    place = data.draw(st.integers(0, len(text) - 1))
    flipped = bytearray(text)
    flipped[place] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), text[:place]):
        with pytest.raises(ValueError):  # noqa: PT011  (many kinds, all of them ValueErrors)
            text_of(damaged)


@given(OBJECTS, st.data())
def test_a_row_is_read_as_it_was_written_or_not_at_all(row, data):
    line = checked_row(row)[:-1]
    assert row_of(line) == row
    place = data.draw(st.integers(0, len(line) - 1))
    flipped = bytearray(line)
    flipped[place] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), line[:place]):
        try:
            found = row_of(damaged)
        except ValueError:
            continue
        # The name of the check itself: a column more, that no table has.
        known = {name: value for name, value in found.items() if name in row}
        assert known == row
        assert len(found) == len(row) + 1


def test_what_older_versions_wrote_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n  "a": 1\n}\n')
    assert read_json(tmp_path / "a.json") == {"a": 1}
    (tmp_path / "rows.jsonl").write_text('{"a":1}\n{"a":NaN}\n{"a":')
    first, second = read_json_lines(tmp_path / "rows.jsonl")
    assert first == {"a": 1}
    assert math.isnan(second["a"])
    # Rows with a check may follow those without.
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append([{"a": 3}])
    lines.close()
    assert [row["a"] for row in read_json_lines(tmp_path / "rows.jsonl")][::2] == [1, 3]


def test_a_path_as_long_as_a_digest_is_no_check() -> None:
    older = {"attempt": 0, "rendezvous": "/scratch/batchscape-4xk2/".ljust(64, "b")}
    assert text_of(json.dumps(older).encode()) == older
    with pytest.raises(ValueError, match="not where it was written"):
        text_of(checked_text(older).replace(b'"sha256"', b'"sha257"'))


def test_pandas_reads_rows_with_their_check(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append({"a": n} for n in range(3))
    lines.close()
    found = pd.read_json(tmp_path / "rows.jsonl", lines=True)
    assert found["a"].tolist() == [0, 1, 2]


def test_rows_that_are_kept_keep_a_check_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    lines.append({"a": n} for n in range(5))
    lines.close()
    keep_json_lines(path, lambda row: row["a"] % 2 == 0)
    assert [row["a"] for row in read_json_lines(path)] == [0, 2, 4]
    assert path.read_bytes().count(b'"crc32":"') == 3


def test_a_changed_newline_is_no_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    lines.append({"a": n} for n in range(3))
    lines.close()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x0b")
    with pytest.raises(DamageError, match="damaged in line 3"):
        list(read_json_lines(path))
    path.write_bytes(content[:-1])
    assert [row["a"] for row in read_json_lines(path)] == [0, 1]


def test_followers_find_damage_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    lines.append([{"a": 10}])
    tail = Tail(path)
    assert tail.read() == [{"a": 10}]
    lines.append([{"a": 11}])
    path.write_bytes(path.read_bytes().replace(b'"a":11', b'"a":17'))
    with pytest.raises(DamageError, match="does not match its crc32"):
        tail.read()
    lines.close()


def test_what_cannot_be_read_is_told_from_damage(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RecordError, match="cannot be read: Is a directory") as raised:
        read_json(tmp_path / "folder.json")
    assert not isinstance(raised.value, DamageError)
    with pytest.raises(DamageError, match="is missing"):
        read_json(tmp_path / "none.json")
    (tmp_path / "deep.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(DamageError, match="is damaged"):
        read_json(tmp_path / "deep.json")


def test_an_object_that_is_written_again_has_one_check(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    write_json(path, {**json.loads(path.read_text()), "a": 2})
    assert read_json(path) == {"a": 2}
    assert path.read_text().count("sha256") == 1


@pytest.mark.parametrize("number", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_is_written_once_with_hard_links_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    if number is not None:  # as exFAT and some FUSE file systems answer

        def refuse(*_: object, **__: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "status.json"
    write_json(path, {"by": "one"}, replaces=False)
    with pytest.raises(FileExistsError):
        write_json(path, {"by": "another"}, replaces=False)
    assert read_json(path) == {"by": "one"}
    run = RunFolder(tmp_path / "run")
    claim = CLAIMS.claim(run)
    assert claim is not None
    assert claim.renew(at_once=True)
    claim.release()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["run", "status.json"]
