"""Rows of steps and evaluations, as they are read."""

from __future__ import annotations

import math
import re
from typing import Any

from batchscape.errors import RecordError

__all__ = ["Row", "Rows", "fill_counts", "fill_train_time"]

Row = dict[str, int | float]

_SHOWN = 100
"""Characters of a line that a message quotes."""
_WORD = re.compile(r"[A-Za-z]+")
_NUMBER = re.compile(r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?")
_NO_NUMBERS = {"nan", "NaN", "inf", "Infinity", "null", "None", "NAN", "INF"}


class Rows:
    """Rows by increasing optimizer step; what comes again replaces what was there before.

    Parameters
    ----------
    source : str
        Begins a message.
    writers : int
        Ranks that may have written it.
    """

    def __init__(self, source: str, *, writers: int = 1) -> None:
        self._source = source
        self._writers = writers
        self._rows: dict[int, Row] = {}
        self._lines: dict[int, list[str]] = {}
        self._last = -1
        self._replaced: dict[int, Row] = {}
        self._again: set[int] = set()
        self._differs = ""

    def add(self, row: Row, least: int, line: str = "") -> None:
        """Add a row; one of a step that is there adds to it, or replaces what comes again.

        Parameters
        ----------
        row : dict
            With `optimizer_step`.
        least : int
            Lowest step that there is.
        line : str
            Where it was read.

        Raises
        ------
        RecordError
            If the step is too low, or comes again in a line of another kind.
        """
        step = int(row["optimizer_step"])
        if step < least:
            msg = (
                f"{self._source}: an optimizer step should be at least {least}, got {step}; a "
                "program that counts from 0 is read with engine.metrics.first_step=0 (jsonl, "
                "regex), or tells the recorder one more"
            )
            raise RecordError(msg)
        there = self._rows.get(step, {})
        if there.keys() & row.keys() - {"optimizer_step"}:
            self._refuse_another_kind(step, step, line)
        self._note(there or self._replaced.get(step, {}), row)
        self._rows[step] = there | row
        self._lines.setdefault(step, []).append(line)
        self._last = max(self._last, step)

    def goes_back(self, row: Row, line: str = "") -> bool:
        """Drop the steps from a row's on, where the training goes back to it; say whether it does.

        A program that was started again goes on from a checkpoint, and trains them once more.

        Raises
        ------
        RecordError
            If the row is of a line of another kind.
        """
        step = int(row["optimizer_step"])
        there = self._rows.get(step)
        if step >= self._last or (there and not there.keys() & row.keys() - {"optimizer_step"}):
            return False
        self._refuse_another_kind(step, step if there else self._last, line)
        self._replaced |= {k: was for k, was in self._rows.items() if k >= step}
        self.cut(step)
        return True

    def cut(self, step: int) -> None:
        """Drop the rows from an optimizer step on."""
        for later in [k for k in self._rows if k >= step]:
            del self._rows[later], self._lines[later]
        self._last = max(self._rows, default=-1)

    def last_of_all(self, where: str) -> int:
        """Return the last optimizer step, 0 where there is none yet.

        Raises
        ------
        RecordError
            If not every step has a row: what comes after the last one may be of a later step.
        """
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
        """Return copies of the rows.

        Raises
        ------
        RecordError
            If every step came again with other numbers, where several ranks may have written it.
        """
        if self._writers > 1 and self._differs and self._again >= self._rows.keys():
            msg = (
                f"{self._source}: every optimizer step comes again with other numbers "
                f"({self._differs}): {self._writers} ranks write, and may train, each for itself, "
                "or one prints a step several times; let rank 0 alone write every step once"
            )
            raise RecordError(msg)
        return [dict(row) for _, row in sorted(self._rows.items())]

    def repeats(self) -> str | None:
        """Say which optimizer steps come again; None where none does."""
        if not self._again:
            return None
        return (
            f"optimizer steps {min(self._again)} to {max(self._again)} come again in its metrics, "
            "as after a restart: the last lines count"
        )

    def _note(self, before: Row, row: Row) -> None:
        """Note where a step comes again, and what of it is another number."""
        step = int(row["optimizer_step"])
        for name in sorted(before.keys() & row.keys() - {"optimizer_step"}):
            self._again.add(step)
            # Each rank has times of its own.
            if not name.endswith("_s") and repr(before[name]) != repr(row[name]):
                told = f"{name} of step {step} is {before[name]:g}, then {row[name]:g}"
                self._differs = self._differs or told

    def _refuse_another_kind(self, step: int, place: int, line: str) -> None:
        """Refuse a line with other words than those that the step at a place was read in."""
        before = self._lines[place]
        if _words(line) not in [_words(other) for other in before]:
            msg = (
                f"{self._source}: two kinds of lines are read as optimizer steps: "
                f"{before[-1].strip()[:_SHOWN]!r} (step {place}) and {line.strip()[:_SHOWN]!r} "
                f"(step {step}); let engine.metrics name what only one of them has"
            )
            raise RecordError(msg)


def _words(line: str) -> set[str]:
    """Return the words of a line, which tell its kind: without numbers, as nan and null are."""
    return set(_WORD.findall(_NUMBER.sub(" ", line))) - _NO_NUMBERS


def fill_counts(rows: list[Row], global_batch_size: int, sequence_length: int | None) -> None:
    """Fill in samples and tokens where a program leaves them out.

    Parameters
    ----------
    rows : list of dict
        Of steps or of evaluations; changed in place.
    global_batch_size : int
        Samples per optimizer step.
    sequence_length : int or None
        Tokens a sample; None: not known.
    """
    for row in rows:
        row.setdefault("samples", int(row["optimizer_step"]) * global_batch_size)
        if sequence_length is not None:
            row.setdefault("tokens", int(row["samples"]) * sequence_length)


def fill_train_time(steps: list[Row], evals: list[Row]) -> None:
    """Add up the times of the steps, as far as none is missing.

    Parameters
    ----------
    steps, evals : list of dict
        An evaluation has the training time of its optimizer step. Changed in place.
    """
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
