"""Files that readers never see half of, and what is said of damaged ones."""

import errno
import os

import pytest

from batchscape.errors import DamageError, RecordError
from batchscape.record.claims import CLAIMS
from batchscape.record.files import (
    JsonLines,
    Tail,
    read_json,
    write_json,
)
from batchscape.record.folder import RunFolder


def test_followers_find_damage_too(tmp_path):
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


def test_what_cannot_be_read_is_told_from_damage(tmp_path):
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
def test_a_file_is_written_once_with_hard_links_and_without(tmp_path, monkeypatch, number):
    if number is not None:  # as exFAT and some FUSE file systems answer

        def refuse(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "status.json"
    write_json(path, {"by": "one"}, replaces=False)
    with pytest.raises(FileExistsError):
        write_json(path, {"by": "another"}, replaces=False)
    assert read_json(path) == {"by": "one"}
    run = RunFolder(tmp_path / "run")
    claim = CLAIMS.claim(run)
    assert claim.renew(at_once=True)
    claim.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "status.json"]
