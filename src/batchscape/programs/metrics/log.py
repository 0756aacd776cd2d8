"""What is read from the metrics of another program: rows, and what they tell of its batch.

A training counts its optimizer steps up and logs each of them once. It goes back to a lower step
where it was started again from a checkpoint: the steps after that are dropped. Logs that only look
so are refused: micro-batches, ranks or two losses with a line each (the same step comes again, with
other numbers), ranks one after the other or epochs that count anew (the first step comes again,
with other numbers), and lines of something else (the dropped steps never come).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchscape.config.metrics import Metrics
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry

Row = dict[str, Any]

_QUOTED_CHARACTERS = 100
"""Characters of a line that a message quotes."""
_SINCE_START = ("samples", "tokens", "train_time_s")
"""Columns that a program may count from its last start."""


@dataclass(frozen=True)
class Log:
    """Everything that a program's metrics held at one moment."""

    steps: list[Row] = field(default_factory=list)
    """Rows of the table `steps`, by increasing `optimizer_step`; what is missing has no key."""
    evals: list[Row] = field(default_factory=list)
    """Rows of the table `evals`, by increasing `optimizer_step`."""
    readings: dict[tuple[str, int], str] = field(default_factory=dict)
    """Where it was read first, by name and value, of each number about the batch."""
    problems: list[str] = field(default_factory=list)
    """Contradictions within the metrics about the batch: with one of them the run is invalid."""
    sources: dict[str, str] = field(default_factory=dict)
    """By name of a column: where its values come from, or why it is missing."""


@dataclass(eq=False)
class Reader(ABC):
    """Reads the metrics of one run; a format says what is in them."""

    _config: Metrics
    _path: Path
    _geometry: BatchGeometry
    _sequence_length: int | None
    _begin: int = 0
    """Bytes of the file that are of earlier attempts, and do not count."""

    @property
    def source(self) -> str:
        """What messages call the metrics."""
        return self._path.name

    def read(self, *, final: bool = False) -> Log:
        """Return what the metrics hold by now; an empty log before the program wrote anything."""
        log = self._read(final=final)
        for column, name in (
            ("samples", "global_batch_size"),
            ("tokens", "tokens_per_optimizer_step"),
        ):
            growth, uneven = even_growth(log.steps, column)
            source = f"{column} in the {self.source}"
            if growth is not None:
                log.readings.setdefault((name, growth), source)
            elif uneven is not None and column == "samples":  # of any number of tokens
                log.problems.append(f"{source}: {uneven}")
        for row in (*log.steps, *log.evals):
            row.setdefault("samples", row["optimizer_step"] * self._geometry.global_batch_size)
            if self._sequence_length is not None:
                row.setdefault("tokens", row["samples"] * self._sequence_length)
        _fill_train_time(log.steps, log.evals)
        return log

    @abstractmethod
    def _read(self, *, final: bool) -> Log:
        """Return what the metrics say themselves."""


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
        self.continued_from: int | None = None
        """The lowest step of a later start that goes on with the steps of an earlier one."""

    def starts_again(self) -> None:
        """Note that the program was started again: it may do its last steps once more."""
        self._is_restarted = True

    def add(self, row: Row, least: int, line: str = "") -> None:
        """Add a row; a second row of a step adds columns to the first."""
        step = row["optimizer_step"]
        if step < least:
            raise RecordError(
                f"{self._source}: an optimizer step should be at least {least}, got {step}; a "
                "program that counts from 0 is read with engine.metrics.first_step=0 (jsonl, "
                "regex), or tells the recorder one more"
            )
        self._expected_steps.discard(step)
        if self._expected_steps and (skipped_step := min(self._expected_steps)) < step:
            raise RecordError(
                f"{self._source}: optimizer step {skipped_step} was logged, then a lower "
                f"one, and now {step} without it: {line.strip()[:_QUOTED_CHARACTERS]!r}; if lines "
                "of something else are read as optimizer steps, let engine.metrics name what only "
                "steps have"
            )
        known_row = self._rows.get(step, {})
        if not self._is_restarted:
            self._refuse_other_numbers(row, line)
        self._is_restarted = False
        earlier_row = known_row or self._dropped_rows.get(step, {})
        if _shared_columns(earlier_row, row):
            self._repeated_steps.add(step)
        self._has_other_numbers |= bool(_differing_columns(earlier_row, row))
        self._rows[step] = known_row | row
        self._lines[step] = line
        self._last = max(self._last, step)

    def goes_back(self, row: Row, line: str = "") -> bool:
        """Drop the steps from a row's on if the training goes back to it, and return whether."""
        step = row["optimizer_step"]
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
        self.continued_from = min(step, self.continued_from or step) if self._rows else None
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
            raise RecordError(
                f"{where}: an evaluation without its optimizer step is of the one printed last, "
                f"but only {len(self._rows)} of {last} steps were printed; let the program print "
                "every step, or the step of an evaluation"
            )
        return last

    def get(self, *, with_dropped: bool = False) -> list[Row]:
        """Return copies of the rows, and of dropped ones whose step did not come again."""
        rows = self._dropped_rows | self._rows if with_dropped else self._rows
        return [dict(row) for _, row in sorted(rows.items())]

    @property
    def repeats_are_equal(self) -> bool:
        """Whether all that was dropped came again, with the same numbers."""
        return not self._has_other_numbers and self._dropped_rows.keys() <= self._rows.keys()

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
        step = row["optimizer_step"]
        known_row = self._rows.get(step, {})
        for name in _differing_columns(known_row, row):
            lines = [text.strip()[:_QUOTED_CHARACTERS] for text in (self._lines[step], line)]
            quotes = f", in {lines[0]!r} and {lines[1]!r}" if any(lines) else ""
            raise RecordError(
                f"{self._source}: optimizer step {step} comes again with another {name}, "
                f"{known_row[name]:g} and then {row[name]:g}{quotes}: micro-batches, ranks, epochs "
                "that count anew or two kinds of lines are read as optimizer steps; let the "
                "program log each step and each evaluation once, or engine.metrics name what only "
                "one kind has"
            )


def _shared_columns(earlier_row: Row, row: Row) -> list[str]:
    """Return the columns beside the step that two rows have."""
    return sorted(earlier_row.keys() & row.keys() - {"optimizer_step"})


def _differing_columns(earlier_row: Row, row: Row) -> list[str]:
    """Return the columns of which two rows have other numbers; each rank has its own times."""
    return [
        name
        for name in _shared_columns(earlier_row, row)
        if not name.endswith("_s") and repr(earlier_row[name]) != repr(row[name])
    ]


def drop_counts_since_start(steps: list[Row], evals: list[Row], begin: int) -> list[str]:
    """Drop what a program may count from its last start, of which `begin` is the first step."""
    later = [row for row in (*steps, *evals) if row["optimizer_step"] >= begin]
    dropped = [name for name in _SINCE_START if any(name in row for row in later)]
    for row in later:
        for name in dropped:
            row.pop(name, None)
    return dropped


def even_growth(rows: list[Row], column: str) -> tuple[int | None, str | None]:
    """Return by how much each optimizer step adds to a count, or where that is uneven."""
    counts = [(row["optimizer_step"], int(row[column])) for row in rows if column in row]
    if not counts:
        return None, None
    first_step, first_count = counts[0]
    size = first_count // first_step
    for step, count in counts:
        if count != size * step:
            return None, f"{count} after optimizer step {step}, and not {size} a step"
    return size, None


def settle_loss(steps: list[Row], parts: int = 1) -> str | None:
    """Remove every loss that is not the mean over the global batch of its step.

    One that is not finite stays: the training diverged, whatever the mean is over.
    """
    previous = removed = 0
    for row in steps:
        if "loss" not in row:
            continue
        step = row["optimizer_step"]
        if (parts > 1 or step - previous > 1) and math.isfinite(row["loss"]):
            del row["loss"]
            removed += 1
        previous = step
    if not removed:
        return None
    return f"missing in {removed} rows: the program may log the mean of a part, or of several steps"


def _fill_train_time(steps: list[Row], evals: list[Row]) -> None:
    """Add up the times of the steps, as far as none is missing."""
    total = 0.0
    times = {0: 0.0}
    for number, row in enumerate(steps, start=1):
        total += row.get("step_time_s", math.nan) if row["optimizer_step"] == number else math.nan
        if not math.isnan(total):
            row.setdefault("train_time_s", total)
        if "train_time_s" in row:
            times[row["optimizer_step"]] = row["train_time_s"]
    for row in evals:
        if row["optimizer_step"] in times:
            row.setdefault("train_time_s", times[row["optimizer_step"]])
