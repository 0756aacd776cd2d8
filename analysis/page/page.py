"""`report.html`, from the sections, tables and charts of a report."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from batchscape.analysis.cells import GEOMETRY, counted
from batchscape.analysis.commands import part_command
from batchscape.analysis.decisions.candidates import is_to_target, own_learning_rate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.vega import choices_of, page_chart
from batchscape.analysis.hardware import was_started
from batchscape.analysis.numbers import MISSING, TIMES, significant
from batchscape.analysis.page.tables import (
    HtmlTable,
    RunIndex,
    comparison_tables,
    html_table,
    run_table,
)
from batchscape.analysis.report.provenance import questions
from batchscape.analysis.report.sections import in_short
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.topics import Material
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.text import duration_text, list_text

__all__ = ["html_page"]

_FILES = resources.files("batchscape.analysis.page")
_LIBRARY = "vendor/vega.min.js"
_FIRST = ("steps_to_target", "pareto", "pareto_0", "heat_map", "cost", "loss")
"""What is shown first, if there is such a chart."""
_MOST_CARDS = 3
_NO_FAILURES = ("completed", "pending", "running")


@dataclass
class PageSection:
    """A section that opens."""

    id: str
    title: str
    answer: Sequence[str] = ()
    warnings: Sequence[str] = ()
    settle: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[HtmlTable] = ()


def html_page(
    material: Material,
    *,
    comparison: Section,
    table: Table,
    sections: Sequence[Section],
    notes: Sequence[str],
    provenance: Sequence[Table],
) -> str:
    """Write the page.

    Parameters
    ----------
    material : Material
        What the sections were computed from.
    comparison : Section
        The comparison of the cells, with its pictures.
    table : Table
        What `tables.comparison_table` chose of it.
    sections : sequence of Section
        As `find_sections` returns them.
    notes : sequence of str
        As `find_notes` returns them.
    provenance : sequence of Table
        As `provenance` returns it.

    Returns
    -------
    str
        HTML that needs no other file and no network.
    """
    cells = material.cells
    index = RunIndex(cells)
    counts = counted(cells.runs["status"])
    shown = [
        PageSection(
            "comparison",
            "Comparison",
            [f"{len(cells.runs)} runs in {len(cells.table)} cells: {counts}."],
            charts=[chart for chart in comparison.pictures if chart.name != "loss"],
            tables=comparison_tables(table, cells, _groups(material), index),
        ),
        PageSection(
            "loss",
            "Loss curves",
            charts=[chart for chart in comparison.pictures if chart.name == "loss"],
        ),
        *_of_topics(sections, index),
        PageSection("failures", "What did not complete", tables=_failures(cells.runs)),
        PageSection("notes", "Left out, and to be kept in mind", notes),
        PageSection(
            "provenance",
            "Provenance",
            [f"Launched by: {command}" for command in _commands(cells.runs)],
            tables=[html_table(of) for of in provenance],
        ),
    ]
    shown = [each for each in shown if each.answer or each.charts or each.tables or each.warnings]
    charts = {chart.name: chart for each in shown for chart in each.charts}
    names = list(dict.fromkeys(cells.runs["sweep_name"].astype(str)))
    content = {
        "charts": {name: page_chart(chart, index.of_rows) for name, chart in charts.items()},
        "runs": outgoing_json(run_table(cells)),
    }
    script, library = _text("page.js"), _text(_LIBRARY)
    recommended = list(_recommended(sections))
    return _template().render(
        title=list_text(names, "and"),
        questions=list(questions(names)),
        answers=in_short(sections),
        recommended=recommended[:_MOST_CARDS],
        n_more=len(recommended[_MOST_CARDS:]),
        counts=counts,
        first=next((charts[name] for name in _FIRST if name in charts), None),
        sections=shown,
        style=Markup(_text("page.css")),  # noqa: S704  (ours)
        data=Markup(_json(content)),  # noqa: S704  (escaped there)
        library=Markup(library),  # noqa: S704  (pinned by its hash)
        script=Markup(script),  # noqa: S704  (ours)
        hashes=[_hash(library), _hash(script)],
    )


def _groups(material: Material) -> pd.DataFrame:
    """What the comparison is parted by; nothing where no run was started."""
    if not was_started(material.cells.runs).any():
        return pd.DataFrame({"label": [], "cells": []})
    return material.groups


def _of_topics(sections: Sequence[Section], index: RunIndex) -> Iterator[PageSection]:
    for number, section in enumerate(sections):
        yield PageSection(
            f"topic-{number}",
            section.title,
            section.answer,
            section.warnings,
            section.settle,
            section.pictures,
            [html_table(view, index.of_table(view)) for view in section.tables],
        )


def _recommended(sections: Sequence[Section]) -> Iterator[dict[str, str]]:
    """Take the geometries that are recommended, one a group of comparable runs."""
    for section in sections:
        for view in section.tables:
            if "recommended" not in view.frame:
                continue
            to_target = is_to_target(view.frame)
            for row in view.frame[view.frame["recommended"].astype(bool)].to_dict("records"):
                cut = [int(row[name]) for name in GEOMETRY]
                ends = [float(row[f"time{end}_s"]) for end in ("", "_low", "_high")]
                time = duration_text(ends[0]) if np.isfinite(ends[0]) else ""
                if time and not np.isnan(ends[2]):
                    time += f" [{duration_text(ends[1])}, {duration_text(ends[2])}]"
                hours = significant(float(row["device_hours"]), 3)
                of = f" to the target, {hours} device-hours" if to_target else " a step"
                yield {
                    "label": view.title.partition(": ")[2],
                    "cut": TIMES.join(map(str, cut[:3])),
                    "batch": str(cut[3]),
                    "rate": own_learning_rate(view.frame, row),
                    "time": time and time + of,
                }


def _failures(runs: pd.DataFrame) -> list[HtmlTable]:
    """Sort the runs that did not complete by their causes."""
    names = ["status", "cause", "reason"]
    lost = runs.reindex(columns=names).assign(position=range(len(runs)))
    lost = lost[~lost["status"].isin(_NO_FAILURES)]
    if lost.empty:
        return []
    keys = lost[names].astype(object).fillna(MISSING).astype(str)
    found = lost["position"].groupby([keys[name] for name in names], sort=False).agg(list)
    frame = found.index.to_frame(index=False).assign(runs=found.map(len).to_numpy())
    columns = [*(Column(name, is_left=True) for name in names), Column("runs")]
    return [html_table(Table("", "", frame, columns), list(found))]


def _commands(runs: pd.DataFrame) -> list[str]:
    commands = runs.reindex(columns=["launch.command"])["launch.command"].dropna().unique()
    return [text for text in commands.tolist() if isinstance(text, str)]


def _json(content: Mapping[str, Any]) -> str:
    """Write JSON that stands in a page: no end of a script, no begin of a comment."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def _hash(script: str) -> str:
    """Name a script as a policy of contents does; https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


def _text(name: str) -> str:
    return _FILES.joinpath(name).read_text(encoding="utf-8")


def _shown(value: object) -> object:
    """Clean the texts of others, which may be of a kind of their own; what is ours is marked."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return outgoing(value)
    return value


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["parts"] = part_command
    environment.filters["choices"] = choices_of
    return environment.from_string(_text("page.html.jinja"))
