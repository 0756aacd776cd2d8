"""The index of a large sweep: what reports read of thousands of sealed runs, in a few files.

::

    <sweep_dir>/index/
        index.json       which runs it holds, what is known of each, and the files' digests
        steps.parquet    rows of all of these runs, in their order; so evals and ranks

It is made from run folders alone, and may be deleted at any time. A run is taken from it only
while the size and the time of change of every file in its folder are what they were when its
seal was verified; all others are read, and verified, anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pandas.api.extensions import ExtensionArray

from batchscape.errors import RecordError
from batchscape.record.checked import checked_text
from batchscape.record.columns import COLUMNS
from batchscape.record.files import read_json, sha256_of, write_atomically
from batchscape.record.folder import TABLES, SweepFolder
from batchscape.record.growing import PLAIN
from batchscape.record.locks import take
from batchscape.record.noise_scale import SAMPLED
from batchscape.record.packed_rows import packed_rows, unpacked_rows
from batchscape.record.reading import RunRead, Shape, Wanted, signature_of

__all__ = [
    "INDEXED",
    "WORTH_AN_INDEX",
    "IndexedRows",
    "index_is_stale",
    "read_index",
    "write_index",
]

INDEXED: dict[str, tuple[str, ...]] = {
    "steps": ("optimizer_step", "samples", "tokens", "train_time_s", "loss", *SAMPLED),
    "evals": tuple(COLUMNS["evals"]),
    "ranks": ("memory_method", "exchanges_every_micro_step"),
}
"""Columns that an index holds: those that a report reads."""

WORTH_AN_INDEX = 400
"""Sealed runs outside of the index that are worth writing it anew."""

_ROWS_A_GROUP = 2**17


class IndexedRows:
    """Rows of an index; each column is read straight into its place.

    Parameters
    ----------
    sweep : SweepFolder
    content : mapping
        Of `index.json`.
    wanted : mapping of str to sequence of str
        Columns to read, for every table.

    Raises
    ------
    OSError, LookupError, AttributeError, TypeError, ValueError
        If the index is damaged; errors of pyarrow are among them.
    """

    def __init__(self, sweep: SweepFolder, content: Mapping[str, Any], wanted: Wanted) -> None:
        self.runs = _runs(content, sweep)
        self._files: dict[str, pq.ParquetFile] = {}
        try:
            for table in TABLES:
                self._files[table] = _verified(sweep, table, content)
            self.shapes = {
                (table, name): self._shape(table, name)
                for table, names in wanted.items()
                for name in names
            }
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files; nothing more can be read then."""
        for file in self._files.values():
            file.close(force=True)

    def fill(
        self, key: tuple[str, str], values: NDArray[Any], missing: NDArray[np.bool_] | None
    ) -> None:
        """Read a column."""
        begin = 0
        for part in self._parts(*key):
            place = slice(begin, begin + len(part))
            known = part
            if part.null_count:
                known = part.fill_null(False if part.type == pa.bool_() else 0)
                if missing is not None:
                    missing[place] = part.is_null().to_numpy(zero_copy_only=False)
            values[place] = known.to_numpy(zero_copy_only=False)
            begin = place.stop

    def _parts(self, table: str, name: str) -> Iterator[pa.Array]:
        file = self._files[table]
        for group in range(file.num_row_groups):
            column = file.read_row_group(group, columns=[name], use_threads=False).column(0)
            yield column.combine_chunks()

    def _shape(self, table: str, name: str) -> Shape:
        file = self._files[table]
        texts: list[str | None] = []
        if COLUMNS[table][name].dtype not in PLAIN:
            texts = [text for part in self._parts(table, name) for text in part.to_pylist()]
        number = file.schema_arrow.get_field_index(name)
        groups = [file.metadata.row_group(g).column(number) for g in range(file.num_row_groups)]
        return Shape(file.metadata.num_rows, any(g.statistics.null_count for g in groups), texts)


def read_index(sweep: SweepFolder, wanted: Wanted) -> IndexedRows | None:
    """Open the index of a sweep; None where there is none that serves.

    Parameters
    ----------
    sweep : SweepFolder
    wanted : mapping of str to sequence of str
        Columns to read, for every table.

    Returns
    -------
    IndexedRows or None
        Runs that have changed since are among it, with an empty `folder`: their rows are there
        too, and are to be left out.
    """
    content = _content(sweep)
    if content is None:
        return None
    try:
        return IndexedRows(sweep, content, wanted) if _serves(content, wanted) else None
    except (OSError, LookupError, AttributeError, TypeError, ValueError):
        return None  # an index that cannot be read is one that is not there


def write_index(
    sweep: SweepFolder,
    runs: Sequence[RunRead],
    columns: Mapping[str, Mapping[str, ExtensionArray]],
) -> None:
    """Write the index of a sweep from what was just read of it.

    Runs that are open or damaged have no place in it. Where the folder cannot be written to, or
    another process is about to write the same, nothing is lost but time.

    Parameters
    ----------
    sweep : SweepFolder
    runs : sequence of RunRead
        All runs of the sweep.
    columns : mapping
        The columns of `INDEXED`: rows of all of these runs, in their order.
    """
    with contextlib.suppress(OSError):
        sweep.index.mkdir(exist_ok=True)
        lock = take(sweep.index / ".lock")
        if lock is not None:
            try:
                _write(sweep, runs, columns)
            finally:
                lock.release(remove=True)


def _write(
    sweep: SweepFolder,
    runs: Sequence[RunRead],
    columns: Mapping[str, Mapping[str, ExtensionArray]],
) -> None:
    kept = [run for run in runs if run.content is not None]
    rows = _row_numbers(runs)
    # While the tables are exchanged there is no index that would speak of both.
    (sweep.index / "index.json").unlink(missing_ok=True)
    files = {}
    for table in TABLES:
        path = sweep.index / f"{table}.parquet"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            _write_table(temporary, columns[table], rows[table], table)
            files[path.name] = sha256_of(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    content = {
        "made_by": _made_by(),
        "columns": INDEXED,
        "files": files,
        "folders": [Path(run.folder).name for run in kept],
        "signatures": [run.signature for run in kept],
        "contents": [run.content for run in kept],
        "counts": [[run.counts.get(table, 0) for table in TABLES] for run in kept],
        "rows": packed_rows([run.row for run in kept]),
    }
    write_atomically(sweep.index / "index.json", checked_text(content, indent=None))


def index_is_stale(sweep: SweepFolder) -> bool:
    """Return whether enough runs are outside of a sweep's index to write it anew."""
    folders = [folder.path for folder in sweep.run_folders()]
    if len(folders) < WORTH_AN_INDEX:
        return False
    content = _content(sweep) or {}
    known: dict[str, str] = {}
    with contextlib.suppress(KeyError, TypeError, ValueError):
        known = dict(zip(content["folders"], content["signatures"], strict=True))
    outside = (path for path in folders if known.get(path.name) != signature_of(str(path)))
    return sum(1 for _ in outside) >= WORTH_AN_INDEX


def _content(sweep: SweepFolder) -> dict[str, Any] | None:
    try:
        content = read_json(sweep.index / "index.json")
    except (RecordError, OSError):
        return None
    return content if content.get("made_by") == _made_by() else None


def _serves(content: Mapping[str, Any], wanted: Wanted) -> bool:
    held = content.get("columns", {})
    return all(set(names) <= set(held.get(table, ())) for table, names in wanted.items())


@cache
def _made_by() -> str:
    """Name the code that reads run folders: what another one made of them may be out of date."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _verified(sweep: SweepFolder, table: str, content: Mapping[str, Any]) -> pq.ParquetFile:
    """Open a table that is what `index.json` speaks of."""
    path = sweep.index / f"{table}.parquet"
    # Open from here on: another process may put a file of its own in that place.
    file = path.open("rb")
    try:
        if hashlib.file_digest(file, "sha256").hexdigest() != content["files"][path.name]:
            msg = f"{path} is of another index"
            raise ValueError(msg)
        return pq.ParquetFile(file)
    except BaseException:
        file.close()
        raise


def _runs(content: Mapping[str, Any], sweep: SweepFolder) -> list[RunRead]:
    runs = []
    found = zip(
        content["folders"],
        content["signatures"],
        content["contents"],
        content["counts"],
        unpacked_rows(content["rows"]),
        strict=True,
    )
    for name, signature, digests, counts, row in found:
        folder = str(sweep.runs / name)
        current = signature == signature_of(folder)
        runs.append(
            RunRead(
                folder=folder if current else "",
                signature=signature,
                row=row,
                content=tuple(digests),
                counts=dict(zip(TABLES, counts, strict=True)),
            )
        )
    return runs


def _write_table(
    path: Path,
    columns: Mapping[str, ExtensionArray],
    rows: Sequence[slice],
    table: str,
) -> None:
    names = INDEXED[table]
    counters = [name for name in names if COLUMNS[table][name].dtype == "Int64"]
    schema = pa.schema([(name, _ARROW[COLUMNS[table][name].dtype]) for name in names])
    with pq.ParquetWriter(
        path,
        schema,
        use_dictionary=False,
        column_encoding=dict.fromkeys(counters, "DELTA_BINARY_PACKED"),
    ) as writer:
        for place in _groups(rows):
            arrays = [
                pa.array(columns[name][place], type=schema.field(name).type) for name in names
            ]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


_ARROW = {
    "Int64": pa.int64(),
    "Float64": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
}


def _row_numbers(runs: Sequence[RunRead]) -> dict[str, list[slice]]:
    """Return where the rows of the runs that have a place in the index lie, in long stretches."""
    found: dict[str, list[slice]] = {table: [] for table in TABLES}
    for table, stretches in found.items():
        begin = 0
        for run in runs:
            end = begin + run.counts.get(table, 0)
            if run.content is not None and end > begin:
                if stretches and stretches[-1].stop == begin:
                    stretches[-1] = slice(stretches[-1].start, end)
                else:
                    stretches.append(slice(begin, end))
            begin = end
    return found


def _groups(rows: Iterable[slice]) -> Iterable[slice]:
    for stretch in rows:
        for begin in range(stretch.start, stretch.stop, _ROWS_A_GROUP):
            yield slice(begin, min(begin + _ROWS_A_GROUP, stretch.stop))
