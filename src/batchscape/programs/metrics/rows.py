"""Rows of steps and evaluations, as they are read."""

from __future__ import annotations

import math
from typing import Any

from batchscape.errors import RecordError

__all__ = ["Row", "Rows", "fill_counts", "fill_train_time"]

Row = dict[str, int | float]


class Rows:
    """Rows by increasing optimizer step.

    Parameters
    ----------
    source : str
        Begins a message.
    may_go_back : bool
        Whether a step that was there before replaces it and all after it: the program was
        started again and went on from a checkpoint.
    """

    def __init__(self, source: str, *, may_go_back: bool = False) -> None:
        self._source = source
        self._may_go_back = may_go_back
        self._is_first = False
        self._rows: list[Row] = []

    def begin_start(self) -> None:
        """Take what follows for that of one start, which may go back with its first row alone."""
        self._may_go_back, self._is_first = False, True

    def add(self, row: Row, least: int) -> None:
        """Add a row; one of the last step adds to it the columns that it does not have.

        Parameters
        ----------
        row : dict
            With `optimizer_step`.
        least : int
            Lowest step that there is.

        Raises
        ------
        RecordError
            If the step is too low, or is behind the last one, or repeats it.
        """
        step = int(row["optimizer_step"])
        if step < least:
            msg = (
                f"{self._source}: an optimizer step should be at least {least}, got {step}; a "
                "program that counts from 0 is read with engine.metrics.first_step=0 (jsonl, "
                "regex), or tells the recorder one more"
            )
            raise RecordError(msg)
        last = int(self._rows[-1]["optimizer_step"]) if self._rows else -1
        adds = step == last and row.keys() & self._rows[-1].keys() == {"optimizer_step"}
        may_go_back, self._is_first = self._may_go_back or self._is_first, False
        if step <= last and may_go_back and not adds:
            self.cut(step)
        elif step < last:
            msg = (
                f"{self._source}: optimizer step {step} comes after {last}; is it the log of one "
                f"program, and of one start of it?"
            )
            raise RecordError(msg)
        elif step == last:
            self._merge(row)
            return
        self._rows.append(dict(row))

    def cut(self, step: int) -> None:
        """Drop the rows from an optimizer step on."""
        while self._rows and self._rows[-1]["optimizer_step"] >= step:
            self._rows.pop()

    def last_of_all(self, where: str) -> int:
        """Return the last optimizer step, 0 where there is none yet.

        Raises
        ------
        RecordError
            If not every step has a row: what comes after the last one may be of a later step.
        """
        last = int(self._rows[-1]["optimizer_step"]) if self._rows else 0
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
        return [dict(row) for row in self._rows]

    def _merge(self, row: Row) -> None:
        last = self._rows[-1]
        if twice := sorted(row.keys() & last.keys() - {"optimizer_step"}):
            msg = (
                f"{self._source}: {', '.join(twice)} of optimizer step {row['optimizer_step']} "
                f"comes twice; let one rank alone write it"
            )
            raise RecordError(msg)
        last |= row


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
