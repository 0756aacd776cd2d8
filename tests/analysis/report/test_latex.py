from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis.report.latex import escape_latex, to_latex
from batchscape.analysis.report.table import Column, Table

NASTY = '100 % of a_b & c#d {x} $y$ ~^\\ <a|b> [1]* "q" `r` it\'s --flag 漢 é ± Δ 10⁻¹² -3'
PACKAGES = r"\usepackage{array}\usepackage{longtable}\usepackage[textwidth=7.25in]{geometry}"


@given(st.text())
def test_nothing_is_left_active_and_nothing_outside_ascii(text):
    escaped = escape_latex(text)
    assert escaped.isascii()
    assert escaped.isprintable()
    # What is left without a backslash is text, a group, a tie, or one of our own math formulas.
    bare = re.sub(r"\\[a-zA-Z]+|\\[{}$&#%_]|\$[^$]*\$", "", escaped)
    assert not set("\\$&#%_^") & set(bare)
    groups = re.sub(r"\\[{}]", "", escaped)
    assert groups.count("{") == groups.count("}")


def test_every_character_is_kept():
    assert escape_latex("10⁻¹² of 漢") == "10$^{-12}$ of {[}U+6F22{]}"
    assert escape_latex("a_b  c\n--d") == r"a\_b c {-}{-}d"


def test_a_minus_is_no_hyphen_and_a_lone_x_a_sign():
    assert escape_latex("-1.5 [-2, -∞]") == r"$-$1.5 {[}$-$2, $-$$\infty${]}"
    assert escape_latex("t-test 2-3 a-4") == "t{-}test 2{-}3 a{-}4"
    assert escape_latex("1 x 8 x 4, x = 2 x") == r"1 $\times$ 8 $\times$ 4, x = 2 x"


def table_of(name: str, frame: pd.DataFrame, **options: Any) -> Table:
    columns = [Column(frame.columns[0], is_left=True), *map(Column, frame.columns[1:])]
    return Table(name, "", frame, columns, **options)


def test_tables_compile_break_their_lines_and_are_read_back(latex):
    """TeX itself measures: a box that sticks out of the page is in its log."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=120).round(3)
    long = pd.DataFrame({"row": [f"row {i}" for i in range(120)], "time (ms)": numbers})
    long["sentence"] = "the larger global batch needs fewer optimizer steps and more samples " * 2
    long["path"] = "/a/long-path_with/" * 6 + "d41d8cd98f00b204e9800998ecf8427e"
    wide = pd.DataFrame({"cut": ["[1x1]", "*4"]})
    for i in range(9):
        wide[f"figure {i}"] = ["2.4217 ± 0.0046 (n = 4)", "0.998 [0.898, 1.110]"]
    reasons = [NASTY, *[None] * 119]
    marked = {"footnotes": [reasons], "bold": {(3, "time (ms)")}, "notes": ["a: definition"]}
    tables = [table_of("long", long, **marked), table_of("wide", wide)]
    files = {table.name: to_latex(table) for table in tables}
    body = "".join(rf"\def\bsTitle{{{name}}}\input{{{name}}}" for name in files)
    floating = to_latex(tables[1], is_long=False)
    body += r"\begin{table}\input{floating}\end{table}"
    paper = latex(body, PACKAGES, floating=floating, **files)
    assert paper.too_wide == []
    text = paper.text.replace("\N{MINUS SIGN}", "-").replace("- ", "-")
    for i, number in enumerate(numbers):
        assert re.search(rf"row {i}a? +{re.escape(f'{number:.4g}'[:5])}", text)
    for word in ("100 %", "& c#d", "[1]*", "--flag", "[U+6F22]", "2.4217 ±", "[1x1]"):
        assert word in text
    assert r"\textbf{\boldmath" in files["long"]
    # A row end takes a following bracket or star for its argument.
    assert not re.search(r"^[\[*]", files["wide"], re.MULTILINE)


def test_a_box_that_sticks_out_is_seen(latex):
    row = " & ".join(["2.4217"] * 15)
    paper = latex(rf"\noindent\begin{{tabular}}{{{'r' * 15}}}{row}\end{{tabular}}")
    assert len(paper.too_wide) == 1
