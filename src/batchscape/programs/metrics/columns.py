"""Rows from logs whose columns the user names: JSON lines and printed text."""

from __future__ import annotations

import contextlib
import json
import re
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from batchscape.config.metrics import (
    EVALUATION_COLUMNS,
    GEOMETRY_NAMES,
    STEP_COLUMNS,
    JsonlMetrics,
    RegexMetrics,
)
from batchscape.errors import RecordError
from batchscape.programs.endings import FAILED_START
from batchscape.programs.metrics.log import (
    Log,
    MetricRows,
    Reader,
    drop_counts_since_start,
    settle_loss,
)
from batchscape.programs.metrics.numbers import (
    as_count,
    as_row,
    content_of,
    lines_of,
    whole_lines,
)


@dataclass(eq=False)
class ColumnReader(Reader):
    """Reads a text; a format says what is in a line of it."""

    _config: JsonlMetrics | RegexMetrics

    def __post_init__(self) -> None:
        """Read what earlier starts of the program have left."""
        self._first_step: int | None = None
        """The lowest optimizer step that was ever read."""
        self._earlier_text = b""
        """Of earlier starts: read before the program is started."""
        with contextlib.suppress(RecordError):
            self._earlier_text = whole_lines(content_of(self._path)[self._begin :])
            self._read(final=False)

    def _read(self, *, final: bool) -> Log:
        self._steps, self._evals = MetricRows(self.source), MetricRows(self.source)
        self._readings: dict[tuple[str, int], str] = {}
        self._columns: set[str] = set()
        self._names_met: set[str] = set()
        """Keys of its lines, or settings whose patterns match one."""
        self._count = 0
        content = content_of(self._path)[self._begin :]
        # A number may be cut off in a last line without its end, but not in a whole object.
        text = content if final and content.rstrip().endswith(b"}") else whole_lines(content)
        if self._earlier_text and text.startswith(self._earlier_text):
            self._take_all(self._earlier_text)
            self._starts_again()
            text = text[len(self._earlier_text) :]
        self._take_all(text)
        if final:
            self._check_end()
        return self._log()

    def _take_all(self, text: bytes) -> None:
        for line in lines_of(text):
            self._count += 1
            self._take(line)

    def _starts_again(self) -> None:
        """Note that the following lines are of another start of the program."""
        self._steps.starts_again()
        self._evals.starts_again()

    @abstractmethod
    def _take(self, line: str) -> None:
        """Add what a line says, or raise a RecordError."""

    @abstractmethod
    def _check_end(self) -> None:
        """Raise a RecordError where the whole text lacks what the configuration names."""

    def _add(self, values: Mapping[str, object], where: str, line: str, *tables: str) -> None:
        """Add what one line says."""
        self._columns |= values.keys()
        for name in GEOMETRY_NAMES:
            if name in values:
                count = as_count(values[name], f"{where}: {name}")
                self._readings.setdefault((name, count), self.source)
        for table in tables:
            columns = STEP_COLUMNS if table == "steps" else EVALUATION_COLUMNS
            # A line without its step is refused.
            table_values = {"optimizer_step": values.get("optimizer_step")}
            table_values |= {name: values[name] for name in columns if name in values}
            row = as_row(table_values, self._config.units, where)
            if table == "steps":
                row["optimizer_step"] += 1 - self._config.first_step
                if self._steps.goes_back(row, line):
                    self._evals.cut(row["optimizer_step"])
                self._steps.add(row, 1, line)
            else:
                self._evals.add(row, 0, line)

    def _log(self) -> Log:
        steps = self._steps.get()
        # Another rank may have printed the same steps, but no evaluation.
        evals = self._evals.get(with_dropped=self._steps.repeats_are_equal)
        if steps:
            first_step = steps[0]["optimizer_step"]
            if self._first_step is not None and first_step > self._first_step:
                raise RecordError(
                    f"{self._path} has been written over and begins with optimizer step "
                    f"{first_step} now: let a program that goes on append to its log"
                )
            self._first_step = first_step
        sources: dict[str, str] = {}
        if (begin := self._steps.continued_from) is not None:
            for name in drop_counts_since_start(steps, evals, begin):
                sources[name] = (
                    f"not read from optimizer step {begin} on: the program was started again, and "
                    "may count from there"
                )
        if repeats := self._steps.repeats():
            sources["optimizer_step"] = repeats
        if repeats := self._evals.repeats("evaluations of optimizer steps"):
            sources["eval_loss"] = repeats
        if self._config.loss_of == "other":
            geometry = self._geometry
            parts = geometry.data_parallel_size * geometry.gradient_accumulation_steps
            if why_missing := settle_loss(steps, parts):
                sources["loss"] = why_missing
        return Log(steps, evals, self._readings, [], sources)


_EVALUATION_ONLY = set(EVALUATION_COLUMNS) - set(STEP_COLUMNS)
_TRAINING_ONLY = {"loss", "learning_rate", "gradient_norm"}
"""Columns of optimizer steps alone: times in a line without them may be an evaluation's."""


class JsonlReader(ColumnReader):
    """Reads the columns that a mapping names; other keys and other lines are left alone."""

    _config: JsonlMetrics

    def _take(self, line: str) -> None:
        where = f"{self._path}, line {self._count}"
        try:
            entry = json.loads(line)
            self._names_met |= entry.keys()
        except (ValueError, AttributeError):
            raise RecordError(f"{where} is no JSON object: {line[:60]!r}") from None
        values = {
            name: entry[key]
            for name, key in self._config.columns.items()
            if entry.get(key) is not None
        }
        measured_columns = values.keys() - {"optimizer_step", *GEOMETRY_NAMES}
        tables = ["evals"] if measured_columns & _EVALUATION_ONLY else []
        # Counts and times belong to the step, unless the line is about an evaluation alone.
        if measured_columns & _TRAINING_ONLY or (measured_columns and not tables):
            tables.insert(0, "steps")
        self._add(values, where, line, *tables)

    def _check_end(self) -> None:
        if not self._count:
            raise RecordError(
                f"{self._path} is empty or not there: the program logged nothing in it"
            )
        absent_keys = [
            f"{key} ({name})"
            for name, key in self._config.columns.items()
            if name not in self._columns
        ]
        if absent_keys:
            raise RecordError(
                f"no line of {self._path} has {', '.join(absent_keys)}; keys that it has: "
                f"{', '.join(sorted(self._names_met)[:40])}"
            )


_PATTERNS: dict[str, tuple[str, ...]] = {
    "geometry_pattern": (),
    "pattern": ("steps",),
    "evaluation_pattern": ("evals",),
}
"""Settings, and the tables that their matches are rows of."""


class RegexReader(ColumnReader):
    """Reads the named groups of every match in every line."""

    _config: RegexMetrics

    def __post_init__(self) -> None:
        """Compile the patterns that are given."""
        self._patterns = {
            setting: re.compile(text)
            for setting in _PATTERNS
            if (text := getattr(self._config, setting)) is not None
        }
        super().__post_init__()

    def _take(self, line: str) -> None:
        if FAILED_START.match(line):
            self._starts_again()
        where = f"{self._path}, {line[:60]!r}"
        for setting, pattern in self._patterns.items():
            for match in pattern.finditer(line):
                self._names_met.add(setting)
                values: dict[str, object] = {
                    name: text for name, text in match.groupdict().items() if text is not None
                }
                if setting == "evaluation_pattern" and "optimizer_step" not in values:
                    values["optimizer_step"] = self._steps.last_of_all(where)
                self._add(values, where, line, *_PATTERNS[setting])

    def _check_end(self) -> None:
        for setting, pattern in self._patterns.items():
            if setting not in self._names_met:
                raise RecordError(
                    f"metrics.{setting} matches no line of {self._path}: {pattern.pattern!r}"
                )
