"""Failures in a report, against attempts that are written here."""

from __future__ import annotations

from typing import Any

from batchscape.analysis import load
from batchscape.analysis.failures.topic import failures_section
from batchscape.record.status import Attempt, RunStatus

HANG = Attempt(0.0, 0, 60.0, "failed", "no rank made progress", "hang")
KILLED = Attempt(70.0, 0, 80.0, "interrupted", "the launcher died", "interrupted")
DONE = Attempt(90.0, 0, 99.0, "completed")
RUNNING = Attempt(90.0, 0)


def note_attempts(folder: Any, *attempts: Attempt) -> None:
    status = RunStatus.read(folder.status)
    status.attempts = list(attempts)
    status.write(folder.status)


def test_attempts_are_counted_by_cause(build):
    sweep = build()
    for seed in range(3):
        note_attempts(sweep.run((2, 16, 1), seed=seed), HANG, KILLED, DONE)
    memory = Attempt(0.0, 0, 60.0, "oom", "out of memory", "out_of_memory")
    note_attempts(sweep.run((1, 32, 1), status="oom", reason="out of memory"), memory)
    # One that still runs is in no count, nor is the attempt that goes on.
    note_attempts(sweep.run((1, 8, 4), status="running"), HANG, RUNNING)
    note_attempts(sweep.run((4, 8, 1)), DONE)
    tables = load(sweep.path)
    section = failures_section(tables.runs, tables.attempts)
    columns = ["status", "cause", "n_attempts", "n_runs", "n_retried", "n_completed"]
    counts = section.tables[0].frame[columns]
    assert counts.to_numpy().tolist() == [
        ["failed", "hang", 4, 4, 4, 3],
        ["interrupted", "interrupted", 3, 3, 3, 3],
        ["oom", "out_of_memory", 1, 1, 0, 0],
    ]
    assert section.answer == [
        "Of 12 ended attempts, 8 did not finish, in 5 runs; 3 of these runs completed since."
    ]


def test_runs_of_one_name_in_two_folders_are_two(build):
    sweeps = [build("one"), build("two")]
    for sweep in sweeps:
        note_attempts(sweep.run((1, 32, 1), status="failed", reason="hang"), HANG)
    tables = load(*(sweep.path for sweep in sweeps))
    section = failures_section(tables.runs, tables.attempts)
    (row,) = section.tables[0].frame.to_dict("records")
    assert (row["n_runs"], row["run_ids"].count(";")) == (2, 1)
    assert section.answer == [
        "Of 2 ended attempts, 2 did not finish, in 2 runs; 0 of these runs completed since."
    ]


def test_runs_that_the_report_leaves_out_are_left_out_here(build):
    sweep = build()
    note_attempts(sweep.run((1, 32, 1), status="failed", reason="hang"), HANG)
    note_attempts(sweep.run((2, 16, 1)), DONE)
    tables = load(sweep.path)
    kept = tables.runs[tables.runs["status"] == "completed"]
    assert failures_section(kept, tables.attempts) is None
    assert failures_section(tables.runs, tables.attempts) is not None


def test_a_result_is_no_failure(build):
    sweep = build()
    for seed, end in enumerate(("completed", "diverged")):
        note_attempts(
            sweep.run((1, 32, 1), seed=seed, status=end), Attempt(0.0, 0, 60.0, end, None, None)
        )
    tables = load(sweep.path)
    assert failures_section(tables.runs, tables.attempts) is None
