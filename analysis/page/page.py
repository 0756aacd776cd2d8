"""`report.html`, from the sections, tables and charts of a report."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import jinja2
import numpy as np
from markupsafe import Markup

from batchscape.analysis.cells import GEOMETRY, status_counts
from batchscape.analysis.commands import split_command
from batchscape.analysis.decisions.candidates import is_to_target, own_learning_rate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.figures.vega import choices_of, page_chart
from batchscape.analysis.joins import column_of
from batchscape.analysis.numbers import TIMES, significant
from batchscape.analysis.page.tables import (
    HtmlTable,
    RunIndex,
    html_table,
    run_table,
)
from batchscape.analysis.report.sections import FIRST_CHARTS, in_short, questions
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.topics import Material
from batchscape.outgoing import outgoing, outgoing_json
from batchscape.text import duration_text, list_text

_FILES = resources.files("batchscape.analysis.page")
_LIBRARY = "vendor/vega.min.js"
_MOST_CARDS = 3


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
    sections: Sequence[Section],
    notes: Sequence[str],
    methods: Mapping[str, Sequence[str]],
) -> str:
    """Write the page in HTML that needs no other file and no network."""
    cells = material.cells
    index = RunIndex(cells)
    counts = status_counts(cells.runs["status"])
    commands = column_of(cells.runs, "launch.command").dropna()
    page_sections = [
        PageSection(
            "comparison",
            "Comparison",
            [f"{len(cells.runs)} runs in {len(cells.table)} cells: {counts}."],
            charts=[chart for chart in comparison.pictures if chart.name != "loss"],
            tables=[html_table(view, index.of_table(view)) for view in comparison.tables],
        ),
        PageSection(
            "loss",
            "Loss curves",
            charts=[chart for chart in comparison.pictures if chart.name == "loss"],
        ),
        *(
            PageSection(
                f"topic-{number}",
                section.title,
                section.answer,
                section.warnings,
                section.settle,
                section.pictures,
                [html_table(view, index.of_table(view)) for view in section.tables],
            )
            for number, section in enumerate(sections)
        ),
        PageSection("notes", "Left out, and to be kept in mind", notes),
        PageSection(
            "methods",
            "Methods",
            [
                *(f"{title}. {' '.join(sentences)}" for title, sentences in methods.items()),
                *(f"Launched by: {command}" for command in commands.unique()),
            ],
        ),
    ]
    charts = {chart.name: chart for section in page_sections for chart in section.charts}
    names = list(dict.fromkeys(cells.runs["sweep_name"].astype(str)))
    content = {
        "charts": {name: page_chart(chart, index.of_rows) for name, chart in charts.items()},
        "runs": outgoing_json(run_table(cells)),
    }
    # JSON that stands in a page has no end of a script and no begin of a comment.
    data = json.dumps(content, allow_nan=False, separators=(",", ":"))
    for letter in "&<>":
        data = data.replace(letter, f"\\u{ord(letter):04x}")
    script, library = _read("page.js"), _read(_LIBRARY)
    cards = list(recommended_cards(sections))
    return _template().render(
        title=list_text(names, "and"),
        questions=list(questions(names)),
        answers=in_short(sections),
        recommended=cards[:_MOST_CARDS],
        n_more=len(cards[_MOST_CARDS:]),
        counts=counts,
        first=next((charts[name] for name in FIRST_CHARTS if name in charts), None),
        sections=[
            section
            for section in page_sections
            if section.answer or section.charts or section.tables or section.warnings
        ],
        style=Markup(_read("page.css")),  # noqa: S704  (ours)
        data=Markup(data),  # noqa: S704  (escaped above)
        library=Markup(library),  # noqa: S704  (pinned by its hash)
        script=Markup(script),  # noqa: S704  (ours)
        hashes=[_hash(library), _hash(script)],
    )


def recommended_cards(sections: Sequence[Section]) -> Iterator[dict[str, str]]:
    """Write the recommended geometries, one a group of comparable runs."""
    views = [view for section in sections for view in section.tables]
    for view in views:
        if "recommended" not in view.frame:
            continue
        to_target = is_to_target(view.frame)
        for row in view.frame[view.frame["recommended"].astype(bool)].to_dict("records"):
            *cut, batch = (str(int(row[name])) for name in GEOMETRY)
            value, low, high = (float(row[f"time{end}_s"]) for end in ("", "_low", "_high"))
            time = duration_text(value) if np.isfinite(value) else ""
            if time and not np.isnan(high):
                time += f" [{duration_text(low)}, {duration_text(high)}]"
            hours = significant(float(row["device_hours"]), 3)
            goal = f" to the target, {hours} device-hours" if to_target else " a step"
            yield {
                "label": view.title.partition(": ")[2],
                "cut": TIMES.join(cut),
                "batch": batch,
                "rate": own_learning_rate(view.frame, row),
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
    environment.filters["parts"] = split_command
    environment.filters["choices"] = choices_of
    return environment.from_string(_read("page.html.jinja"))
