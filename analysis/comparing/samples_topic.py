"""Runs as samples in `batchscape analyze`: their spread, divergence, and groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
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
from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate
from batchscape.analysis.labels import group_name
from batchscape.analysis.multiplicity import holm
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.tidy import distinct_trajectories

_BATCH, _RATE = "global_batch_size", "learning_rate"
_LOSS, _STEPS = "final_eval_loss", "log steps to target"


def samples_section(
    runs: pd.DataFrame,
    *,
    groups: Mapping[int, str] | None = None,
    margin: float | None = None,
    below: float | None = None,
) -> Section:
    """Show how runs spread over seeds, how many diverged, and how groups differ.

    Rows are runs with `final_eval_loss`, or runs and targets with `outcome` and `steps_to_target`.
    Two groups are tested to be equal within `margin`, losses of cells to lie below `below`.
    """
    labels = groups or {}
    runs = distinct_trajectories(runs)
    sample, value, unit = _sample_of(runs)
    spread = pooled_spread(sample, value)
    rate = divergence_rate(runs)
    cells = _cell_rows(runs, sample, value)
    common, where = _at_common_target(runs, sample, labels)
    comparisons = _compare_groups(common, value, labels, margin)
    answer = [
        *_run_sentences(spread, rate, unit),
        *_comparison_sentences(comparisons, value),
        *where,
    ]
    tables = []
    if value == _LOSS:
        tables.append(_cells_table(cells, labels, "final_losses", "Final losses"))
    elif cells["diverged"].any():
        tables.append(_cells_table(cells, labels, "divergence", "Divergence"))
    if comparisons:
        table = pd.DataFrame(
            [_comparison_row(place, comparison) for place, comparison in comparisons]
        )
        tables.append(_pairs_table(table, value))
    if below is not None:
        tests = _test_cells(sample, below)
        n_shown = tests["verdict"].eq("shown").sum()
        answer.append(
            f"A mean final loss below {below:g} is shown in {n_shown} of {len(tests)} cells, each "
            f"tested one-sided at {1 - LEVEL:.0%} by itself."
        )
        tables.append(_tests_table(tests, labels, below))
    headlines = {"seed_spread": spread, "divergence_rate": rate}
    return Section("Runs as samples", answer, tables, headlines=headlines)


def _sample_of(runs: pd.DataFrame) -> tuple[pd.DataFrame, str, str]:
    """Return one row a run, the compared column and its unit; steps to each group's main target."""
    if _LOSS in runs:
        return runs, _LOSS, "nats"
    parts = [_at(group_runs, _most_reached(group_runs)) for _, group_runs in runs.groupby("group")]
    return pd.concat(parts).sort_index(), _STEPS, "in log steps"


def _at_common_target(
    runs: pd.DataFrame, sample: pd.DataFrame, names: Mapping[int, str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the runs of groups that share a target, and a sentence that names it."""
    if _LOSS in runs or runs["group"].nunique() < 2:
        return sample, []
    counts = runs.groupby(_targets(runs))["group"].nunique()
    if counts.max() < 2:
        return sample.iloc[:0], ["Groups are not compared: no two of them have a target in common."]
    shared = runs[_targets(runs).isin(counts.index[counts.eq(counts.max())])]
    target = _most_reached(shared)
    at_target = _at(runs, target)
    if not np.isfinite(target):
        return at_target, []
    groups = set(at_target["group"])
    missing_groups = [group_name(names, g) for g in runs["group"].unique() if g not in groups]
    sentence = f"Groups are compared at the target {target:g}"
    if missing_groups:
        sentence += f"; without runs at it, and not compared: {', '.join(missing_groups)}"
    return at_target, [f"{sentence}."]


def _targets(runs: pd.DataFrame) -> pd.Series[float]:
    return runs["target_loss"].astype(float).fillna(np.inf)


def _most_reached(runs: pd.DataFrame) -> float:
    """Return the target that most runs reached, the lowest if there are several."""
    counts = runs["outcome"].eq("reached").groupby(_targets(runs)).sum()
    return float(counts[counts.eq(counts.max())].index.min())


def _at(runs: pd.DataFrame, target: float) -> pd.DataFrame:
    at_target = runs[_targets(runs).eq(target)]
    steps = at_target["steps_to_target"].where(at_target["outcome"].eq("reached"), np.inf)
    return at_target.assign(**{_STEPS: np.log(steps.to_numpy(dtype=float))})


def _cell_rows(runs: pd.DataFrame, sample: pd.DataFrame, value: str) -> pd.DataFrame:
    """Return runs, divergence with interval, and mean and spread of finite values, by cell."""
    rates = divergence_rates(runs)
    keys = [name for name in ("group", _BATCH, _RATE) if name in rates]
    sample = sample.assign(value=sample[value].where(np.isfinite(sample[value])))
    sums = sample.groupby(keys, dropna=False)["value"].agg(["mean", "std", "count"]).reset_index()
    sums = sums.rename(columns={"std": "sd", "count": "finite"})
    rates = rates.rename(columns={"low": "rate_low", "high": "rate_high"})
    return rates.merge(sums, on=keys, how="left").fillna({"finite": 0}).astype({"finite": int})


def _compare_groups(
    runs: pd.DataFrame, value: str, names: Mapping[int, str], margin: float | None
) -> list[tuple[dict[str, Any], TwoSamples]]:
    """Compare groups, unpaired, at each batch and learning rate where both have two runs."""
    if runs["group"].nunique() < 2:
        return []
    labelled = runs.assign(group=[group_name(names, g) for g in runs["group"]])
    keys = [name for name in (_BATCH, _RATE) if name in runs]
    comparisons = []
    for key, place_runs in labelled.groupby(keys, dropna=False):
        if place_runs["group"].value_counts().ge(2).sum() > 1:
            place = dict(zip(keys, key, strict=True))
            pairs = compare_samples(place_runs, value, "group", margin=margin)
            comparisons += [(place, pair) for pair in pairs]
    adjusted = holm([pair.p_different for _, pair in comparisons])
    return [
        (place, replace(pair, p_adjusted=float(p)))
        for (place, pair), p in zip(comparisons, adjusted, strict=True)
    ]


def _test_cells(runs: pd.DataFrame, below: float) -> pd.DataFrame:
    keys = [name for name in ("group", _BATCH, _RATE) if name in runs]
    rows = []
    for key, cell_runs in runs.groupby(keys, dropna=False):
        test = one_sided_test(cell_runs, _LOSS, below)
        rows.append(
            {
                **dict(zip(keys, key, strict=True)),
                "n": len(cell_runs),
                "mean": test.mean.value,
                "bound": test.mean.high,
                "p": test.p,
                "verdict": test.verdict,
                "note": test.mean.note,
            }
        )
    return pd.DataFrame(rows)


def _run_sentences(spread: Estimate, rate: Estimate, unit: str) -> Iterator[str]:
    if spread.is_identified:
        how = f" and {LEVEL:.0%} interval; {spread.method}" if spread.n >= FEWEST else ""
        yield (
            f"Runs that differ in their seed alone spread by {spread.text()} {unit} (standard "
            f"deviation{how})."
        )
    else:
        yield f"The spread over seeds is {spread.note}."
    if not rate.n:
        yield f"The share of runs that diverged is {rate.note}."
        return
    how = f" ({LEVEL:.0%} interval of Clopper and Pearson)" if rate.n >= FEWEST else ""
    yield (
        f"Of {rate.n} runs {round(rate.value * rate.n)} diverged: a share of {rate.text()}{how}."
    )


def _comparison_sentences(
    comparisons: list[tuple[dict[str, Any], TwoSamples]], value: str
) -> Iterator[str]:
    if not comparisons:
        return
    tested = [comparison for _, comparison in comparisons if np.isfinite(comparison.p_different)]
    n_different = sum(comparison.p_adjusted < 1 - LEVEL for comparison in tested)
    text = (
        f"Groups are compared unpaired (Welch) in {len(comparisons)} places by "
        f"{value.replace('_', ' ')}: in {n_different} of {len(tested)} that could be tested they "
        f"differ at {1 - LEVEL:.0%} by Holm's adjustment for all of them."
    )
    equivalences = [
        comparison.equivalence
        for _, comparison in comparisons
        if comparison.equivalence is not None
    ]
    if equivalences:
        n_equivalent = sum(equivalence.verdict == "equivalent" for equivalence in equivalences)
        text += (
            f" Equivalent within {equivalences[0].margin:g} (two one-sided tests): {n_equivalent}."
        )
    yield text


def _comparison_row(place: dict[str, Any], comparison: TwoSamples) -> dict[str, Any]:
    equivalence = comparison.equivalence
    return {
        **place,
        "reference": comparison.reference,
        "other": comparison.other,
        "n_reference": comparison.n_reference,
        "n_other": comparison.n_other,
        "difference": comparison.difference.value,
        "low": comparison.difference.low,
        "high": comparison.difference.high,
        "p_different": comparison.p_different,
        "p_adjusted": comparison.p_adjusted,
        "margin": np.nan if equivalence is None else equivalence.margin,
        "p_equivalent": np.nan if equivalence is None else equivalence.p_equivalent,
        "equivalence": None if equivalence is None else equivalence.verdict,
        "note": comparison.difference.note,
    }


def _place_columns(table: pd.DataFrame, names: Mapping[int, str] | None = None) -> list[Column]:
    """Return the columns that name a cell; its group where there are several groups."""
    several = names is not None and "group" in table and table["group"].nunique() > 1
    group = [Column("group", words=names, is_left=True)] if several else []
    rate = _RATE in table and table[_RATE].notna().any()
    return [
        *group,
        Column(_BATCH, "global batch", format="g", is_left=True),
        *([Column(_RATE, format=3, is_left=True)] if rate else []),
    ]


def _cells_table(cells: pd.DataFrame, names: Mapping[int, str], name: str, title: str) -> Table:
    diverged = []
    for row in cells.to_dict("records"):
        ends = f" [{row['rate_low']:.0%}, {row['rate_high']:.0%}]" if row["n"] >= FEWEST else ""
        diverged.append(f"{row['diverged']}{ends}")
    return Table(
        name,
        title,
        cells,
        [
            *_place_columns(cells, names),
            Column("n", "runs"),
            Column("mean"),
            Column("sd", format=2),
            Column("diverged", texts=diverged),
        ],
        notes=[
            "Mean and standard deviation of the runs that did not diverge; of those that did the "
            f"number, and from {FEWEST} runs on the {LEVEL:.0%} interval of their share (Clopper "
            "and Pearson).",
        ],
    )


def _pairs_table(table: pd.DataFrame, value: str) -> Table:
    fewest = table[["n_reference", "n_other"]].min(axis=1)
    has_interval = np.isfinite(table["low"]) & fewest.ge(FEWEST)
    counts = table["n_other"].astype(str) + " and " + table["n_reference"].astype(str)
    groups = table["other"] + " against " + table["reference"]
    verdict_columns = [Column("equivalence")] if table["margin"].notna().any() else []
    interval_columns = {f"shown_{end}": table[end].where(has_interval) for end in ("low", "high")}
    return Table(
        "group_comparisons",
        "Groups compared",
        table.assign(**interval_columns),
        [
            *_place_columns(table),
            Column("groups", texts=groups, is_left=True),
            Column("n_other", "runs", texts=counts),
            Column(
                "difference", f"difference, {LEVEL:.0%} interval", "", 3, "shown_low", "shown_high"
            ),
            Column("p_adjusted", "p (Holm)", format=2),
            *verdict_columns,
        ],
        notes=[
            f"Difference of mean {value.replace('_', ' ')}, runs taken as independent (Welch); p "
            "adjusted for all comparisons here. Runs on the same samples would say more in pairs.",
        ],
        hidden=list(interval_columns),
    )


def _tests_table(tested: pd.DataFrame, names: Mapping[int, str], below: float) -> Table:
    return Table(
        "below",
        f"Final loss below {below:g}",
        tested,
        [
            *_place_columns(tested, names),
            Column("n", "runs"),
            Column("mean"),
            Column("bound", f"{LEVEL:.0%} upper bound"),
            Column("p", format=2),
            Column("verdict"),
        ],
        notes=["One-sided t-test of the mean; not shown is no proof of the contrary."],
    )
