"""Folders that cannot be used for a sweep are refused before anything is launched."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from sweeps_of_fakes import ENTRY, MACHINE, spec_named

from batchscape.errors import LaunchError
from batchscape.launch.launcher import Launcher
from batchscape.record.disk import check_usable
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from small_disk import fill, in_child, make_read_only, own_mounts, with_small_disk

NOBODY = 65534


def refusal(path: Path, name: str = "completes") -> str:
    """Launch into a folder; return what is said, and nothing must have been launched."""
    output = io.StringIO()
    console = Console(file=output)
    with pytest.raises(LaunchError) as raised:
        Launcher(SweepFolder(path), MACHINE, [spec_named(name)], entry=ENTRY, console=console).run()
    assert output.getvalue() == ""
    message = str(raised.value)
    assert message.startswith(f"{path} cannot be used: ")
    assert message.endswith("; give a sweep_dir that can be written to")
    return message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file", "file"),
        ("file/deep/below", "file"),
        ("with_runs", "runs"),
        ("link", "link"),
        ("n" * 300, "File name too long"),
    ],
)
def test_folders_that_cannot_be(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "with_runs").mkdir()
    (tmp_path / "with_runs" / "runs").write_text("a file in the place of the runs")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert reason in refusal(tmp_path / name)


def test_missing_parents_are_made(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path / "not" / "there" / "yet")
    check_usable(sweep)
    assert sweep.runs.is_dir()
    # Nothing is left of the trial.
    assert [path.name for path in sweep.path.iterdir()] == ["runs"]


def without_privileges(work: Callable[..., str], *arguments: object) -> str:
    """Call something as a user whom permissions bind; root itself is bound by none."""

    def drop_and_call() -> str:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        return work(*arguments)

    result: str = in_child(drop_and_call)
    return result


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that everybody may pass to, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        Path(path).chmod(0o755)
        yield Path(path)


def test_a_folder_of_somebody_else(public: Path) -> None:
    parent = public / "parent"
    parent.mkdir()
    sweep = parent / "sweep"
    (sweep / "runs").mkdir(parents=True)
    for folder in (sweep / "runs", sweep, parent):
        folder.chmod(0o555)
    try:
        message = without_privileges(refusal, sweep)
        assert "Permission denied" in message
        assert str(sweep) in message
    finally:
        for folder in (parent, sweep, sweep / "runs"):
            folder.chmod(0o755)


def on_a_full_disk(place: Path) -> str:
    fill(place)
    return refusal(place / "sweep")


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    message = with_small_disk(place, 1 << 20, on_a_full_disk, place)
    assert "No space left on device, 0 bytes free there" in message


def becomes_read_only(path: Path) -> tuple[str, list[str]]:
    """A disk that fails is often mounted again read-only, by the system itself."""
    own_mounts()
    sweep = SweepFolder(path)
    specs = [spec_named("completes"), spec_named("completes-later")]
    console = Console(file=io.StringIO())
    Launcher(sweep, MACHINE, specs[:1], entry=ENTRY, console=console, method="spawn").run()
    make_read_only(path)
    with pytest.raises(LaunchError) as raised:
        Launcher(sweep, MACHINE, specs, entry=ENTRY, console=console, method="spawn").run()
    status = RunStatus.read(sweep.run("completes").status)
    return str(raised.value), [str(status.status), *sorted(p.name for p in sweep.runs.iterdir())]


@pytest.mark.slow
def test_what_was_done_before_a_disk_failed_stays(tmp_path: Path) -> None:
    message, files = in_child(becomes_read_only, tmp_path)
    assert "Read-only file system" in message
    assert files == [str(Status.COMPLETED), "completes"]
