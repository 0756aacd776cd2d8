"""A file with one JSON object a line."""

from __future__ import annotations

import json

from batchscape.config.metrics import (
    EVALUATION_COLUMNS,
    GEOMETRY_NAMES,
    STEP_COLUMNS,
    JsonlMetrics,
)
from batchscape.errors import RecordError
from batchscape.programs.metrics.collected import ColumnReader

__all__ = ["JsonlReader"]

_EVALUATION_ONLY = set(EVALUATION_COLUMNS) - set(STEP_COLUMNS)
_TRAINING_ONLY = {"loss", "learning_rate", "gradient_norm"}
"""What a line of an optimizer step has: the times of one without it may be an evaluation's."""


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
        rest = values.keys() - {"optimizer_step", *GEOMETRY_NAMES}
        tables = []
        # Counts and times belong to the step, unless the line is about an evaluation alone.
        if rest & _TRAINING_ONLY or not rest & _EVALUATION_ONLY:
            tables += ["steps"] if rest else []
        if rest & _EVALUATION_ONLY:
            tables += ["evals"]
        self._add(values, tuple(tables), where, line)

    def _check_end(self) -> None:
        if not self._count:
            msg = f"{self._path} is empty or not there: the program logged nothing in it"
            raise RecordError(msg)
        missing = [
            f"{key} ({name})"
            for name, key in self._config.columns.items()
            if name not in self._seen
        ]
        if missing:
            msg = (
                f"no line of {self._path} has {', '.join(missing)}; keys that it has: "
                f"{', '.join(sorted(self._keys)[:40])}"
            )
            raise RecordError(msg)

    def _is_whole(self, line: str) -> bool:
        """What is cut off an object is none."""
        try:
            return isinstance(json.loads(line), dict)
        except (ValueError, RecursionError):
            return False
