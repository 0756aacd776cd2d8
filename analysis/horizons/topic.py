"""The report's section on horizons: batch and rate that are best together, and how they grow."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate
from batchscape.analysis.figures.chart import Axis, Chart, Choice, Look, Marks
from batchscape.analysis.figures.style import GREY, INK
from batchscape.analysis.horizons.optima import NAMES, PUBLISHED, joint_optima
from batchscape.analysis.labels import group_name
from batchscape.analysis.learning_rate.aim import LOSS
from batchscape.analysis.learning_rate.table import costs_by_rate, with_runs
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.table import Column, Table
from batchscape.analysis.report.topic import Section
from batchscape.errors import AnalysisError

_TITLE = "Batch and rate together"
_BEST = "best, chosen together"
_DASHES = ((), (4.0, 2.0))


def horizons_section(runs: pd.DataFrame, groups: Mapping[int, str]) -> Section | None:
    """Say which batch and rate are best together; None where there is no grid of both.

    Parameters
    ----------
    runs : DataFrame
        One row a run: `group`, `horizon`, and as for `costs_by_rate`.
    groups : mapping of int to str
        Labels of the groups.
    """
    if not {*NAMES, LOSS} <= {*runs} or runs[LOSS].isna().all():
        return None
    values = runs.groupby(["group", "horizon"])[list(NAMES)].nunique()
    # A grid of both has three batches, and three rates, at least.
    grids = values[values.ge(3).all(axis=1)].index.unique("group").tolist()
    labels = {group: group_name(groups, group) if len(grids) > 1 else "" for group in grids}
    answer, warnings, optima, exponents = [], [], [], []
    headlines: dict[str, Estimate] = {}
    for group, label in labels.items():
        prefix, suffix = (f"{label}: ", f"_{group}") if label else ("", "")
        rows = runs[runs["group"] == group]
        try:
            costs = costs_by_rate(rows.assign(group=rows["horizon"]), LOSS)
            fit = joint_optima(costs.rename(columns={"group": "horizon"}))
        except AnalysisError as error:
            warnings.append(f"{prefix}{error}")
            continue
        lost = sorted({*costs["group"]} - {h for each in fit.optima.values() for h in each})
        too_few_seeds = (
            f"{prefix}no optimum after {', '.join(f'{h:g}' for h in lost)} samples: fewer than "
            "half of the seeds ran there"
        )
        warnings += [too_few_seeds] * bool(lost)
        misfit = (
            f"{prefix}near the optima the log loss is no quadratic form of one curvature (p = "
            f"{significant(fit.lack_of_fit_p, 2)}): the intervals do not allow for that"
        )
        warnings += [misfit] * (fit.lack_of_fit_p < 1 - LEVEL)
        quoted = {}
        for name, one in fit.exponents.items():
            row = {"group": group, "of": NAMES[name], "published": _published(name, one)}
            exponents.append(asdict(one) | row | {"lack_of_fit_p": fit.lack_of_fit_p})
            quoted[f"{name}_exponent_in_horizon"] = one
        for name, of in NAMES.items():
            for horizon, one in fit.optima[name].items():
                optima.append(asdict(one) | {"group": group, "of": of, "horizon": horizon})
                unit = "samples" if name == "global_batch_size" else ""
                quoted[f"{name}_together"] = replace(one, unit=unit)
        for name, one in quoted.items():
            headlines[name + suffix] = replace(one, group=label)
            answer.append(f"{prefix}The {one.definition}: {one.text(2)}.")
    if not optima:
        return Section(_TITLE, ["Not identified."], warnings=warnings) if warnings else None
    table = with_runs(pd.DataFrame(optima), runs, ("group", "horizon"))
    table = table.replace({"horizon": {math.inf: math.nan}})
    tables, pictures = [_optima_table(table, labels)], []
    if exponents and table["value"].notna().any():
        tables.append(_exponents_table(pd.DataFrame(exponents), labels))
        pictures.append(_optima_chart(table, labels))
    return Section(_TITLE, answer, tables, pictures, warnings, headlines)


def _published(name: str, exponent: Estimate) -> str:
    """Write which published exponents an interval holds, where there is one."""
    has_interval = exponent.is_identified and exponent.n >= FEWEST
    return " and ".join(
        f"{power} by {source}"
        + (" inside" if exponent.low <= power <= exponent.high else " outside") * has_interval
        for power, source in PUBLISHED[name].items()
    )


def _optima_table(optima: pd.DataFrame, labels: Mapping[int, str]) -> Table:
    return Table(
        "horizons",
        "Global batch and learning rate with the lowest final loss",
        optima,
        [
            Column("group", words=labels, is_left=True),
            Column("horizon", "horizon (samples)", format="g", is_left=True),
            Column("of", is_left=True),
            Column("value", "best, chosen together", format=2, low="low", high="high", n="n"),
        ],
        footnotes=[optima["note"]],
        notes=[
            "Lowest point of a quadratic form of the log loss in log rate and log batch, of one "
            "curvature for all horizons, through the better two thirds of the cells of each "
            "horizon, by their mean over seeds; a cell in which a run diverged is worse than all "
            f"others. In brackets the {LEVEL:.0%} interval, jackknife-t over seeds."
        ],
    )


def _exponents_table(exponents: pd.DataFrame, labels: Mapping[int, str]) -> Table:
    return Table(
        "horizon_exponents",
        "How the best batch and rate grow with the horizon",
        exponents,
        [
            Column("group", words=labels, is_left=True),
            Column("of", is_left=True),
            Column("value", "exponent", format=2, low="low", high="high", n="n"),
            Column("published", "published, and the interval"),
            Column("lack_of_fit_p", "lack of fit (p)", format=2),
        ],
        footnotes=[exponents["note"]],
        notes=[
            "Slope of the logarithms by least squares. Published exponents are of language models "
            "of one size, over tokens: arXiv 2505.13738 and 2503.04715."
        ],
    )


def _optima_chart(optima: pd.DataFrame, labels: Mapping[int, str]) -> Chart:
    """Draw the optima over the horizon, with published slopes through their middle."""
    marks, looks = [], {_BEST: INK}
    for name, of in NAMES.items():
        columns = {"value": name, "low": f"{name}_low", "high": f"{name}_high"}
        rows = optima[optima["of"].eq(of)].rename(columns=columns)
        rows = rows.assign(group=rows["group"].astype(str)).dropna(subset=name)
        logs = rows[["horizon", name]].apply(np.log)
        middle = logs.groupby(rows["group"]).transform("mean")
        for power, dash in zip(PUBLISHED[name], _DASHES, strict=False):
            line = np.exp(middle[name] + power * (logs - middle)["horizon"])
            looks[f"horizon^{power}"] = Look(GREY.colour, GREY.dark, "stroke", dash)
            slope = rows[["group", "horizon"]].assign(**{name: line})
            marks.append(Marks("line", slope, f"horizon^{power}"))
        marks.append(Marks("interval", rows[rows["n"] >= FEWEST], _BEST))
        marks.append(Marks("point", rows, _BEST, size=40))
    options = {str(group): label for group, label in labels.items()}
    return Chart(
        "horizons",
        "Best global batch and learning rate by horizon",
        "Chosen together, with 95 % intervals over seeds; lines have published exponents and go "
        "through the middle of the optima.",
        Axis({"horizon": "horizon (samples)"}, kind="log", ticks=optima["horizon"].tolist()),
        Axis({name: f"best {of}" for name, of in NAMES.items()}, "Of", "log"),
        marks,
        looks,
        choices=[Choice("group", "Runs", options)] if len(options) > 1 else [],
        panels="y",
        tables=["tables/horizons.csv"],
    )
