"""The protocol of a topic: a `Section`, which the writers set on the page and in files.

A topic is a folder of `analysis/`, or a pair of modules where a folder has two. Its modules compute
Estimates and DataFrames from DataFrames and know nothing of reports. Its `topic.py` makes a
`Section` of these, with a `figures.py` where there is much. `report/topics.py` lists
the topics in the order of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pandas as pd

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.report.table import Table


@dataclass(frozen=True)
class Section:
    """The answer of a topic, with its tables and charts."""

    title: str
    answer: Sequence[str] = ()
    """Sentences of plain text, the answer first; each becomes a paragraph."""
    tables: Sequence[Table] = ()
    pictures: Sequence[Chart] = ()
    warnings: Sequence[str] = ()
    """Reasons to doubt the answer, in bold above the tables."""
    headlines: dict[str, Estimate] = field(default_factory=dict)
    """Numbers that a paper would quote, by a name in lower case with underscores; they become
    LaTeX macros."""
    first_screen: Sequence[str] = ()
    """One or two sentences for the first screen; empty: the first of the answer."""
    settling_runs: Sequence[str] = ()
    """Runs that would settle the open questions, with their commands; behind the answer."""
    chart_data: dict[str, pd.DataFrame] = field(default_factory=dict)
    """Data of charts that no table shows, by file name: `tables/<name>.csv`."""


def join_sections(title: str, parts: Sequence[Section]) -> Section:
    """Set the sections of several groups one behind the other; the first screen has one alone."""

    def joined(name: str) -> list[Any]:
        return [*chain.from_iterable(getattr(part, name) for part in parts)]

    return Section(
        title,
        joined("answer"),
        joined("tables"),
        joined("pictures"),
        joined("warnings"),
        headlines={name: part.headlines[name] for part in parts for name in part.headlines},
        first_screen=next((part.first_screen for part in parts if part.first_screen), ()),
        settling_runs=[*dict.fromkeys(joined("settling_runs"))],
        chart_data={name: part.chart_data[name] for part in parts for name in part.chart_data},
    )
