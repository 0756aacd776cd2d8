"""Files that readers never see half of, and what is said of damaged ones."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

import pytest

from batchscape.errors import DamageError, RecordError
from batchscape.record.claims import CLAIMS
from batchscape.record.files import (
    JsonLines,
    Tail,
    read_json,
    read_json_lines,
    write_json,
)
from batchscape.record.folder import RunFolder


def test_a_torn_last_line_is_dropped_and_rows_go_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a":1}\n{"a":NaN}\n{"a":')
    first, second = read_json_lines(path)
    assert first == {"a": 1}
    assert math.isnan(second["a"])
    lines = JsonLines(path)
    lines.append([{"a": 3}])
    lines.close()
    assert [row["a"] for row in read_json_lines(path)][::2] == [1, 3]
    # A row that is whole but for its newline was torn as well: the next one would follow it.
    path.write_bytes(path.read_bytes()[:-1])
    assert len(list(read_json_lines(path))) == 2


def test_followers_find_damage_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = JsonLines(path)
    lines.append([{"a": 10}])
    tail = Tail(path)
    assert tail.read() == [{"a": 10}]
    lines.append([{"a": 11}])
    path.write_bytes(path.read_bytes().replace(b'"a":11', b'"a":,1'))
    with pytest.raises(DamageError, match="is damaged"):
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "status.json"]
