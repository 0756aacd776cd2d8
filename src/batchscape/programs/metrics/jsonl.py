"""A file with one JSON object a line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from batchscape.config.metrics import (
    EVALUATION_COLUMNS,
    GEOMETRY_NAMES,
    STEP_COLUMNS,
    JsonlMetrics,
)
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.collected import Collected
from batchscape.programs.metrics.lines import Lines
from batchscape.programs.metrics.log import Log

__all__ = ["JsonlReader"]

_EVALUATION_ONLY = set(EVALUATION_COLUMNS) - set(STEP_COLUMNS)


class JsonlReader:
    """Reads the columns that a mapping names; other keys and other lines are left alone.

    Parameters
    ----------
    config : JsonlMetrics
    path : Path
        The file.
    geometry : BatchGeometry
        As planned.
    sequence_length : int or None
        Tokens a sample, where every sample is full.
    may_go_back : bool
        Whether the next start of the program may repeat steps of earlier ones.
    """

    def __init__(
        self,
        config: JsonlMetrics,
        path: Path,
        geometry: BatchGeometry,
        sequence_length: int | None,
        *,
        may_go_back: bool,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._sequence_length = sequence_length
        self._may_go_back = may_go_back
        self._lines = Lines(path)
        self._start_anew()
        if may_go_back:
            # The program is not started yet: this is what earlier starts left.
            with contextlib.suppress(RecordError):
                self.read()
            self._collected.begin_start()

    def _start_anew(self) -> None:
        name = self._lines.path.name
        self._collected = Collected(self._config, name, may_go_back=self._may_go_back)
        self._keys: set[str] = set()
        self._count = 0
        self._broken: str | None = None

    def read(self, *, final: bool = False) -> Log:
        """Return what the file holds by now."""
        lines, anew = self._lines.read(final=final)
        if anew:
            self._start_anew()
        if self._lines.is_torn and not _is_whole(lines[-1]):
            lines.pop()
        if self._broken is not None:
            raise RecordError(self._broken)
        try:
            for line in lines:
                self._take(line)
        except RecordError as error:
            # The lines are read once, and what is wrong with one is wrong for good.
            self._broken = str(error)
            raise
        if final:
            self._check_columns()
        return self._collected.log(self._geometry, self._sequence_length)

    def _take(self, line: str) -> None:
        self._count += 1
        if not line.strip():
            return
        where = f"{self._lines.path}, line {self._count}"
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
        # Running counts belong to the step, unless the line is about an evaluation alone.
        if rest & (set(STEP_COLUMNS) - set(EVALUATION_COLUMNS)) or not rest & _EVALUATION_ONLY:
            tables += ["steps"] if rest else []
        if rest & _EVALUATION_ONLY:
            tables += ["evals"]
        self._collected.take(values, tuple(tables), where)

    def _check_columns(self) -> None:
        if not self._count:
            msg = f"{self._lines.path} is empty or not there: the program logged nothing in it"
            raise RecordError(msg)
        missing = [
            f"{key} ({name})"
            for name, key in self._config.columns.items()
            if name not in self._collected.seen
        ]
        if missing:
            msg = (
                f"no line of {self._lines.path} has {', '.join(missing)}; keys that it has: "
                f"{', '.join(sorted(self._keys)[:40])}"
            )
            raise RecordError(msg)


def _is_whole(line: str) -> bool:
    """Say whether a line without its end is an object: what is cut off one never is."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
