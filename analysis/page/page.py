"""`report.html`, from the sections, tables and charts of a report."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from markupsafe import Markup

from batchscape.analysis.cells import GEOMETRY, counted, launched_batches
from batchscape.analysis.commands import part_command
from batchscape.analysis.decisions.candidates import is_to_target, own_learning_rate
from batchscape.analysis.hardware import was_started
from batchscape.analysis.numbers import MISSING, TIMES, significant
from batchscape.analysis.page.chart import Chart
from batchscape.analysis.page.charts import (
    claims_chart,
    cost_chart,
    decompositions_chart,
    heat_map,
    learning_rate_charts,
    noise_charts,
    pareto_chart,
    steps_chart,
)
from batchscape.analysis.page.loss import loss_chart
from batchscape.analysis.page.settings import setting_names
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
_LIBRARY = "vendor/plotly-cartesian.min.js"
_FIRST = ("steps_to_target", "pareto", "heat_map", "cost", "loss")
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
    charts: list[Chart] = field(default_factory=list)
    tables: Sequence[HtmlTable] = ()


def html_page(
    material: Material,
    *,
    comparison: pd.DataFrame,
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
    comparison : DataFrame
        As `compare` returns it.
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
            charts=_there(
                heat_map(comparison, cells, index.of_cell),
                cost_chart(comparison, cells, index.of_cell),
            ),
            tables=comparison_tables(table, cells, _groups(material), index),
        ),
        PageSection(
            "loss",
            "Loss curves",
            charts=_there(loss_chart(cells, material.tables, material.reaches, material.at_best)),
        ),
        *_of_topics(sections, material, index),
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
        "charts": {name: _drawing(chart) for name, chart in charts.items()},
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


def _there(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _groups(material: Material) -> pd.DataFrame:
    """What the comparison is parted by; nothing where no run was started."""
    if not was_started(material.cells.runs).any():
        return pd.DataFrame({"label": [], "cells": []})
    return material.groups


def _of_topics(
    sections: Sequence[Section], material: Material, index: RunIndex
) -> Iterator[PageSection]:
    started = len(_groups(material)) > 0
    names = setting_names(material.cells, pd.Series(material.group_of)) if started else {}
    curves = {name: table for section in sections for name, table in section.curves.items()}
    spoken_of = _spoken_of(sections)
    for number, section in enumerate(sections):
        yield PageSection(
            f"topic-{number}",
            section.title,
            section.answer,
            section.warnings,
            section.settle,
            list(_charts(section, curves, material, index, names, spoken_of=spoken_of)),
            [html_table(view, index.of_table(view)) for view in section.tables],
        )


def _charts(
    section: Section,
    curves: Mapping[str, pd.DataFrame],
    material: Material,
    index: RunIndex,
    names: Mapping[int, str],
    *,
    spoken_of: tuple[int, float] | None,
) -> Iterator[Chart]:
    """Draw what the tables of a section have; which ones there are decides."""
    cells = material.cells
    tables = {view.name: view.frame for view in section.tables}
    fitted = curves.get("tradeoff_curve")
    place = "reaches" if fitted is None else "tradeoff_curve"
    if place in section.curves and material.best is not None:
        yield from _there(steps_chart(material.best, fitted, names, index.of_row, spoken_of))
    for view in section.tables:
        if view.name.startswith("time_to_target"):
            chart = pareto_chart(view.name, view.title, view.frame, index.of_row)
            yield from _there(chart)
    if "noise_scale" in tables:
        curve = section.curves["noise_scale_curve"]
        yield from noise_charts(tables["noise_scale"], curve, cells, index.of_cell)
    if "learning_rates" in tables:
        costs = section.curves["learning_rate_costs"]
        rates, batches = tables["learning_rates"], launched_batches(cells.runs)
        yield from learning_rate_charts(rates, costs, names, index.of_row, batches)
    if "decompositions" in tables:
        apart = tables["decompositions"]
        yield from _there(decompositions_chart(apart, cells, index.of_cell))
    if "claims" in tables:
        yield from _there(claims_chart(tables["claims"], index.of_row))


def _spoken_of(sections: Sequence[Section]) -> tuple[int, float] | None:
    """Find the group and target of which the first screen speaks."""
    tables = (view.frame for section in sections for view in section.tables)
    for table in tables:
        if "is_spoken_of" in table:
            row = table[table["is_spoken_of"]].iloc[0]
            return int(row["group_number"]), float(row["target_loss"])
    return None


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


def _drawing(chart: Chart) -> dict[str, Any]:
    return {
        "traces": chart.traces,
        "layout": chart.layout,
        "choices": {choice.name: list(choice.options) for choice in chart.choices},
    }


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
    return environment.from_string(_text("page.html.jinja"))
