"""A hang is found by heartbeats, by the rule that is stated; what waits or evaluates is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchscape.config import Local
from batchscape.launch import hangs
from batchscape.launch.hangs import HangWatch
from batchscape.record.heartbeat import Beat, Heartbeat, Phase, beats_path
from batchscape.record.spec import RunSpec

SETTINGS = Local("local", hang_s=10.0)


@pytest.fixture(autouse=True)
def _four_steps(monkeypatch):
    monkeypatch.setattr(hangs, "HANG_STEPS", 4.0)


class Ranks:
    """Ranks that tell what a test makes them tell, and their watch, on a clock of its own."""

    def __init__(self, place: Path, count: int, *, is_program: bool = False, **rule: Any) -> None:
        settings = dataclasses.replace(SETTINGS, **rule)
        spec = SimpleNamespace(
            config=SimpleNamespace(launcher=settings),
            geometry=SimpleNamespace(devices_per_node=count),
            processes=count,
            is_program=is_program,
        )
        self.watch = HangWatch(str(place), cast("RunSpec", spec))
        self.hearts = [Heartbeat(beats_path(str(place), rank)) for rank in range(count)]
        self.beats = 0
        self.now = 1000.0
        self.begun = False

    def tell(self, rank: int, phase: Phase, step: int = 0, micro_step: int = 0) -> None:
        self.beats += 1
        self.hearts[rank].write(Beat(self.beats, step, max(step - 1, 0), micro_step, phase))

    def quiet_s(self, most_s: float = 500.0) -> float:
        """Return after how many seconds without a word the ranks hang, looking every second."""
        for second in range(int(most_s)):
            if self.watch.look(self.now) is not None:
                return second
            self.now += 1.0
        return most_s

    def train(self, steps: int, step_s: int = 1) -> None:
        """Do optimizer steps, one after the other."""
        for step in range(1, steps + 1):
            for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
                for rank in range(len(self.hearts)):
                    self.tell(rank, phase, step)
            for _ in range(step_s):
                assert self.watch.look(self.now) is None
                self.now += 1.0


@pytest.mark.parametrize(("step_s", "limit_s"), [(1, 10), (5, 20)])
def test_within_steps_the_limit_scales_with_the_step_time(tmp_path, step_s, limit_s):
    """At least 10 s, or 4 steps; the first second is that of the step itself."""
    ranks = Ranks(tmp_path / "run", 2)
    ranks.train(8, step_s)
    ranks.tell(0, Phase.BACKWARD, 9)
    ranks.tell(1, Phase.FORWARD, 9)
    assert ranks.quiet_s() == limit_s
    hang = ranks.watch.look(ranks.now)
    assert hang is not None
    assert hang.rank == 1
    assert hang.reason == (
        f"rank 1 hangs in forward of optimizer step 9: no heartbeat for {limit_s} s "
        f"(4 x step time {step_s} s, at least hang_s = 10 s)"
    )


@pytest.mark.parametrize(
    ("phase", "step", "where"),
    [
        (Phase.START, 0, "start before the first optimizer step"),
        (Phase.COMPILATION, 0, "compilation before the first optimizer step"),
        (Phase.FORWARD, 1, "forward of optimizer step 1"),
    ],
)
def test_before_the_end_of_the_first_step_the_longer_limit_holds(tmp_path, phase, step, where):
    ranks = Ranks(tmp_path / "run", 2)
    for rank in range(2):
        ranks.tell(rank, phase, step)
    assert ranks.quiet_s() == 60
    hang = ranks.watch.look(ranks.now)
    assert hang is not None
    assert hang.rank is None
    assert hang.reason == (
        f"ranks 0 and 1 hang in {where}: no heartbeat for 60 s (6 x hang_s = 60 s)"
    )


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.CHECKPOINT])
def test_ranks_that_wait_for_one_elsewhere_have_its_limit(tmp_path, phase):
    ranks = Ranks(tmp_path / "run", 3)
    ranks.train(8)
    ranks.tell(0, phase, 8)
    ranks.tell(1, Phase.BACKWARD, 9)
    ranks.tell(2, Phase.BACKWARD, 9)
    assert ranks.quiet_s() == 60
    hang = ranks.watch.look(ranks.now)
    assert hang is not None
    assert hang.rank == 0
    assert f"rank 0 hangs in {phase} after optimizer step 8" in hang.reason


def test_as_long_as_one_rank_makes_progress_nobody_hangs(tmp_path):
    ranks = Ranks(tmp_path / "run", 2)
    ranks.train(8)
    ranks.tell(1, Phase.RECORD, 8)
    for _ in range(20):
        ranks.tell(0, Phase.EVALUATION, 8)
        assert ranks.quiet_s(50) == 50


def test_a_launcher_that_slept_has_not_watched(tmp_path):
    """Stopped for a day, or its machine suspended: the ranks may have been as well."""
    ranks = Ranks(tmp_path / "run", 1)
    ranks.train(8)
    ranks.now += 86400
    assert ranks.watch.look(ranks.now) is None
    # That look counted for 5 s.
    assert ranks.quiet_s() == 5


def test_null_never_finds_a_hang(tmp_path):
    ranks = Ranks(tmp_path / "run", 1, hang_s=None)
    ranks.train(8)
    assert ranks.quiet_s(500) == 500


def test_a_program_is_judged_once_it_shows_steps(tmp_path):
    ranks = Ranks(tmp_path / "run", 1, is_program=True)
    ranks.tell(0, Phase.RECORD)
    assert ranks.quiet_s(500) == 500
    ranks.train(8)
    # A program evaluates without a word.
    ranks.tell(0, Phase.RECORD, 8)
    assert ranks.quiet_s() == 60
    hang = ranks.watch.look(ranks.now)
    assert hang is not None
    assert hang.reason.startswith(
        "the program hangs after optimizer step 8: neither its log nor its metrics grew, no "
        "heartbeat for 60 s"
    )


def test_the_watch_leaves_nothing(tmp_path):
    ranks = Ranks(tmp_path / "run", 2)
    assert len(list(tmp_path.iterdir())) == 2
    assert ranks.watch.last_phase(0) is None
    ranks.tell(0, Phase.FORWARD, 3, 1)
    assert [ranks.watch.last_phase(rank) for rank in (0, 1, 2)] == ["forward", None, None]
    ranks.watch.close()
    assert list(tmp_path.iterdir()) == []
