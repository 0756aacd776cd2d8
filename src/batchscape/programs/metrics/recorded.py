"""What `batchscape.recorder` and the callback for `transformers` wrote."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchscape.config.metrics import EVALUATION_COLUMNS, GEOMETRY_NAMES, STEP_COLUMNS
from batchscape.errors import DamageError, RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.log import Log, ObservedBatch, finish
from batchscape.programs.metrics.numbers import as_count, as_row, content_of, lines_of, whole_lines
from batchscape.programs.metrics.rows import MetricRows
from batchscape.recorder import FOLDER


@dataclass
class _Rank:
    """What one rank wrote in its last start."""

    start: tuple[int, int] = (-1, 0)
    """Which attempt at the run, and which start within it by a launcher that restarts."""
    begins: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    time_before_s: float = 0.0
    """Training time of the rows that earlier starts left."""


class RecorderReader:
    """Reads the files of all ranks."""

    def __init__(self, run_dir: Path, geometry: BatchGeometry, sequence_length: int | None) -> None:
        self._folder = run_dir / FOLDER
        self._geometry = geometry
        self._sequence_length = sequence_length
        self._forget_all()

    def _forget_all(self) -> None:
        self._ranks: dict[Path, _Rank] = {}
        self._steps = MetricRows("the recorder")
        self._evals = MetricRows("the recorder")
        self._windows: set[int] = set()

    def read(self, *, final: bool = False) -> Log:
        """Return what was recorded by now."""
        self._forget_all()
        for path in sorted(self._folder.glob("rank_*.jsonl")):
            for line in lines_of(whole_lines(content_of(path) or b"")):
                self._take(path, line)
        if final and not any(rank.begins for rank in self._ranks.values()):
            msg = (
                f"{self._folder} is empty: the program made no batchscape.recorder.Recorder (or "
                f"runs in an environment without BATCHSCAPE_RUN_DIR)"
            )
            raise RecordError(msg)
        return self._log()

    def _take(self, path: Path, line: str) -> None:
        try:
            event = json.loads(line)
            kind = event.pop("event")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            msg = f"{path} is damaged: {line[:60]!r} is none of the recorder's lines"
            raise DamageError(msg) from None
        rank = self._ranks.setdefault(path, _Rank())
        if kind == "begin":
            start = (
                as_count(event.get("attempt", 0), f"{path}: attempt"),
                as_count(event.get("restart", 0), f"{path}: restart"),
            )
            if start != rank.start:
                rank.start, rank.begins, rank.problems = start, [], []
                rank.time_before_s = -1.0
            rank.begins.append(event)
        elif kind == "problem":
            rank.problems.append(str(event.get("message")))
        elif kind == "step":
            self._step(rank, event, str(path))
        elif kind == "evaluation":
            self._evals.add(self._row(rank, event, EVALUATION_COLUMNS, str(path)), least=0)

    def _step(self, rank: _Rank, event: dict[str, Any], where: str) -> None:
        window = event.pop("loss_window", 1)
        row = self._row(rank, event, STEP_COLUMNS, where)
        if window != 1:
            self._windows.add(as_count(window, f"{where}: loss_window"))
            # A mean over several steps is the loss of no step; but if it is not finite, one of
            # their losses is not.
            if math.isfinite(row.get("loss", 0.0)):
                row.pop("loss", None)
        self._steps.add(row, least=1)

    def _row(
        self, rank: _Rank, event: dict[str, Any], columns: tuple[str, ...], where: str
    ) -> dict[str, int | float]:
        if "optimizer_step" not in event:
            msg = f"{where} is damaged: an event has no optimizer_step"
            raise DamageError(msg)
        values = {name: event[name] for name in columns if name in event}
        row = as_row(values, {}, where)
        if rank.time_before_s < 0:
            # This start does the steps after its checkpoint again.
            self._steps.cut(int(row["optimizer_step"]))
            self._evals.cut(int(row["optimizer_step"]))
            times_s = (row.get("train_time_s", 0.0) for row in self._steps.get())
            rank.time_before_s = max(times_s, default=0.0)
        if "train_time_s" in row:
            row["train_time_s"] += rank.time_before_s
        return row

    def _log(self) -> Log:
        steps, evals, batch = self._steps.get(), self._evals.get(), ObservedBatch()
        start = max((rank.start for rank in self._ranks.values()), default=None)
        latest_ranks = {path: rank for path, rank in self._ranks.items() if rank.start == start}
        for path, rank in latest_ranks.items():
            batch.problems += [f"{path.stem}: {problem}" for problem in rank.problems]
            if len(rank.begins) > 1:
                pids = ", ".join(str(begin.get("pid")) for begin in rank.begins)
                batch.problems.append(
                    f"{len(rank.begins)} recorders are {path.stem} (processes {pids}): every "
                    f"process trains for itself, or a script made two recorders"
                )
            for begin in rank.begins:
                for name in GEOMETRY_NAMES:
                    if name in begin:
                        count = as_count(begin[name], f"{path}: {name}")
                        batch.put(name, count, "the recorder, as the script says")
        world_size = batch.value("world_size")
        if world_size is not None and len(latest_ranks) > world_size:
            batch.problems.append(
                f"{len(latest_ranks)} ranks made a recorder of world_size {world_size}"
            )
        sources = {}
        if any("step_time_s" in row for row in steps):
            sources["step_time_s"] = "between calls of the recorder, on rank 0"
        if self._windows:
            sources["loss"] = (
                f"missing where it is a mean over {sorted(self._windows)} optimizer steps; log "
                f"every step to have it"
            )
        return finish(
            steps,
            evals,
            batch,
            geometry=self._geometry,
            sequence_length=self._sequence_length,
            sources=sources,
            source="recorder",
        )
