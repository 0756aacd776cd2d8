"""What is said, and what is left, when a disk takes no more: on real disks that are full."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from batchscape.errors import DiskError
from batchscape.record import disk
from batchscape.record.disk import (
    Reserve,
    disk_error,
    disk_trouble,
    explained,
    free_bytes,
    make_room,
    read_each,
)
from batchscape.record.files import JsonLines, read_json, read_json_lines, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import fill, in_child, make_read_only, own_mounts, with_small_disk

SIZE = 1 << 20


def grow_until_full(folder: Path) -> tuple[str, list[int], int]:
    """Append rows until the disk is full, then make space and go on."""
    filler = fill(folder, leave=10_000)
    lines = JsonLines(folder / "rows.jsonl")
    written = 0
    try:
        while True:
            lines.append([{"row": written, "text": "x" * 300}])
            written += 1
    except DiskError as error:
        message = str(error)
    whole = [row["row"] for row in read_json_lines(folder / "rows.jsonl")]
    filler.unlink()
    lines.append([{"row": written}])
    lines.close()
    after = [row["row"] for row in read_json_lines(folder / "rows.jsonl")]
    assert after == [*whole, written], after
    return message, whole, written


def test_rows_on_a_full_disk_are_whole_and_go_on_after(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    message, whole, written = with_small_disk(place, SIZE, grow_until_full, place)
    assert whole == list(range(written))
    assert written > 0
    assert message.startswith(f"no space left on {place}: ")
    assert "free, needed about 3" in message
    assert message.endswith(f"for {place / 'rows.jsonl'}")


def replace_when_full(folder: Path) -> tuple[str, dict[str, int], list[str], int]:
    path = folder / "status.json"
    write_json(path, {"a": 1})
    fill(folder)
    with pytest.raises(DiskError) as raised:
        write_json(path, {"a": 2, "long": "x" * 100_000})
    names = sorted(found.name for found in folder.iterdir())
    return str(raised.value), read_json(path), names, free_bytes(folder)


def test_a_file_that_cannot_be_replaced_is_the_one_before(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    message, content, names, free = with_small_disk(place, SIZE, replace_when_full, place)
    assert content == {"a": 1}
    assert names == ["filler", "status.json"]
    assert free == 0
    assert message.startswith(f"no space left on {place}: 0 bytes free, needed about 97.8 KiB")


def trouble_and_reserve(folder: Path) -> list[str | bool | None]:
    found: list[str | bool | None] = [disk_trouble(folder)]
    with Reserve(folder):
        fill(folder)
        found.append(disk_trouble(folder))
        found.append(make_room(folder))
        write_json(folder / "status.json", {"ended": True})
        found.append(disk_trouble(folder))
        found.append(make_room(folder))
    return found


def test_the_reserve_has_room_for_what_the_launcher_must_write(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    before, full, had, after, twice = with_small_disk(place, SIZE, trouble_and_reserve, place)
    assert before is None
    assert full.startswith(f"no space left on {place}: 0 bytes free, needed about 64.0 KiB")
    assert had is True
    assert after is None
    assert twice is False


RESERVES = """
import sys
from pathlib import Path
from batchscape.record.disk import Reserve
with Reserve(Path(sys.argv[1])):
    print(len(list(Path(sys.argv[1]).iterdir())))
"""


def test_each_launcher_has_a_reserve_of_its_own(tmp_path: Path) -> None:
    with Reserve(tmp_path):
        other = [sys.executable, "-c", RESERVES, str(tmp_path)]
        assert subprocess.run(other, check=True, capture_output=True, text=True).stdout == "2\n"
        (own,) = tmp_path.iterdir()
        assert (own.name, own.stat().st_size) == (f".reserve.{os.getpid()}.tmp", 1 << 18)
        assert make_room(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write_where_nothing_may_be_written(folder: Path) -> list[str]:
    own_mounts()
    make_read_only(folder)
    with pytest.raises(DiskError) as raised:
        write_json(folder / "a.json", {})
    with pytest.raises(DiskError) as appended:
        JsonLines(folder / "rows.jsonl")
    return [str(raised.value), str(appended.value), str(disk_trouble(folder))]


def test_a_read_only_disk_is_named(tmp_path: Path) -> None:
    for message in in_child(write_where_nothing_may_be_written, tmp_path):
        assert message.startswith(str(tmp_path))
        assert message.endswith(" is on a read-only disk and cannot be written")


def write_beyond_a_limit(folder: Path) -> tuple[str, int]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    lines = JsonLines(folder / "rows.jsonl")
    count = 0
    try:
        while True:
            lines.append([{"row": count, "text": "x" * 300}])
            count += 1
    except DiskError as error:
        message = str(error)
    assert [row["row"] for row in read_json_lines(folder / "rows.jsonl")] == list(range(count))
    return message, count


def test_a_limit_on_file_sizes_is_named(tmp_path: Path) -> None:
    message, count = in_child(write_beyond_a_limit, tmp_path)
    assert "needed about 3" in message
    assert message.endswith("a limit on the size of files (ulimit -f) is met")
    assert 5 < count < 4096 / 300


def test_a_device_that_is_always_full() -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="28") as raised,
    ):
        file.write(b"a")
    assert str(disk_error(raised.value, Path("/dev/full"), 1)).startswith("no space left on /dev")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EDQUOT, "the disk quota at"),
        (errno.EIO, "failed to write"),
        (errno.ENOSPC, "no space left on"),
    ],
)
def test_errors_of_disks_are_told_from_others(tmp_path: Path, number: int, said: str) -> None:
    error = disk_error(OSError(number, "of the system"), tmp_path / "a", 2048)
    assert isinstance(error, DiskError)
    assert said in str(error)
    assert error.errno == number
    wrapped = RuntimeError("a library says something")
    wrapped.__cause__ = OSError(number, "of the system")
    assert said in str(explained(wrapped, tmp_path))


def test_errors_of_others_are_what_they_are(tmp_path: Path) -> None:
    for error in (OSError(errno.EACCES, "denied"), OSError(errno.ENOENT, "gone")):
        assert disk_error(error, tmp_path) is error
    other = ValueError("no disk")
    assert explained(other, tmp_path) is other


def test_the_check_of_a_file_is_plain_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [1, {"b": None}]})
    assert set(json.loads((tmp_path / "a.json").read_text())) == {"a", "sha256"}


def test_many_are_read_at_once_where_several_machines_share_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    barrier = threading.Barrier(4)

    def read(number: int) -> int:
        threads.add(threading.get_ident())
        if number < 4 and not disk.is_of_this_machine(tmp_path):
            barrier.wait(30)  # for as many as read at the same time
        return 10 * number

    for is_local in (True, False):
        threads.clear()
        monkeypatch.setattr(disk, "is_of_this_machine", lambda _, it=is_local: it)
        assert read_each(read, range(40), tmp_path) == list(range(0, 400, 10))
        assert (threads == {threading.get_ident()}) == is_local
    assert read_each(read, [], tmp_path) == []
