"""What a report says of learning rates: the optimum of each global batch, and how it scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import FEWEST, LEVEL, Estimate
from batchscape.analysis.figures.style import name_group
from batchscape.analysis.learning_rate.aim import LOSS, STEPS, find_optima, is_varied
from batchscape.analysis.learning_rate.choice import tuning_warning
from batchscape.analysis.learning_rate.figure import draw_learning_rates
from batchscape.analysis.learning_rate.laws import LearningRateLaws, learning_rate_laws
from batchscape.analysis.learning_rate.optimum import optimum_estimate
from batchscape.analysis.learning_rate.table import cost_table
from batchscape.analysis.numbers import MISSING, significant
from batchscape.analysis.report.grids import Grid, lettered
from batchscape.analysis.report.section import Picture, Section, TableView
from batchscape.errors import AnalysisError

__all__ = ["learning_rate_section"]


def learning_rate_section(
    reaches: pd.DataFrame,
    finals: pd.DataFrame | None = None,
    groups: Mapping[int, str] | None = None,
) -> Section | None:
    """Say which learning rate each global batch wants.

    Steps to the hardest target that some learning rate of every batch reached are minimised;
    where there is none, the final held-out loss.

    Parameters
    ----------
    reaches : DataFrame
        One row a run and target, with `learning_rate`; as for `best_learning_rates`.
    finals : DataFrame, optional
        One row a run of equal samples: `global_batch_size`, `learning_rate`, `seed`,
        `final_eval_loss`, and `group`, `status` where there are any.
    groups : mapping of int to str, optional
        Labels of the groups; shown where there is more than one.

    Returns
    -------
    Section or None
        None where no global batch was trained at two learning rates.
    """
    try:
        return _section(reaches, finals, groups or {})
    except AnalysisError as error:
        if not is_varied(reaches):
            return None
        return Section(_TITLE, answer=["Not identified."], warnings=[str(error)])


_TITLE = "Learning rate"


def _section(
    reaches: pd.DataFrame, finals: pd.DataFrame | None, groups: Mapping[int, str]
) -> Section | None:
    found = find_optima(reaches, finals)
    if found is None:
        return None
    table, value, best = found
    answer: list[str] = []
    warnings: list[str] = []
    headlines: dict[str, Estimate] = {}
    laws: dict[int, LearningRateLaws] = {}
    for group in [int(number) for number in best["group"].unique()]:
        own = best[best["group"] == group]
        several = best["group"].nunique() > 1
        prefix = f"{groups.get(group, f'group {group}')}: " if several else ""
        laws[group] = learning_rate_laws(own)
        answer.append(prefix + _answer(own, laws[group], value))
        exponent = laws[group].exponent
        headlines[f"learning_rate_exponent{f'_{group}' if several else ''}"] = exponent
        left = "; ".join(f"B = {text}" for text in laws[group].left_out)
        warnings += [f"{prefix}Left out of exponent and laws: {left}."] if left else []
    untuned = tuning_warning(table) if value == STEPS else None
    warnings = [*([untuned] if untuned else []), *warnings]
    several = best["group"].nunique() > 1
    tables = [
        TableView(
            "learning_rates",
            _title(best, value),
            _full(best, table),
            _grid(best, groups if several else None, value),
        ),
        TableView(
            "learning_rate_laws",
            "How the best learning rate grows with the global batch",
            pd.concat([law.table.assign(group=group) for group, law in laws.items()]),
            _laws_grid(laws, groups if several else None),
        ),
    ]
    costs = cost_table(table, value)
    pictures = []
    for group, law in laws.items():
        own, rows = best[best["group"] == group], costs[costs["group"] == group]
        name = f"learning_rates{f'_{group}' if several else ''}"
        figure = draw_learning_rates(rows, own, law, value)
        label = groups.get(group, f"group {group}") if several else ""
        name_group(figure, label)
        caption = f"{label}: {_caption(value)}" if label else _caption(value)
        pictures.append(Picture(name, caption, figure))
    return Section(_TITLE, answer, tables, pictures, warnings, headlines)


def _answer(best: pd.DataFrame, laws: LearningRateLaws, value: str) -> str:
    inside = best[best["learning_rate"].notna()]
    aim = "to reach the target" if value == STEPS else "for the final held-out loss"
    if inside.empty:
        return f"No global batch has its best learning rate {aim} inside its grid."
    ends = inside.iloc[[0, -1]] if len(inside) > 1 else inside
    parts = [
        f"{optimum_estimate(row).text(2)} at B = {row['global_batch_size']:g}"
        for _, row in ends.iterrows()
    ]
    exponent = laws.exponent
    grows = f"exponent of the global batch {exponent.text(2)}" if exponent.is_identified else ""
    doubt = f" ({exponent.note})" if grows and exponent.note else ""
    grows = f"{grows}{doubt}" or f"exponent {exponent.note}"
    return f"The best learning rate {aim} is {', and '.join(parts)}; {grows}. {laws.verdict}"


def _title(best: pd.DataFrame, value: str) -> str:
    if value == LOSS:
        return "Learning rate with the lowest final held-out loss"
    targets = sorted(best["target_loss"].dropna().unique())
    named = ", ".join(f"{target:g}" for target in targets)
    return f"Learning rate with the fewest steps to a held-out loss of {named}".removesuffix(" of ")


def _full(best: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Add the runs behind each optimum."""
    if "run_id" not in table:
        return best
    keys = [name for name in ("group", "target_loss", "global_batch_size") if name in table]
    ids = table.groupby(keys, dropna=False)["run_id"].agg(lambda run: ";".join(sorted(set(run))))
    return best.merge(ids.rename("run_ids").reset_index(), on=keys, how="left")


def _grid(best: pd.DataFrame, groups: Mapping[int, str] | None, value: str) -> Grid:
    headers = ["global batch", "best learning rate", "best tried", "rates tried", "n"]
    rows = [
        [
            f"{row['global_batch_size']:g}",
            _optimum_text(row),
            significant(row["grid_learning_rate"], 3),
            str(row["n_learning_rates"]),
            str(row["n"]),
        ]
        for _, row in best.iterrows()
    ]
    if groups is not None:
        headers.insert(0, "group")
        for row, group in zip(rows, best["group"], strict=True):
            row.insert(0, groups.get(int(group), str(group)))
    marks, footnotes = lettered([[note] for note in best["note"]])
    what = "steps to the target, on a log scale," if value == STEPS else "final held-out loss"
    return Grid(
        headers=headers,
        rows=rows,
        short_first=headers[0],
        n_left=1 if groups is None else 2,
        marks=marks,
        footnotes=footnotes,
        notes=[
            f"Lowest point of a parabola of {what} in that power of the learning rate which fits "
            "best through the best rate tried and its neighbours, averaged over n seeds; in "
            f"brackets its {LEVEL:.0%} interval (Fieller over seeds, widened by what the grid "
            f"leaves open), from {FEWEST} seeds on.",
        ],
    )


def _optimum_text(row: pd.Series[Any]) -> str:
    """Write an optimum, or the side of the grid on which it lies."""
    estimate = optimum_estimate(row)
    if estimate.is_identified:
        return estimate.text(2)
    ends = [(estimate.low, "≥", 0.0), (estimate.high, "≤", np.inf)]
    known = [f"{sign} {significant(end, 2)}" for end, sign, none in ends if end != none]
    return " and ".join(known) or MISSING


def _laws_grid(laws: Mapping[int, LearningRateLaws], groups: Mapping[int, str] | None) -> Grid:
    rows = []
    for group, found in laws.items():
        for _, law in found.table.iterrows():
            second = law["exponent"] if law["law"] == "power" else law["noise_scale"]
            texts = [
                str(law["law"]),
                significant(law["coefficient"], 3),
                significant(second, 3),
                significant(law["slope"], 2),
                significant(law["rms"], 2),
                significant(law["delta_aicc"], 2),
                significant(law["weight"], 2),
            ]
            label = [] if groups is None else [groups.get(group, str(group))]
            rows.append([*label, *texts])
    headers = ["law", "coefficient", "exponent or B_noise", "slope", "residual (log)", "ΔAICc"]
    headers += ["weight"]
    headers = headers if groups is None else ["group", *headers]
    return Grid(
        headers=headers,
        rows=rows,
        short_first=headers[0],
        n_left=1 if groups is None else 2,
        notes=[
            "Learning rate over coefficient: fixed 1, sqrt B^(1/2), linear B, power B^exponent, "
            "saturating 1/(1 + B_noise/B), surge 2/(sqrt(B_noise/B) + sqrt(B/B_noise)). Least "
            "squares in logarithms; AICc counts the scatter as a parameter, and laws within 2 of "
            "the lowest are not told apart. Compared are laws whose slope over these batches lies "
            "inside the exponent's interval.",
        ],
    )


def _caption(value: str) -> str:
    what = "Steps to the target" if value == STEPS else "Final held-out loss"
    return (
        f"{what} against learning rate, mean over seeds, with the optimum of each global batch "
        f"(left); optima with {LEVEL:.0%} intervals against the global batch, and the laws fitted "
        "to them (right). Crosses at the top: rates at which a run diverged or missed the target. "
        "Hollow: the optimum is at the edge of the grid."
    )
