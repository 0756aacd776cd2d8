"""The protocol of a topic: what it says of the runs, on the page, in the terminal and in files.

A topic is a folder of `analysis/`, or a pair of modules where a folder has two. It computes
(DataFrames in, `Estimate`s and DataFrames out; such modules know nothing of reports) and then
shows: `topic.py` turns what was found into a `Section`, with the help of `tables.py` and
`figures.py` where there is much. What it leaves open it says, with what would settle it.
`report/topics.py` is the list of topics, in the order of the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.report.table import Table

__all__ = ["Section"]


@dataclass(frozen=True)
class Section:
    """What a topic says."""

    title: str
    answer: Sequence[str] = ()
    """Sentences of plain text, the answer first; each becomes a paragraph."""
    tables: Sequence[Table] = ()
    pictures: Sequence[Chart] = ()
    warnings: Sequence[str] = ()
    """What weakens the answer, said loudly: shown in bold above the tables."""
    headlines: dict[str, Estimate] = field(default_factory=dict)
    """Numbers that a paper would quote, by a name in lower case with underscores; they become
    LaTeX macros."""
    short: Sequence[str] = ()
    """What the first screen says of it, in a sentence or two; empty: the first of the answer."""
    settle: Sequence[str] = ()
    """What would settle what the answer leaves open, and by which command; behind the answer."""
    curves: dict[str, pd.DataFrame] = field(default_factory=dict)
    """What charts draw and no table shows, by file name: `tables/<name>.csv`."""
