"""Regular expressions over what a program prints."""

from __future__ import annotations

import re

from batchscape.config.metrics import RegexMetrics
from batchscape.errors import RecordError
from batchscape.programs.endings import FAILED_START
from batchscape.programs.metrics.collected import ColumnReader
from batchscape.programs.metrics.numbers import as_row

__all__ = ["RegexReader"]

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
        self._matched: set[str] = set()
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
                self._matched.add(setting)
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
        for setting in self._patterns.keys() - self._matched:
            msg = (
                f"metrics.{setting} matches no line of {self._path}: "
                f"{getattr(self._config, setting)!r}"
            )
            raise RecordError(msg)
