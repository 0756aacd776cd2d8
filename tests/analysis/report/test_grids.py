from __future__ import annotations

import re
import shutil
import subprocess
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from batchscape.analysis.report.grids import (
    Grid,
    escape_latex,
    escape_markdown,
    show,
    to_latex,
    to_markdown,
)

NASTY = '100 % of a_b & c#d {x} $y$ ~^\\ <a|b> [1]* "q" `r` it\'s --flag 漢 é ± Δ 10⁻¹²'
GRID = Grid(
    headers=["devices and so on = global", "status", "loss"],
    short_first="geometry",
    rows=[["[1x2]", "completed", "1.0 ± 0.1"], ["*4", "rejected", "—"]],
    n_left=2,
    marks=[[], ["a", "b"]],
    footnotes={"a": NASTY, "b": "[bold] reason"},
    notes=["loss: a_definition"],
)


def test_markdown_is_a_table_with_footnotes() -> None:
    lines = to_markdown(GRID).splitlines()
    assert lines[1] == "| :--- | :--- | ---: |"
    assert lines[3].startswith("| \\*4 | rejected <sup>a,b</sup> |")
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in lines[:4])
    assert lines[-1].rstrip() == "loss: a\\_definition"


@given(st.text())
def test_markdown_never_breaks_a_row(text: str) -> None:
    escaped = escape_markdown(text)
    assert "\n" not in escaped
    assert not re.search(r"(?<!\\)(\\\\)*\|", escaped)


@given(st.text())
def test_latex_leaves_nothing_active_and_nothing_outside_ascii(text: str) -> None:
    escaped = escape_latex(text)
    assert escaped.isascii()
    assert escaped.isprintable()
    # What is left without a backslash is text, a group, or one of our own math formulas.
    bare = re.sub(r"\\[a-zA-Z]+|\\[{}$&#%_]|\$[^$]*\$", "", escaped)
    assert not set("\\$&#%_~^") & set(bare)
    groups = re.sub(r"\\[{}]", "", escaped)
    assert groups.count("{") == groups.count("}")


def test_latex_keeps_every_character() -> None:
    assert escape_latex("10⁻¹² of 漢") == "10$^{-12}$ of {[}U+6F22{]}"
    assert escape_latex("a_b  c\n--d") == r"a\_b c {-}{-}d"


def test_latex_is_a_booktabs_tabular() -> None:
    text = to_latex(GRID)
    body = text[text.index(r"\begin{tabular}") : text.index(r"\end{tabular}")]
    assert r"{@{}llr@{}}" in body
    assert [body.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1] * 3
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert [row.split(" & ")[0] for row in rows[:2]] == ["devices and", "so on ="]
    assert all(len(re.findall(r"(?<!\\)&", row)) == 2 for row in rows)
    # A row end takes a following bracket or star for its argument.
    assert not any(row.startswith(("[", "*")) for row in rows)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
def test_latex_compiles(tmp_path: Path) -> None:
    (tmp_path / "table.tex").write_text(to_latex(GRID), encoding="utf-8")
    document = (
        r"\documentclass{article}\usepackage{booktabs}\begin{document}"
        r"\input{table}\end{document}"
    )
    (tmp_path / "page.tex").write_text(document, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


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
