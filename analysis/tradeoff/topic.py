"""The report's section on the trade-off: the critical batch size, its fit and its curve."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from batchscape.analysis.estimates import LEVEL, NOT_IDENTIFIED, Estimate
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
_CRITICAL = (
    "{prefix}The critical batch size{at} is {critical_batch_size} samples{misfit}"
    "{critical_batch_size_readings} (mccandlish, {formula}; {behind}; {rule}): there the target "
    "takes twice the fewest optimizer steps. Far below it, a batch twice as large {saves}; far "
    "above it, it saves hardly any."
)
_NO_CRITICAL = "{prefix}The critical batch size{at} is {why_not}.{span}"
_RATES = (
    "Each batch size stands at the best of up to {:g} learning rates: the lowest of several "
    "noisy means is a little too low, and intervals take the chosen rates as known."
)
_BUYS = (
    "{prefix}From a global batch of {first:g} to {last:g} samples{rates}, {target} takes "
    "{steps_ratio} times fewer optimizer steps{steps_ratio_readings} and {samples_ratio} times the "
    "samples{samples_ratio_readings} (n = {n} seeds; {rule})."
)
_SHORT_CRITICAL = (
    "{prefix}The critical batch size, where {target} takes twice the fewest optimizer steps, is "
    "{critical_batch_size} samples{critical_batch_size_readings} ({batches} batch sizes, n = "
    "{seeds} seeds; {rule}){doubt}."
)
_SHORT_NO_CRITICAL = "{prefix}The critical batch size is {why_not}."
_UNSETTLED = (
    "{prefix}What fewer optimizer steps cost is not identified: no target is settled. At {target} "
    "{unsettled}."
)


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
    all_warnings = list(warnings)
    parts = [part for part in table.groupby("group") if part[1]["global_batch_size"].nunique() > 1]
    if not parts:
        return None
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
            all_warnings.append(f"{label}: {error}" if label else str(error))
            continue
        group_fits.append(_choose_target(group, label, group_reaches, fits))
    curves = fitted_curves(group_fits)
    headline_target = next(((g.number, g.target) for g in group_fits if g.unsettled is None), None)
    steps = steps_chart(table, curves, groups or {}, headline_target)
    if not group_fits:
        answer = ["Not identified: nothing can be fitted."]
        return Section(_TITLE, answer, pictures=[steps] if steps else [], warnings=all_warnings)
    several = len(group_fits) > 1
    return Section(
        _TITLE,
        [sentence for group in group_fits for sentence in _answer(group, noise_scales)],
        tradeoff_tables(group_fits),
        _pictures(group_fits, noise_scales, steps),
        [*all_warnings, *(text for group in group_fits for text in _warnings(group, tuning))],
        {
            f"{name}_group_{group.number}" if several else name: estimate
            for group in group_fits
            for name, estimate in group.headlines.items()
        },
        first_screen=_short(group_fits),
        chart_data={} if curves.empty else {"tradeoff_curve": curves},
    )


def _warnings(group: GroupFits, tuning: Callable[[int, float], str | None] | None) -> list[str]:
    """Say what weakens the fit of a group."""
    texts = [
        None if tuning is None else tuning(group.number, group.target),
        *group.fit.warnings,
        *(
            f"{name.replace('_', ' ')}: {estimate.note}"
            for name, estimate in group.headlines.items()
            if estimate.readings
        ),
    ]
    return [f"{group.prefix}{text}" for text in texts if text]


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


def _facts(group: GroupFits) -> dict[str, Any]:
    """Return what the sentences on a group name: every headline, and what it rests on."""
    fit, critical = group.fit, group.headlines["critical_batch_size"]
    where = "" if math.isinf(group.target) else f"a loss of {group.target:g}"
    facts: dict[str, Any] = {
        "prefix": group.prefix,
        "at": where and f" at {where}",
        "target": where or "the target",
        "batches": len(fit.batches),
        "seeds": fit.n_seeds,
        "rule": _rule(fit),
        # With the bound that is left of a value.
        "why_not": str(critical.note).replace(NOT_IDENTIFIED, critical.text(), 1),
    }
    for name, estimate in group.headlines.items():
        facts |= {name: estimate.text(), f"{name}_readings": _over_readings(estimate)}
    return facts


def _answer(group: GroupFits, noise_scales: pd.DataFrame | None) -> list[str]:
    fit, headlines, facts = group.fit, group.headlines, _facts(group)
    critical, largest = headlines["critical_batch_size"], headlines["overhead_batch_size"]
    if critical.is_identified:
        saves = f"needs nearly {significant(2 ** fit.parameters[2], 3)} times fewer updates"
        if fit.form == "two_term":
            saves = "nearly halves the updates at no cost in samples"
        facts |= {"formula": FORMULAS[fit.form], "behind": _behind(fit, critical), "saves": saves}
        answer = [_CRITICAL.format(**facts, misfit=f", but {fit.misfit}" if fit.misfit else "")]
    else:
        sizes = fit.batches["global_batch_size"]
        span = f" Batch sizes of {sizes.min():g} to {sizes.max():g} were fitted."
        answer = [_NO_CRITICAL.format(**facts, span=span if fit.fitted else "")]
    answer += [] if group.unsettled else _by_form(fit)
    if largest.is_identified:
        what = largest.definition.partition(": ")[2].partition(", by")[0]
        answer.append(
            f"{what[:1].upper()}{what[1:]}: {largest.text()} samples{_over_readings(largest)}."
        )
    if headlines["s_min"].is_identified:
        also = f"; fewest samples: {fit.fewest_samples.text()}" if fit.form == "two_term" else ""
        answer.append(
            "Fewest optimizer steps: {s_min}{s_min_readings}".format_map(facts) + f"{also}."
        )
    if _most_rates(fit) > 1:
        answer.append(_RATES.format(_most_rates(fit)))
    scales = _of_group(noise_scales, group)
    sentence = None if scales is None else noise_scale_sentence(critical, scales, len(fit.batches))
    return answer if sentence is None else [*answer, sentence]


def _short(group_fits: Sequence[GroupFits]) -> list[str]:
    """Say of the first group what its samples buy, and its critical batch size."""
    group, *other_groups = group_fits
    fit, headlines, facts = group.fit, group.headlines, _facts(group)
    critical, sentences = headlines["critical_batch_size"], list[str]()
    if group.unsettled is not None:
        sentences.append(_UNSETTLED.format(**facts, unsettled=group.unsettled))
    else:
        if "steps_ratio" in headlines:
            first, last = fit.batches["global_batch_size"].iloc[[0, -1]]
            facts |= {"first": first, "last": last, "n": headlines["steps_ratio"].n}
            sentences.append(_BUYS.format(**facts, rates=_rates(fit)))
        doubt = f": {critical.note}" if critical.note and not critical.readings else ""
        template = _SHORT_CRITICAL if critical.is_identified else _SHORT_NO_CRITICAL
        sentences.append(template.format(**facts, doubt=doubt))
        sentences[0] += _left_out(fit)
    if other_groups:
        rest = count_text(len(other_groups), "more group of runs is", "more groups of runs are")
        sentences[-1] += f" {rest} in the tables."
    return sentences


def _rule(fit: TradeoffFit) -> str:
    """Name the crossing that counts."""
    rules = fit.runs.get("crossing", pd.Series(dtype=object)).dropna().unique()
    return ", ".join(CROSSING_RULES[rule] for rule in rules) or "steps as the table gives them"


def _most_rates(fit: TradeoffFit) -> float:
    """Return the most learning rates that a batch size was tried at; NaN where none is known."""
    return float(fit.runs.reindex(columns=["n_learning_rates"])["n_learning_rates"].max())


def _rates(fit: TradeoffFit) -> str:
    """Name the learning rates at both ends of the range, where they are known."""
    runs = fit.runs.reindex(columns=["global_batch_size", "learning_rate"])
    sizes = fit.batches["global_batch_size"].iloc[[0, -1]]
    ends = [runs.loc[runs["global_batch_size"].eq(size), "learning_rate"] for size in sizes]
    if any(end.isna().any() or end.nunique() != 1 for end in ends):
        return ""
    texts = [*dict.fromkeys(significant(end.iloc[0], 3) for end in ends)]
    most = _most_rates(fit)
    best = f", the best of {most:g}" if most > 1 else ""
    if len(texts) == 1:
        return f" (learning rate {texts[0]}{best})"
    return f" (learning rates {' and '.join(texts)}{best and f'{best} each'})"


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
    ends = tuple(fit.batches["global_batch_size"].iloc[[0, -1]]) if len(fit.batches) else None
    others = _other_fits(fit, rows[main])
    readings = {name: _estimates(other, ends) for name, other in others.items()}
    easier = min((target for target in settled if target > main), default=None)
    if easier is not None:
        estimates = _estimates(fits[easier], ends).items()
        readings[f"at a loss of {easier:g}"] = {n: e for n, e in estimates if n not in _OF_A_TARGET}
    checked_estimates = {
        name: under_readings(
            estimate,
            [
                Reading(reading, estimates[name], of_half=reading.startswith("by seeds"))
                for reading, estimates in readings.items()
                if name in estimates
            ],
        )
        for name, estimate in headlines.items()
    }
    return GroupFits(number, label, fits, main, early, None, checked_estimates)


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
    sizes, missed = (
        fit.excluded["global_batch_size"],
        fit.excluded["reached"] < fit.excluded["runs"],
    )
    kinds = {
        "not all runs reached the target": sizes[missed],
        "it needs more samples than a larger one": sizes[~missed],
    }
    texts = [
        f"B = {', '.join(map('{:g}'.format, left_out))} left out: {why}"
        for why, left_out in kinds.items()
        if len(left_out)
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
    scales = {group.label: _of_group(noise_scales, group) for group in group_fits}
    typical = {label: _typical(rows)[0] for label, rows in scales.items() if rows is not None}
    charts = [steps, critical_batch_chart(group_fits, typical)]
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
