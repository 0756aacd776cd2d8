"""The list of topics: each answers, says nothing, or says why it cannot, and leaves the others."""

from __future__ import annotations

import pytest

from batchscape.analysis import find_cells, load
from batchscape.analysis.report import topics
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError


def test_a_topic_that_cannot_answer_says_why(build, monkeypatch):
    def refuse(_: topics.Material) -> Section:
        msg = "two targets are mixed"
        raise AnalysisError(msg)

    listed = {
        "refused": refuse,
        "silent": lambda _: None,
        "runs": lambda m: Section("runs", [f"{len(m.cells.runs)} of them."]),
    }
    monkeypatch.setattr(topics, "TOPICS", listed)
    sweep = build()
    sweep.run((1, 8, 1))
    tables = load(sweep.path)
    cells = find_cells(tables.runs)
    refused, runs = topics.find_sections(topics.Material(cells, tables))
    assert (refused.title, refused.answer) == ("refused", ["Not identified."])
    assert refused.warnings == ["two targets are mixed"]
    assert runs.answer == ["1 of them."]
    # A target that was asked for is refused for the whole report.
    with pytest.raises(AnalysisError, match="met before the first optimizer step"):
        list(topics.find_sections(topics.Material(cells, tables, [100.0])))
