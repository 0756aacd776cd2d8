"""`report.html`, from the sections, tables and charts of a report."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from batchscape.analysis.cells import GEOMETRY, Cells, geometry_label, status_counts
from batchscape.analysis.commands import split_command
from batchscape.analysis.decisions.candidates import is_to_target, own_learning_rate
from batchscape.analysis.figures.vega import page_chart
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import TIMES, significant
from batchscape.analysis.report.sections import FIRST_CHARTS, in_short, title_and_questions
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.text import duration_text

_FILES = resources.files("batchscape.analysis.page")
_LIBRARY = "vendor/vega.min.js"
_MOST_CARDS = 3
_ID_COLUMNS = ("run_ids", "run_id", "runs")


def html_page(
    cells: Cells,
    *,
    comparison: Section,
    sections: Sequence[Section],
    notes: Sequence[str],
    methods: Mapping[str, Sequence[str]],
) -> str:
    """Write the page in HTML that needs no other file and no network."""
    index = RunIndex(cells)
    counts = status_counts(cells.runs["status"])
    loss, others = (
        [chart for chart in comparison.pictures if (chart.name == "loss") is is_loss]
        for is_loss in (True, False)
    )
    summary = f"{len(cells.runs)} runs in {len(cells.table)} cells: {counts}."
    paragraphs = [f"{title}. {' '.join(sentences)}" for title, sentences in methods.items()]
    commands = column_of(cells.runs, "launch.command").dropna().unique()
    parts = {
        "comparison": replace(comparison, answer=[summary], pictures=others),
        "loss": Section("Loss curves", pictures=loss),
        **{f"topic-{number}": section for number, section in enumerate(sections)},
        "notes": Section("Left out, and to be kept in mind", notes),
        "methods": Section("Methods", [*paragraphs, *(f"Launched by: {c}" for c in commands)]),
    }
    charts = {chart.name: chart for part in parts.values() for chart in part.pictures}
    title, questions = title_and_questions(cells)
    content = {
        "charts": {name: page_chart(chart, index.of_rows) for name, chart in charts.items()},
        "runs": outgoing_json(_run_table(cells)),
    }
    # JSON that stands in a page has no end of a script and no begin of a comment.
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for letter in "&<>":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    script, library = _read("page.js"), _read(_LIBRARY)
    cards = list(recommended_cards(sections))
    return _template().render(
        title=title,
        questions=questions,
        answers=in_short([comparison, *sections]),
        recommended=cards[:_MOST_CARDS],
        n_more=len(cards[_MOST_CARDS:]),
        counts=counts,
        first=next((charts[name] for name in FIRST_CHARTS if name in charts), None),
        parts=parts,
        runs_of=index.of_table,
        style=Markup(_read("page.css")),  # noqa: S704  (ours)
        data=Markup(data),  # noqa: S704  (escaped above)
        library=Markup(library),  # noqa: S704  (pinned by its hash)
        script=Markup(script),  # noqa: S704  (ours)
        hashes=[_hash(library), _hash(script)],
    )


def recommended_cards(sections: Sequence[Section]) -> Iterator[dict[str, str]]:
    """Write the recommended geometries, one a group of comparable runs."""
    tables = [table for section in sections for table in section.tables]
    for table in tables:
        if "recommended" not in table.frame:
            continue
        to_target = is_to_target(table.frame)
        for row in table.frame[table.frame["recommended"].astype(bool)].to_dict("records"):
            *cut, batch = (str(int(row[name])) for name in GEOMETRY)
            value, low, high = (float(row[f"time{end}_s"]) for end in ("", "_low", "_high"))
            time = duration_text(value) if np.isfinite(value) else ""
            if time and not np.isnan(high):
                time += f" [{duration_text(low)}, {duration_text(high)}]"
            hours = significant(float(row["device_hours"]), 3)
            goal = f" to the target, {hours} device-hours" if to_target else " a step"
            yield {
                "label": table.title.partition(": ")[2],
                "cut": TIMES.join(cut),
                "batch": batch,
                "rate": own_learning_rate(table.frame, row),
                "time": time and time + goal,
            }


def _hash(script: str) -> str:
    """Name a script as a policy of contents does; https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _read(name: str) -> str:
    return _FILES.joinpath(name).read_text(encoding="utf-8")


def _clean(value: object) -> object:
    """Remove secrets and control characters from every text but our own, which is `Markup`."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return outgoing(value)
    return value


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_clean,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["split"] = split_command
    return environment.from_string(_read("page.html.jinja"))


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


def _run_table(cells: Cells) -> dict[str, Any]:
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
