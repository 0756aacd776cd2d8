"""What a recommendation says: facts, put into the sentences of `answer.jinja`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import pandas as pd

from batchscape.analysis.cost.table import FACTORS
from batchscape.analysis.estimates import FEWEST, interval_text
from batchscape.analysis.numbers import MISSING, significant
from batchscape.text import SIZES, duration_text, list_text, size_text

_MOST_NAMED = 3
"""Geometries named in a sentence."""

Row = Mapping[Any, Any]
"""A candidate."""


def paragraphs_of(part: str, facts: Mapping[str, Any]) -> list[str]:
    """Return the paragraphs of one block of the template, each as a line."""
    template = _template()
    text = "".join(template.blocks[part](template.new_context(dict(facts))))
    return [" ".join(lines.split()) for lines in text.split("\n\n") if lines.strip()]


def cut_text(row: Row | pd.Series[Any], sign: str = " x ") -> str:
    """Write the geometry of a candidate."""
    return sign.join(str(row[name]) for name in FACTORS)


def time_text(row: Row | pd.Series[Any]) -> str:
    """Write the time of a candidate, with its ends where it has them."""
    value, low, high = (float(row[f"time{end}_s"]) for end in ("", "_low", "_high"))
    if math.isnan(value):
        return MISSING
    ends = "" if math.isnan(high) else f" [{duration_text(low)}, {duration_text(high)}]"
    return f"{duration_text(value)}{ends}"


def slower_text(row: Row | pd.Series[Any]) -> str:
    """Write the ratio of a candidate's time to that of the chosen one; n where it was measured."""
    value, low, high, n = (float(row[f"times_slower{end}"]) for end in ("", "_low", "_high", "_n"))
    return interval_text(value, low, high, int(n) if row["source"] == "measured" else FEWEST)


def _cuts_text(rows: Sequence[Row]) -> str:
    """Name the first few cuts, and count the others."""
    return list_text(map(cut_text, rows), "and", _MOST_NAMED)


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=False,  # noqa: S701  (plain text, which its writers escape)
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cut": cut_text,
        "cuts": _cuts_text,
        "duration": duration_text,
        "gib": lambda size: size_text(size * SIZES["GiB"]),
        "significant": significant,
        "slower": slower_text,
        "time": time_text,
    }
    environment.tests["finite"] = math.isfinite
    text = (files("batchscape.analysis.decisions") / "answer.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)
