"""Reading records with a text: JSON Lines, Parquet, and what `datasets` has saved."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from batchscape.config import Documents
from batchscape.data.sources import files_below
from batchscape.errors import ConfigError

_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_BATCH_RECORDS = 1024
"""Records that are read at once."""


Label = int | str | None
Record = tuple[bytes, Label]
"""The text of a document, in UTF-8, and its class."""


def read_records(
    files: Iterable[Path], config: Documents, advance: Callable[[int], object]
) -> Iterator[list[Record]]:
    """Yield the records of files, some at a time; `advance` takes the bytes of each file."""
    fields = [field for field in (config.text_field, config.label_field) if field is not None]
    for file in files:
        read = _json_rows if file.suffix in _JSON_SUFFIXES else _table_rows
        number = 0
        for rows in read(file, fields):
            yield [
                _record(row, config, f"{file}, record {number + index}")
                for index, row in enumerate(rows, start=1)
            ]
            number += len(rows)
        advance(file.stat().st_size)


def _record(row: dict[str, Any], config: Documents, where: str) -> Record:
    value: Any = None
    for setting, field, kinds, kind in (
        ("text", config.text_field, str, "a text"),
        ("label", config.label_field, int | str, "a whole number or a text"),
    ):
        if field is None:
            continue
        if field not in row:
            raise ConfigError(
                f"data.{setting}_field={field}: there is no such field in {where}; it has "
                f"{', '.join(row) or 'none'}"
            )
        value = row[field]
        if not isinstance(value, kinds):
            raise ConfigError(
                f"data.{setting}_field={field} must hold {kind} in every record; {where} holds "
                f"{value!r:.80}"
            )
    text: str = row[config.text_field]
    # A lone surrogate is valid JSON, but no text.
    return text.encode(errors="replace"), None if config.label_field is None else value


def document_files(path: str) -> dict[str, Path]:
    """Return the files of a path by their names below it, in the order of the names."""
    root = Path(path).expanduser()
    if root.is_file() and root.suffix in {*_JSON_SUFFIXES, ".parquet"}:
        return {root.name: root}
    if (root / "dataset_dict.json").is_file():
        splits = sorted(inner.name for inner in root.iterdir() if inner.is_dir())
        raise ConfigError(
            f"data.path={path} holds the splits {', '.join(splits)}; give the path of one of them"
        )
    if (root / "state.json").is_file() and (root / "dataset_info.json").is_file():
        # A folder of `Dataset.save_to_disk`: its state lists the data files.
        state = json.loads((root / "state.json").read_bytes())
        if state.get("_indices_data_files"):
            raise ConfigError(
                f"{root} was saved with a list of indices, as old releases of datasets did; load "
                "and save it again with a newer one"
            )
        names = [entry["filename"] for entry in state["_data_files"]]
    else:
        names = files_below(root, {*_JSON_SUFFIXES, ".parquet"})
    if not names:
        raise ConfigError(
            f"data.path={path}: no documents there; give a file or a folder of files that end in "
            f"one of {' '.join(sorted(_JSON_SUFFIXES))} .parquet, or a folder of "
            "Dataset.save_to_disk"
        )
    return {name: root / name for name in names}


RowLists = Iterator[list[dict[str, Any]]]


def _json_rows(file: Path, _fields: Sequence[str]) -> RowLists:
    rows: list[dict[str, Any]] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                row = error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{file}, line {number} is not a JSON object ({line.strip()[:40]!r}); JSON "
                    "Lines holds one object a line"
                )
            rows.append(row)
            if len(rows) == _BATCH_RECORDS:
                yield rows
                rows = []
    yield rows


def _table_rows(file: Path, fields: Sequence[str]) -> RowLists:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    is_arrow = file.suffix == ".arrow"
    try:
        with ExitStack() as files:
            if is_arrow:
                source = files.enter_context(pyarrow.memory_map(str(file)))
                stream = files.enter_context(pyarrow.ipc.open_stream(source))
                names = stream.schema.names
            else:
                table = files.enter_context(ParquetFile(file))
                names = table.schema_arrow.names
            # Without one of the fields all columns are read, for `_record` to list them.
            columns = list(fields) if set(fields) <= set(names) else None
            batches = (
                (batch if columns is None else batch.select(columns) for batch in stream)
                if is_arrow
                else table.iter_batches(batch_size=_BATCH_RECORDS, columns=columns)
            )
            for batch in batches:
                for start in range(0, len(batch), _BATCH_RECORDS):
                    yield batch.slice(start, _BATCH_RECORDS).to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(
            f"{file} cannot be read as {'Arrow' if is_arrow else 'Parquet'}: {error}"
        ) from None
