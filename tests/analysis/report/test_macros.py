from __future__ import annotations

import re
from typing import Any

import pytest

from batchscape.analysis.estimates import Estimate
from batchscape.analysis.report.macros import headline_rows, macro_name, macros
from batchscape.errors import AnalysisError

NAN, INF = float("nan"), float("inf")


def estimate(
    value: float, low: float, high: float, unit: str = "samples", **other: Any
) -> Estimate:
    return Estimate(value, low, high, other.pop("n", 5), unit, "a method", "a definition", **other)


HEADLINES = {
    "critical_batch_size": estimate(745.3, 612.4, 901.9),
    "critical_batch_size_overhead20": estimate(120.0, 95.0, INF),
    "exponent": estimate(-1.25e-9, -2.5e-9, 1e-9, unit="", n=3),
    "noise_scale": estimate(NAN, 80.0, INF, note="the gradient cannot be told from zero"),
    "break_even": estimate(NAN, NAN, NAN, note="one batch size"),
    "share": estimate(12.0, NAN, NAN, unit="%"),
}


def test_names_hold_letters_only():
    assert macro_name("critical_batch_size_overhead20") == "bsCriticalBatchSizeOverheadTwoZero"
    assert macro_name("e_min") == "bsEMin"


@pytest.mark.parametrize("name", ["", "2x", "a b", "a-b", "_a", "straße", "a\n", "a%"])
def test_other_names_are_refused(name):
    with pytest.raises(AnalysisError, match="letters, digits and underscores"):
        macro_name(name)


@pytest.mark.parametrize(
    "pair",
    [
        ("a_b", "a__b"),
        ("a1", "a_one"),
        ("a", "a_low"),
        ("x_text", "x"),
        ("a", "headlines"),
        ("a", "folder"),
    ],
)
def test_names_that_give_the_same_command_are_refused(pair):
    with pytest.raises(AnalysisError, match="names that differ"):
        macros(dict.fromkeys(pair, estimate(1.0, 0.5, 2.0)))


def test_every_command_has_a_text_and_each_headline_a_comment():
    text = macros(HEADLINES)
    for name in HEADLINES:
        assert f"% {name}: a definition; n = " in text
        for ending in ("", "Low", "High", "N", "Text"):
            (body,) = re.findall(rf"\\newcommand{{\\{macro_name(name)}{ending}}}{{(.+)}}\n", text)
            assert body.strip()
    assert "the gradient cannot be told from zero" in text
    assert "nan" not in text.lower()


def test_a_definition_cannot_break_out_of_its_comment():
    odd = Estimate(1.0, 0.5, 2.0, 3, "100%\n_", "m\r\\n", "one\ntwo\x85three\u2028four", None)
    lines = macros({"x": odd}).splitlines()
    assert all(
        line.startswith(("%", "\\newcommand", "\\providecommand", "  ", "}")) or not line
        for line in lines
    )


def test_every_number_is_read_back_from_the_page(latex):
    body = "\n\n".join(
        rf"{i}: \{macro_name(name)}{{}} from \{macro_name(name)}Low{{}} to "
        rf"$\{macro_name(name)}High$ with n=\{macro_name(name)}N; \{macro_name(name)}Text."
        for i, name in enumerate(HEADLINES)
    )
    table = r"\begin{tabular}{llr}\toprule\bsHeadlines\bottomrule\end{tabular}"
    body = rf"\raggedright\hyphenpenalty=10000 {body}"
    paper = latex(f"{body}\n\n{table}", preamble=r"\input{macros}", macros=macros(HEADLINES))
    text = " ".join(paper.text.replace("\N{MINUS SIGN}", "-").split())
    for expected in (
        "0: 745 from 612 to 902 with n=5; 745 [612, 902] samples.",
        "1: 120 from 95.0 to ∞ with n=5; 120 [95.0, ∞] samples.",
        "with n=3; -1.25 \N{MULTIPLICATION SIGN} 10",
        "3: not identified from 80.0 to ∞ with n=5; not identified (≥ 80.0 samples).",
        "4: not identified from not identified to not identified with n=5; not identified.",
        "5: 12.0 from no interval to no interval with n=5; 12.0 %.",
        "critical batch size overhead20 120 [95.0, ∞] samples 5",
    ):
        assert expected in text
    assert "undefined" not in paper.log.lower()


def test_headlines_of_several_groups_name_the_group():
    several = {
        f"time_to_target_{n}": estimate(1.0, 0.5, 2.0, group=f"width {n + 8}") for n in (0, 1)
    }
    first, second = headline_rows(several)
    assert first.lstrip().startswith("time to target, width 8 &")
    assert second.lstrip().startswith("time to target, width 9 &")
