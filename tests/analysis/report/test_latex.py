from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchscape.analysis.numbers import TIMES
from batchscape.analysis.report.grids import Grid
from batchscape.analysis.report.latex import escape_latex, escape_long, to_latex

NASTY = '100 % of a_b & c#d {x} $y$ ~^\\ <a|b> [1]* "q" `r` it\'s --flag 漢 é ± Δ 10⁻¹² -3'
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


@given(st.text())
def test_nothing_is_left_active_and_nothing_outside_ascii(text: str) -> None:
    escaped = escape_latex(text)
    assert escaped.isascii()
    assert escaped.isprintable()
    # What is left without a backslash is text, a group, or one of our own math formulas.
    bare = re.sub(r"\\[a-zA-Z]+|\\[{}$&#%_]|\$[^$]*\$", "", escaped)
    assert not set("\\$&#%_~^") & set(bare)
    groups = re.sub(r"\\[{}]", "", escaped)
    assert groups.count("{") == groups.count("}")


def test_every_character_is_kept() -> None:
    assert escape_latex("10⁻¹² of 漢") == "10$^{-12}$ of {[}U+6F22{]}"
    assert escape_latex("a_b  c\n--d") == r"a\_b c {-}{-}d"


def test_a_minus_is_no_hyphen() -> None:
    assert escape_latex("-1.5 [-2, -∞]") == r"$-$1.5 {[}$-$2, $-$$\infty${]}"
    assert escape_latex("t-test 2-3 a-4") == "t{-}test 2{-}3 a{-}4"


def test_a_lone_x_is_a_sign() -> None:
    assert escape_latex("1 x 8 x 4, x = 2 x") == r"1 $\times$ 8 $\times$ 4, x = 2 x"
    assert escape_long("devices x micro") == r"devices $\times$ micro"


def test_a_booktabs_tabular() -> None:
    text = to_latex(GRID)
    body = text[text.index(r"\begin{tabular}") : text.index(r"\end{tabular}")]
    assert r"{@{}llr@{}}" in body
    assert [body.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1] * 3
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    assert [row.split(" & ")[0] for row in rows[:2]] == ["devices", "and so on"]
    assert all(len(re.findall(r"(?<!\\)&", row)) == 2 for row in rows)
    # A row end takes a following bracket or star for its argument.
    assert not any(row.startswith(("[", "*")) for row in rows)
    assert body.count(r"\textbf") == 1
    assert r"\textbf{\boldmath 1.0 $\pm$ 0.1}" in body


def test_rows_of_broken_lines_stand_apart() -> None:
    broken = to_latex(Grid(["claim"], [[SENTENCE * 3]] * 3, n_left=1))
    assert broken.count(r"\addlinespace") == 2
    assert r"\addlinespace" not in to_latex(GRID)


def test_a_small_table_is_set_at_full_size_and_a_wide_one_smaller() -> None:
    assert r"\normalsize" in to_latex(GRID)
    wide = to_latex(_table(8, "2.4217 ± 0.0046"))
    assert r"\normalsize" not in wide
    assert wide.count(r"\begin{tabular}") > 1


def _table(n_figures: int, text: str, left: tuple[str, ...] = ("1x8x4=32", "completed")) -> Grid:
    geometry = f"devices {TIMES} micro {TIMES} accumulation = global"
    names = [geometry, *(f"setting {i}" for i in range(1, len(left)))]
    return Grid(
        headers=[*names, *(f"figure {i} (MiB)" for i in range(n_figures))],
        rows=[[*left, *[text] * n_figures]] * 3,
        n_left=len(left),
        marks=[["a", "b"], [], ["b"]],
        footnotes={"a": "a reason " * 30, "b": f"not found: {'/a/long-path' * 30}"},
        bold={(1, column) for column in range(len(left), len(left) + n_figures)},
    )


SENTENCE = "the larger global batch needs fewer optimizer steps and more samples " * 2
WIDE = {
    "figures": _table(12, "2.4217 ± 0.0046"),
    "intervals": _table(7, "0.998 [0.898, 1.110]"),
    "negative": _table(4, "-0.998 [-0.898, -0.110]", ("1x1",)),
    "powers": _table(7, f"(1.234 ± 0.012) {TIMES} 10⁻¹²"),
    "settings": _table(4, "0.1 ± 0.2", ("1x1", *["NVIDIA H200 of 141 GB, 700 W"] * 4)),
    "hashes": _table(2, "0.1 ± 0.2", ("1x1", "d41d8cd98f00b204e9800998ecf8427e" * 3, "[64, 64]")),
    "sentences": _table(2, SENTENCE, ("1x1", SENTENCE)),
    "capitals": _table(6, "WWWW MMMM", ("WWWWWWWW", "MMMM ∞ 漢")),
}


@pytest.mark.parametrize("two_columns", [False, True])
def test_every_table_fits_the_page(latex: Callable[..., Any], two_columns: bool) -> None:
    """LaTeX itself measures: a box that sticks out of the page is in its log."""
    tables = {name: to_latex(grid) for name, grid in WIDE.items()}
    if two_columns:
        body = "\\twocolumn\n" + "".join(
            rf"\begin{{table*}}\input{{{name}}}\end{{table*}}\clearpage" for name in tables
        )
    else:
        body = "\n\n".join(rf"\input{{{name}}}" for name in tables)
    paper = latex(body, **tables)
    assert paper.too_wide == []
    assert "0.998 [0.898, 1.110]" in paper.text


def _tall(words: list[int]) -> Grid:
    rows = [[f"row{i}. {'steps and samples ' * count}", "open"] for i, count in enumerate(words)]
    return Grid(headers=["claim", "verdict"], rows=rows, n_left=1)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=30))
def test_every_row_is_on_one_page_and_no_page_is_empty(words: list[int]) -> None:
    tabulars = to_latex(_tall(words)).split(r"\begin{tabular}")[1:]
    found = [list(map(int, re.findall(r"row(\d+)\.", each))) for each in tabulars]
    assert all(found)
    assert [row for each in found for row in each] == list(range(len(words)))


def test_rows_of_many_heights_stay_on_their_pages(latex: Callable[..., Any]) -> None:
    """LaTeX itself measures pages that are as full as they may be."""
    rng = np.random.default_rng(1)
    for most in (10, 40, 70):
        grid = _tall(rng.integers(1, most, size=60).tolist())
        paper = latex(r"\input{table}", table=to_latex(grid))
        assert paper.too_wide == []
        assert "Overfull \\vbox" not in paper.log
        assert all(f"row{i}." in paper.text for i in range(60))


def test_a_table_that_does_not_fit_is_seen(latex: Callable[..., Any]) -> None:
    row = " & ".join(["2.4217"] * 15)
    paper = latex(rf"\noindent\begin{{tabular}}{{{'r' * 15}}}{row}\end{{tabular}}")
    assert len(paper.too_wide) == 1


def test_widths_are_not_estimated_too_wide() -> None:
    """Ten columns of seven digits need 425 pt at full size, but fit a page in small letters."""
    digits = Grid(headers=["n"] * 8, rows=[["1234567"] * 8])
    assert r"\normalsize" not in to_latex(digits)
    assert to_latex(digits).count(r"\begin{tabular}") == 1


def test_text_is_read_back_as_it_was(latex: Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    numbers = [f"{x:.3f}" for x in rng.normal(size=12)]
    grid = Grid(
        headers=["what", "time (ms)"],
        rows=[[f"row {i}", number] for i, number in enumerate(numbers)],
        bold={(3, 1)},
        marks=[["a"], *[[]] * 11],
        footnotes={"a": NASTY},
    )
    paper = latex(r"\input{table}", table=to_latex(grid))
    text = paper.text.replace("\N{MINUS SIGN}", "-")
    for i, number in enumerate(numbers):
        assert re.search(rf"row {i}a? +{re.escape(number)}", text.replace("- ", "-"))
    assert "time (ms)" in text
    for word in ("100 %", "& c#d", "[1]*", "--flag", "[U+6F22]", "10"):
        assert word in text


def test_footnotes_that_would_fill_the_page_are_cut_at_a_word() -> None:
    texts = {
        letter: f"{letter} {'some words of a long reason ' * 20}finis" for letter in "abcdefgh"
    }
    whole = Grid(headers=["x"], rows=[["1"]], marks=[["a"]], footnotes={"a": texts["a"]})
    assert "finis" in to_latex(whole)
    many = Grid(headers=["x"], rows=[["1"]], marks=[list(texts)], footnotes={**texts, "z": "brief"})
    text = to_latex(many)
    assert "finis" not in text
    # The sentence that says so has one more.
    assert text.count(r"\ldots{}") == len(texts) + 1
    assert "~brief" in text
    assert "Markdown file of this table" in text


def test_a_table_with_long_footnotes_stays_on_its_page(latex: Callable[..., Any]) -> None:
    footnotes = {
        chr(97 + i): f"reason {i} {'global_batch_size=32 and so on ' * 30}" for i in range(20)
    }
    grid = Grid(
        headers=["x", "y"],
        rows=[[str(i), "1.0"] for i in range(20)],
        marks=[[mark] for mark in footnotes],
        footnotes=footnotes,
    )
    paper = latex(r"\begin{table}\input{table}\end{table}", table=to_latex(grid))
    assert paper.too_wide == []
    assert "Float too large" not in paper.log
