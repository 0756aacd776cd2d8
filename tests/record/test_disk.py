"""What is said, and what is left, when a disk takes no more: on real disks that are full."""

from __future__ import annotations

import errno
import resource
import sys
import threading
from pathlib import Path

import pytest

from batchscape.errors import DiskError
from batchscape.record import disk
from batchscape.record.disk import (
    as_disk_error,
    disk_error,
    disk_trouble,
    free_bytes,
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
    rows = [row["row"] for row in read_json_lines(folder / "rows.jsonl")]
    filler.unlink()
    lines.append([{"row": written}])
    lines.close()
    after = [row["row"] for row in read_json_lines(folder / "rows.jsonl")]
    assert after == [*rows, written], after
    return message, rows, written


def test_rows_on_a_full_disk_are_whole_and_go_on_after(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    message, rows, written = with_small_disk(place, SIZE, grow_until_full, place)
    assert rows == list(range(written))
    assert written > 0
    full = f"{place / 'rows.jsonl'} cannot be written: No space left on device, "
    assert message.startswith(full)
    assert message.endswith(" free there")


def replace_when_full(folder: Path) -> tuple[str, dict[str, int], list[str], int]:
    path = folder / "status.json"
    write_json(path, {"a": 1})
    fill(folder)
    with pytest.raises(DiskError) as raised:
        write_json(path, {"a": 2, "long": "x" * 100_000})
    names = sorted(file.name for file in folder.iterdir())
    return str(raised.value), read_json(path), names, free_bytes(folder)


def test_a_file_that_cannot_be_replaced_is_the_one_before(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    message, content, names, free = with_small_disk(place, SIZE, replace_when_full, place)
    assert content == {"a": 1}
    assert names == ["filler", "status.json"]
    assert free == 0
    full = "cannot be written: No space left on device, 0 bytes free there"
    assert message == f"{place / 'status.json'} {full}"


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
        assert " cannot be written: Read-only file system, " in message


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
    assert message.startswith(f"{tmp_path / 'rows.jsonl'} cannot be written: File too large, ")
    assert 5 < count < 4096 / 300


def test_a_device_that_is_always_full() -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="28") as raised,
    ):
        file.write(b"a")
    text = str(disk_error(raised.value, Path("/dev/full")))
    assert text.startswith("/dev/full cannot be written: No space left on device")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EDQUOT, "Disk quota exceeded"),
        (errno.EIO, "Input/output error"),
        (errno.ENOSPC, "No space left on device"),
    ],
)
def test_errors_of_disks_are_told_from_others(tmp_path: Path, number: int, text: str) -> None:
    error = disk_error(OSError(number, "of the system"), tmp_path / "a")
    assert isinstance(error, DiskError)
    assert text in str(error)
    assert error.errno == number
    wrapped = RuntimeError("a library says something")
    wrapped.__cause__ = OSError(number, "of the system")
    assert text in str(as_disk_error(wrapped, tmp_path))


def test_errors_of_others_are_what_they_are(tmp_path: Path) -> None:
    for error in (OSError(errno.EACCES, "denied"), OSError(errno.ENOENT, "gone")):
        assert disk_error(error, tmp_path) is error
    other = ValueError("no disk")
    assert as_disk_error(other, tmp_path) is other


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
