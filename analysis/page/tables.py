"""Tables of the page: rows that sort by their numbers and open the runs behind them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from batchscape.analysis.cells import GEOMETRY, Cells, geometry_label
from batchscape.analysis.figures.settings import setting_names
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.table import Column, Table, Texts

_ID_COLUMNS = ("run_ids", "run_id", "runs")


@dataclass(frozen=True)
class HtmlTable:
    """A table for the template."""

    texts: Texts
    runs: Sequence[Sequence[int]]
    """Positions of the runs behind each row; empty where no row has runs."""
    file: str
    """CSV file of the table, or empty."""


class RunIndex:
    """Finds the positions of the runs behind a row of a table."""

    def __init__(self, cells: Cells) -> None:
        runs = cells.runs
        self._of_id: dict[str, dict[str, int]] = {}
        keys = zip(runs["run_id"], runs["sweep_dir"], strict=True)
        for position, (run_id, folder) in enumerate(keys):
            self._of_id.setdefault(str(run_id), {})[str(folder)] = position
        positions = pd.Series(range(len(runs)), index=runs["cell"].to_numpy())
        self.of_cell = {int(str(cell)): list(runs) for cell, runs in positions.groupby(level=0)}
        """Positions by cell."""
        settings = cells.table[cells.settings].astype(object).fillna(MISSING).astype(str)
        self._settings = dict(zip(settings.index, settings.to_dict("records"), strict=True))
        self._context = cells.context_of()
        self._of_cut: dict[tuple[str, ...], list[int]] = {}
        for cell, *cut in cells.table[list(GEOMETRY)].itertuples():
            self._of_cut.setdefault(_cut(cut), []).append(cell)

    def of_rows(self, table: pd.DataFrame) -> list[list[int]]:
        """Find the runs behind each row of marks, by `run` (positions), by `cell`, or by row."""
        if "run" in table:
            return [runs if isinstance(runs, list) else [runs] for runs in table["run"].tolist()]
        if "cell" in table:
            return [self.of_cell[cell] for cell in table["cell"].tolist()]
        return [self.of_row(row) for row in table.to_dict("records")]

    def of_row(self, row: Mapping[Any, Any]) -> list[int]:
        """Find the runs of a row by its ids, or by its geometry and settings; empty if ambiguous.

        An id is ambiguous if several folders have it and the row neither repeats it as often nor
        names a folder; a geometry, if cells of several contexts have it.
        """
        ids = [row[name] for name in row if str(name).endswith(_ID_COLUMNS)]
        texts = [text for text in ids if isinstance(text, str)]
        if texts or "run_ids" in row:
            return self._of_ids(re.split(r"[;\s]+", " ".join(texts)), row)
        if not all(name in row for name in GEOMETRY):
            return []
        settings = {
            name: MISSING if pd.api.types.is_scalar(value) and pd.isna(value) else str(value)
            for name, value in row.items()
        }
        same_cells = [
            cell
            for cell in self._of_cut.get(_cut(row[name] for name in GEOMETRY), [])
            if all(settings.get(name, v) == v for name, v in self._settings[cell].items())
        ]
        if self._context.loc[same_cells].nunique() > 1:
            return []
        return [position for cell in same_cells for position in self.of_cell[cell]]

    def of_table(self, table: Table) -> list[list[int]]:
        """Find the runs of each row that is shown."""
        return [self.of_row(row) for row in table.frame.iloc[table.positions].to_dict("records")]

    def _of_ids(self, run_ids: Iterable[str], row: Mapping[Any, Any]) -> list[int]:
        texts = [str(row[name]) for name in ("sweep_dir", "sweep_dirs") if name in row]
        folders = {folder for text in texts for folder in text.split(";")}
        counts = Counter(run_ids)
        by_folder = {run_id: self._of_id.get(run_id, {}) for run_id in counts}
        if not texts and any(counts[run_id] < len(runs) for run_id, runs in by_folder.items()):
            return []
        positions = {
            position
            for runs in by_folder.values()
            for folder, position in runs.items()
            if not texts or folder in folders
        }
        return sorted(positions)


def _cut(parts: Iterable[Any]) -> tuple[str, ...]:
    """Write a geometry so that integers and floats give the same texts."""
    return tuple("?" if pd.isna(part) else f"{part:g}" for part in parts)


def html_table(table: Table, runs: Sequence[Sequence[int]] = ()) -> HtmlTable:
    """Prepare a table, with the positions of the runs behind each row that is shown."""
    return HtmlTable(table.texts, runs, f"tables/{table.name}.csv" if table.name else "")


def comparison_tables(
    table: Table, cells: Cells, groups: pd.DataFrame, index: RunIndex
) -> list[HtmlTable]:
    """Split the comparison by groups of settings, each without the columns that are equal in it."""
    group_of = {
        int(cell): int(str(g)) for g, members in groups["cells"].items() for cell in members
    }
    names = [name for name in groups.columns if name not in {"label", "cells"}]
    by_settings = {tuple(map(str, row[names])): int(str(g)) for g, row in groups.iterrows()}
    for cell, row in cells.table.iterrows():
        settings = tuple(map(str, row.reindex(names).astype(object).fillna(MISSING)))
        group_of.setdefault(int(str(cell)), by_settings.get(settings, -1))
    names_of = setting_names(cells, pd.Series(group_of))
    tables = []
    for number in [*groups.index, -1]:
        rows = [cell for cell in table.positions if group_of[cell] == number]
        if not rows:
            continue
        label = "Never launched" if number < 0 else names_of[number] or groups["label"][number]
        columns = [
            column
            for column in table.columns
            if not column.is_left
            or column.texts is None
            or column.name == "geometry"
            or len({list(column.texts)[row] for row in rows}) > 1
        ]
        title = label if len(names_of) > 1 else ""
        part = replace(table, title=title, columns=columns, rows=rows)
        tables.append(html_table(part, [index.of_cell[row] for row in rows]))
    return tables


_RUN_COLUMNS = (
    Column("run_id", "run"),
    Column("geometry"),
    Column("seed", format=".10g"),
    Column("learning_rate", format=3),
    Column("status"),
    Column("optimizer_steps", "steps", format=".10g"),
    Column("step_time_s", "step time", "s"),
    Column("peak_allocated_gib", "peak memory", "GiB"),
    Column("final_loss"),
    Column("final_eval_loss", "eval loss"),
    Column("why", "what to know", missing=""),
    Column("folder"),
)


def run_table(cells: Cells) -> dict[str, Any]:
    """List all runs as texts: `headers`, and `rows` in the order of `cells.runs`."""
    names = {column.name for column in _RUN_COLUMNS}
    runs = cells.runs.reindex(columns=[*cells.runs, *names - {*cells.runs}])
    frame = runs.assign(
        geometry=geometry_label(cells.table).loc[runs["cell"]].tolist(),
        why=runs["reason"].astype(object).where(runs["reason"].notna(), runs["timing_note"]),
        folder=runs["sweep_dir"].astype(str) + "/runs/" + runs["run_id"].astype(str),
    )
    numbers = [*names - {"run_id", "geometry", "status", "why", "folder"}]
    frame[numbers] = frame[numbers].apply(pd.to_numeric, errors="coerce")
    texts = Table("", "", frame, _RUN_COLUMNS).texts
    return {"headers": texts.headers, "rows": texts.rows}
