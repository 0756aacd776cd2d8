"""What `batchscape.recorder` and the callback for `transformers` wrote."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchscape.config.metrics import EVALUATION_COLUMNS, GEOMETRY_NAMES, STEP_COLUMNS
from batchscape.errors import DamageError, RecordError
from batchscape.programs.metrics.log import Log, MetricRows, Reader, Row
from batchscape.programs.metrics.numbers import content_of, lines_of, whole_lines


@dataclass
class _Rank:
    """What one rank wrote in its last start."""

    start: tuple[int, int] = (-1, 0)
    """Which attempt at the run, and which start within it by a launcher that restarts."""
    begins: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    time_before_s: float = 0.0
    """Training time of the rows that earlier starts left."""


class RecorderReader(Reader):
    """Reads the files of all ranks."""

    source = "recorder"

    def _read(self, *, final: bool) -> Log:
        self._ranks: dict[Path, _Rank] = {}
        self._steps = MetricRows("the recorder")
        self._evals = MetricRows("the recorder")
        self._windows: set[int] = set()
        for path in sorted(self._path.glob("rank_*.jsonl")):
            for line in lines_of(whole_lines(content_of(path))):
                self._take(path, line)
        if final and not any(rank.begins for rank in self._ranks.values()):
            raise RecordError(
                f"{self._path} is empty: the program made no batchscape.recorder.Recorder (or "
                f"runs in an environment without BATCHSCAPE_RUN_DIR)"
            )
        return self._log()

    def _take(self, path: Path, line: str) -> None:
        try:
            event = json.loads(line)
            kind = event.pop("event")
            if kind in {"step", "evaluation"}:
                event["optimizer_step"] = int(event["optimizer_step"])
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DamageError(
                f"{path} is damaged: {line[:60]!r} is none of the recorder's lines"
            ) from None
        rank = self._ranks.setdefault(path, _Rank())
        if kind == "begin":
            start = event.get("attempt", 0), event.get("restart", 0)
            if start != rank.start:
                self._ranks[path] = rank = _Rank(start, time_before_s=-1.0)
            rank.begins.append(event)
        elif kind == "problem":
            rank.problems.append(event["message"])
        elif kind == "step":
            row = self._row(rank, event, STEP_COLUMNS)
            if "loss_window" in event:
                self._windows.add(event["loss_window"])
                # A mean over several steps is the loss of no step; but if it is not finite, one
                # of their losses is not.
                if math.isfinite(row.get("loss", 0.0)):
                    row.pop("loss", None)
            self._steps.add(row, least=1)
        elif kind == "evaluation":
            self._evals.add(self._row(rank, event, EVALUATION_COLUMNS), least=0)

    def _row(self, rank: _Rank, event: dict[str, Any], columns: tuple[str, ...]) -> Row:
        row = {name: event[name] for name in columns if name in event}
        if rank.time_before_s < 0:
            # This start does the steps after its checkpoint again.
            self._steps.cut(row["optimizer_step"])
            self._evals.cut(row["optimizer_step"])
            times_s = (earlier.get("train_time_s", 0.0) for earlier in self._steps.get())
            rank.time_before_s = max(times_s, default=0.0)
        if "train_time_s" in row:
            row["train_time_s"] += rank.time_before_s
        return row

    def _log(self) -> Log:
        log = Log(self._steps.get(), self._evals.get())
        start = max((rank.start for rank in self._ranks.values()), default=None)
        latest_ranks = {path: rank for path, rank in self._ranks.items() if rank.start == start}
        for path, rank in latest_ranks.items():
            log.problems.extend(f"{path.stem}: {problem}" for problem in rank.problems)
            if len(rank.begins) > 1:
                log.problems.append(
                    f"{len(rank.begins)} recorders are {path.stem}: every process trains for "
                    "itself, or a script made two recorders"
                )
            for begin in rank.begins:
                for name in GEOMETRY_NAMES:
                    if name in begin:
                        reading = name, begin[name]
                        log.readings.setdefault(reading, "the recorder, as the script says")
        if len(latest_ranks) > (planned := self._geometry.data_parallel_size):
            log.problems.append(f"{len(latest_ranks)} ranks made a recorder, instead of {planned}")
        if self._windows:
            log.sources["loss"] = (
                f"missing where it is a mean over {sorted(self._windows)} optimizer steps; log "
                f"every step to have it"
            )
        return log
