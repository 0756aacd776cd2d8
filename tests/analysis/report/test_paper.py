from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from batchscape.analysis import write_report
from batchscape.analysis.estimates import Estimate
from batchscape.analysis.report.macros import write_macros

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_a_paper_made_of_a_report(build: Any, tmp_path: Path, paper: Callable[[Path], Any]) -> None:
    """Every figure of the comparison's LaTeX stands on the page as in its Markdown."""
    sweep = build().fork()
    sweep.run((1, 16, 2), status="diverged", reason="the loss is NaN at 100 %", done=9)
    report = write_report([sweep.path])
    headline = Estimate(745.3, 612.4, 901.9, 3, "samples", "jackknife", "b/a of S = a + b/B")
    write_macros(report.out / "macros.tex", {"critical_batch_size": headline})
    text = (ROOT / "examples/paper/paper.tex").read_text(encoding="utf-8")
    folder = tmp_path / "paper"
    folder.mkdir()
    shutil.copytree(report.out, folder / "report")
    (folder / "paper.tex").write_text(
        text.replace("../../outputs/fixed_global_batch/report", "report"), encoding="utf-8"
    )
    made = paper(folder / "paper.tex")
    assert made.too_wide == []
    assert made.pdf.with_suffix(".log").read_text(errors="replace").count("figures/") > 0
    page = " ".join(made.text.split()).replace(" ± ", "±")
    markdown = (report.out / "tables" / "comparison.md").read_text()
    figures = re.findall(r"\d[\d.]* ± \d[\d.]*", markdown)
    assert len(figures) > 10
    for figure in figures:
        assert figure.replace(" ± ", "±") in page
    assert "745 [612, 902] samples" in page
    assert "the loss is NaN at 100 %" in page
    assert "Bold: best in its column" in page


@pytest.mark.slow
def test_bold_in_all_formats(build: Any) -> None:
    sweep = build()
    for seed in range(4):
        sweep.run((1, 32, 1), seed=seed)
        sweep.run((1, 8, 4), seed=seed)
    tables = write_report([sweep.path], figures=False).out / "tables"
    comparison = pd.read_csv(tables / "comparison.csv")
    assert comparison["peak_allocated_gib_best"].tolist() == [False, True]
    least = f"{1024 * comparison['peak_allocated_gib_mean'].min():.2f} ± 0"
    assert f"**{least}**" in (tables / "comparison.md").read_text()
    latex = (tables / "comparison.tex").read_text()
    assert r"\textbf{\boldmath " + least.replace("±", r"$\pm$") in latex
    assert "Holm" in latex


@pytest.mark.slow
def test_the_interval_is_that_of_the_mean(build: Any) -> None:
    report = write_report([build().fork().path], figures=False)
    row = report.comparison.iloc[0]
    markdown = (report.out / "tables" / "comparison.md").read_text()
    shown = re.search(r"^\| 1.32.1=32 .* (\S+) ± (\S+) \| \S+ ± \S+ \|$", markdown, re.MULTILINE)
    assert shown is not None
    for figure, column in zip(shown.groups(), ("mean", "ci95"), strict=True):
        decimals = len(figure.partition(".")[2])
        assert decimals >= 3
        assert figure == f"{row[f'final_loss_{column}']:.{decimals}f}"
    assert "means ± half-widths of their 95% t-intervals" in markdown


@pytest.mark.slow
def test_every_cell_that_lacks_something_has_a_footnote(build: Any) -> None:
    sweep = build()
    sweep.run(seed=0, stop_reason="target")
    sweep.run(seed=1)
    sweep.run((1, 16, 2), seed=0, status="pruned", done=4)
    sweep.run((1, 8, 4), seed=0, status="failed", reason="out of luck", done=4)
    report = write_report([sweep.path], figures=False)
    text = (report.out / "tables" / "comparison.md").read_text()
    for note in ("1 of 2 stopped at a target loss", "</sup> pruned", "</sup> out of luck"):
        assert note in text


@pytest.mark.slow
def test_padding_is_said_to_be_counted(build: Any) -> None:
    sweep = build()
    sweep.run(ranks={"model_flops_per_sample": 1e9, "peak_tflops": 0.5, "peak_source": "x"})
    report = write_report([sweep.path], figures=False)
    details = (report.out / "details" / "comparison.md").read_text()
    assert "padding counted like any other token" in details
