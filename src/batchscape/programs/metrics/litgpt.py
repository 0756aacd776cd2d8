"""LitGPT's CSV logger, together with what LitGPT prints.

Read in the source of litgpt 0.5.13, `pretrain.py` and the CSV logger of Lightning Fabric 2.6:
a row is written at the end of an optimizer step; its `step` is the iteration less one (the
optimizer step is overwritten), `iter` the micro-steps done, `loss` the mean over the step's
micro-steps on rank 0 alone, `tokens` and `samples` are a rank's and `total_tokens` is everyone's.
The optimizer step stands only in the printed line, `iter 8 step 2 | ... (step)`. The rates that
are logged divide by a window, the printed one by a point in time; none is used.
"""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path
from typing import NamedTuple

from batchscape.errors import RecordError
from batchscape.geometry import BatchGeometry
from batchscape.programs.metrics.finish import finish
from batchscape.programs.metrics.inference import ObservedBatch
from batchscape.programs.metrics.lines import content_of
from batchscape.programs.metrics.log import Log
from batchscape.programs.metrics.numbers import as_count, as_float, as_row
from batchscape.programs.metrics.rows import Row, Rows

__all__ = ["LitGptReader"]

_STEP_LINE = re.compile(r"\biter (\d{1,18}) step (\d{1,18}) \|.*\(step\)")
_EVALUATION_LINE = re.compile(r"\biter (\d{1,18}): val loss \S+, val time: (\d+\.?\d*) ms")
_CHECKPOINT_LINE = re.compile(r"Saving checkpoint to \S*step-(\d{1,18})\b")
_NEEDED = ("iter", "step", "loss")
_Cells = dict[str, str]


class LitGptReader:
    """Reads `metrics.csv` and the text that the program printed.

    Parameters
    ----------
    path : Path
        The file, or a folder that holds it.
    printed : Path
        What the program printed.
    geometry : BatchGeometry
        As planned.
    sequence_length : int or None
        Tokens a sample.
    """

    def __init__(
        self, path: Path, printed: Path, geometry: BatchGeometry, sequence_length: int | None
    ) -> None:
        self._path = path
        self._printed = printed
        self._geometry = geometry
        self._sequence_length = sequence_length

    def read(self, *, final: bool = False) -> Log:
        """Return what the files hold by now."""
        path = self._file()
        found = None if path is None else content_of(path)
        rows = [] if path is None or found is None else _cells(found, path)
        if path is None or not rows:
            if final:
                msg = (
                    f"no metrics.csv with a row in {self._path}: give litgpt --out_dir there and "
                    f"--logger_name csv"
                )
                raise RecordError(msg)
            return Log()
        printed = self._read_printed()
        if not printed.steps_of:
            if final:
                msg = (
                    f"{self._printed} has no line like `iter 8 step 2 | ... (step)`, which alone "
                    f"tells the optimizer step of a row of {path}"
                )
                raise RecordError(msg)
            return Log()
        return _Reading(rows, path, printed).log(self._geometry, self._sequence_length)

    def _file(self) -> Path | None:
        """Find the file; that of the last version, where a program was started again."""
        if not self._path.is_dir():
            return self._path
        folders: dict[Path, list[tuple[int, Path]]] = {}
        for path in sorted(self._path.rglob("metrics.csv")):
            version = re.fullmatch(r"version_(\d{1,9})", path.parent.name)
            key = path.parent.parent if version else path.parent
            folders.setdefault(key, []).append((int(version[1]) if version else 0, path))
        if len(folders) > 1:
            msg = f"several logs of metrics in {self._path}; name one: {sorted(map(str, folders))}"
            raise RecordError(msg)
        return max(next(iter(folders.values())))[1] if folders else None

    def _read_printed(self) -> _Printed:
        text = (content_of(self._printed) or b"").decode(errors="replace")
        return _Printed(
            {int(found[1]): int(found[2]) for found in _STEP_LINE.finditer(text)},
            {int(found[1]): float(found[2]) / 1000 for found in _EVALUATION_LINE.finditer(text)},
            {int(found[1]) for found in _CHECKPOINT_LINE.finditer(text)},
        )


class _Printed(NamedTuple):
    """What LitGPT printed."""

    steps_of: dict[int, int]
    """Optimizer steps done, by iteration."""
    evaluated: dict[int, float]
    """Time of an evaluation in seconds, by iteration."""
    saved: set[int]
    """Optimizer steps after which a checkpoint was written."""


class _Reading:
    """Rows of one file and what was printed beside them."""

    def __init__(self, rows: list[_Cells], path: Path, printed: _Printed) -> None:
        self._path = path
        self._steps_of = printed.steps_of
        self._evaluated = printed.evaluated
        self._saved = printed.saved
        self._training = [row for row in rows if row["loss"]]
        self._evaluations = [row for row in rows if row.get("val_loss") and not row["loss"]]
        self._batch = ObservedBatch()
        self._iterations = {self._count(row, "iter") for row in self._training}

    def log(self, geometry: BatchGeometry, sequence_length: int | None) -> Log:
        for iteration, step in self._steps_of.items():
            self._put_quotient("gradient_accumulation_steps", iteration, step, "iter / step")
        for row in self._training:
            self._put_batch(row, sequence_length)
        ranks = self._batch.value("world_size") or geometry.data_parallel_size
        steps, evals = Rows(str(self._path)), Rows(str(self._path))
        for row in self._training:
            iteration = self._count(row, "iter")
            if iteration in self._steps_of:
                steps.add(self._step(row, iteration, ranks), least=1)
        for row in self._evaluations:
            self._add_evaluation(row, ranks, evals)
        rows = steps.get()
        self._time(rows)
        sources = {"step_time_s": "differences of `time`, less evaluations as printed"}
        if ranks > 1:
            rest = "missing: LitGPT logs that of rank 0 alone"
            sources |= {"loss": rest, "eval_loss": rest}
        return finish(
            rows,
            evals.get(),
            self._batch,
            geometry=geometry,
            sequence_length=sequence_length,
            sources=sources,
            source=self._path.name,
        )

    def _count(self, row: _Cells, name: str) -> int:
        return as_count(row.get(name, ""), f"{self._path}: {name}")

    def _put_quotient(self, name: str, whole: int, part: int, source: str) -> None:
        if not part or whole % part:
            problem = f"{name} is no whole number by {source}: {whole} / {part}"
            if problem not in self._batch.problems:
                self._batch.problems.append(problem)
        else:
            self._batch.put(name, whole // part, source)

    def _put_batch(self, row: _Cells, sequence_length: int | None) -> None:
        iteration = self._count(row, "iter")
        if row.get("tokens") and row.get("total_tokens"):
            tokens = self._count(row, "tokens")
            total = self._count(row, "total_tokens")
            self._put_quotient("world_size", total, tokens, "total_tokens / tokens")
        if row.get("samples"):
            samples = self._count(row, "samples")
            self._put_quotient("micro_batch_size", samples, iteration, "samples / iter")
            if row.get("lengths") and sequence_length is not None:
                length = self._count(row, "lengths") / max(samples, 1)
                problem = f"samples have {length:g} tokens, sequence_length is {sequence_length}"
                if length != sequence_length and problem not in self._batch.problems:
                    self._batch.problems.append(problem)

    def _step(self, row: _Cells, iteration: int, ranks: int) -> Row:
        cells: dict[str, object] = {"optimizer_step": self._steps_of[iteration]}
        if row.get("learning_rate"):
            cells["learning_rate"] = row["learning_rate"]
        if row.get("total_tokens"):
            cells["tokens"] = row["total_tokens"]
        if row.get("samples"):
            cells["samples"] = self._count(row, "samples") * ranks
        # That of rank 0 is the whole step's only where there is no other rank.
        if ranks == 1 or not math.isfinite(as_float(row["loss"], f"{self._path}: loss")):
            cells["loss"] = row["loss"]
        values = as_row(cells, {}, str(self._path))
        if row.get("time"):
            values["time"] = as_float(row["time"], f"{self._path}: time")
        values["iter"] = iteration
        return values

    def _add_evaluation(self, row: _Cells, ranks: int, evals: Rows) -> None:
        logged = self._count(row, "step")
        # Within training it is the iteration less one, at the end the iteration itself.
        during = logged + 1 in self._evaluated or logged + 1 in self._iterations
        parts = self._batch.value("gradient_accumulation_steps")
        if parts is None or ranks > 1:
            return
        step = (logged + 1 if during else logged) // parts
        known = evals.get()
        if known and known[-1]["optimizer_step"] == step:
            return
        values = as_row({"optimizer_step": step, "eval_loss": row["val_loss"]}, {}, str(self._path))
        if during and logged + 1 in self._evaluated:
            values["evaluation_s"] = self._evaluated[logged + 1]
        evals.add(values, least=0)

    def _time(self, rows: list[Row]) -> None:
        """Turn the time since the start into times of steps, where evaluations are known."""
        before: Row = {"optimizer_step": 0, "iter": 0, "time": 0.0}
        ends = {self._count(row, "step") + 1 for row in self._evaluations} & self._iterations
        for row in rows:
            between = [
                i for i in ends | self._evaluated.keys() if before["iter"] <= i < row["iter"]
            ]
            spent = sum(self._evaluated.get(i, math.nan) for i in between)
            time_s = row.get("time", math.nan) - before.get("time", math.nan) - spent
            last = before["optimizer_step"]
            # How long a checkpoint took stands nowhere.
            if row["optimizer_step"] == last + 1 and last not in self._saved and time_s >= 0:
                row["step_time_s"] = time_s
            before = dict(row)
        for row in rows:
            row.pop("time", None)
            del row["iter"]


def _cells(content: bytes, path: Path) -> list[_Cells]:
    """Return the whole rows of a CSV file; a torn last one is left out."""
    text = content[: content.rfind(b"\n") + 1].decode(errors="replace")
    try:
        lines = list(csv.reader(io.StringIO(text, newline=""), strict=True))
    except csv.Error as error:
        msg = f"{path} is no CSV: {error}"
        raise RecordError(msg) from None
    if not any(lines):
        return []
    header, *rows = (line for line in lines if line)
    if missing := [name for name in _NEEDED if name not in header]:
        msg = f"{path} has no column {', '.join(missing)}; its columns: {', '.join(header)[:200]}"
        raise RecordError(msg)
    if len(set(header)) < len(header):
        msg = f"{path} has a column twice: {', '.join(header)[:200]}"
        raise RecordError(msg)
    if broken := next((row for row in rows if len(row) != len(header)), None):
        msg = f"{path}: a row has {len(broken)} values, the header {len(header)} columns"
        raise RecordError(msg)
    return [dict(zip(header, row, strict=True)) for row in rows]
