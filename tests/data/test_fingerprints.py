"""What is remembered of a file is forgotten once it is written to."""

from __future__ import annotations

import os
import time

from batchscape.data.fingerprints import file_sha256


def test_an_edit_in_place_is_seen_though_its_time_was_put_back(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "tokens.bin"
    file.write_bytes(b"one")
    long_ago = time.time_ns() - 10**12
    os.utime(file, ns=(long_ago, long_ago))
    reads = []
    first = file_sha256(file, reads.append)
    assert file_sha256(file, reads.append) == first
    assert reads == [3]
    time.sleep(0.05)
    with file.open("r+b") as opened:
        opened.write(b"two")
    os.utime(file, ns=(long_ago, long_ago))
    assert file_sha256(file, reads.append) != first
