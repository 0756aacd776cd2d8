"""Failures in a report, against attempts that are written here."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from batchscape.analysis import load, write_report
from batchscape.analysis.failures.topic import failed_attempts, failures_by_cause, failures_section
from batchscape.record.status import Attempt, RunStatus

HOUR_S = 3600.0


def hang(start: float, hours: float, step: int) -> Attempt:
    end = start + hours * HOUR_S
    return Attempt(start, step, end, "failed", "no rank made progress", "hang")


def note_attempts(folder: Any, *attempts: Attempt) -> None:
    status = RunStatus.read(folder.status)
    status.attempts = list(attempts)
    status.write(folder.status)


def test_attempts_are_summed_by_cause(build: Any) -> None:
    sweep = build()
    for seed, minutes in enumerate((1, 2, 3, 4, 5, 6)):
        folder = sweep.run((2, 16, 1), seed=seed)
        # Two ranks for half an hour, and what is begun again after some minutes completes.
        again = 0.5 * HOUR_S + 60 * minutes
        resumed = 10 if seed < 4 else 0
        note_attempts(
            folder, hang(0.0, 0.5, 0), Attempt(again, resumed, again + HOUR_S, "completed")
        )
    given_up = sweep.run((1, 32, 1), status="oom", reason="out of memory", optimizer_steps=20)
    note_attempts(given_up, Attempt(0.0, 0, 0.25 * HOUR_S, "oom", "out of memory", "out_of_memory"))
    sweep.run((4, 8, 1))
    report = write_report([sweep.path], figures=False)
    table = pd.read_csv(report.out / "tables" / "failures.csv")
    assert table["status"].tolist() == ["failed", "oom"]
    assert table["cause"].tolist() == ["hang", "out of memory"]
    assert table["n_attempts"].tolist() == table["n_runs"].tolist() == [6, 1]
    assert table["n_completed"].tolist() == [6, 0]
    assert table["n_kept"].tolist() == [4, 0]
    assert table["device_hours"].tolist() == pytest.approx([6 * 2 * 0.5, 0.25])
    # Of six values the lowest and the highest hold the median with 1 - 2 / 2^6 = 97 %.
    row = table.iloc[0]
    assert [row["minutes_to_next"], row["low"], row["high"]] == pytest.approx([3.5, 1, 6])
    assert pd.isna(table.loc[1, "minutes_to_next"])
    answer = (report.out / "report.md").read_text()
    told = "7 of 13 attempts did not complete, of 7 runs; they took 6.25 device-hours"
    assert told in answer


def test_half_without_a_next_attempt_leave_no_median(build: Any) -> None:
    sweep = build()
    for seed in range(4):
        folder = sweep.run((1, 32, 1), seed=seed, status="failed", reason="hang")
        attempts = [hang(0.0, 1.0, 0)]
        if seed == 0:
            attempts.append(hang(HOUR_S + 60, 1.0, 0))
        note_attempts(folder, *attempts)
    tables = load(sweep.path)
    failed = failed_attempts(tables.runs, tables.attempts)
    (row,) = failures_by_cause(failed).to_dict("records")
    assert (row["n_attempts"], row["n_runs"], row["n_completed"]) == (5, 4, 0)
    assert pd.isna(row["minutes_to_next"])


def test_runs_of_one_name_in_two_folders_are_two(build: Any) -> None:
    sweeps = [build("one"), build("two")]
    for sweep in sweeps:
        note_attempts(sweep.run((1, 32, 1), status="failed", reason="hang"), hang(0.0, 1.0, 0))
    tables = load(*(sweep.path for sweep in sweeps))
    section = failures_section(tables.runs, tables.attempts)
    assert section is not None
    assert section.answer == [
        "2 of 2 attempts did not complete, of 2 runs; they took 2 device-hours."
    ]


def test_a_sweep_without_failures_has_no_section(build: Any) -> None:
    sweep = build()
    for seed, end in enumerate(("completed", "diverged")):
        folder = sweep.run((1, 32, 1), seed=seed, status=end)
        note_attempts(folder, Attempt(0.0, 0, 60.0, end))
    tables = load(sweep.path)
    assert failures_section(tables.runs, tables.attempts) is None
