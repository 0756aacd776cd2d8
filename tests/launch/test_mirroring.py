from __future__ import annotations

import errno
import shlex
from pathlib import Path

import pytest
from sweeps_of_fakes import spec_named

from batchscape.config import NoTracker, WandbTracker
from batchscape.record.folder import SweepFolder
from batchscape.record.status import RunStatus, Status
from batchscape.tracking.mirror import Mirror, may_mirror_live


@pytest.mark.parametrize(
    ("device_type", "ranks", "concurrent", "cores", "live"),
    [
        ("cuda", 1, 1, 5, True),
        ("cuda", 1, 1, 4, False),
        ("cuda", 8, 1, 18, False),
        ("cuda", 8, 1, 19, True),
        ("cuda", 2, 4, 19, True),
        ("cuda", 2, 4, 18, False),
        ("cpu", 1, 1, 64, False),
    ],
)
def test_live_only_beside_idle_cores(
    device_type: str, ranks: int, concurrent: int, cores: int, live: bool
) -> None:
    """Two cores a rank, and two more, must be left over."""
    narrow = spec_named("a", 1, device_type=device_type, concurrent_runs=concurrent)
    wide = spec_named("b", ranks, device_type=device_type, concurrent_runs=concurrent)
    assert may_mirror_live([narrow, wide], cores) is live
    assert not may_mirror_live([], cores)


def test_nothing_is_mirrored_unasked(tmp_path: Path) -> None:
    mirror = Mirror(NoTracker(name="none"), SweepFolder(tmp_path), live=True)
    for interrupted in (True, False):
        assert mirror.finish(interrupted=interrupted) is None
    assert mirror.summary() is None
    assert list(tmp_path.iterdir()) == []


def test_the_interrupted_user_does_not_wait(tmp_path: Path) -> None:
    sweep = ended(tmp_path)
    note = str(Mirror(WandbTracker(name="wandb"), sweep, live=False).finish(interrupted=True))
    assert note.startswith(
        "Weights & Biases was not updated: it lacks 1 of 1 runs (a), because the sweep was "
        f"interrupted. `batchscape sync {shlex.quote(str(tmp_path))}` sends what it lacks."
    )
    assert not sweep.wandb.exists()


def test_run_folders_that_cannot_be_read_stop_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = ended(tmp_path)
    mirror = Mirror(WandbTracker(name="wandb"), sweep, live=False)

    def fail(_: SweepFolder) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(SweepFolder, "run_folders", fail)
    assert mirror.finish(interrupted=True) == (
        f"What Weights & Biases lacks is not known: [Errno {errno.ESTALE}] Stale file handle. "
        f"`batchscape sync {shlex.quote(str(sweep.path))}` sends it."
    )
    assert mirror.summary() is None


def test_a_mirror_that_cannot_start_stops_nothing(tmp_path: Path) -> None:
    sweep = ended(tmp_path)
    sweep.wandb.write_text("a file where the mirror wants a folder")
    for live in (True, False):
        mirror = Mirror(WandbTracker(name="wandb"), sweep, live=live)
        note = str(mirror.finish(interrupted=False))
        assert "it lacks 1 of 1 runs (a), because its mirror cannot start (" in note
        assert f"batchscape sync {shlex.quote(str(tmp_path))}" in note


def ended(sweep_dir: Path) -> SweepFolder:
    """A sweep with one run that is over, for those who only look at its status."""
    sweep = SweepFolder(sweep_dir)
    RunStatus(Status.FAILED).write(sweep.run("a").status)
    return sweep
