"""What `batchscape analyze` says of runs as samples: their spread, divergence, and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.comparing.samples import (
    TwoSamples,
    compare_samples,
    divergence_rate,
    divergence_rates,
    one_sided_test,
    pooled_spread,
)
from batchscape.analysis.estimates import LEVEL, Estimate
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.grids import Grid
from batchscape.analysis.report.section import Section, TableView
from batchscape.analysis.targets.tidy import distinct_trajectories

__all__ = ["samples_section"]

_BATCH, _RATE = "global_batch_size", "learning_rate"
_LOSS, _STEPS = "final_eval_loss", "log steps to target"
_FEWEST = 3
"""Runs on either side below which no interval is shown: it would say nothing."""


def samples_section(
    runs: pd.DataFrame,
    *,
    groups: Mapping[int, str] | None = None,
    margin: float | None = None,
    below: float | None = None,
) -> Section:
    """Say how runs that differ in their seed spread, how many diverged, and how groups differ.

    Parameters
    ----------
    runs : DataFrame
        One row a run with `final_eval_loss`, infinite where it diverged; or one a run and target
        with `outcome` and `steps_to_target`. With `group`, `global_batch_size`, and
        `learning_rate` where there are any.
    groups : mapping of int to str, optional
        Labels of the groups.
    margin : float, optional
        Within which two groups count as equal: nats, or a difference of log steps.
    below : float, optional
        What the final loss of each cell is tested to lie below.

    Returns
    -------
    Section
    """
    names = groups or {}
    runs = distinct_trajectories(runs)
    own, value, unit = _runs_of(runs)
    spread = pooled_spread(own, value)
    rate = divergence_rate(runs)
    cells = _cells(own, value)
    compared = _compared(own, value, names, margin)
    tested = _tested(own, below)
    answer = [
        *_said(spread, rate, unit),
        *_groups_said(compared, value),
        *_tests_said(tested, below),
    ]
    tables = []
    if value == _LOSS:
        tables.append(TableView("final_losses", "Final losses", cells, _cells_grid(cells, names)))
    elif cells["diverged"].any():
        tables.append(TableView("divergence", "Divergence", cells, _cells_grid(cells, names)))
    if compared:
        table = pd.DataFrame([_row(place, found) for place, found in compared])
        tables.append(
            TableView("group_comparisons", "Groups compared", table, _pairs_grid(table, value))
        )
    if len(tested):
        view = TableView("below", f"Final loss below {below:g}", tested, _tests_grid(tested, names))
        tables.append(view)
    headlines = {"seed_spread": spread, "divergence_rate": rate}
    return Section("Runs as samples", answer, tables, headlines=headlines)


def _runs_of(runs: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """Return one row a run, what is compared, and its unit; at the target that most reached."""
    if _LOSS in runs:
        return runs, _LOSS, "nats"
    target = runs["target_loss"].fillna(np.inf)
    counts = runs["outcome"].eq("reached").groupby(target).sum()
    own = runs[target.eq(float(counts[counts.eq(counts.max())].index.min()))]
    steps = own["steps_to_target"].where(own["outcome"].eq("reached"), np.inf)
    return own.assign(**{_STEPS: np.log(steps.to_numpy(dtype=float))}), _STEPS, "in log steps"


def _cells(runs: pd.DataFrame, value: str) -> pd.DataFrame:
    """Sum up each cell: runs, divergence with its interval, mean and spread of what is finite."""
    rates = divergence_rates(runs)
    keys = [name for name in ("group", _BATCH, _RATE) if name in rates]
    own = runs.assign(value=runs[value].where(np.isfinite(runs[value])))
    found = own.groupby(keys, dropna=False)["value"].agg(["mean", "std", "count"]).reset_index()
    found = found.rename(columns={"std": "sd", "count": "finite"})
    return rates.rename(columns={"low": "rate_low", "high": "rate_high"}).merge(found, on=keys)


def _compared(
    runs: pd.DataFrame, value: str, names: Mapping[int, str], margin: float | None
) -> list[tuple[dict[str, Any], TwoSamples]]:
    """Compare groups, unpaired, at each batch and learning rate where both have two runs."""
    if runs["group"].nunique() < 2:
        return []
    labelled = runs.assign(group=[names.get(int(g), f"group {g}") for g in runs["group"]])
    keys = [name for name in (_BATCH, _RATE) if name in runs]
    found = []
    for key, own in labelled.groupby(keys, dropna=False):
        if own["group"].value_counts().ge(2).sum() > 1:
            place = dict(zip(keys, key, strict=True))
            pairs = compare_samples(own, value, "group", margin=margin)
            found += [(place, pair) for pair in pairs]
    return found


def _tested(runs: pd.DataFrame, below: float | None) -> pd.DataFrame:
    if below is None:
        return pd.DataFrame()
    keys = [name for name in ("group", _BATCH, _RATE) if name in runs]
    rows = []
    for key, own in runs.groupby(keys, dropna=False):
        found = one_sided_test(own, _LOSS, below)
        numbers = {"n": len(own), "mean": found.mean.value, "bound": found.mean.high, "p": found.p}
        place = dict(zip(keys, key, strict=True))
        rows.append({**place, **numbers, "verdict": found.verdict, "note": found.mean.note})
    return pd.DataFrame(rows)


def _said(spread: Estimate, rate: Estimate, unit: str) -> Iterator[str]:
    if spread.is_identified:
        yield (
            f"Runs that differ in their seed alone spread by {spread.text()} {unit} (standard "
            f"deviation and {LEVEL:.0%} interval; {spread.method})."
        )
    else:
        yield f"The spread over seeds is {spread.note}."
    yield (
        f"Of {rate.n} runs {round(rate.value * rate.n)} diverged: a share of {rate.text()} "
        f"({LEVEL:.0%} interval of Clopper and Pearson)."
    )


def _groups_said(compared: list[tuple[dict[str, Any], TwoSamples]], value: str) -> Iterator[str]:
    if not compared:
        return
    tested = [found for _, found in compared if np.isfinite(found.p_different)]
    apart = sum(found.difference.low > 0 or found.difference.high < 0 for found in tested)
    text = (
        f"Groups are compared unpaired (Welch) in {len(compared)} places by "
        f"{value.replace('_', ' ')}: in {apart} of {len(tested)} with an interval it leaves out 0."
    )
    judged = [found.equivalence for _, found in compared if found.equivalence is not None]
    if judged:
        alike = sum(one.verdict == "equivalent" for one in judged)
        text += f" Equivalent within {judged[0].margin:g} (two one-sided tests): {alike}."
    yield text


def _tests_said(tested: pd.DataFrame, below: float | None) -> Iterator[str]:
    if len(tested):
        shown = tested["verdict"].eq("shown").sum()
        yield (
            f"A mean final loss below {below:g} is shown in {shown} of {len(tested)} cells, each "
            f"tested one-sided at {1 - LEVEL:.0%} by itself."
        )


def _row(place: dict[str, Any], found: TwoSamples) -> dict[str, Any]:
    equal = found.equivalence
    return {
        **place,
        "reference": found.reference,
        "other": found.other,
        "n_reference": found.n_reference,
        "n_other": found.n_other,
        "difference": found.difference.value,
        "low": found.difference.low,
        "high": found.difference.high,
        "p_different": found.p_different,
        "p_adjusted": found.p_adjusted,
        "margin": np.nan if equal is None else equal.margin,
        "p_equivalent": np.nan if equal is None else equal.p_equivalent,
        "equivalence": None if equal is None else equal.verdict,
        "note": found.difference.note,
    }


def _place_headers(table: pd.DataFrame, names: Mapping[int, str] | None) -> tuple[list[str], Any]:
    """Return the headers of the columns that name a cell, and what writes them for a row."""
    several = names is not None and "group" in table and table["group"].nunique() > 1
    has_rate = _RATE in table and bool(table[_RATE].notna().any())
    headers = [*(["group"] * several), "global batch", *(["learning rate"] * has_rate)]

    def texts(row: Mapping[Any, Any]) -> list[str]:
        group = [(names or {}).get(int(row["group"]), str(row["group"]))] if several else []
        return [*group, f"{row[_BATCH]:g}", *([significant(row[_RATE], 3)] if has_rate else [])]

    return headers, texts


def _cells_grid(cells: pd.DataFrame, names: Mapping[int, str]) -> Grid:
    place, texts = _place_headers(cells, names)
    rows = [
        [
            *texts(row),
            str(row["n"]),
            significant(row["mean"]),
            significant(row["sd"], 2),
            f"{row['diverged']} [{row['rate_low']:.0%}, {row['rate_high']:.0%}]",
        ]
        for row in cells.to_dict("records")
    ]
    return Grid(
        headers=[*place, "runs", "mean", "sd", "diverged"],
        rows=rows,
        short_first=place[0],
        n_left=len(place),
        notes=[
            "Mean and standard deviation of the runs that did not diverge; of those that did the "
            f"number, and the {LEVEL:.0%} interval of their share (Clopper and Pearson).",
        ],
    )


def _pairs_grid(table: pd.DataFrame, value: str) -> Grid:
    place, texts = _place_headers(table, None)
    has_margin = table["margin"].notna().any()
    rows = []
    for row in table.to_dict("records"):
        ends = f" [{significant(row['low'], 3)}, {significant(row['high'], 3)}]"
        difference = significant(row["difference"], 3)
        pair = f"{row['other']} against {row['reference']}"
        counts = f"{row['n_other']} and {row['n_reference']}"
        shown = np.isfinite(row["low"]) and min(row["n_reference"], row["n_other"]) >= _FEWEST
        known = difference + (ends if shown else "")
        cells = [*texts(row), pair, counts, known, significant(row["p_adjusted"], 2)]
        rows.append([*cells, *([row["equivalence"] or MISSING] if has_margin else [])])
    headers = [*place, "groups", "runs", f"difference, {LEVEL:.0%} interval", "p (Holm)"]
    return Grid(
        headers=[*headers, *(["equivalence"] if has_margin else [])],
        rows=rows,
        short_first=place[0],
        n_left=len(place) + 1,
        notes=[
            f"Difference of mean {value.replace('_', ' ')}, runs taken as independent (Welch); p "
            "adjusted for the groups compared in one place, not for the number of places. Runs on "
            "the same samples would say more in pairs.",
        ],
    )


def _tests_grid(tested: pd.DataFrame, names: Mapping[int, str]) -> Grid:
    place, texts = _place_headers(tested, names)
    rows = [
        [
            *texts(row),
            str(row["n"]),
            significant(row["mean"]),
            significant(row["bound"]),
            significant(row["p"], 2),
            str(row["verdict"]),
        ]
        for row in tested.to_dict("records")
    ]
    return Grid(
        headers=[*place, "runs", "mean", f"{LEVEL:.0%} upper bound", "p", "verdict"],
        rows=rows,
        short_first=place[0],
        n_left=len(place),
        notes=["One-sided t-test of the mean; not shown is no proof of the contrary."],
    )
