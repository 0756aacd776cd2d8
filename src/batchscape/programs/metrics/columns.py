"""Rows from logs whose columns the user names: JSON lines and printed text."""

from __future__ import annotations

import contextlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from batchscape.config.metrics import (
    EVALUATION_COLUMNS,
    GEOMETRY_NAMES,
    STEP_COLUMNS,
    JsonlMetrics,
    RegexMetrics,
)
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.endings import FAILED_START
from batchscape.programs.metrics.log import Log, ObservedBatch, finish, settle_loss
from batchscape.programs.metrics.numbers import (
    as_count,
    as_row,
    content_of,
    drawn_lines_of,
    whole_lines,
)
from batchscape.programs.metrics.rows import MetricRows, Row, drop_counts_since_start


class ColumnReader(ABC):
    """Reads a text; a format says what is in a line of it."""

    def __init__(
        self,
        config: JsonlMetrics | RegexMetrics,
        path: Path,
        geometry: BatchGeometry,
        sequence_length: int | None,
        *,
        begin: int = 0,
    ) -> None:
        self._config = config
        self._path = path
        self._name = path.name
        self._geometry = geometry
        self._sequence_length = sequence_length
        self._begin = begin
        self._rows_before: tuple[list[Row], list[Row]] = [], []
        """Steps and evaluations of the last read: a program may overwrite its log."""
        self._text_of_earlier_starts = b""
        """Read before the program is started, as it may overwrite its log."""
        self._forget_all()
        with contextlib.suppress(RecordError):
            self.read()
        with contextlib.suppress(RecordError):
            self._text_of_earlier_starts = whole_lines((content_of(path) or b"")[begin:])

    def _forget_all(self) -> None:
        """Forget all that was read."""
        self._steps, self._evals = MetricRows(self._name), MetricRows(self._name)
        self._is_redrawn = False
        self._counts_by_name: dict[str, dict[int, None]] = {}
        self._columns: set[str] = set()
        self._non_finite_counts: dict[str, int] = {}
        self._since_start: dict[str, int] = {}

    def read(self, *, final: bool = False) -> Log:
        """Return what the text holds by now."""
        self._forget_all()
        content = (content_of(self._path) or b"")[self._begin :]
        # A log that the program overwrote no longer begins with the text of earlier starts.
        earlier_text = self._text_of_earlier_starts
        if not content.startswith(earlier_text):
            earlier_text = b""
        self._take_all(drawn_lines_of(earlier_text))
        if earlier_text:
            self._starts_again()
        self._take_all(drawn_lines_of(whole_lines(content)[len(earlier_text) :]))
        if final:
            # A last line without its end counts if it is complete.
            last_lines = drawn_lines_of(content[content.rfind(b"\n") + 1 :])
            if last_lines and not self._is_whole(last_lines[-1][0]):
                last_lines.pop()
            self._take_all(last_lines)
            self._check_end()
        return self._log()

    def _take_all(self, lines: list[tuple[str, bool]]) -> None:
        # With several micro-batches or ranks each may have drawn the line.
        has_one_micro_batch = self._geometry.global_batch_size == self._geometry.micro_batch_size
        for line, is_redrawn in lines:
            self._is_redrawn = is_redrawn and has_one_micro_batch
            self._take(line)

    def _starts_again(self) -> None:
        """Note that the following lines are of another start of the program."""
        self._steps.starts_again()
        self._evals.starts_again()

    @abstractmethod
    def _take(self, line: str) -> None:
        """Add what a line says, or raise a RecordError."""

    @abstractmethod
    def _is_whole(self, line: str) -> bool:
        """Return whether a last line without its end is complete."""

    @abstractmethod
    def _check_end(self) -> None:
        """Raise a RecordError where the whole text lacks what the configuration names."""

    def _add(
        self, values: Mapping[str, object], tables: tuple[str, ...], where: str, line: str
    ) -> None:
        """Add what one line says."""
        self._columns |= values.keys()
        for name in GEOMETRY_NAMES:
            if name in values:
                count = as_count(values[name], f"{where}: {name}")
                self._counts_by_name.setdefault(name, {})[count] = None
        for table in tables:
            columns = STEP_COLUMNS if table == "steps" else EVALUATION_COLUMNS
            table_values = {name: values[name] for name in columns if name in values}
            if "optimizer_step" not in table_values:
                msg = f"{where} has {', '.join(sorted(table_values))}, but no optimizer_step"
                raise RecordError(msg)
            row = as_row(table_values, self._config.units, where)
            for name in table_values.keys() - row.keys():
                self._non_finite_counts[name] = self._non_finite_counts.get(name, 0) + 1
            if table == "steps":
                row["optimizer_step"] += 1 - self._config.first_step
                if self._steps.goes_back(row, line):
                    self._evals.cut(int(row["optimizer_step"]))
                self._steps.add(row, 1, line, is_redrawn=self._is_redrawn)
            else:
                self._evals.add(row, 0, line)

    def _log(self) -> Log:
        (steps, evals), batch = self._with_overwritten(), ObservedBatch()
        for name, counts in self._counts_by_name.items():
            for count in counts:
                batch.put(name, count, self._name)
        sources: dict[str, str] = {}
        if repeats := self._steps.repeats():
            sources["optimizer_step"] = repeats
        if repeats := self._evals.repeats("evaluations of optimizer steps"):
            sources["eval_loss"] = repeats
        if self._config.loss_of == "other":
            ranks = batch.value("world_size") or self._geometry.data_parallel_size
            micro_steps = batch.value("gradient_accumulation_steps")
            parts = ranks * (micro_steps or self._geometry.gradient_accumulation_steps)
            if why_missing := settle_loss(steps, parts):
                sources["loss"] = why_missing
        if any("step_time_s" in row for row in steps):
            sources["step_time_s"] = f"as {self._name} has it"
        for name, count in self._non_finite_counts.items():
            sources[name] = f"missing in {count} rows: {self._name} has no finite number there"
        for name, begin in self._since_start.items():
            sources[name] = (
                f"not read from optimizer step {begin} on: the program was started again, and may "
                "count from there"
            )
        return finish(
            steps,
            evals,
            batch,
            geometry=self._geometry,
            sequence_length=self._sequence_length,
            sources=sources,
            source=self._name,
        )

    def _with_overwritten(self) -> tuple[list[Row], list[Row]]:
        """Return the rows, preceded by those of the last read that the text no longer has."""
        steps, evals = self._steps.get(), self._evals.get()
        if self._steps.repeats_are_equal:
            # Another rank printed the same steps, but perhaps no evaluation.
            evals = self._evals.get_with_dropped()
        first = steps[0]["optimizer_step"] if steps else math.inf
        evaluated_steps = {row["optimizer_step"] for row in evals}
        overwritten_steps, overwritten_evals = (
            [row for row in rows if row["optimizer_step"] < first] for rows in self._rows_before
        )
        begin = int(first) if overwritten_steps and steps else self._steps.continued_from
        if begin is not None:
            for name in drop_counts_since_start(steps, evals, begin):
                self._since_start[name] = begin
        steps = overwritten_steps + steps
        evals = [
            row for row in overwritten_evals if row["optimizer_step"] not in evaluated_steps
        ] + evals
        evals.sort(key=lambda row: row["optimizer_step"])
        self._rows_before = [dict(row) for row in steps], [dict(row) for row in evals]
        return steps, evals


_EVALUATION_ONLY = set(EVALUATION_COLUMNS) - set(STEP_COLUMNS)
_TRAINING_ONLY = {"loss", "learning_rate", "gradient_norm"}
"""Columns of optimizer steps alone: times in a line without them may be an evaluation's."""


class JsonlReader(ColumnReader):
    """Reads the columns that a mapping names; other keys and other lines are left alone."""

    _config: JsonlMetrics

    def _forget_all(self) -> None:
        super()._forget_all()
        self._keys: set[str] = set()
        self._count = 0

    def _take(self, line: str) -> None:
        self._count += 1
        if not line.strip():
            return
        where = f"{self._path}, line {self._count}"
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            msg = f"{where} is no JSON ({error}): {line[:60]!r}"
            raise RecordError(msg) from None
        if not isinstance(entry, dict):
            msg = f"{where} is no JSON object: {line[:60]!r}"
            raise RecordError(msg)
        self._keys |= entry.keys()
        values = {
            name: entry[key]
            for name, key in self._config.columns.items()
            if entry.get(key) is not None
        }
        measured_columns = values.keys() - {"optimizer_step", *GEOMETRY_NAMES}
        tables = []
        # Counts and times belong to the step, unless the line is about an evaluation alone.
        if measured_columns & _TRAINING_ONLY or not measured_columns & _EVALUATION_ONLY:
            tables += ["steps"] if measured_columns else []
        if measured_columns & _EVALUATION_ONLY:
            tables += ["evals"]
        self._add(values, tuple(tables), where, line)

    def _check_end(self) -> None:
        if not self._count:
            msg = f"{self._path} is empty or not there: the program logged nothing in it"
            raise RecordError(msg)
        absent_keys = [
            f"{key} ({name})"
            for name, key in self._config.columns.items()
            if name not in self._columns
        ]
        if absent_keys:
            msg = (
                f"no line of {self._path} has {', '.join(absent_keys)}; keys that it has: "
                f"{', '.join(sorted(self._keys)[:40])}"
            )
            raise RecordError(msg)

    def _is_whole(self, line: str) -> bool:
        """Whether a line is a whole object: a part of one is no JSON."""
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return False


_PATTERNS: dict[str, tuple[str, ...]] = {
    "geometry_pattern": (),
    "pattern": ("steps",),
    "evaluation_pattern": ("evals",),
}


class RegexReader(ColumnReader):
    """Reads the named groups of every match in every line."""

    _config: RegexMetrics

    def _forget_all(self) -> None:
        super()._forget_all()
        self._matched_settings: set[str] = set()
        self._patterns = {
            setting: re.compile(text)
            for setting in _PATTERNS
            if (text := getattr(self._config, setting)) is not None
        }

    def _take(self, line: str) -> None:
        if FAILED_START.match(line):
            self._starts_again()
        for setting, pattern in self._patterns.items():
            for match in pattern.finditer(line):
                self._matched_settings.add(setting)
                values: dict[str, object] = {
                    name: text for name, text in match.groupdict().items() if text is not None
                }
                where = f"{self._path}, {line[:60]!r}"
                if setting == "evaluation_pattern" and "optimizer_step" not in values:
                    row = as_row(values, self._config.units, where)
                    row["optimizer_step"] = self._steps.last_of_all(where)
                    self._evals.add(row, 0, line)
                else:
                    self._add(values, _PATTERNS[setting], where, line)

    def _is_whole(self, line: str) -> bool:  # noqa: ARG002  (a number may be cut off)
        return False

    def _check_end(self) -> None:
        for setting in self._patterns.keys() - self._matched_settings:
            msg = (
                f"metrics.{setting} matches no line of {self._path}: "
                f"{getattr(self._config, setting)!r}"
            )
            raise RecordError(msg)
