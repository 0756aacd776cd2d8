"""Rows of steps and evaluations, as they are read.

A training counts its optimizer steps up and logs each of them once. It goes back to a lower step
where it was started again from a checkpoint: the steps after that are dropped. Logs that only look
so are refused: micro-batches, ranks or two losses with a line each (the same step comes again, with
other numbers), ranks one after the other or epochs that count anew (the first step comes again,
with other numbers), and lines of something else (the dropped steps never come).
"""

from __future__ import annotations

import math
from typing import Any

from batchscape.errors import RecordError

Row = dict[str, int | float]

_QUOTED_CHARACTERS = 100
"""Characters of a line that a message quotes."""
_STEP_COLUMN = "optimizer_step"
_SINCE_START = ("samples", "tokens", "train_time_s")
"""Columns that a program may count from its last start."""


class MetricRows:
    """Rows by increasing optimizer step."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._rows: dict[int, Row] = {}
        self._lines: dict[int, str] = {}
        self._last = -1
        self._dropped_rows: dict[int, Row] = {}
        self._expected_steps: set[int] = set()
        self._repeated_steps: set[int] = set()
        self._has_other_numbers = False
        self._is_restarted = False
        self._first_continued: int | None = None

    def starts_again(self) -> None:
        """Note that the program was started again: it may do its last steps once more."""
        self._is_restarted = True

    def add(self, row: Row, least: int, line: str = "", *, is_redrawn: bool = False) -> None:
        """Add a row; a second row of a step adds columns to the first."""
        step = int(row[_STEP_COLUMN])
        if step < least:
            msg = (
                f"{self._source}: an optimizer step should be at least {least}, got {step}; a "
                "program that counts from 0 is read with engine.metrics.first_step=0 (jsonl, "
                "regex), or tells the recorder one more"
            )
            raise RecordError(msg)
        self._expected_steps.discard(step)
        if skipped_steps := [
            step_before for step_before in self._expected_steps if step_before < step
        ]:
            msg = (
                f"{self._source}: optimizer step {min(skipped_steps)} was logged, then a lower "
                f"one, and now {step} without it: {line.strip()[:_QUOTED_CHARACTERS]!r}; if lines "
                "of something else are read as optimizer steps, let engine.metrics name what only "
                "steps have"
            )
            raise RecordError(msg)
        known_row = self._rows.get(step, {})
        if not is_redrawn and not self._is_restarted:
            self._refuse_other_numbers(row, line)
        self._is_restarted = False
        earlier_row = known_row or self._dropped_rows.get(step, {})
        if _shared_columns(earlier_row, row) and not is_redrawn:
            self._repeated_steps.add(step)
        self._has_other_numbers |= bool(_differing_columns(earlier_row, row))
        self._rows[step] = known_row | row
        self._lines[step] = line
        self._last = max(self._last, step)

    def goes_back(self, row: Row, line: str = "") -> bool:
        """Drop the steps from a row's on if the training goes back to it, and return whether."""
        step = int(row[_STEP_COLUMN])
        known_row = self._rows.get(step)
        if step > self._last or (step == self._last and not self._is_restarted):
            return False
        if known_row and not _shared_columns(known_row, row):
            return False  # another line of the same step, with other columns
        if step == min(self._rows) and not self._is_restarted:
            # Ranks or epochs that begin anew would have other numbers in the first step.
            self._refuse_other_numbers(row, line)
        self._expected_steps |= {later for later in self._rows if later > step}
        self.cut(step)
        begin = step if self._first_continued is None else min(step, self._first_continued)
        self._first_continued = begin if self._rows else None
        return True

    def cut(self, step: int) -> None:
        """Drop the rows from an optimizer step on."""
        for later in [k for k in self._rows if k >= step]:
            self._dropped_rows[later] = self._rows.pop(later)
        self._last = max(self._rows, default=-1)

    def last_of_all(self, where: str) -> int:
        """Return the last optimizer step, 0 where there is none yet."""
        last = max(self._last, 0)
        if last != len(self._rows):
            msg = (
                f"{where}: an evaluation without its optimizer step is of the one printed last, "
                f"but only {len(self._rows)} of {last} steps were printed; let the program print "
                "every step, or the step of an evaluation"
            )
            raise RecordError(msg)
        return last

    def get(self) -> list[Row]:
        """Return copies of the rows."""
        return [dict(row) for _, row in sorted(self._rows.items())]

    def get_with_dropped(self) -> list[Row]:
        """Return copies of the rows, and of dropped ones whose step did not come again."""
        return [dict(row) for _, row in sorted((self._dropped_rows | self._rows).items())]

    @property
    def repeats_are_equal(self) -> bool:
        """Whether all that was dropped came again, with the same numbers."""
        return not self._has_other_numbers and self._dropped_rows.keys() <= self._rows.keys()

    @property
    def continued_from(self) -> int | None:
        """The lowest step of a later start that goes on with the steps of an earlier one."""
        return self._first_continued

    def repeats(self, what: str = "optimizer steps") -> str | None:
        """Return which optimizer steps have rows more than once; None: none has."""
        if not self._repeated_steps:
            return None
        return (
            f"{what} {min(self._repeated_steps)} to {max(self._repeated_steps)} come again in its "
            "metrics, as after a restart: the last lines count"
        )

    def _refuse_other_numbers(self, row: Row, line: str) -> None:
        """Refuse a row whose step has other numbers already."""
        step = int(row[_STEP_COLUMN])
        known_row = self._rows.get(step, {})
        for name in _differing_columns(known_row, row):
            lines = [text.strip()[:_QUOTED_CHARACTERS] for text in (self._lines[step], line)]
            quotes = f", in {lines[0]!r} and {lines[1]!r}" if any(lines) else ""
            msg = (
                f"{self._source}: optimizer step {step} comes again with another {name}, "
                f"{known_row[name]:g} and then {row[name]:g}{quotes}: micro-batches, ranks, epochs "
                "that count anew or two kinds of lines are read as optimizer steps; let the "
                "program log each step and each evaluation once, or engine.metrics name what only "
                "one kind has"
            )
            raise RecordError(msg)


def _shared_columns(earlier_row: Row, row: Row) -> list[str]:
    """Return the columns beside the step that two rows have."""
    return sorted(earlier_row.keys() & row.keys() - {_STEP_COLUMN})


def _differing_columns(earlier_row: Row, row: Row) -> list[str]:
    """Return the columns of which two rows have other numbers; each rank has its own times."""
    return [
        name
        for name in _shared_columns(earlier_row, row)
        if not name.endswith("_s") and repr(earlier_row[name]) != repr(row[name])
    ]


def drop_counts_since_start(steps: list[Row], evals: list[Row], begin: int) -> list[str]:
    """Drop what a program may count from its last start, of which `begin` is the first step."""
    later = [row for row in (*steps, *evals) if row[_STEP_COLUMN] >= begin]
    dropped = [name for name in _SINCE_START if any(name in row for row in later)]
    for row in later:
        for name in dropped:
            row.pop(name, None)
    return dropped


def fill_counts(rows: list[Row], global_batch_size: int, sequence_length: int | None) -> None:
    """Fill in samples and tokens where a program leaves them out."""
    for row in rows:
        row.setdefault("samples", int(row["optimizer_step"]) * global_batch_size)
        if sequence_length is not None:
            row.setdefault("tokens", int(row["samples"]) * sequence_length)


def fill_train_time(steps: list[Row], evals: list[Row]) -> None:
    """Add up the times of the steps, as far as none is missing."""
    total = 0.0
    for number, row in enumerate(steps, start=1):
        total += row.get("step_time_s", math.nan) if row["optimizer_step"] == number else math.nan
        if not math.isnan(total):
            row.setdefault("train_time_s", total)
    times: dict[Any, int | float] = {
        row["optimizer_step"]: row["train_time_s"] for row in steps if "train_time_s" in row
    }
    times.setdefault(0, 0.0)
    for row in evals:
        if row["optimizer_step"] in times:
            row.setdefault("train_time_s", times[row["optimizer_step"]])
