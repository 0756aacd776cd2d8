"""Reading many run folders with all cores.

Each further core has a process of its own, started anew: forking a process that holds threads may
hang, and multiprocessing's own way would run the caller's script again. Rows come back through a
pipe, one column after the other, straight into their place.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.extensions import ExtensionArray

from batchscape.errors import RecordError
from batchscape.record.columns import COLUMNS
from batchscape.record.growing import PLAIN
from batchscape.record.reading import Part, Rows, RunRead, Shape, Wanted, read_folders

__all__ = ["Columns", "read_many", "serve"]

_RUNS_A_PROCESS = 400
"""Run folders that are worth the start of a process, which takes about as long as to read them."""
_MOST_PROCESSES = 16
_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from batchscape.record.reading_pool import serve; serve()"
)
"""With the import path of the caller, which need not be the one that a new process has."""


Columns = dict[str, dict[str, ExtensionArray]]
"""Whole columns, by table and name."""


def read_many(
    paths: Sequence[Path], wanted: Wanted, known: Sequence[Rows] = ()
) -> tuple[list[RunRead], Columns]:
    """Read run folders with as many processes as are worth it.

    Parameters
    ----------
    paths : sequence of Path
    wanted : mapping of str to sequence of str
        Columns to read, for every table.
    known : sequence of Rows
        Runs that were read before; those whose folder is among the paths are not read again, and
        rows of the others are left out.

    Returns
    -------
    runs : list of RunRead
        In the order of the paths.
    columns : mapping
        Rows of all of the runs, in the same order.
    """
    before = {run.folder for part in known for run in part.runs}
    left = [path for path in paths if str(path) not in before]
    count = max(min(_cores(), _MOST_PROCESSES, len(left) // _RUNS_A_PROCESS), 1)
    edges = [len(left) * index // count for index in range(count + 1)]
    own, *others = [left[a:b] for a, b in pairwise(edges)]
    with ExitStack() as stack:
        helpers = [stack.enter_context(_Helper(part, wanted)) for part in others]
        read: list[Rows] = [*known, _Here(read_folders(own, wanted))]
        read += [helper.read() for helper in helpers]
        runs = [run for part in read for run in part.runs]
        columns = {
            table: {name: _whole(table, name, read) for name in names}
            for table, names in wanted.items()
        }
    return _in_order([str(path) for path in paths], runs, columns) if known else (runs, columns)


def _in_order(
    folders: Sequence[str], runs: list[RunRead], columns: Columns
) -> tuple[list[RunRead], Columns]:
    """Choose the runs of some folders, in their order, and their rows."""
    if [run.folder for run in runs] == folders:
        return runs, columns
    place = {run.folder: number for number, run in enumerate(runs)}
    chosen = np.array([place[folder] for folder in folders], dtype=np.int64)
    for table, found in columns.items():
        counts = np.array([run.counts.get(table, 0) for run in runs], dtype=np.int64)
        starts, lengths = (np.cumsum(counts) - counts)[chosen], counts[chosen]
        # Rows count on within a run, and jump between runs.
        jumps = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        rows = np.arange(len(jumps)) + jumps
        for name in found:
            found[name] = found[name][rows]
    return [runs[number] for number in chosen], columns


def serve() -> None:
    """Read the folders that standard input names; write what was read to standard output."""
    # Nothing else may write there.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    paths, wanted = pickle.load(sys.stdin.buffer)  # noqa: S301  (from the process that started us)
    part = read_folders(paths, wanted)
    shapes = {key: Shape.of(part.columns[key[0]][key[1]]) for key in _keys(wanted)}
    pickle.dump((part.runs, shapes), out)
    for table, name in shapes:
        # Taken out of the part, so that its memory goes as it is sent.
        column = part.columns[table].pop(name)
        for block in (*column.values(), *(column.missing() if column.has_missing else ())):
            out.write(block.view(np.uint8))
    out.close()


class _Here:
    """Rows read by this process."""

    def __init__(self, part: Part) -> None:
        self.runs = part.runs
        self._columns = part.columns
        self.shapes = {
            (table, name): Shape.of(column)
            for table, columns in part.columns.items()
            for name, column in columns.items()
        }

    def fill(
        self, key: tuple[str, str], values: NDArray[Any], missing: NDArray[np.bool_] | None
    ) -> None:
        """Copy blocks, and let go of them."""
        column = self._columns[key[0]].pop(key[1])
        for target, blocks in ((values, column.values()), (missing, column.missing())):
            if target is not None:
                begin = 0
                for block in blocks:
                    target[begin : begin + len(block)] = block
                    begin += len(block)


class _There:
    """Rows read by another process."""

    def __init__(
        self, runs: list[RunRead], shapes: dict[tuple[str, str], Shape], pipe: IO[bytes]
    ) -> None:
        self.runs = runs
        self.shapes = shapes
        self._pipe = pipe

    def fill(
        self, key: tuple[str, str], values: NDArray[Any], missing: NDArray[np.bool_] | None
    ) -> None:
        """Read from the pipe into place."""
        self._read_into(values)
        if missing is not None and self.shapes[key].has_missing:
            self._read_into(missing)

    def _read_into(self, target: NDArray[Any]) -> None:
        room = target.view(np.uint8).data
        while room:
            count = self._pipe.readinto(room)  # type: ignore[attr-defined]
            if not count:
                msg = "a process that read run folders ended before it had handed over its rows"
                raise RecordError(msg)
            room = room[count:]


class _Helper:
    """A process that reads some of the folders."""

    def __init__(self, paths: Sequence[Path], wanted: Wanted) -> None:
        self._job = (list(paths), {table: tuple(names) for table, names in wanted.items()})

    def __enter__(self) -> _Helper:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the caller, which then ends it
        )
        with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", self._process.stdin) as pipe:
            pickle.dump(sys.path, pipe)
            pickle.dump(self._job, pipe)
        return self

    def read(self) -> Rows:
        """Wait for what was read; where the process has died, read it here."""
        pipe = cast("IO[bytes]", self._process.stdout)
        try:
            runs, shapes = pickle.load(pipe)  # noqa: S301  (our own process)
        except (EOFError, pickle.UnpicklingError):
            return _Here(read_folders(*self._job))
        return _There(runs, shapes, pipe)

    def __exit__(self, *error: object) -> None:
        cast("IO[bytes]", self._process.stdout).close()
        self._process.kill()
        self._process.wait()


def _whole(table: str, name: str, read: Sequence[Rows]) -> ExtensionArray:
    """Join a column; its parts are copied or received one after the other."""
    dtype = COLUMNS[table][name].dtype
    shapes = [part.shapes[table, name] for part in read]
    if dtype not in PLAIN:
        texts = [text for shape in shapes for text in shape.texts]
        return cast("ExtensionArray", pd.Series(texts, dtype=dtype).array)
    ends = np.cumsum([shape.size for shape in shapes])
    values = np.empty(ends[-1], PLAIN[dtype])
    # Zeros that nobody writes to take no memory.
    missing = np.zeros(ends[-1], np.bool_)
    known = any(shape.has_missing for shape in shapes)
    for part, shape, end in zip(read, shapes, ends, strict=True):
        place = slice(end - shape.size, end)
        part.fill((table, name), values[place], missing[place] if known else None)
    if dtype == "Int64":
        return pd.arrays.IntegerArray(values, missing)
    if dtype == "Float64":
        return pd.arrays.FloatingArray(values, missing)
    return pd.arrays.BooleanArray(values, missing)


def _keys(wanted: Wanted) -> list[tuple[str, str]]:
    return [(table, name) for table, names in wanted.items() for name in names]


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
