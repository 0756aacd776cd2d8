from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from batchscape.analysis import find_cells, load
from batchscape.analysis.comparison import compare
from batchscape.analysis.numbers import MISSING
from batchscape.analysis.report.grids import (
    GEOMETRY_HEADER,
    Grid,
    columns_grid,
    escape_markdown,
    group_column,
    lettered,
    printed,
    shorten,
    show,
    to_markdown,
)
from batchscape.analysis.report.sections import show_section
from batchscape.analysis.report.tables import comparison_grid
from batchscape.analysis.report.topic import Section

NASTY = '100 % of a_b & c#d {x} $y$ ~^\\ <a|b> [1]* "q" `r` it\'s --flag 漢 é ± Δ 10⁻¹²'
GRID = Grid(
    headers=["devices and so on = global", "status", "loss"],
    short_first="geometry",
    rows=[["[1x2]", "completed", "1.0 ± 0.1"], ["*4", "rejected", "—"]],
    n_left=2,
    marks=[[], ["a", "b"]],
    footnotes={"a": NASTY, "b": "[bold] reason"},
    notes=["loss: a_definition"],
    bold={(0, 2)},
)


def test_markdown_is_a_table_with_footnotes() -> None:
    lines = to_markdown(GRID).splitlines()
    assert lines[1] == "| :--- | :--- | ---: |"
    assert lines[2] == r"| \[1x2\] | completed | **1.0 ± 0.1** |"
    assert lines[3].startswith("| \\*4 | rejected <sup>a,b</sup> |")
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines[:4])
    assert lines[-1].rstrip() == "loss: a\\_definition"


@given(st.text())
def test_markdown_never_breaks_a_row(text: str) -> None:
    escaped = escape_markdown(text)
    assert "\n" not in escaped
    assert not re.search(r"(?<!\\)(\\\\)*\|", escaped)


@pytest.mark.parametrize("markup", [True, False])
def test_the_terminal_escapes_nothing_whatever_the_console_reads(markup: bool) -> None:
    file = StringIO()
    console = Console(file=file, width=200, markup=markup)
    grid = replace(GRID, headers=["devices", "[red]status", "loss"])
    show(console, grid, "[red]Title")
    section = Section("[red]Where", ["[enforce fail at x.cpp:1]"], [], [], ["[alarm:on]"])
    show_section(console, section, tables=False)
    text = file.getvalue()
    assert "\\" not in text.replace(NASTY, "")
    for word in ("[red]status", "[red]Title", "(b) [bold] reason", "[red]Where", "[enforce fail"):
        assert word in text


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_terminal_shows_every_number_whole(width: int) -> None:
    file = StringIO()
    show(Console(file=file, width=width), GRID, "Title")
    text = file.getvalue()
    for word in ("geometry", "completed", "±0.1", "(a,b)", "[bold]", "[1x2]"):
        assert word in text
    assert "…" not in text


def test_the_terminal_says_how_many_rows_it_leaves_out() -> None:
    file = StringIO()
    many = Grid(headers=["a", "b"], rows=[[str(i), "x"] for i in range(30)], short_first="a")
    show(Console(file=file, width=80), many, "Title", max_rows=10)
    assert "... and 20 more rows" in file.getvalue()
    assert "11" not in file.getvalue()


def test_the_terminal_sets_the_best_in_bold() -> None:
    file = StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    show(console, GRID, "Title")
    assert re.search(r"\x1b\[1m *1\.0 ±0\.1", file.getvalue())
    assert not re.search(r"\x1b\[1m *completed", file.getvalue())


def test_a_long_table_is_shortened_and_says_so() -> None:
    n = 3000
    grid = Grid(
        headers=["cell", "seldom", "loss"],
        rows=[[f"cell {i}", "1" if i == 20 else MISSING, str(i)] for i in range(n)],
        marks=[[f"m{i}"] if i % 2 else [] for i in range(n)],
        footnotes={f"m{i}": f"reason {i}" for i in range(1, n, 2)},
        notes=["a definition"],
        bold={(5, 2), (2999, 2)},
    )
    assert list(shorten(grid).headers) == ["cell", "seldom", "loss"]
    short = shorten(grid, 10)
    assert list(short.headers) == ["cell", "loss"]
    assert [row[0] for row in short.rows] == [*(f"cell {i}" for i in range(9)), "cell 2999"]
    assert {short.rows[row][column] for row, column in short.bold} == {"5", "2999"}
    assert short.footnotes == {f"m{i}": f"reason {i}" for i in (1, 3, 5, 7, 2999)}
    assert short.marks[-1] == ["m2999"]
    assert short.notes[0].startswith("10 of 3000 rows are shown")
    assert "CSV" in short.notes[0]
    assert short.notes[1] == "a definition"
    assert len(to_markdown(shorten(grid))) < 5000
    assert shorten(GRID) is GRID


def test_equal_texts_share_a_letter() -> None:
    marks, footnotes = lettered([["x", None], [float("nan")], ["y", "x"]])
    assert marks == [["a"], [], ["a", "b"]]
    assert footnotes == {"a": "x", "b": "y"}
    assert list(lettered([[str(i)] for i in range(28)])[1])[-2:] == ["aa", "ab"]


def test_a_title_explains_a_short_header_and_no_other() -> None:
    file = StringIO()
    for short in ("group", "g"):
        grid = Grid(headers=["group", "x"], rows=[["a", "1"]], short_first=short)
        show(Console(file=file, width=80), grid, "A title")
    titles = [line for line in file.getvalue().splitlines() if line.startswith("A title")]
    assert titles == ["A title", "A title (g: group)"]


def test_columns_stand_under_their_headers():
    left, right = [(GEOMETRY_HEADER, ["x", "y"])], [("n", iter(["1", "2"])), ("n", ["3", "4"])]
    grid = columns_grid([*group_column(["a", "b"]), *left], right, notes=["of both"])
    assert grid.headers == ["group", GEOMETRY_HEADER, "n", "n"]
    assert grid.rows == [["a", "x", "1", "3"], ["b", "y", "2", "4"]]
    assert (grid.n_left, grid.short_first, grid.notes) == (2, "group", ["of both"])
    alone = columns_grid([*group_column(["", ""]), *left], [("n", ["1", "2"])])
    assert (alone.n_left, alone.short_first) == (1, "geometry")
    with pytest.raises(ValueError, match="shorter"):
        columns_grid(left, [("n", ["1"])])


def test_a_column_without_anything_is_left_out() -> None:
    grid = columns_grid(
        [("cell", ["a", "b"]), ("note", [MISSING, MISSING])],
        [("n", ["1", "2"]), ("time", [MISSING, MISSING]), ("loss", [MISSING, "2.0"])],
        bold={(1, 4)},
    )
    # What tells rows apart stays, and bold stays where it was.
    assert list(grid.headers) == ["cell", "note", "n", "loss"]
    assert list(grid.rows) == [["a", MISSING, "1", MISSING], ["b", MISSING, "2", "2.0"]]
    assert grid.bold == {(1, 3)}


def test_a_short_comparison_has_every_cut_at_the_best_learning_rate_of_its_batch(
    build: Any,
) -> None:
    best = {8: 0.004, 32: 0.016}
    sweep = build()
    for cut in ((1, 8, 1), (1, 32, 1), (1, 8, 4)):
        size = cut[0] * cut[1] * cut[2]
        for rate in (0.001, 0.004, 0.016):

            def loss(step: np.ndarray, away: float = abs(np.log(rate / best[size]))) -> np.ndarray:
                return 2 + away + np.exp(-step / 9)

            sweep.run(cut, loss=loss, held_out=loss, optimizer__learning_rate=rate)
    cells = find_cells(load(sweep.path).runs)
    comparison = compare(cells)
    grid = comparison_grid(comparison, cells)
    short = shorten(grid, 3)
    shown = [(row[0].rpartition("=")[2], row[1]) for row in short.rows]
    assert shown == [("8", "0.004"), ("32", "0.016"), ("32", "0.016")]
    assert len(grid.lead) == 3
    assert "3 of 9 rows are shown: those at the best settings of the update" in short.notes[0]
    # A paper has room for all nine; of a long table the best are printed.
    assert len(printed(grid).rows) == 9
    unseen = "of others: what no row that is printed has"
    long = replace(
        grid,
        rows=[*grid.rows, *[grid.rows[0]] * 20],
        marks=(),
        notes=[*grid.notes, unseen],
        spare={*grid.spare, "of others"},
    )
    paper = printed(long)
    assert [(row[0].rpartition("=")[2], row[1]) for row in paper.rows] == shown
    assert {"status", "throughput ratio"} <= set(grid.headers)
    assert not {"status", "throughput ratio"} & set(paper.headers)
    assert not any(note.startswith("throughput ratio:") for note in paper.notes)
    assert unseen not in paper.notes
    assert paper.notes[-1] == "In the CSV file alone: throughput ratio."
    # Of survivors the mean says less: two of three seeds were lost at the rate with the lowest.
    for seed in (1, 2):
        sweep.run((1, 8, 1), seed=seed, status="diverged", optimizer__learning_rate=best[8])
    cells = find_cells(load(sweep.path).runs)
    grid = comparison_grid(compare(cells), cells)
    assert sorted((grid.rows[row][0][-2:], grid.rows[row][1]) for row in grid.lead)[-1] == (
        "=8",
        "0.001",
    )
    # Where nothing of the update varies there is none to choose.
    cuts = cells.runs[cells.runs["optimizer.learning_rate"].eq(0.004)]
    alike = find_cells(cuts.drop(columns="cell"))
    assert comparison_grid(compare(alike), alike).lead == []


@pytest.mark.parametrize(
    ("texts", "header", "shown"),
    [
        (["3 (n = 2)", "4 (n = 2)"], "x, n = 2", ["3", "4"]),
        (["3 (n=1)", MISSING, "4 (n=1)"], "x, n=1", ["3", MISSING, "4"]),
        (
            ["3 (n = 2)", "not identified (≥ 1)", "5 (n = 2)"],
            "x, n = 2",
            ["3", "not identified (≥ 1)", "5"],
        ),
        (["3 (n = 2)", "4 (n = 1)"], "x", ["3 (n = 2)", "4 (n = 1)"]),
        (["3 (n = 2)", "4 [3, 5]"], "x", ["3 (n = 2)", "4 [3, 5]"]),
        (["3 (n = 2)", MISSING], "x", ["3 (n = 2)", MISSING]),
    ],
)
def test_an_n_that_all_numbers_share_is_said_once(
    texts: list[str], header: str, shown: list[str]
) -> None:
    grid = columns_grid([("cell", ["a", "b", "c"][: len(texts)])], [("x", texts)])
    assert grid.headers == ["cell", header]
    assert [row[1] for row in grid.rows] == shown
