r"""`macros.tex`: every headline number as a LaTeX command, so that no paper copies it by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from batchscape.analysis.estimates import FEWEST, NOT_IDENTIFIED, Estimate
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.latex import escape_latex
from batchscape.errors import AnalysisError

FOLDER = "bsFolder"
"""Command that says where tables and figures lie; a document elsewhere defines it beforehand."""
TABLE = "bsTable"
"""Command that sets a table between paragraphs, where it may go on over pages: name, caption."""

_HEADLINES = "bsHeadlines"
"""Command that sets the headline numbers that are identified, as rows of three columns."""

_DIGITS = 3
_WORDS_OF = {"s_min": "fewest steps", "e_min": "fewest samples"}
_NO_INTERVAL = "no interval"
_WORDS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def macro_name(name: str) -> str:
    r"""Turn `batch_size20` into `bsBatchSizeTwoZero`: commands hold letters only."""
    if not _NAME.fullmatch(name):
        raise AnalysisError(
            f"the name of a headline consists of letters, digits and underscores and begins with "
            f"a letter, as in critical_batch_size; got {name!r}"
        )
    spelled = re.sub("[0-9]", lambda digit: f"_{_WORDS[int(digit[0])]}_", name)
    return "bs" + "".join(part[:1].upper() + part[1:] for part in spelled.split("_"))


def macros(headlines: Mapping[str, Estimate], warnings: Sequence[str] = ()) -> str:
    r"""Define the commands of headline numbers, under `warnings`; docs/report.md lists them."""
    owners = {
        FOLDER: "the folder",
        TABLE: "a table",
        _HEADLINES: "the list of all headlines",
    }
    lines = [
        r"% Headline numbers of a batchscape report. Read by \input in the preamble; braces behind",
        r"% a command keep the space that follows: \bsCriticalBatchSize{} samples.",
        *(f"% To be kept in mind: {_in_a_comment(warning)}" for warning in warnings),
        "",
        "% Where tables and figures lie, for a document in another folder.",
        rf"\providecommand{{\{FOLDER}}}{{.}}",
        "",
        "% A table by name, with a caption; needs array, booktabs and longtable.",
        rf"\newcommand{{\{TABLE}}}[2]{{\def\bsTitle{{#2}}\input{{\{FOLDER}/tables/#1}}\bigskip}}",
    ]
    for name, estimate in headlines.items():
        parts = [estimate.definition, f"n = {estimate.n}", estimate.method, estimate.note]
        lines += ["", f"% {name}: {_in_a_comment('; '.join(filter(None, parts)))}"]
        for ending, text in _texts(estimate).items():
            command = macro_name(name) + ending
            if command in owners:
                raise AnalysisError(
                    f"two headlines give the command \\{command}: {owners[command]} and {name}; "
                    "they need names that differ in more than case, underscores and endings such "
                    "as _low"
                )
            owners[command] = name
            lines.append(rf"\newcommand{{\{command}}}{{{text}}}")
    lines += ["", "% What is identified, estimate with interval, n; for a tabular of columns llr."]
    lines += [rf"\newcommand{{\{_HEADLINES}}}{{%", *headline_rows(headlines), "}"]
    return "\n".join(lines) + "\n"


def _in_a_comment(text: str) -> str:
    # A line end would end the comment.
    return "".join(letter if letter.isprintable() else " " for letter in " ".join(text.split()))


def headline_rows(headlines: Mapping[str, Estimate]) -> list[str]:
    """Set the identified headline numbers by their commands, as rows of three columns."""
    rows = []
    for name, estimate in headlines.items():
        if estimate.is_identified:
            command, group = macro_name(name), estimate.group
            words = words_of(name, estimate) + (f", {group}" if group else "")
            rows.append(rf"  {escape_latex(words)} & \{command}Text & \{command}N \\")
    return rows


def words_of(name: str, estimate: Estimate) -> str:
    """Name a headline number in words, without its group."""
    stem = name.rstrip("_0123456789") if estimate.group else name
    return _WORDS_OF.get(stem, stem.replace("_", " "))


def _texts(estimate: Estimate) -> dict[str, str]:
    is_identified = estimate.is_identified
    missing_end = _NO_INTERVAL if is_identified else NOT_IDENTIFIED
    unit = escape_latex(estimate.unit)
    is_few = is_identified and estimate.n < FEWEST
    low, high = (math.nan, math.nan) if is_few else (estimate.low, estimate.high)
    # Formulas within a text may stand in a formula, too.
    text = re.sub(r"\$([^$]*)\$", r"\\ensuremath{\1}", escape_latex(estimate.text(_DIGITS)))
    value_text = text
    if unit and is_identified:
        text += f"~{unit}"
    elif unit and text.endswith(")"):
        text = f"{text[:-1]}~{unit})"
    value = _number(estimate.value if is_identified else math.nan, NOT_IDENTIFIED)
    if estimate.readings:
        # A value alone would hide that another reading gives another one.
        value = rf"\mbox{{{value_text}}}"
    return {
        "": value,
        "Low": _number(low, missing_end),
        "High": _number(high, missing_end),
        "N": str(estimate.n),
        "Unit": unit,
        "Text": text,
    }


def _number(value: float, otherwise: str) -> str:
    if math.isnan(value):
        return rf"\mbox{{{otherwise}}}"
    formula = escape_latex(significant(value, _DIGITS)).replace("$", "")
    return rf"\ensuremath{{{formula}}}"
