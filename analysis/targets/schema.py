"""What columns hold, said once: a table is checked where it comes in; inside, functions trust.

A name means the same in every table, so each name has one rule. Which columns a table needs is said
where it comes in.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from batchscape.errors import AnalysisError

OUTCOMES = ("reached", "censored", "pruned", "diverged")
"""How a run stands to a target."""

MISSING = {"", "na", "n/a", "#n/a", "#n/a n/a", "#na", "<na>", "null", "none"}
"""Texts that stand for no value, in small letters."""
NAN = {sign + text for text in ("nan", "1.#ind", "1.#qnan") for sign in ("", "-", "+")}
"""Texts that programs write for a number that is none."""

_LARGEST = 2.0**53
"""From there on floating-point numbers skip whole ones."""
_ABOVE_0 = math.ulp(0.0)


class Column(NamedTuple):
    """What a column of numbers holds."""

    rule: str
    """In words, as in "global_batch_size is ..."."""
    low: float = -sys.float_info.max
    high: float = sys.float_info.max
    """Limits of its numbers, which may be reached."""
    is_whole: bool = False
    may_be_missing: bool = False
    may_be_infinite: bool = False
    """Whether infinity is beside the limits."""


_SAMPLES = "a positive whole number of samples below 2^53 in every row"
_COUNT = Column("a whole number of at least 1 in every row", 1, _LARGEST, is_whole=True)
_PROGRESS = Column("a finite number in every row, which counts from 0", 0)
_AMOUNT = Column("a finite number, 0 or above; missing where there is none", 0, may_be_missing=True)
_LOSS = Column("a number, or missing", -math.inf, math.inf, may_be_missing=True)
_TO_TARGET = Column(
    "a number above 0 (a target is reached by training) and below 2^53; where the target was not "
    "reached it is missing (the run ended before) or infinite (it diverged)",
    *(1 / _LARGEST, _LARGEST),
    may_be_missing=True,
    may_be_infinite=True,
)
COLUMNS: dict[str, Column | str] = {
    "global_batch_size": _COUNT._replace(
        rule=f"{_SAMPLES} (for tokens, divide by those of a sample)"
    ),
    "learning_rate": Column("a finite number above 0 in every row", _ABOVE_0),
    "optimizer_step": _PROGRESS,
    "samples": _PROGRESS,
    "tokens": _AMOUNT,
    "loss": _LOSS,
    "target_loss": Column("a finite number in every row"),
    **dict.fromkeys(("steps_to_target", "samples_to_target"), _TO_TARGET),
    **dict.fromkeys(("tokens_to_target", "time_to_target_s"), _TO_TARGET),
    **dict.fromkeys(("run", "run_id", "sweep_dir"), "there in every row"),
    "seed": "there in every row (number the runs of a batch)",
    "outcome": f"one of {', '.join(OUTCOMES)}",
    **dict.fromkeys(("data_parallel_size", "micro_batch_size"), _COUNT),
    "gradient_accumulation_steps": _COUNT,
    "step_time_s": _AMOUNT._replace(
        rule="a finite number above 0; missing where there is none", low=_ABOVE_0
    ),
}
"""The rule of each name, of texts in words alone. Of other names, those that end in `_s` or `_gib`
are amounts, and the rest losses."""


def check(
    table: pd.DataFrame, what: str, needed: Sequence[str], others: Sequence[str] = ()
) -> pd.DataFrame:
    """Refuse a table that breaks a rule, with the rule, the value and its row.

    Parameters
    ----------
    table : DataFrame
        As it was handed in.
    what : str
        What it should be, as in "a table of curves".
    needed, others : sequence of str
        Columns that it must have, and those that are checked where they are there.

    Returns
    -------
    DataFrame
        The same with these columns as numbers, whole ones as integers; NaN is a missing one.

    Raises
    ------
    AnalysisError
        If a column is missing or there twice, there are no rows, or a value breaks its rule.
    """
    names = [str(name) for name in table.columns]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise AnalysisError(
            f"every column needs a name of its own; more than one is called {', '.join(twice)}"
        )
    if missing := [name for name in needed if name not in table]:
        have = ", ".join(names) or "none"
        raise AnalysisError(f"{what} needs the columns {', '.join(missing)}; it has: {have}")
    if not len(table):
        raise AnalysisError(f"{what} needs rows; it is empty")
    checked = table.filter([*needed, *others]).items()
    return table.assign(**{str(name): _check_column(column, str(name)) for name, column in checked})


def with_defaults(table: pd.DataFrame, defaults: Mapping[str, Any]) -> pd.DataFrame:
    """Add the columns that a table lacks."""
    return table.assign(**{name: value for name, value in defaults.items() if name not in table})


def refuse_rows(wrong: ArrayLike, name: str, column: pd.Series[Any], rule: str) -> None:
    """Refuse a column of which some rows break a rule, and show the first of them."""
    bad = np.asarray(wrong, dtype=bool)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        raise AnalysisError(
            f"{name} is {rule}; {bad.sum()} of {len(bad)} rows have another value, such as "
            f"{str(column.iloc[row])!r} in row {row + 1}"
        )


def _check_column(column: pd.Series[Any], name: str) -> pd.Series[Any]:
    """Refuse values that break the rule; return numbers, or texts unchanged."""
    rule = COLUMNS.get(name, _AMOUNT if name.endswith(("_s", "_gib")) else _LOSS)
    if isinstance(rule, str):
        wrong = column.isna() if name != "outcome" else ~column.isin(OUTCOMES)
        refuse_rows(wrong, name, column, rule)
        return column
    numbers, is_missing = _numbers(column)
    is_good = numbers.between(rule.low, rule.high) & (
        numbers.eq(numbers.round()) | (not rule.is_whole)
    )
    is_good |= (is_missing & rule.may_be_missing) | (numbers.eq(math.inf) & rule.may_be_infinite)
    refuse_rows(~is_good, name, column, rule.rule)
    return numbers.astype("int64") if rule.is_whole else numbers


def _numbers(column: pd.Series[Any]) -> tuple[pd.Series[float], pd.Series[bool]]:
    """Return a column as numbers, and where it says that it has none."""
    if isinstance(column.dtype, np.dtype) and column.dtype.kind in "iuf":
        return column.astype("float64"), column.isna()
    # As objects, for Arrow's NaN is no missing value; True and 1j are no numbers of a table.
    objects = column.astype(object)
    objects = objects.mask(objects.map(type).isin([bool, np.bool_, complex]), "no number")
    numbers = pd.to_numeric(objects, errors="coerce").astype("float64")
    words = objects.astype(str).str.strip().str.lower()
    return numbers, objects.isna() | words.isin(MISSING | NAN)
