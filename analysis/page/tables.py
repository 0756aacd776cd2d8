"""Tables of the page: rows that sort by their numbers and open the runs behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from batchscape.analysis.cells import Cells, geometry_label
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

    def of_rows(self, table: pd.DataFrame) -> list[list[int]]:
        """Find the runs behind each row of marks, by `run` (positions), by `cell`, or by ids."""
        if "run" in table:
            return [runs if isinstance(runs, list) else [runs] for runs in table["run"].tolist()]
        if "cell" in table:
            return [self.of_cell[cell] for cell in table["cell"].tolist()]
        return [self.of_row(row) for row in table.to_dict("records")]

    def of_row(self, row: Mapping[Any, Any]) -> list[int]:
        """Find the runs of a row by its ids or its cell; empty if ambiguous.

        An id is ambiguous if several folders have it and the row neither repeats it as often nor
        names a folder.
        """
        ids = [row[name] for name in row if str(name).endswith(_ID_COLUMNS)]
        texts = [text for text in ids if isinstance(text, str)]
        if not texts:
            return self.of_cell.get(row.get("cell", -1), [])
        return self._of_ids(" ".join(texts).replace(";", " ").split(), row)

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


def html_table(table: Table, runs: Sequence[Sequence[int]] = ()) -> HtmlTable:
    """Prepare a table, with the positions of the runs behind each row that is shown."""
    return HtmlTable(table.texts, runs, f"tables/{table.name}.csv" if table.name else "")


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
