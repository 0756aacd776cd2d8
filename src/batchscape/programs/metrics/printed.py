"""Regular expressions over what a program prints."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from batchscape.config.metrics import RegexMetrics
from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.collected import Collected
from batchscape.programs.metrics.lines import Lines
from batchscape.programs.metrics.log import Log

__all__ = ["RegexReader"]

_PATTERNS: dict[str, tuple[str, ...]] = {
    "geometry_pattern": (),
    "pattern": ("steps",),
    "evaluation_pattern": ("evals",),
}


class RegexReader:
    """Reads the named groups of every match in every line.

    Parameters
    ----------
    config : RegexMetrics
    path : Path
        The text.
    geometry : BatchGeometry
        As planned.
    sequence_length : int or None
        Tokens a sample, where every sample is full.
    may_go_back : bool
        Whether the next start of the program may repeat steps of earlier ones.
    begin : int
        Bytes of the text that are none of this program's.
    """

    def __init__(
        self,
        config: RegexMetrics,
        path: Path,
        geometry: BatchGeometry,
        sequence_length: int | None,
        *,
        may_go_back: bool,
        begin: int = 0,
    ) -> None:
        self._config = config
        self._geometry = geometry
        self._sequence_length = sequence_length
        self._may_go_back = may_go_back
        self._patterns = {
            setting: re.compile(text)
            for setting in _PATTERNS
            if (text := getattr(config, setting)) is not None
        }
        self._lines = Lines(path, begin)
        self._start_anew()
        if may_go_back:
            # The program is not started yet: this is what earlier starts left.
            with contextlib.suppress(RecordError):
                self.read()
            self._collected.begin_start()

    def _start_anew(self) -> None:
        name = self._lines.path.name
        self._collected = Collected(self._config, name, may_go_back=self._may_go_back)
        self._matched: set[str] = set()
        self._broken: str | None = None

    def read(self, *, final: bool = False) -> Log:
        """Return what the text holds by now."""
        lines, anew = self._lines.read()
        if anew:
            self._start_anew()
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
            for setting in self._patterns.keys() - self._matched:
                msg = (
                    f"metrics.{setting} matches no line of {self._lines.path}: "
                    f"{getattr(self._config, setting)!r}"
                )
                raise RecordError(msg)
        return self._collected.log(self._geometry, self._sequence_length)

    def _take(self, line: str) -> None:
        for setting, pattern in self._patterns.items():
            for match in pattern.finditer(line):
                self._matched.add(setting)
                values = {
                    name: text for name, text in match.groupdict().items() if text is not None
                }
                where = f"{self._lines.path}, {line[:60]!r}"
                self._collected.take(values, _PATTERNS[setting], where)
