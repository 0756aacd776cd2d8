"""What is expected of a run, by the runs that are over."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sweeps_of_fakes import renamed, spec_named

from batchscape.config import RunConfig
from batchscape.launch.durations import Duration, Durations
from batchscape.record.folder import SweepFolder
from batchscape.record.spec import RunSpec
from batchscape.record.status import Attempt, RunStatus, Status


def over(status: Status = Status.COMPLETED, **summary: Any) -> RunStatus:
    figures = {"samples": 12, "train_time_s": 24.0, "evaluation_s": None, "startup_s": 5.0}
    return RunStatus(status, summary=figures | summary)


def cell(ranks: int, seed: int = 0) -> RunSpec:
    """Return a run of 12 samples a rank."""
    return renamed(spec_named(f"completes-d{ranks}", seed=seed), f"d{ranks}-s{seed}")


def test_the_pace_of_a_run() -> None:
    assert Duration.of(over()) == Duration(5.0, 2.0)
    more = over(evaluation_s=6.0, checkpoint_s=6.0, compile_s=3.0)
    assert Duration.of(more) == Duration(8.0, 3.0)
    # Processes come and go, which ranks do not see.
    more.attempts = [Attempt(100.0, 0, ended_at=150.0)]
    assert Duration.of(more) == Duration(50.0 - 36.0, 3.0)
    # A program that does not tell its times: by the clock.
    attempts = [Attempt(100.0, 0, ended_at=110.0), Attempt(200.0, 0, ended_at=202.0)]
    told = RunStatus(Status.COMPLETED, attempts=attempts, summary={"samples": 24})
    assert Duration.of(told) == Duration(0.0, 0.5)


@pytest.mark.parametrize(
    "status",
    [
        over(Status.FAILED),
        over(samples=None),
        over(train_time_s=None),
        # The clock was set back meanwhile.
        RunStatus(
            Status.COMPLETED, attempts=[Attempt(100.0, 0, ended_at=90.0)], summary={"samples": 24}
        ),
    ],
)
def test_what_has_no_pace(status: RunStatus) -> None:
    assert Duration.of(status) is None


def test_the_same_cell_before_the_nearest(tmp_path: Path) -> None:
    durations = Durations(SweepFolder(tmp_path), (), {})
    assert durations.expected_s(cell(1)) is None
    durations.learn(cell(4), over(samples=48, train_time_s=480.0))
    # Nothing as wide is known: the nearest there is.
    assert durations.expected_s(cell(1)) == 5.0 + 10.0 * 12
    durations.learn(cell(1), over())
    assert durations.expected_s(cell(1, seed=3)) == 5.0 + 2.0 * 12
    # The nearest by samples, of three.
    durations.learn(cell(2), over(samples=24, train_time_s=72.0))
    assert durations.expected_s(cell(3)) == pytest.approx(5.0 + 10.0 * 36)
    for seconds in (36.0, 36.0):
        durations.learn(cell(1), over(train_time_s=seconds))
    # The median of the cell.
    assert durations.expected_s(cell(1, seed=9)) == 5.0 + 3.0 * 12


def test_a_prediction_is_scaled_by_what_others_took_over_theirs(tmp_path: Path) -> None:
    predicted = {cell(n).run_id: 10.0 * n for n in (1, 2, 3, 4)} | {cell(2, seed=1).run_id: 20.0}
    durations = Durations(SweepFolder(tmp_path), (), predicted)
    assert durations.expected_s(cell(3)) == pytest.approx(1.0 + 30.0)
    durations.learn(cell(1), over(samples=12, train_time_s=30.0))  # 3 times as long
    assert durations.expected_s(cell(3)) == pytest.approx(5.0 + 90.0)
    # Of runs with the nearest number of ranks: those that share cores are the worst predicted.
    durations.learn(cell(2), over(samples=24, train_time_s=20.0, startup_s=6.0))  # as long
    assert durations.expected_s(cell(4)) == pytest.approx(6.0 + 40.0)
    durations.learn(cell(2, seed=1), over(samples=24, train_time_s=60.0, startup_s=6.0))
    assert durations.expected_s(cell(4)) == pytest.approx(6.0 + 40.0 * 2)  # medians of two
    # What its own cell took counts more.
    assert durations.expected_s(cell(1, seed=5)) == 35.0
    # Of one that was begun, what is left.
    durations.learn(cell(4), over(Status.INTERRUPTED, samples=36))
    assert durations.expected_s(cell(4)) == pytest.approx(6.0 + 40.0 * 2 / 4)


def test_as_many_ranks_count_before_as_many_samples(tmp_path: Path) -> None:
    durations = Durations(SweepFolder(tmp_path), (), {})
    wide = spec_named("completes", 2, seed=1)
    other_model = {"name": "gpt", "n_layers": 2, "n_heads": 1, "d_model": 8}
    settings = wide.config.to_mapping() | {"model": other_model}
    unlike = dataclasses.replace(wide, run_id="unlike", config=RunConfig.from_mapping(settings))
    durations.learn(unlike, over(samples=24, train_time_s=24.0))
    durations.learn(cell(3), over(samples=36, train_time_s=360.0))
    assert durations.expected_s(wide) == 5.0 + 24.0


def test_what_was_sealed_before_is_known_and_what_was_done_counts(tmp_path: Path) -> None:
    sweep = SweepFolder(tmp_path)
    specs = [cell(1), cell(1, seed=1), cell(1, seed=2), cell(2)]
    statuses = [
        over(),
        over(Status.INTERRUPTED, samples=9),
        RunStatus(Status.PENDING),
        RunStatus(Status.PENDING),
    ]
    for spec, status in zip(specs, statuses, strict=True):
        folder = sweep.run(spec.run_id)
        folder.path.mkdir(parents=True)
        status.write(folder.status)
    sweep.run(specs[3].run_id).status.write_text("{")
    durations = Durations(sweep, specs, {})
    assert durations.expected_s(specs[1]) == 5.0 + 2.0 * 3
    assert durations.expected_s(specs[2]) == 5.0 + 2.0 * 12
    assert durations.expected_s(specs[3]) == 5.0 + 2.0 * 24


def test_thousands_of_cells_without_a_run_are_looked_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever a run ends, all that are queued are expected anew."""
    durations = Durations(SweepFolder(tmp_path), (), {})
    durations.learn(cell(1), over())
    settings = cell(1).config.to_mapping()
    unlike = [
        dataclasses.replace(
            cell(2),
            run_id=f"unlike-{width}",
            config=RunConfig.from_mapping(
                settings | {"model": {**settings["model"], "d_model": 8 * width}}
            ),
        )
        for width in range(2, 7)
    ]
    asked: list[str] = []
    find = Durations._nearest_duration

    def count(self: Durations, spec: RunSpec, ranks: int) -> Duration | None:
        asked.append(spec.run_id)
        return find(self, spec, ranks)

    monkeypatch.setattr(Durations, "_nearest_duration", count)
    assert [durations.expected_s(spec) for spec in unlike] == [5.0 + 2.0 * 24] * 5
    assert len(asked) == 1
    durations.learn(cell(2), over(samples=24, train_time_s=24.0))
    assert [durations.expected_s(spec) for spec in unlike] == [5.0 + 24.0] * 5
    assert len(asked) == 2
