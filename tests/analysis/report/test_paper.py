from __future__ import annotations

import re

import pytest

from batchscape.analysis import write_report
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.figures.style import COLUMN_IN, PAGE_IN
from batchscape.analysis.report.macros import macro_name
from batchscape.analysis.report.paper import paper_texts
from batchscape.analysis.report.topic import Section
from batchscape.analysis.report.write import Report
from batchscape.analysis.report.writers import to_markdown

HOSTILE = r"100% of \end{tabular} $x_1$ ^^M {a}~#&|<b>"


def plain(text: str) -> str:
    """Leave out what a page sets as gaps and rules: blanks, hyphens at line ends, underscores."""
    accents = {"\N{MODIFIER LETTER CIRCUMFLEX ACCENT}": "^", "\N{SMALL TILDE}": "~"}
    return re.sub(r"[\s_\-\N{HYPHEN}\N{MINUS SIGN}]+", "", text).translate(str.maketrans(accents))


@pytest.mark.slow
def test_paper_and_appendix_of_a_report_compile_where_they_lie(build, paper):
    """The paper on three pages; in the appendix all figures of the tables, as in Markdown."""
    sweep = build().fork()
    sweep.run((1, 16, 2), status="diverged", reason=HOSTILE, done=9)
    for micro in (2, 4):
        for seed in (0, 1, 2):
            sweep.run((1, micro, 2), seed=seed, noise=(40.0, 1.0))
    report = write_report([sweep.path])
    folder = report.out / "paper"
    main, appendix = (paper(folder / f"{name}.tex") for name in ("paper", "appendix"))
    for made in (main, appendix):
        assert made.too_wide == []
        for warning in ("undefined", "Float too large", "multiply defined"):
            assert warning not in made.log
    assert main.text.count("\f") <= 3
    page = plain(appendix.text)
    figures = re.findall(r"\d[\d.]* ± \d[\d.]*", to_markdown(report.table))
    assert len(figures) > 10
    for figure in figures:
        assert plain(figure) in page
    assert plain(HOSTILE) in page

    # Every table and figure is in the appendix and all that it reads is beside it.
    everything = (folder / "everything.tex").read_text()
    for kind, of in (("tables", r"\\bsTable{(\w+)}"), ("figures", r"figures/(\w+)")):
        there = {file.stem for file in (folder / kind).iterdir()}
        assert there == {file.stem for file in report.files if file.parent == folder / kind}
        assert there == set(re.findall(of, everything))
    assert set(re.findall(r"\\label{fig:(\w+)}", everything)) == {
        file.stem for file in report.files if file.suffix == ".png"
    }
    _check_headlines(report)
    _check_figures(report)


def _check_headlines(report: Report) -> None:
    """Numbers that are identified are listed, and no others."""
    folder = report.out / "paper"
    headlines = {name: value for of in report.sections for name, value in of.headlines.items()}
    unknown = {name for name, value in headlines.items() if not value.is_identified}
    assert unknown
    assert set(headlines) > unknown
    everything = (folder / "everything.tex").read_text()
    rows = (folder / "macros.tex").read_text().partition(r"\newcommand{\bsHeadlines}")[2]
    for text in (everything, rows):
        for name in headlines:
            assert (rf"\{macro_name(name)}Text &" in text) == (name not in unknown)
    # Signs, not letters, and no count of warnings, which is the page's.
    results = (folder / "results.tex").read_text()
    assert any(section.warnings for section in report.sections)
    assert not re.search(r"\d warning", results)
    assert " x " not in results
    assert r"$\times$" in results


def test_headlines_of_which_none_is_identified_make_no_table():
    why = Estimate.unknown("too few seeds", 1, "what it is")
    texts = paper_texts(
        [Section("Comparison", headlines={"critical_batch_size": why}, warnings=["It\nwarns."])],
        answers=[
            "Use 1 x 2 x 3 = 6.",
            "Times do not count. The same sweep measures them: batchscape sweep seed=0",
        ],
        methods={},
        with_charts=False,
    )
    results, macros = texts["results.tex"], texts["macros.tex"]
    assert "tabular" not in results
    assert "Use 1 $\\times$ 2 $\\times$ 3 = 6.\nTimes do not count.\n" in results
    assert "batchscape" not in results
    assert r"\newcommand{\bsCriticalBatchSizeText}{not identified}" in macros
    assert "% To be kept in mind: Comparison: It warns.\n" in macros


def _check_figures(report: Report) -> None:
    """Figures embed their fonts and are as wide as a column or a page."""
    widths = set()
    figures = [file for file in report.files if file.suffix == ".pdf"]
    for file in figures:
        content = file.read_bytes()
        # A font that is embedded has its file, and no venue takes type 3.
        assert content.count(b"/FontFile2") == content.count(b"/Type /FontDescriptor") > 0
        assert b"/Subtype /Type3" not in content
        # The one that the renderer brings: machines have others or none, and text went missing.
        assert set(re.findall(rb"/BaseFont /[A-Z]{6}\+(\w+)", content)) == {b"LiberationSans"}
        box = re.findall(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) [\d.]+\s*\]", content)[0]
        widths.add(float(box) / 72)
    assert len(figures) > 5
    # A paper scales less than this unseen.
    assert all(min(abs(w / column - 1) for column in (COLUMN_IN, PAGE_IN)) < 0.04 for w in widths)
    geometry = (report.out / "paper" / "paper.tex").read_text()
    text, gap = map(float, re.findall(r"(?:textwidth|columnsep)=([\d.]+)in", geometry))
    assert (text - gap) / 2 == COLUMN_IN


@pytest.mark.slow
def test_a_paper_that_was_edited_is_kept_and_its_parts_are_made_anew(build):
    sweep = build()
    sweep.run(seed=0)
    folder = write_report([sweep.path], with_charts=False).out / "paper"
    (folder / "paper.tex").write_text("mine")
    (folder / "results.tex").write_text("stale")
    report = write_report([sweep.path], with_charts=False)
    assert (folder / "paper.tex").read_text() == "mine"
    assert "stale" not in (folder / "results.tex").read_text()
    assert folder / "paper.tex" in report.files
