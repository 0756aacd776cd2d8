from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from sweeps_of_fakes import spec_named

from batchscape.config import NoTracker, WandbTracker
from batchscape.launch.mirroring import Mirroring, may_mirror_live
from batchscape.plan.machine import Machine
from batchscape.record.folder import SweepFolder


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
    machine = Machine(cpu_cores=cores, cpu_name="x")
    assert may_mirror_live([narrow, wide], machine) is live
    assert not may_mirror_live([], machine)


def test_nothing_is_mirrored_unasked(tmp_path: Path) -> None:
    mirroring = Mirroring(NoTracker(name="none"), SweepFolder(tmp_path), live=True)
    assert mirroring.finish(3, interrupted=False) is None
    assert list(tmp_path.iterdir()) == []


def test_a_disabled_tracker_is_silent(tmp_path: Path) -> None:
    tracker = WandbTracker(name="wandb", mode="disabled")
    mirroring = Mirroring(tracker, SweepFolder(tmp_path), live=True)
    for interrupted in (True, False):
        assert mirroring.finish(3, interrupted=interrupted) is None
    assert mirroring.standing() is None
    assert list(tmp_path.iterdir()) == []


def test_the_interrupted_user_does_not_wait(tmp_path: Path) -> None:
    mirroring = Mirroring(WandbTracker(name="wandb"), SweepFolder(tmp_path), live=False)
    note = mirroring.finish(3, interrupted=True)
    assert note == (
        "Weights & Biases was not updated: the sweep was interrupted. "
        f"`batchscape sync {shlex.quote(str(tmp_path))}` sends what it lacks."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_mirror_that_cannot_start_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "wandb").write_text("a file where the mirror wants a folder")
    mirroring = Mirroring(WandbTracker(name="wandb"), SweepFolder(tmp_path), live=False)
    note = str(mirroring.finish(1, interrupted=False))
    assert "was not updated: its mirror cannot start (" in note
    assert f"batchscape sync {shlex.quote(str(tmp_path))}" in note
