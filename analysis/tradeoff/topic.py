"""The report's section on the trade-off: the critical batch size, its fit and its curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import LEVEL, Estimate
from batchscape.analysis.figures.chart import Chart
from batchscape.analysis.labels import group_name
from batchscape.analysis.numbers import significant
from batchscape.analysis.report.topic import Section
from batchscape.analysis.targets.choice import early_crossings, why_unsettled
from batchscape.analysis.targets.readings import (
    CROSSING_RULES,
    Reading,
    at_first_crossing,
    halves_of_seeds,
    under_readings,
)
from batchscape.analysis.tradeoff.figures import critical_batch_chart, steps_chart
from batchscape.analysis.tradeoff.fit import TradeoffFit, fit_tradeoff
from batchscape.analysis.tradeoff.forms import FORMULAS, Form
from batchscape.analysis.tradeoff.measurements import ends_of_range
from batchscape.analysis.tradeoff.tables import GroupFits, fitted_curves, tradeoff_tables
from batchscape.analysis.tradeoff.targets import fit_targets
from batchscape.errors import AnalysisError
from batchscape.text import count_text

_TITLE = "Update frequency against convergence"
_HEADLINES = ("critical_batch_size", "overhead_batch_size", "s_min", "exponent")
_OF_A_TARGET = ("s_min", "e_min")
"""Counts that belong to one target: another target is no other reading of them."""


def tradeoff_section(
    reaches: pd.DataFrame,
    *,
    groups: Mapping[int, str] | None = None,
    form: Form | None = None,
    overhead: float = 0.2,
    reference_batch_size: float | None = None,
    noise_scales: pd.DataFrame | None = None,
    warnings: Sequence[str] = (),
    tuning: Callable[[int, float], str | None] | None = None,
) -> Section | None:
    """Say how update frequency trades against convergence, by the lowest settled target."""
    if reaches.empty or "global_batch_size" not in reaches.columns:
        return None
    table = reaches if "group" in reaches.columns else reaches.assign(group=0)
    # A foreign table may have one target that it does not name.
    targets = table.get("target_loss", pd.Series(math.inf, table.index))
    table = table.assign(target_loss=targets.fillna(math.inf))
    group_fits: list[GroupFits] = []
    loud = list(warnings)
    parts = [part for part in table.groupby("group") if part[1]["global_batch_size"].nunique() > 1]
    for number, group_reaches in parts:
        group = int(str(number))
        label = group_name(groups, group) if len(parts) > 1 else ""
        try:
            fits = fit_targets(
                group_reaches,
                form=form,
                overhead=overhead,
                reference_batch_size=reference_batch_size,
            )
        except AnalysisError as error:
            loud.append(f"{label}: {error}" if label else str(error))
            continue
        group_fits.append(_choose_target(group, label, group_reaches, fits))
    if not parts:
        return None
    curves = fitted_curves(group_fits)
    headline_target = next(((g.number, g.target) for g in group_fits if g.unsettled is None), None)
    steps = steps_chart(table, curves, groups or {}, headline_target)
    if not group_fits:
        answer = ["Not identified: nothing can be fitted."]
        return Section(_TITLE, answer, pictures=[steps] if steps else [], warnings=loud)
    several = len(group_fits) > 1
    return Section(
        _TITLE,
        [sentence for group in group_fits for sentence in _answer(group, noise_scales)],
        tradeoff_tables(group_fits),
        _pictures(group_fits, noise_scales, steps),
        [
            *loud,
            *(
                f"{group.prefix}{warning}"
                for group in group_fits
                if tuning is not None and (warning := tuning(group.number, group.target))
            ),
            *(f"{g.prefix}{text}" for g in group_fits for text in g.fit.warnings),
            *(
                f"{g.prefix}{name.replace('_', ' ')}: {estimate.note}"
                for g in group_fits
                for name, estimate in g.headlines.items()
                if estimate.readings
            ),
        ],
        {
            f"{name}_group_{group.number}" if several else name: estimate
            for group in group_fits
            for name, estimate in group.headlines.items()
        },
        short=_short(group_fits),
        curves={} if curves.empty else {"tradeoff_curve": curves},
    )


def noise_scale_sentence(
    critical: Estimate, noise_scales: pd.DataFrame, batches: int
) -> str | None:
    """Compare a critical batch size with gradient noise scales; None without either."""
    scale, n_known = _typical(noise_scales)
    if not (critical.is_identified and math.isfinite(scale)):
        return None
    ratio = significant(scale / critical.value, 2)
    return (
        f"The gradient noise scale, {significant(scale, 3)} samples (geometric mean over {n_known} "
        f"of {batches} batch sizes), is {ratio} times that. It tells the order of magnitude only: "
        "over the eight tasks of McCandlish et al. 2018 (table 1) the ratio went from 0.05 to 8."
    )


def _answer(group: GroupFits, noise_scales: pd.DataFrame | None) -> list[str]:
    fit, headlines = group.fit, group.headlines
    critical, largest = headlines["critical_batch_size"], headlines["overhead_batch_size"]
    where = "" if math.isinf(group.target) else f" at a loss of {group.target:g}"
    sizes = fit.batches["global_batch_size"]
    if critical.is_identified:
        doubt = "" if fit.misfit is None else f", but {fit.misfit}"
        doubt += _over_readings(critical)
        saves = f"needs nearly {significant(2 ** fit.parameters[2], 3)} times fewer updates"
        if fit.form == "two_term":
            saves = "nearly halves the updates at no cost in samples"
        first = (
            f"{group.prefix}The critical batch size{where} is {critical.text()} samples{doubt} "
            f"(mccandlish, {FORMULAS[fit.form]}; {_behind(fit, critical)}; {_rule(fit)}): there "
            "the target takes "
            "twice the fewest optimizer steps. Far below it, a batch twice as large "
            f"{saves}; far above it, it saves hardly any."
        )
    else:
        bound = (
            f" It is at least {significant(critical.low, 3)} samples." if critical.low > 0 else ""
        )
        most = critical.high
        bound += f" It is at most {significant(most, 3)} samples." if math.isfinite(most) else ""
        span = (
            f" Batch sizes of {sizes.min():g} to {sizes.max():g} were fitted." if fit.fitted else ""
        )
        first = f"{group.prefix}The critical batch size{where} is {critical.note}.{bound}{span}"
    answer = [first, *([] if group.unsettled else _by_form(fit))]
    if largest.is_identified:
        what = largest.definition.partition(": ")[2].partition(", by")[0]
        answer.append(
            f"{what[:1].upper()}{what[1:]}: {largest.text()} samples{_over_readings(largest)}."
        )
    least, samples = headlines["s_min"], fit.fewest_samples
    if least.is_identified:
        also = f"; fewest samples: {samples.text()}" if fit.form == "two_term" else ""
        answer.append(f"Fewest optimizer steps: {least.text()}{_over_readings(least)}{also}.")
    scales = _of_group(noise_scales, group)
    sentence = None if scales is None else noise_scale_sentence(critical, scales, len(fit.batches))
    most = fit.runs.get("n_learning_rates", pd.Series(dtype="float64")).max()
    if most > 1:
        answer.append(
            f"Each batch size stands at the best of up to {most:g} learning rates: the lowest of "
            "several noisy means is a little too low, and intervals take the chosen rates as known."
        )
    return answer if sentence is None else [*answer, sentence]


def _short(group_fits: Sequence[GroupFits]) -> list[str]:
    """Say of the first group what its samples buy, and its critical batch size."""
    first, *other_groups = group_fits
    fit = first.fit
    where = "the target" if math.isinf(first.target) else f"a loss of {first.target:g}"
    critical = first.headlines["critical_batch_size"]
    sentences = []
    if first.unsettled is not None:
        sentences.append(
            f"{first.prefix}What fewer optimizer steps cost is not identified: no target is "
            f"settled. At {where} {first.unsettled}."
        )
    elif "steps_ratio" in first.headlines:
        fewer, more = first.headlines["steps_ratio"], first.headlines["samples_ratio"]
        low, high = fit.batches["global_batch_size"].iloc[[0, -1]]
        sentences.append(
            f"{first.prefix}From a global batch of {low:g} to {high:g} samples{_rates(fit)}, "
            f"{where} takes {fewer.text()} times fewer optimizer steps{_over_readings(fewer)} and "
            f"{more.text()} times the samples{_over_readings(more)} (n = {fewer.n} seeds; "
            f"{_rule(fit)})."
        )
    if first.unsettled is None and critical.is_identified:
        note = None if critical.readings else critical.note
        sentences.append(
            f"{first.prefix}The critical batch size, where {where} takes twice the fewest "
            f"optimizer steps, is {critical.text()} samples{_over_readings(critical)} "
            f"({len(fit.batches)} batch sizes, n = {fit.n_seeds} seeds; {_rule(fit)})"
            f"{f': {note}' if note else ''}."
        )
    elif first.unsettled is None:
        sentences.append(f"{first.prefix}The critical batch size is {critical.note}.")
    if first.unsettled is None:
        sentences[0] += _left_out(fit)
    if other_groups:
        rest = count_text(len(other_groups), "more group of runs is", "more groups of runs are")
        sentences[-1] += f" {rest} in the tables."
    return sentences


def _rule(fit: TradeoffFit) -> str:
    """Name the crossing that counts."""
    rules = fit.runs.get("crossing", pd.Series(dtype=object)).dropna().unique()
    return ", ".join(CROSSING_RULES[rule] for rule in rules) or "steps as the table gives them"


def _rates(fit: TradeoffFit) -> str:
    """Name the learning rates at both ends of the range, where they are known."""
    rates = fit.runs.get("learning_rate", pd.Series(dtype="float64"))
    sizes = fit.batches["global_batch_size"].iloc[[0, -1]]
    ends = [rates[fit.runs["global_batch_size"].eq(size)] for size in sizes]
    if rates.empty or any(end.isna().any() or end.nunique() != 1 for end in ends):
        return ""
    texts = [significant(end.iloc[0], 3) for end in ends]
    most = fit.runs.get("n_learning_rates", pd.Series(dtype="float64")).max()
    best = f", the best of {most:g}" if most > 1 else ""
    if texts[0] == texts[1]:
        return f" (learning rate {texts[0]}{best})"
    suffix = f"{best} each" if best else ""
    return f" (learning rates {texts[0]} and {texts[1]}{suffix})"


def _over_readings(estimate: Estimate) -> str:
    """Say that a range is one over readings, and what each gives; nothing for an interval."""
    if not estimate.readings:
        return ""
    # A reading that gives what the one before gave adds nothing.
    names: dict[str, str] = {}
    for name, value in estimate.readings:
        names.setdefault(significant(value, 3), name)
    listed = ", ".join(f"{value} {name}" for value, name in names.items())
    return f" (a range over readings: {listed})"


def _choose_target(
    number: int, label: str, reaches: pd.DataFrame, fits: dict[float, TradeoffFit]
) -> GroupFits:
    """Choose the headline target, and check its estimates against their other readings."""
    rows = {target: reaches[reaches["target_loss"] == target] for target in fits}
    whys = {target: why_unsettled(target_rows) for target, target_rows in rows.items()}
    early = {target: early_crossings(target_rows) for target, target_rows in rows.items()}
    # Chosen without looking at the estimates, which would favour some of them.
    settled = [target for target in fits if whys[target] is None]
    main = max(
        settled or fits,
        key=lambda target: (len(fits[target].batches), -target if settled else target),
    )
    fit, unsettled = fits[main], whys[main]
    headlines = _estimates(fit)
    if unsettled is not None:
        where = "" if math.isinf(main) else f" at {main:g}"
        headlines = {
            name: Estimate.unknown(f"{unsettled}{where}", e.n, e.definition, unit=e.unit)
            for name, e in headlines.items()
        }
        return GroupFits(number, label, fits, main, early, unsettled, headlines)
    easier = min((target for target in settled if target > main), default=None)
    others = _other_fits(fit, rows[main])
    if easier is not None:
        others[f"at a loss of {easier:g}"] = fits[easier]
    ends = tuple(fit.batches["global_batch_size"].iloc[[0, -1]]) if len(fit.batches) else None
    readings = {name: _estimates(other, ends) for name, other in others.items()}
    held = {
        name: under_readings(
            estimate,
            [
                Reading(reading, estimates[name], of_half=reading.startswith("by seeds"))
                for reading, estimates in readings.items()
                if name in estimates
                and not (name in _OF_A_TARGET and reading.startswith("at a loss"))
            ],
        )
        for name, estimate in headlines.items()
    }
    return GroupFits(number, label, fits, main, early, None, held)


def _other_fits(fit: TradeoffFit, reaches: pd.DataFrame) -> dict[str, TradeoffFit]:
    """Fit the batch sizes of a fit to their first crossings, and to each half of the seeds."""
    fitted_rows = reaches[reaches["global_batch_size"].isin(fit.batches["global_batch_size"])]
    if fitted_rows.empty:
        return {}
    first = at_first_crossing(fitted_rows)
    tables = dict(halves_of_seeds(fitted_rows))
    if first is not None and not first["steps_to_target"].equals(fitted_rows["steps_to_target"]):
        tables["at the first crossing"] = first
    return {name: fit_tradeoff(table, form=fit.form) for name, table in tables.items()}


def _left_out(fit: TradeoffFit) -> str:
    """Name the batch sizes that the fit leaves out, and why."""
    missed = fit.excluded["reached"] < fit.excluded["runs"]
    kinds = {
        "not all runs reached the target": fit.excluded[missed],
        "it needs more samples than a larger one": fit.excluded[~missed],
    }
    texts = [
        f"B = {', '.join(f'{size:g}' for size in rows['global_batch_size'])} left out: {why}"
        for why, rows in kinds.items()
        if len(rows)
    ]
    return f" ({'; '.join(texts)}.)" if texts else ""


def _by_form(fit: TradeoffFit) -> list[str]:
    """Set both forms side by side, and say which is trusted."""
    free, two = fit.of_form("free_exponent"), fit.of_form("two_term")
    if free is None or two is None:
        return []
    return [
        f"With the exponent free, {FORMULAS['free_exponent']}, it is "
        f"{free.critical_batch_size.text()} samples and the exponent {free.exponent.text()}; with "
        f"the exponent taken for 1, {FORMULAS['two_term']}, {two.critical_batch_size.text()} "
        f"samples. The first is {free.trust}; the second {two.trust}."
    ]


def _behind(fit: TradeoffFit, critical: Estimate) -> str:
    sizes = f"{len(fit.batches)} batch sizes"
    note = (fit.critical_batch_size.note or "").removesuffix(fit.misfit or "").removesuffix("; ")
    if critical.readings:
        return f"{critical.method}, over {fit.n_seeds} seeds at {sizes}"
    if note:
        return f"{sizes}; {note}"
    return f"{LEVEL * 100:g} % interval over {fit.n_seeds} seeds at {sizes}"


def _pictures(
    group_fits: list[GroupFits], noise_scales: pd.DataFrame | None, steps: Chart | None
) -> list[Chart]:
    scales = {}
    for group in group_fits:
        group_scales = _of_group(noise_scales, group)
        if group_scales is not None:
            scales[group.label] = _typical(group_scales)[0]
    charts = [steps, critical_batch_chart(group_fits, scales)]
    return [chart for chart in charts if chart is not None]


def _estimates(fit: TradeoffFit, ends: tuple[float, float] | None = None) -> dict[str, Estimate]:
    """Return the trusted estimates, the ratios over the range, and those at exponent 1."""
    estimates = {name: getattr(fit, name) for name in _HEADLINES}
    ratios = None if fit.fitted is None else ends_of_range(fit.fitted.measurements, ends)
    if ratios is not None:
        estimates |= {"steps_ratio": ratios[0], "samples_ratio": ratios[1]}
    two = fit.of_form("two_term")
    if two is not None and two.contradiction is None:
        estimates["critical_batch_size_two_term"] = two.critical_batch_size
    if two is not None:
        estimates["e_min"] = two.fewest_samples
    return estimates


def _of_group(noise_scales: pd.DataFrame | None, group: GroupFits) -> pd.DataFrame | None:
    """Select the noise scales of the cells of a fit."""
    if noise_scales is None or noise_scales.empty:
        return None
    group_scales = noise_scales[noise_scales["group"] == group.number]
    return group_scales[group_scales["cell"].isin(group.fit.runs["cell"])]


def _typical(noise_scales: pd.DataFrame) -> tuple[float, int]:
    """Geometric mean over the batch sizes at which it is identified, and their number."""
    # A scale without an interval counts; one without an upper end is not identified.
    is_identified = noise_scales["estimate"].gt(0) & ~np.isinf(noise_scales["high"])
    usable = noise_scales[is_identified]
    logs = np.log(usable["estimate"].astype(float))
    means = logs.groupby(usable["global_batch_size"]).mean()
    return math.exp(means.mean()), len(means)
